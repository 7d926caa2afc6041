"""Accuracy on held-out sets: their figures, and when training evaluates. `evaluate.py` is the command.

Figures, each with its standard error over problems: avg@k, the mean score of k samples of a
problem; pass@k, the chance that at least one of k is correct (unbiased, Chen et al. 2021); maj@k,
the chance that the most frequent answer of k is correct; the mean length in tokens; the shares that
are truncated and that could not be graded. A completion is correct if the reward's first verifier
gives it 1 or more.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from batch import Metrics, Rollout
from data import PromptData
from flags import Sampling, Settings, ks_of_pass
from fsdp_utils import is_main_process
from grading import Grade
from reward import Grader
from run import describe_completion
from runtime.files import best_effort, write
from runtime.rank import Stopped

if TYPE_CHECKING:  # importing vLLM takes seconds; the checks of bad input come first
    from rollout import Engine

Figure = tuple[float, float]  # mean and standard error; nan for what one problem cannot tell


@dataclass(frozen=True)
class Result:
    """The figures of one set."""

    data: PromptData
    sampling: Sampling
    figures: dict[str, Figure]

    def metrics(self) -> Metrics:
        """`eval/<set>/<figure>`, and `..._stderr` beside it; `stderr` alone belongs to avg@k."""
        metrics, prefix = {}, f"eval/{self.data.name}"
        for name, (mean, stderr) in self.figures.items():
            metrics[f"{prefix}/{name}"] = mean
            metrics[f"{prefix}/{'stderr' if name.startswith('avg@') else name + '_stderr'}"] = stderr
        return metrics


class Evaluator(Settings):
    """Evaluation during training: the held-out sets, how each is sampled, and when."""

    sets: Sequence[PromptData]
    samplings: Sequence[Sampling]  # one for each set
    grader: Grader
    folder: Path  # the completions after step 20 go to step_20 in it
    eval_every: int  # steps; 0: never
    eval_before_training: bool
    seed: int

    def is_due(self, step: int, is_last: bool = False) -> bool:
        """Whether to evaluate after this step. Step 0 is the start of training."""
        if step == 0:
            return self.eval_before_training
        return self.eval_every > 0 and (is_last or step % self.eval_every == 0)

    def is_missing(self, step: int, is_last: bool, logged: Metrics) -> bool:
        """Whether the evaluation after this step is due, but a signal has cut it short: its metrics are not there."""
        return self.is_due(step, is_last) and not any(name.startswith("eval/") for name in logged)

    def run(self, engine: Engine, step: int) -> Metrics:
        """The metrics of all sets, the same on every rank; {} if a signal has come."""
        metrics = {}
        try:
            for index, (data, sampling) in enumerate(zip(self.sets, self.samplings, strict=True), start=1):
                seed = self.seed, step, index
                metrics |= evaluate(engine, data, sampling, self.grader, seed, self.folder / f"step_{step}").metrics()
        except Stopped:
            return {}
        return metrics


def evaluate(
    engine: Engine, data: PromptData, sampling: Sampling, grader: Grader, seed: tuple[int, ...], folder: Path
) -> Result:
    """Samples and grades the set; every completion with its grade goes to <set>.jsonl in the folder."""
    on_finished = grader.callback_for(data.rows, sampling)
    rollout = engine.sample(data.rows, sampling, seed, f"evaluate {data.name}", on_finished)
    rollout = replace(rollout, grades=grader.collect_from_ranks())
    if is_main_process():
        with best_effort(str(folder)):
            folder.mkdir(parents=True, exist_ok=True)
            lines = [json.dumps(describe_completion(rollout, b)) + "\n" for b in range(len(rollout.rows))]
            write(folder / f"{data.name}.jsonl", "".join(lines))
    return Result(data, sampling, figures_of(rollout, sampling.num_samples))


def figures_of(rollout: Rollout, num_samples: int) -> dict[str, Figure]:
    """Every figure of the module's docstring, from graded completions."""
    grades = rollout.grades
    groups = [grades[i : i + num_samples] for i in range(0, len(grades), num_samples)]
    num_correct = [sum(grade.is_correct for grade in group) for group in groups]
    figures = {f"avg@{num_samples}": _figure([sum(grade.score for grade in group) / num_samples for group in groups])}
    for k in ks_of_pass(num_samples):
        figures[f"pass@{k}"] = _figure([pass_at_k(count, num_samples, k) for count in num_correct])
    votes = [majority_score(group) for group in groups]
    if num_samples > 1 and any(vote is not None for vote in votes):
        figures[f"maj@{num_samples}"] = _figure([vote or 0.0 for vote in votes])
    lengths_B, is_failed_B = rollout.completion_lengths_B, [grade.is_failed for grade in grades]
    columns = {"frac_truncated": rollout.is_truncated_B, "tokens_mean": lengths_B, "frac_failed": is_failed_B}
    means = {name: np.reshape(values_B, (-1, num_samples)).mean(axis=1) for name, values_B in columns.items()}
    return figures | {name: _figure(values) for name, values in means.items()}


def pass_at_k(num_correct: int, num_samples: int, k: int) -> float:
    """The chance that at least one of k of the samples, drawn without replacement, is correct."""
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def majority_score(grades: list[Grade]) -> float | None:
    """The chance that the most frequent answer of one problem is correct, ties broken by lot; None without any answer.

    All correct answers are one answer, whatever their form; incorrect ones are the same if they are read the same.
    """
    answered = [grade for grade in grades if grade.answer is not None]
    votes = Counter("correct" if grade.is_correct else f"incorrect {grade.answer}" for grade in answered)
    if not votes:
        return None
    most = max(votes.values())
    return float(votes["correct"] == most) / sum(count == most for count in votes.values())


def _figure(per_problem: list[float] | np.ndarray) -> Figure:
    values = np.asarray(per_problem, dtype=np.float64)
    return float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan
