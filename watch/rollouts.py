"""All completions of every step, kept for later: OUT_DIR/rollouts/step_N.parquet, a row for each. docs/runs.md

`ReplaySampler` trains on them again; the report shows them. tokens.parquet beside them has the
bytes of each token id: a run folder that was copied elsewhere has no tokenizer.
"""

from __future__ import annotations

import json
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fsdp_utils import broadcast_from_main, gather_from_ranks, is_main_process
from run import Observer, StepRecord
from runtime.files import atomic_write, best_effort, numbered, rollouts_file
from runtime.rank import OwnCodeError

if TYPE_CHECKING:  # half a second that most processes never need
    import pyarrow as pa
    from transformers import PreTrainedTokenizerBase

# Written --------------------------------------------------------------------------------------------------------------


@dataclass
class Keeper(Observer):
    """Every rank has one: all send their log-probs to the main process, which writes in the background.

    The oldest files go when all are larger than `max_gib`, or than a quarter of the room that the disk has for them.
    """

    out_dir: Path
    max_gib: float
    tokens: list[bytes] | None  # the bytes of each token id; None: not known, or not the main process
    thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "rollouts"))
    writing: Future[None] | None = None  # the step that is being written, or was last

    def rollout(self, record: StepRecord, end: Exception | None = None) -> None:
        """Returns soon, if the disk has taken the step before. The sentence that ends a run names the file.

        After an OwnCodeError each rank writes what it has: others may wait for it in a collective.
        """
        is_alone, logprobs = isinstance(end, OwnCodeError), {}
        for part in [record.logprobs] if is_alone else gather_from_ranks(record.logprobs):
            logprobs |= part
        if is_alone or is_main_process():
            self.wait()
            self.writing = self.thread.submit(self._write, replace(record, logprobs=logprobs))
        if end:
            self.wait()
            file = rollouts_file(self.out_dir, record.step)
            # Else the main process writes it, and no rank ends before.
            if file.exists() if is_alone else broadcast_from_main(file.exists()):
                kept = f"{file} holds the step's tokens and log-probs, for --replay."
                end.args = (f"{str(end).removesuffix('.')}. {kept}",)

    def end(self, how: str) -> None:
        self.wait()

    def wait(self) -> None:
        """Returns when the file of the last step is complete."""
        if self.writing is not None:
            self.writing.result()

    def _write(self, record: StepRecord) -> None:
        import pyarrow as pa

        folder = self.out_dir / "rollouts"
        with best_effort(str(folder)):
            folder.mkdir(exist_ok=True)
            tokens = folder / "tokens.parquet"
            if self.tokens and not tokens.exists():
                _write_table(pa.table({"bytes": pa.array(self.tokens, pa.binary())}), tokens)
            _write_table(table_of(record), rollouts_file(self.out_dir, record.step))
            files = [*numbered(folder, ".parquet").values()]  # the oldest first
            sizes = [file.stat().st_size for file in files]
            room = shutil.disk_usage(folder).free + sum(sizes)
            while sum(sizes) > min(self.max_gib * 2**30, room / 4) and len(sizes) > 1:
                files.pop(0).unlink()
                sizes.pop(0)


def _write_table(table: pa.Table, file: Path) -> None:
    """Raises OSError."""
    import pyarrow.parquet

    with atomic_write(file) as unfinished:
        pyarrow.parquet.write_table(table, unfinished, compression="zstd", write_page_checksum=True)


def table_of(record: StepRecord) -> pa.Table:
    """A row for each completion. `advantages` and `old_logprobs` are null where it was not trained on."""
    import pyarrow as pa

    rollout = record.rollout
    rows, grades = rollout.rows, rollout.grades
    count = len(rows)
    integers, floats = pa.large_list(pa.int32()), pa.large_list(pa.float32())
    advantages, logprobs = [None] * count, [None] * count
    for i, b in enumerate(record.used_B):
        advantages[b] = record.advantages[i] if record.advantages else None
        logprobs[b] = record.logprobs.get(i)
    is_trained_B = np.isin(np.arange(count), record.used_B) & bool(record.advantages)
    return pa.table({
        "step": np.full(count, record.step, dtype=np.int32),
        "b": np.arange(count, dtype=np.int32),
        "group": np.arange(count, dtype=np.int32) // record.group_size,
        "round": record.round_B.astype(np.int32),
        "row": [row.where for row in rows],
        "prompt": [row.text for row in rows],
        "answer": [row.answer for row in rows],
        "completion": rollout.texts,
        "prompt_ids": pa.array([row.ids for row in rows], integers),
        "token_ids": pa.array(rollout.completions, integers),
        "rollout_logprobs": pa.array(rollout.rollout_logprobs, floats),
        "old_logprobs": pa.array(logprobs, floats),
        "advantages": pa.array(advantages, floats),
        "versions": pa.array(rollout.parts.get("versions", [None] * count), integers),
        "is_sampled": pa.array(rollout.is_sampled, pa.large_list(pa.bool_())),
        "reward": np.array([grade.reward for grade in grades]),
        "reward_parts": [json.dumps(grade.parts) for grade in grades],
        "turn_rewards": [grade.turn_rewards for grade in grades],
        "reward_status": [grade.status for grade in grades],
        "read_as": pa.array([grade.answer for grade in grades], pa.string()),
        "is_compared": rollout.is_compared_B,
        "is_correct": rollout.is_correct_B,
        "is_truncated": rollout.is_truncated_B,
        "is_trained": is_trained_B & rollout.is_trained_B,
    })  # fmt: skip


def bytes_of_tokens(tokenizer: PreTrainedTokenizerBase) -> list[bytes] | None:
    """The bytes of all ids up to the last one, empty for an id without a token; one may begin or end within a
    character. None for a tokenizer that is not of the library `tokenizers`.
    """
    if not hasattr(tokenizer, "backend_tokenizer"):
        return None
    from xgrammar import TokenizerInfo  # comes with vLLM; knows byte-level BPE and SentencePiece's byte fallback

    try:
        return TokenizerInfo.from_huggingface(tokenizer).decoded_vocab
    except (ValueError, RuntimeError):
        return None
