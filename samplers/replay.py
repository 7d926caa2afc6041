"""--replay: trains on the completions that another run has kept, without an engine. docs/runs.md"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from batch import Rollout, Row
from grading import Grade
from instruments.rollout_files import FOLDER, file_of, steps_in
from runtime.files import cause, checkpoints
from runtime.start import RunError
from sampling import Sampler


class NoEngine:
    """Stands for the engine with --replay, where nothing is sampled."""

    seconds_E = np.zeros(1)

    def begin(self, *_: object) -> None:
        pass

    sync = sleep = close = begin


@dataclass
class ReplaySampler(Sampler):
    """Fills steps with the groups that another run sampled."""

    folder: Path = Path()

    def sample_rounds(self, step: int) -> list[Rollout]:
        rows = {row.where: row for row in self.data.rows}
        rounds = read_rounds(self.folder, step, rows)
        self.seconds_RE = [np.zeros(1) for _ in rounds]
        return [self.as_training_data(rollout, step) for rollout in rounds]


def read_rounds(out_dir: Path, step: int, rows: dict[str, Row]) -> list[Rollout]:
    """The rounds of a step, as they were sampled and graded; `rows`: those of the data, by their place in it.

    Raises RunError if the data has other prompts.
    """
    import pyarrow.parquet

    file = file_of(out_dir, step)
    try:
        table = pyarrow.parquet.ParquetFile(file, page_checksum_verification=True).read()
    except (OSError, pyarrow.ArrowException) as error:
        wrong = f"{file} cannot be read ({cause(error)})"
        raise RunError(f"{wrong}; begin later with --from_step, or end earlier.") from None
    graded = table.select(["reward", "reward_status", "reward_parts", "read_as"]).to_pylist()
    places = table["row"].to_pylist()
    of_tokens = ("prompt_ids", "token_ids", "rollout_logprobs", "versions", "is_sampled")
    arrays = {name: list(table[name].to_numpy()) for name in of_tokens}
    for where, ids in zip(places, arrays["prompt_ids"], strict=True):
        if where not in rows or not np.array_equal(rows[where].ids, ids):
            raise RunError(f"{file}: {where} is another prompt in --train_data, or not in it; give that run's data.")
    whole = Rollout(
        rows=[rows[where] for where in places],
        completions=arrays["token_ids"],
        rollout_logprobs=arrays["rollout_logprobs"],
        texts=table["completion"].to_pylist(),
        is_truncated_B=table["is_truncated"].to_numpy(),
        versions=None if arrays["versions"][0] is None else arrays["versions"],
        is_sampled=None if arrays["is_sampled"][0] is None else arrays["is_sampled"],
        grades=[Grade(x["reward"], x["reward_status"], json.loads(x["reward_parts"]), x["read_as"]) for x in graded],
    )
    round_B = table["round"].to_numpy()
    return [whole.select(np.flatnonzero(round_B == number)) for number in range(round_B.max() + 1)]


def weights_of(folder: Path, first: int, last: int) -> tuple[int, Path | None]:
    """The step before `first` and its checkpoint, with which a replay of these steps begins; (0, None): the model.

    Raises RunError if not all of these steps are there, or not that checkpoint.
    """
    there, saved = steps_in(folder), dict(checkpoints(folder))
    if not there:
        raise RunError(f"--replay {folder}: there are no rollouts in {folder / FOLDER}; name the folder of a run.")
    if missing := sorted(set(range(first, last + 1)) - set(there)):
        known = f"it has steps {there[0]} to {there[-1]}"
        advice = "begin later with --from_step, end earlier with --stop_after"
        raise RunError(f"--replay {folder}: the rollouts of step {missing[0]} are missing; {known}; {advice}.")
    if first > 1 and first - 1 not in saved:
        possible = ", ".join(str(step + 1) for step in [0, *saved])
        wrong = f"--from_step {first}: {folder} has no checkpoint of step {first - 1}"
        raise RunError(f"{wrong}; steps that can be begun with: {possible}.")
    return first - 1, saved.get(first - 1)
