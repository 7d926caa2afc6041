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
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

COLUMNS = ["group", "row", "prompt", "answer", "reward", "reward_parts", "reward_status", "read_as", "is_correct"]
COLUMNS += ["is_truncated", "is_trained", "token_ids", "rollout_logprobs", "old_logprobs", "advantages", "versions"]
OF_A_GROUP = ("row", "prompt", "answer")  # the same for all its completions
OF_A_COMPLETION = ("reward", "reward_status", "read_as", "is_correct", "is_truncated", "is_trained")
OF_A_TOKEN = ("rollout_logprobs", "old_logprobs", "advantages", "versions")
GROUPS_OF_A_STEP = 8  # at least, before another step is shown
MARGIN = 1.1  # what steps may cost beyond the estimate
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


def pack_samples(folder: Path, config: dict, num_bytes: int) -> tuple[dict, dict[str, str]]:
    """(what is there and what was left out, name -> chunk: "tokens", and the number of each step)."""
    files = sorted((folder / "rollouts").glob("step_*.parquet"), key=number_of)
    if not files:
        return {"steps": []}, {}
    tokenizer = find_tokenizer(folder, config)
    columns = COLUMNS if tokenizer else [*COLUMNS, "completion"]
    kept, num_groups, groups = choose(files, columns, num_bytes)
    with ThreadPoolExecutor() as pool:  # zlib and pyarrow compute without Python's lock
        tables = list(pool.map(lambda i: take_groups(read(files[i], columns), groups), kept))
        ids, places = order_of_ids(tables)
        packed = pool.map(lambda table: pack_step(table, places), tables)
        steps = [number_of(files[i]) for i in kept]
        chunks = dict(zip(map(str, steps), packed, strict=True))
    if tokenizer:
        pieces = pieces_of(tokenizer, ids.tolist())
        text = np.frombuffer(b"".join(pieces), np.uint8)
        chunks["tokens"] = embed({"ids": ids.tolist(), "lengths": [len(piece) for piece in pieces]}, {"text": text})
    found = {"steps": steps, "num_steps": len(files), "groups": groups, "num_groups": num_groups}
    return found | {"has_tokens": tokenizer is not None}, chunks


def choose(files: list[Path], columns: list[str], num_bytes: int) -> tuple[list[int], int, int]:
    """(indices of the files that are kept, groups of a step, how many of them are kept).

    What a file costs goes by its size and by what the first and the last file cost: early tokens are less likely.
    """
    tables, sizes = [read(file, columns) for file in (files[0], files[-1])], [file.stat().st_size for file in files]
    num_groups = max(pc.count_distinct(table["group"]).as_py() for table in tables)
    costs = [len(pack_step(table, order_of_ids([table])[1])) for table in tables]
    cost = MARGIN * sum(sizes) * max(costs[0] / sizes[0], costs[1] / sizes[-1])
    if cost <= num_bytes:
        return list(range(len(files))), num_groups, num_groups
    num_fitting = max(1, int(num_bytes / (cost / len(files) / num_groups)))
    num_steps = min(len(files), max(1, num_fitting // GROUPS_OF_A_STEP))
    return evenly(len(files), num_steps), num_groups, min(num_groups, num_fitting // num_steps)


def read(file: Path, columns: list[str]) -> pa.Table:
    """The columns of a step."""
    return pq.ParquetFile(file).read(columns)  # pq.read_table would import other formats, for a quarter of a second


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
    rows |= {"group": of_groups["group"], "parts": [parts_of(text) for text in table["reward_parts"].to_pylist()]}
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


def parts_of(text: str) -> dict[str, float | None]:
    """The parts of a reward, from their JSON."""
    return {name: rounded(value) for name, value in json.loads(text).items()}


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


def find_tokenizer(folder: Path, config: dict) -> dict | None:
    """The content of tokenizer.json: of the newest checkpoint, else of the model that was trained."""
    files = sorted(folder.glob("step_*/tokenizer.json"), key=lambda file: number_of(file.parent))
    model = config.get("model") or "/nowhere"
    if not files and (Path(model) / "tokenizer.json").exists():
        files = [Path(model) / "tokenizer.json"]
    if not files and re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        from huggingface_hub import try_to_load_from_cache  # a fifth of a second; nothing is downloaded

        files = [Path(file) for file in [try_to_load_from_cache(model, "tokenizer.json")] if isinstance(file, str)]
    return parse(files[-1].read_bytes()) if files else None


@cache  # runs of the same model have the same
def parse(content: bytes) -> dict:
    return json.loads(content)


def pieces_of(tokenizer: dict, ids: list[int]) -> list[bytes]:
    """The bytes of each token. A token of byte-level BPE may begin or end within a character."""
    vocabulary = tokenizer["model"]["vocab"]
    if isinstance(vocabulary, dict):
        texts = {i: text for text, i in vocabulary.items()}
    else:  # Unigram: [text, score], in the order of the ids
        texts = dict(enumerate(text for text, _ in vocabulary))
    added = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    is_byte_level = '"ByteLevel"' in json.dumps(tokenizer["decoder"])
    table = {ord(character): byte for character, byte in characters_of_bytes().items()}

    def piece(i: int) -> bytes:
        if i in added or i not in texts:
            return added.get(i, f"<token {i}>").encode()
        text = texts[i]
        if is_byte_level:
            return text.translate(table).encode("latin-1")
        if match := re.fullmatch("<0x([0-9A-F]{2})>", text):  # SentencePiece's byte fallback
            return bytes([int(match[1], 16)])
        return text.replace("\u2581", " ").encode()  # SentencePiece's space

    return [piece(i) for i in ids]


def characters_of_bytes() -> dict[str, int]:
    """GPT-2's table: printable bytes of Latin-1 stand for themselves, the others for characters from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
