"""Ends the run at an accuracy: --after_step docs/hooks/stop_at.py:stop_at"""


def stop_at(step, metrics):
    accuracies = [value for name, value in metrics.items() if name.startswith("eval/") and "/avg@" in name]
    return "stop" if accuracies and min(accuracies) >= 0.9 else None
