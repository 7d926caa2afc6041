"""`--replay`: trains on the rollouts of another run again, without an engine. docs/replay.md

The loop is the same; what is sampled and graded comes from that run's files.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from batch import Rollout
from checkpoint import checkpoints
from guards.start import RunError
from records.rollouts import FOLDER, read_rounds, steps_in
from sampling import Sampler


class NoEngine:
    """In the place of an engine: nothing is sampled."""

    seconds_E = np.zeros(1)

    def begin(self, *_: object) -> None:
        pass

    def sync(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """The weights stay where they are."""

    def sleep(self) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass
class ReplaySampler(Sampler):
    """Fills steps with the groups that another run has sampled."""

    folder: Path = Path()

    def sample_rounds(self, step: int) -> list[Rollout]:
        rows = {row.where: row for row in self.data.rows}
        rounds = read_rounds(self.folder, step, rows)
        self.seconds_RE = [np.zeros(1) for _ in rounds]
        return [self.as_training_data(rollout, step) for rollout in rounds]


def weights_of(folder: Path, first: int, last: int) -> tuple[int, Path | None]:
    """The step before `first` and its checkpoint, with which a replay of these steps begins; (0, None): the model.

    Raises RunError if not all of these steps are there, or not that checkpoint.
    """
    there = steps_in(folder)
    if not there:
        raise RunError(f"--replay {folder}: there are no rollouts in {folder / FOLDER}; name the folder of a run.")
    if missing := sorted(set(range(first, last + 1)) - set(there)):
        known = f"it has steps {there[0]} to {there[-1]}" if len(there) > 1 else f"it has step {there[0]}"
        advice = "begin later with --from_step, end earlier with --stop_after"
        raise RunError(f"--replay {folder}: the rollouts of step {missing[0]} are missing; {known}; {advice}.")
    if first > 1 and first - 1 not in dict(checkpoints(folder)):
        saved = ", ".join(str(step + 1) for step, _ in checkpoints(folder)) or "no other"
        wrong = f"--from_step {first}: {folder} has no checkpoint of step {first - 1}"
        raise RunError(f"{wrong}; steps that can be begun with: 1, {saved}.")
    return first - 1, dict(checkpoints(folder)).get(first - 1)
