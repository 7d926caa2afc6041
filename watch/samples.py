"""Outputs of a run, to look at: samples.jsonl and reward_failures.jsonl."""

import json
from dataclasses import dataclass
from pathlib import Path

from batch import Rollout
from run import Observer, StepRecord, describe_completion
from runtime.files import append, best_effort


@dataclass
class Samples(Observer):
    """Appends a few completions of each step, and those that could not be graded, on the main process."""

    out_dir: Path

    def rollout(self, record: StepRecord, end: Exception | None = None) -> None:
        """Keeps the first two completions of the first two groups that are trained on."""
        self.report_failures(record.step, record.rollout)
        for i in (0, 1, record.group_size, record.group_size + 1):
            if i < len(record.used_B):
                advantage = round(float(record.advantages[i].mean()), 4) if record.advantages else None
                line = {"step": record.step, "advantage": advantage}
                self._append("samples.jsonl", line | describe_completion(record.rollout, record.used_B[i]))

    def report_failures(self, step: int, rollout: Rollout) -> None:
        """Keeps what could not be graded, and names the first three on the console."""
        failed = [b for b, grade in enumerate(rollout.grades) if grade.is_failed]
        for b in failed:
            self._append("reward_failures.jsonl", {"step": step} | describe_completion(rollout, b))
        for b in failed[:3]:
            status, text = rollout.grades[b].status, rollout.texts[b]
            print(f"step {step}: reward {status}, of {rollout.rows[b].where}: {text[-100:]!r}", flush=True)
        if len(failed) > 3:
            counted = f"{len(failed)} completions were not graded"
            print(f"step {step}: {counted}; all are in reward_failures.jsonl", flush=True)

    def _append(self, name: str, record: dict[str, object]) -> None:
        with best_effort(str(self.out_dir / name)):
            append(self.out_dir / name, json.dumps(record, ensure_ascii=False) + "\n")
