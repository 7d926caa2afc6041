"""All completions of every step, kept for later: OUT_DIR/rollouts/step_N.parquet, a row for each. docs/metrics.md

tokens.parquet beside them has the bytes of each token id.

They are written in the background. `records/replay.py` trains on them again; the report shows them.
"""

from __future__ import annotations

import json
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from batch import Rollout, Row, Sampled
from fsdp_utils import HostGroup, gather_on_main, new_host_group
from grading import Grade
from guards.disk import GIB, tolerated
from guards.start import RunError

if TYPE_CHECKING:  # half a second that most processes never need
    import pyarrow as pa

FOLDER = "rollouts"


def file_of(out_dir: Path, step: int) -> Path:
    return out_dir / FOLDER / f"step_{step}.parquet"


def steps_in(out_dir: Path) -> list[int]:
    """The steps whose rollouts are there, in order."""
    return sorted(int(file.stem.partition("_")[2]) for file in (out_dir / FOLDER).glob("step_*.parquet"))


# Written --------------------------------------------------------------------------------------------------------------


@dataclass
class Keeper:
    """Writes rollouts in the background. Every rank has one: it sends its log-probs, and the main process writes.

    The oldest go when all are larger than `max_gib`, or than a quarter of the room that the disk has for them:
    checkpoints need it more.
    """

    out_dir: Path
    max_gib: float
    tokens: list[bytes] | None  # of each token id; None: not known, or not of the main process
    thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "rollouts"))
    under_way: Future[None] | None = None
    group: HostGroup = field(default_factory=new_host_group)

    def keep(self, sampled: Sampled) -> None:
        """Returns at once, unless the disk has not yet taken the step before. All ranks call it."""
        self.wait()
        self.under_way = self.thread.submit(self._gather, sampled)

    def wait(self) -> None:
        if self.under_way is not None:
            self.under_way.result()

    def _gather(self, sampled: Sampled) -> None:
        parts = gather_on_main(sampled.logprobs, self.group)
        if parts:
            self._write(replace(sampled, logprobs={b: values for part in parts for b, values in part.items()}))

    def _write(self, sampled: Sampled) -> None:
        import pyarrow as pa

        folder = self.out_dir / FOLDER
        with tolerated(str(folder)):
            folder.mkdir(exist_ok=True)
            tokens = folder / "tokens.parquet"  # a folder that is copied elsewhere has no tokenizer
            if self.tokens and not tokens.exists():
                _write_table(pa.table({"bytes": pa.array(self.tokens, pa.binary())}), tokens)
            _write_table(table_of(sampled), file_of(self.out_dir, sampled.step))
            sizes = {step: file_of(self.out_dir, step).stat().st_size for step in steps_in(self.out_dir)}
            room = shutil.disk_usage(self.out_dir).free + sum(sizes.values())
            while sum(sizes.values()) > min(self.max_gib * GIB, room / 4) and len(sizes) > 1:
                file_of(self.out_dir, oldest := min(sizes)).unlink()
                del sizes[oldest]


def _write_table(table: pa.Table, file: Path) -> None:
    """Whole or not at all. Raises OSError."""
    import pyarrow.parquet

    unfinished = file.with_name(f".{file.name}.unfinished")
    try:
        pyarrow.parquet.write_table(table, unfinished, compression="zstd", write_page_checksum=True)
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)


