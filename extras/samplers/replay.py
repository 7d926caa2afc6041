"""--replay: trains on the completions that another run has kept, without an engine. docs/runs.md

The seam is `Sampler.collect`: `train_grpo.build_sampler` takes `ReplaySampler` in place of `Sampler`.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from batch import Rollout, Row
from grading import Grade
from runtime.files import cause, numbered, rollouts_file, run_and_step
from runtime.rank import RunError
from sampling import Sampler

GRADE = ("reward", "reward_status", "reward_parts", "read_as", "turn_rewards", "is_compared")  # columns of a grade


class NoEngine:
    """Stands for the engine with --replay, where nothing is sampled."""

    seconds_E = np.zeros(1)

    def begin(self, *_: object) -> None:
        """Does nothing, as the other verbs of an engine."""

    sync = sleep = close = begin


@dataclass
class ReplaySampler(Sampler):
    """Fills steps with the groups that another run sampled."""

    folder: Path = Path()

    def rounds(self, step: int) -> list[Rollout]:
        rows = {row.where: row for row in self.data.rows}
        rounds = read_rounds(self.folder, step, rows)
        self.seconds_RE = [np.zeros(1) for _ in rounds]
        return [self.as_training_data(rollout, step) for rollout in rounds]


def read_rounds(out_dir: Path, step: int, rows: dict[str, Row]) -> list[Rollout]:
    """The rounds of a step, as they were sampled and graded. `rows`: rows of the data, by their place in it.

    Raises RunError if the data has other prompts.
    """
    import pyarrow.parquet

    file = rollouts_file(out_dir, step)
    try:
        table = pyarrow.parquet.ParquetFile(file, page_checksum_verification=True).read()
    except (OSError, pyarrow.ArrowException) as error:
        raise RunError(
            f"{file} cannot be read ({cause(error)}); begin later, with --replay {out_dir}/step_N, or end earlier."
        ) from None
    places = table["row"].to_pylist()
    for where, ids in zip(places, table["prompt_ids"].to_numpy(), strict=True):
        if where not in rows or not np.array_equal(rows[where].ids, ids):
            raise RunError(f"{file}: {where} is another prompt in --train_data, or not in it; give that run's data.")
    versions = list(table["versions"].to_numpy())
    grades = [
        Grade(
            record["reward"],
            record["reward_status"],
            json.loads(record["reward_parts"]),
            record["read_as"],
            turn_rewards=tuple(record.get("turn_rewards", ())),  # older files have none
            is_compared=record.get("is_compared", True),
        )
        for record in table.select([name for name in GRADE if name in table.column_names]).to_pylist()
    ]
    step_rollout = Rollout(
        rows=[rows[where] for where in places],
        completions=list(table["token_ids"].to_numpy()),
        rollout_logprobs=list(table["rollout_logprobs"].to_numpy()),
        texts=table["completion"].to_pylist(),
        is_truncated_B=table["is_truncated"].to_numpy(),
        is_sampled=list(table["is_sampled"].to_numpy()),
        is_trained_B=np.ones(len(places), dtype=bool),
        parts={} if versions[0] is None else {"versions": versions},
    ).graded(grades)
    round_B = table["round"].to_numpy()
    return [step_rollout.select(np.flatnonzero(round_B == number)) for number in range(round_B.max() + 1)]


def weights_of(replayed: str, last: int) -> tuple[int, Path | None]:
    """The checkpoint that the replay up to step `last` begins with, and its step; (0, None): the model.

    Raises RunError if that checkpoint is not there, or not all of the steps after it.
    """
    folder, done = run_and_step(replayed)
    steps, saved = [*numbered(folder / "rollouts", ".parquet")], numbered(folder)
    if not steps:
        raise RunError(f"--replay {folder}: it has no folder rollouts; name the folder of a run.")
    for step in range(done + 1, last + 1):
        if step not in steps:
            raise RunError(
                f"--replay {folder}: the rollouts of step {step} are missing; it has steps {steps[0]} to {steps[-1]}; "
                f"begin later, with --replay {folder}/step_N, or end earlier, with --stop_after."
            )
    if done and done not in saved:
        names = ", ".join(path.name for path in saved.values()) or "none"
        raise RunError(f"--replay {replayed}: there is no such checkpoint; {folder} has {names}.")
    return done, saved.get(done)
