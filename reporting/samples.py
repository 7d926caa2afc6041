"""The stored completions (`rollouts/step_N.parquet`), packed for the page: one compressed chunk per step.

A token costs about 4 bytes of the page before base64: its place in the list of the run's token texts, and its values,
rounded to a byte. `samples.js` undoes what `quantized` does. What is over the budget is left out, in whole groups of
evenly spaced steps.
"""

from __future__ import annotations

import base64
import json
import math
import re
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

COLUMNS = pa.schema(
    [(name, pa.string()) for name in ("row", "prompt", "answer", "reward_parts", "reward_status", "read_as")]
    + [(name, pa.bool_()) for name in ("is_correct", "is_truncated", "is_trained")]
    + [(name, pa.large_list(pa.float32())) for name in ("rollout_logprobs", "old_logprobs", "advantages")]
    + [(name, pa.large_list(pa.int32())) for name in ("token_ids", "versions")]
    + [("group", pa.int32()), ("reward", pa.float64())]
)
OF_A_GROUP = ("row", "prompt", "answer")  # the same for all its completions
OF_A_COMPLETION = ("reward", "reward_status", "read_as", "is_correct", "is_truncated", "is_trained")
OF_A_TOKEN = ("rollout_logprobs", "old_logprobs", "advantages", "versions")
GROUPS_OF_A_STEP = 8  # at least, before another step is shown
LOWEST_LOGPROB = -20.0
UNKNOWN = {"u1": 255, "i1": -128, "i2": -32768, "i4": -1}  # the value of a token of which it is not known


