"""The stored completions (`rollouts/step_N.parquet`), packed for the page: one compressed chunk for each step.

A token is its bytes, their number, and its log-prob, rounded to a byte: about 4 bytes of the page.
What is over the budget is left out: groups first, then steps.
"""

import base64
import json
import math
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from runtime.files import numbered

COMPLETION_COLUMNS = (
    "group", "row", "prompt", "answer", "reward", "reward_parts", "reward_status", "read_as", "is_correct",
    "is_truncated", "is_trained",
)  # fmt: skip
TOKEN_COLUMNS = ("token_ids", "rollout_logprobs", "is_sampled")
COLUMNS = {*COMPLETION_COLUMNS, *TOKEN_COLUMNS, "completion"}
STEPS = 20  # the fewest that are shown, with fewer groups if need be
LOWEST_LOGPROB, UNKNOWN = -20.0, 255  # the second also for what an environment said


def rounded(value: float | None) -> float | None:
    """To six digits, which no curve and no table shows: a third of the bytes. JSON knows no nan."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def embed(header: dict, **arrays: np.ndarray) -> str:
    """base64(deflate(length of the header, header as JSON, bytes of the arrays)); the header lists the arrays."""
    layout = [[name, array.dtype.str[1:], array.nbytes] for name, array in arrays.items()]
    text = json.dumps({**header, "arrays": layout}, ensure_ascii=False, separators=(",", ":"))
    head = text.encode(errors="replace")
    raw = len(head).to_bytes(4, "little") + head
    for array in arrays.values():
        raw += array.tobytes()
    return base64.b64encode(zlib.compress(raw, 1)).decode()


def pack_samples(folder: Path, num_bytes: int) -> tuple[dict, dict[int, str]]:
    """(counts of all and of what is shown, step -> chunk). Damaged files are named on the console and left out."""
    files = [*reversed(numbered(folder / "rollouts", ".parquet").items())]
    tokens = read(folder / "rollouts" / "tokens.parquet", {"bytes"}) if files else None
    # The last one first, then others between those before: what fits is spread over the run.
    order = []
    for power in range(len(files).bit_length(), -1, -1):
        order += files[:: 2**power]
    chunks, num_groups, kept = {}, 0, 0
    for step, file in dict.fromkeys(order):
        table = read(file, COLUMNS)
        if not table:
            continue
        groups = pc.unique(table["group"])
        if not chunks:
            num_groups = len(groups)
            share = num_bytes / min(STEPS, len(files)) / len(pack_step(table, tokens))
            kept = max(1, int(min(share, 1) * num_groups))
        spaced = groups.take([i * len(groups) // kept for i in range(kept)])
        chunk = pack_step(table.filter(pc.is_in(table["group"], spaced)), tokens)
        if chunks and sum(map(len, chunks.values())) + len(chunk) > num_bytes:
            break
        chunks[step] = chunk
    summary = {
        "steps": sorted(chunks), "num_steps": len(files), "groups": kept, "num_groups": num_groups,
        "has_tokens": tokens is not None,
    }  # fmt: skip
    return summary, chunks


def read(file: Path, columns: set[str]) -> pa.Table | None:
    """These columns; None, with a warning, if they cannot be read."""
    names = sorted(columns)
    try:  # not `pq.read_table`, which would import formats of no use here
        return pq.ParquetFile(file, page_checksum_verification=True).read(names).select(names).combine_chunks()
    except (OSError, ValueError, LookupError, pa.ArrowException) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        print(f"warning: {file} cannot be read and is left out: {reason}", flush=True)
        return None


def pack_step(table: pa.Table, tokens: pa.Table | None) -> str:
    """The chunk of a step. Without the bytes of the tokens, it has the texts that were stored."""
    rows = table.select(COMPLETION_COLUMNS if tokens else (*COMPLETION_COLUMNS, "completion")).to_pylist()
    lengths = pc.list_value_length(table["token_ids"]).to_pylist()
    for row, length in zip(rows, lengths, strict=True):
        row["length"] = length
        row["reward"] = rounded(row["reward"])
        row["reward_parts"] = {name: rounded(part) for name, part in json.loads(row["reward_parts"]).items()}
    if not tokens:
        return embed({"rows": rows})
    ids, logprobs, is_sampled = (pc.list_flatten(table[name]).combine_chunks() for name in TOKEN_COLUMNS)
    known = pc.if_else(pc.less(ids, tokens.num_rows), ids, None)  # a model may have more ids than its tokenizer
    pieces = tokens["bytes"].combine_chunks().take(known).fill_null(b"<unknown token>")
    sizes = np.asarray(pc.binary_length(pieces))
    text = np.frombuffer(pieces.buffers()[2], np.uint8, sizes.sum())
    # Most log-probs are small: the root spreads them.
    shares = np.clip(np.asarray(logprobs), LOWEST_LOGPROB, 0) / LOWEST_LOGPROB
    codes = np.nan_to_num((np.sqrt(shares) * (UNKNOWN - 1)).round(), nan=UNKNOWN)
    codes[~np.asarray(is_sampled)] = UNKNOWN
    return embed({"rows": rows}, bytes=text, sizes=sizes.astype("<u2"), logprob=codes.astype(np.uint8))