def table_of(sampled: Sampled) -> pa.Table:
    """A row for each completion. `advantages` and `old_logprobs` are null where it was not trained on."""
    import pyarrow as pa

    rollout, count = sampled.rollout, len(sampled.rollout.rows)
    place = {int(b): i for i, b in enumerate(sampled.used_B)}
    advantages, logprobs = [], []
    for b in range(count):
        advantages.append(sampled.advantages[place[b]] if sampled.advantages and b in place else None)
        logprobs.append(sampled.logprobs.get(place[b]) if b in place else None)
    is_trained_B = np.ones(count, dtype=bool) if rollout.is_trained_B is None else rollout.is_trained_B
    rows, grades = rollout.rows, rollout.grades
    return pa.table({
        "step": np.full(count, sampled.step, dtype=np.int32),
        "b": np.arange(count, dtype=np.int32),
        "group": np.arange(count, dtype=np.int32) // sampled.group_size,
        "round": sampled.round_B.astype(np.int32),
        "row": [row.where for row in rows],
        "prompt": [row.text for row in rows],
        "answer": [row.answer for row in rows],
        "completion": rollout.texts,
        "prompt_ids": _lists([row.ids for row in rows], np.int32),
        "token_ids": _lists(rollout.completions, np.int32),
        "rollout_logprobs": _lists(rollout.rollout_logprobs, np.float32),
        "old_logprobs": _lists(logprobs, np.float32),
        "advantages": _lists(advantages, np.float32),
        "versions": _lists(rollout.versions or [None] * count, np.int32),
        "reward": np.array([grade.reward for grade in grades]),
        "reward_parts": [json.dumps(grade.parts) for grade in grades],
        "reward_status": [grade.status for grade in grades],
        "read_as": pa.array([grade.answer for grade in grades], pa.string()),
        "is_correct": rollout.is_correct_B,
        "is_truncated": rollout.is_truncated_B,
        "is_trained": is_trained_B & np.isin(np.arange(count), sampled.used_B) & (sampled.advantages is not None),
    })  # fmt: skip


def _lists(of_rows: list[np.ndarray | None], dtype: type) -> pa.Array:
    """An array of lists; null for None."""
    import pyarrow as pa

    lengths = [0 if values is None else len(values) for values in of_rows]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    values = np.concatenate([np.zeros(0, dtype), *(values for values in of_rows if values is not None)])
    mask = pa.array([values is None for values in of_rows])
    return pa.LargeListArray.from_arrays(offsets, values.astype(dtype, copy=False), mask=mask)


# Read -----------------------------------------------------------------------------------------------------------------


def read_rounds(out_dir: Path, step: int, rows: dict[str, Row]) -> list[Rollout]:
    """The rounds of a step, as they were sampled and graded; `rows`: those of the data, by their place in it.

    Raises RunError if the data has other prompts.
    """
    import pyarrow.parquet

    file = file_of(out_dir, step)
    try:
        table = pyarrow.parquet.ParquetFile(file, page_checksum_verification=True).read()
    except (OSError, pyarrow.ArrowException) as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise RunError(f"{file} cannot be read ({why}); begin later with --from_step, or end earlier.") from None
    found = {name: table[name].to_pylist() for name in ("row", "reward", "reward_status", "reward_parts", "read_as")}
    arrays = {name: _arrays(table[name]) for name in ("prompt_ids", "token_ids", "rollout_logprobs", "versions")}
    for where, ids in zip(found["row"], arrays["prompt_ids"], strict=True):
        if where not in rows or not np.array_equal(rows[where].ids, ids):
            raise RunError(f"{file}: {where} is another prompt in --train_data, or not in it; give that run's data.")
    whole = Rollout(
        rows=[rows[where] for where in found["row"]],
        completions=arrays["token_ids"],
        rollout_logprobs=arrays["rollout_logprobs"],
        texts=table["completion"].to_pylist(),
        is_truncated_B=table["is_truncated"].to_numpy(),
        versions=None if arrays["versions"][0] is None else arrays["versions"],
        grades=[
            Grade(reward, status, json.loads(parts), answer)
            for reward, status, parts, answer in zip(
                found["reward"], found["reward_status"], found["reward_parts"], found["read_as"], strict=True
            )
        ],
    )
    round_B = table["round"].to_numpy()
    return [whole.take(np.flatnonzero(round_B == number)) for number in range(round_B.max() + 1)]


def _arrays(column: pa.ChunkedArray) -> list[np.ndarray | None]:
    """The lists of a column."""
    return [each.values.to_numpy(zero_copy_only=False) if each.is_valid else None for each in column]
