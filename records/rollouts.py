"""All completions of every step, kept for later: OUT_DIR/rollouts/step_N.parquet, a row for each. docs/runs.md

`ReplaySampler` trains on them again; the report shows them. tokens.parquet beside them has the bytes of each token id:
a run folder that was copied elsewhere has no tokenizer.
"""

from __future__ import annotations

import json
import re
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from batch import Rollout, Row, Sampled
from fsdp_utils import gather_from_ranks, is_main_process
from grading import Grade
from guards.files import cause, checkpoints, tolerated, whole
from guards.start import RunError

if TYPE_CHECKING:  # half a second that most processes never need
    import pyarrow as pa
    from transformers import PreTrainedTokenizerBase

FOLDER = "rollouts"


def file_of(out_dir: Path, step: int) -> Path:
    return out_dir / FOLDER / f"step_{step}.parquet"


def steps_in(out_dir: Path) -> list[int]:
    """The steps whose rollouts are there, in order."""
    return sorted(int(file.stem.partition("_")[2]) for file in (out_dir / FOLDER).glob("step_*.parquet"))


# Written --------------------------------------------------------------------------------------------------------------


@dataclass
class Keeper:
    """Every rank has one: all send their log-probs to the main process, which writes in the background.

    The oldest files go when all are larger than `max_gib`, or than a quarter of the room that the disk has for them.
    """

    out_dir: Path
    max_gib: float
    tokens: list[bytes] | None  # of each token id; None: not known, or not of the main process
    thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "rollouts"))
    under_way: Future[None] | None = None

    def keep(self, sampled: Sampled) -> None:
        """Returns soon, unless the disk has not yet taken the step before. All ranks call it."""
        logprobs = {b: values for part in gather_from_ranks(sampled.logprobs) for b, values in part.items()}
        if is_main_process():
            self.wait()
            self.under_way = self.thread.submit(self._write, replace(sampled, logprobs=logprobs))

    def wait(self) -> None:
        if self.under_way is not None:
            self.under_way.result()

    def _write(self, sampled: Sampled) -> None:
        import pyarrow as pa

        folder = self.out_dir / FOLDER
        with tolerated(str(folder)):
            folder.mkdir(exist_ok=True)
            tokens = folder / "tokens.parquet"
            if self.tokens and not tokens.exists():
                _write_table(pa.table({"bytes": pa.array(self.tokens, pa.binary())}), tokens)
            _write_table(table_of(sampled), file_of(self.out_dir, sampled.step))
            sizes = {step: file_of(self.out_dir, step).stat().st_size for step in steps_in(self.out_dir)}
            room = shutil.disk_usage(self.out_dir).free + sum(sizes.values())
            while sum(sizes.values()) > min(self.max_gib * 2**30, room / 4) and len(sizes) > 1:
                file_of(self.out_dir, oldest := min(sizes)).unlink()
                del sizes[oldest]


def _write_table(table: pa.Table, file: Path) -> None:
    """Raises OSError."""
    import pyarrow.parquet

    with whole(file) as unfinished:
        pyarrow.parquet.write_table(table, unfinished, compression="zstd", write_page_checksum=True)


def table_of(sampled: Sampled) -> pa.Table:
    """A row for each completion. `advantages` and `old_logprobs` are null where it was not trained on."""
    import pyarrow as pa

    rollout, count = sampled.rollout, len(sampled.rollout.rows)
    integers, floats = pa.large_list(pa.int32()), pa.large_list(pa.float32())
    advantages, logprobs = [None] * count, [None] * count
    for i, b in enumerate(sampled.used_B):
        advantages[b] = sampled.advantages[i] if sampled.advantages else None
        logprobs[b] = sampled.logprobs.get(i)
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
        "prompt_ids": pa.array([row.ids for row in rows], integers),
        "token_ids": pa.array(rollout.completions, integers),
        "rollout_logprobs": pa.array(rollout.rollout_logprobs, floats),
        "old_logprobs": pa.array(logprobs, floats),
        "advantages": pa.array(advantages, floats),
        "versions": pa.array(rollout.versions or [None] * count, integers),
        "is_sampled": pa.array(rollout.is_sampled or [None] * count, pa.large_list(pa.bool_())),
        "reward": np.array([grade.reward for grade in grades]),
        "reward_parts": [json.dumps(grade.parts) for grade in grades],
        "reward_status": [grade.status for grade in grades],
        "read_as": pa.array([grade.answer for grade in grades], pa.string()),
        "is_correct": rollout.is_correct_B,
        "is_truncated": rollout.is_truncated_B,
        "is_trained": is_trained_B & np.isin(np.arange(count), sampled.used_B) & (sampled.advantages is not None),
    })  # fmt: skip


def bytes_of_tokens(tokenizer: PreTrainedTokenizerBase) -> list[bytes] | None:
    """The bytes of all ids up to the last one; a token may begin or end within a character.

    None for a tokenizer that is not of the library `tokenizers`.
    """
    if not hasattr(tokenizer, "backend_tokenizer"):
        return None
    from transformers.convert_slow_tokenizer import bytes_to_unicode  # GPT-2's table of byte-level BPE

    spec = json.loads(tokenizer.backend_tokenizer.to_str())
    added = {token["id"]: token["content"] for token in spec["added_tokens"]}
    texts = {i: text for text, i in tokenizer.get_vocab().items()}
    is_byte_level = '"ByteLevel"' in json.dumps(spec["decoder"])
    table = {ord(character): byte for byte, character in bytes_to_unicode().items()}

    def bytes_of(i: int) -> bytes:
        if i in added or i not in texts:
            return added.get(i, f"<token {i}>").encode()
        if is_byte_level:
            with suppress(UnicodeEncodeError):  # a token that was added by hand
                return texts[i].translate(table).encode("latin-1")
        if match := re.fullmatch("<0x([0-9A-F]{2})>", texts[i]):  # SentencePiece's byte fallback
            return bytes([int(match[1], 16)])
        return texts[i].replace("\u2581", " ").encode()  # SentencePiece's space

    return [bytes_of(i) for i in range(max(texts, default=-1) + 1)]


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
    return [whole.take(np.flatnonzero(round_B == number)) for number in range(round_B.max() + 1)]


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
