"""--after_step FILE.py:FUNCTION: a function of the user's, after each step. docs/hacks.md"""

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Literal

from batch import Metrics
from fsdp_utils import broadcast_from_main
from run import Observer
from runtime.rank import RunError


@dataclass
class AfterStep(Observer):
    """Calls the function on every rank, with the same metrics; what it returns on the main process counts."""

    function: Callable[[int, Metrics], object]

    def step(self, step: int, metrics: Metrics) -> Metrics | Literal["stop"] | None:
        """As `repeat`. Raises RunError for a metric that the line has."""
        return check_names(self.repeat(step, metrics), taken=metrics)

    def repeat(self, step: int, metrics: Metrics) -> Metrics | Literal["stop"] | None:
        """The function's result; None for an evaluation before training. Raises RunError if it fails."""
        if step == 0:
            return None
        metrics = broadcast_from_main(metrics)  # times differ from rank to rank
        try:
            answer = self.function(step, dict(metrics))
            if isinstance(answer, dict):
                answer = {str(name): float(value) for name, value in answer.items() if name != "step"}
            elif answer not in (None, "stop"):
                raise TypeError(f'it returned {answer!r}, but may return None, a dict of metrics or "stop"')
        except Exception as error:  # noqa: BLE001  the user's code may raise anything
            raise RunError(
                f"--after_step fails after step {step}: {type(error).__name__}: {error}; correct the function, and "
                "start the same command again. A step that is not evaluated has no metrics of eval/."
            ) from error
        return check_names(broadcast_from_main(answer))

    recall = repeat


def check_names(answer: Metrics | str | None, taken: Container[str] = ()) -> Metrics | str | None:
    """The answer. Raises RunError for a metric of these names, or that evaluations and times may give the line."""
    for name in answer if isinstance(answer, dict) else ():
        if name in taken or name.startswith(("eval/", "time/")):
            raise RunError(f"--after_step returned {name}, a metric of the run's own; give it another name.")
    return answer