def rounded(value: float | None) -> float | None:
    """To six digits, which no curve and no table shows: a third of the bytes. JSON knows no nan."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def evenly(count: int, wanted: int) -> list[int]:
    """So many of `range(count)`, evenly spaced; the last is one of them, and of two or more the first."""
    return sorted(set(np.linspace(count - 1, 0, min(count, wanted)).round().astype(int).tolist()))


def embed(header: dict, arrays: dict[str, np.ndarray] | None = None) -> str:
    """base64(deflate(length of the header, header as JSON, bytes of the arrays)); the header lists the arrays."""
    arrays = arrays or {}
    layout = [[name, array.dtype.str[1:], array.nbytes] for name, array in arrays.items()]
    head = json.dumps({**header, "arrays": layout}, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")
    raw = b"".join([len(head).to_bytes(4, "little"), head, *(array.tobytes() for array in arrays.values())])
    return base64.b64encode(zlib.compress(raw, 1)).decode()


class UnreadableError(Exception):
    """A file that is damaged, or that the run has just removed."""


def pack_samples(folder: Path, num_bytes: int) -> tuple[dict, dict[str, str]]:
    """(what is there and what was left out, name -> chunk: "tokens", and the number of each step)."""
    rollouts, unreadable = folder / "rollouts", set()
    budget, there = num_bytes, set(rollouts.glob("step_[0-9]*.parquet"))
    while files := sorted(there - unreadable, key=number_of):
        try:
            found, chunks = pack_files(files, *(set(rollouts.glob("tokens.parquet")) - unreadable), num_bytes=budget)
        except UnreadableError as error:
            print(f"warning: {error.args[0]} cannot be read and is left out: {error.args[1]}", flush=True)
            unreadable.add(error.args[0])
            continue
        size = sum(map(len, chunks.values()))
        if size <= num_bytes or len(found["steps"]) == found["groups"] == 1:
            return found | {"num_steps": len(there)}, chunks
        budget = int(0.9 * budget * num_bytes / size)  # `choose` was mistaken
    return {"steps": []}, {}


def pack_files(files: list[Path], tokens: Path | None = None, *, num_bytes: int) -> tuple[dict, dict[str, str]]:
    """The same of these files. Without the bytes of the tokens, the texts that were stored are shown."""
    columns = COLUMNS if tokens else COLUMNS.append(pa.field("completion", pa.string()))
    kept, num_groups, groups = choose(files, columns, num_bytes)
    with ThreadPoolExecutor() as pool:  # zlib and pyarrow compute without Python's lock
        tables = list(pool.map(lambda i: take_groups(read(files[i], columns), groups), kept))
        ids, places = order_of_ids(tables)
        packed = pool.map(lambda table: pack_step(table, places), tables)
        steps = [number_of(files[i]) for i in kept]
        chunks = dict(zip(map(str, steps), packed, strict=True))
    if tokens:
        known = dict(enumerate(read(tokens, pa.schema([("bytes", pa.binary())]))["bytes"].to_pylist()))
        pieces = [known.get(i, f"<token {i}>".encode()) for i in ids.tolist()]
        text = np.frombuffer(b"".join(pieces), np.uint8)
        chunks["tokens"] = embed({"ids": ids.tolist(), "lengths": [len(piece) for piece in pieces]}, {"text": text})
    return {"steps": steps, "groups": groups, "num_groups": num_groups, "has_tokens": tokens is not None}, chunks


def choose(files: list[Path], columns: pa.Schema, num_bytes: int) -> tuple[list[int], int, int]:
    """(indices of the files that are kept, groups of a step, how many of them are kept).

    What a file costs goes by its size and by what the first and the last file cost: early tokens are less likely.
    """
    tables, sizes = [read(file, columns) for file in (files[0], files[-1])], [file.stat().st_size for file in files]
    num_groups = max(pc.count_distinct(table["group"]).as_py() for table in tables)
    costs = [len(pack_step(table, order_of_ids([table])[1])) for table in tables]
    cost = sum(sizes) * max(costs[0] / sizes[0], costs[1] / sizes[-1])
    if cost <= num_bytes:
        return list(range(len(files))), num_groups, num_groups
    num_fitting = max(1, int(num_bytes / (cost / len(files) / num_groups)))
    num_steps = min(len(files), max(1, num_fitting // min(GROUPS_OF_A_STEP, num_groups)))
    return evenly(len(files), num_steps), num_groups, min(num_groups, num_fitting // num_steps)


def read(file: Path, columns: pa.Schema) -> pa.Table:
    """These columns. Raises UnreadableError. `pq.read_table` would import other formats, for a quarter of a second."""
    try:
        table = pq.ParquetFile(file, page_checksum_verification=True).read(columns.names)
        return table.select(columns.names).cast(columns)
    except (OSError, ValueError, LookupError, pa.ArrowException) as error:
        raise UnreadableError(file, (str(error).splitlines() or [type(error).__name__])[0]) from None


def order_of_ids(tables: list[pa.Table]) -> tuple[np.ndarray, np.ndarray]:
    """(the token ids that occur, the most frequent first; id -> its place among them)."""
    counts = np.bincount(np.concatenate([flat(table["token_ids"]) for table in tables]))
    ids = np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)]
    places = np.zeros(len(counts), np.uint32)
    places[ids] = np.arange(len(ids))
    return ids, places


def number_of(path: Path) -> int:
    """The N of step_N."""
    return int(re.search(r"step_(\d+)", path.name)[1])


def take_groups(table: pa.Table, wanted: int) -> pa.Table:
    """The completions of so many of the groups."""
    groups = pc.unique(table["group"])
    if len(groups) <= wanted:
        return table
    return table.filter(pc.is_in(table["group"], groups.take(evenly(len(groups), wanted))))


def flat(column: pa.ChunkedArray) -> np.ndarray:
    """The values of a column of lists, end to end."""
    return to_array(pc.list_flatten(column))


def to_array(column: pa.ChunkedArray) -> np.ndarray:
    return np.from_dlpack(column.combine_chunks())  # `to_numpy` would import pandas, for a quarter of a second


def pack_step(table: pa.Table, places: np.ndarray) -> str:
    """The chunk of a step: with the values of its tokens, or, without a tokenizer, with the texts that were stored."""
    ids = flat(table["token_ids"])
    lengths = to_array(pc.list_value_length(table["token_ids"]))
    first_rows = np.unique(to_array(table["group"]), return_index=True)[1].tolist()
    of_groups = {name: table[name].to_pylist() for name in ("group", *OF_A_GROUP)}
    firsts = [{name: values[i] for name, values in of_groups.items()} for i in first_rows]
    rows = {name: table[name].to_pylist() for name in OF_A_COMPLETION}
    rows["reward"] = [rounded(reward) for reward in rows["reward"]]
    parts = [json.loads(text).items() for text in table["reward_parts"].to_pylist()]
    rows |= {"group": of_groups["group"], "parts": [{name: rounded(x) for name, x in each} for each in parts]}
    header = {"lengths": lengths.tolist(), "rows": rows, "groups": firsts}
    if "completion" in table.column_names:
        rows["text"] = table["completion"].to_pylist()
        return embed(header)
    planes = places[ids].astype("<u4").view(np.uint8).reshape(-1, 4).T  # bytes of one weight together deflate better
    num_planes = max(1, (int(places.max(initial=0)).bit_length() + 7) // 8)
    arrays = {f"place{i}": np.ascontiguousarray(planes[i]) for i in range(num_planes)}
    values = {name: per_token(table[name], lengths) for name in OF_A_TOKEN}
    scale = float(np.nanmax(np.abs(values["advantages"]), initial=1e-9))
    for name, array in quantized(values, scale).items():
        if (array != UNKNOWN[array.dtype.str[1:]]).any():
            arrays[name] = array
    return embed(header | {"num_planes": num_planes, "advantage_scale": scale}, arrays)


def per_token(column: pa.ChunkedArray, lengths: np.ndarray) -> np.ndarray:
    """float32 for each token of the step; nan for completions that have no such list."""
    is_known = np.array([length is not None for length in pc.list_value_length(column).to_pylist()], bool)
    values = np.full(int(lengths.sum()), np.nan, np.float32)
    values[np.repeat(is_known, lengths)] = flat(column)
    return values


def quantized(values: dict[str, np.ndarray], scale: float) -> dict[str, np.ndarray]:
    """Log-probs by the root of their distance from 0, gaps by the root of their size: most of both are small."""
    sampler, trainer = values["rollout_logprobs"], values["old_logprobs"]
    gap = np.exp(trainer) - np.exp(sampler)
    found = {
        "logprob": ("u1", np.sqrt(np.clip(sampler, LOWEST_LOGPROB, 0) / LOWEST_LOGPROB) * 254),
        "gap": ("i1", np.sign(gap) * np.sqrt(np.abs(gap)) * 127),
        "advantage": ("i2", values["advantages"] / scale * 32767),
        "version": ("i4", values["versions"]),
    }
    return {
        name: np.nan_to_num(array.round(), nan=UNKNOWN[kind]).astype(f"<{kind}")
        for name, (kind, array) in found.items()
    }
