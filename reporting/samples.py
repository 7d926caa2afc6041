"""The stored completions (`rollouts/step_N.parquet`), packed for the page: one compressed chunk per step.

A token costs about 4 bytes of the page before base64: its place in the list of the run's token texts, and its values,
rounded to a byte. `page.js` undoes what `quantized` does. What is over the budget is left out in whole groups of evenly
spaced steps.
"""

from __future__ import annotations

import base64
import json
import math
import re
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

COLUMNS = ["group", "row", "prompt", "answer", "reward", "reward_parts", "reward_status", "read_as", "is_correct"]
COLUMNS += ["is_truncated", "is_trained", "token_ids", "rollout_logprobs", "old_logprobs", "advantages", "versions"]
OF_A_GROUP = ("row", "prompt", "answer")  # the same for all its completions
OF_A_COMPLETION = ("reward", "reward_status", "read_as", "is_correct", "is_truncated", "is_trained")
GROUPS_OF_A_STEP = 8  # at least, before another step is shown
LOWEST_LOGPROB = -20.0
UNKNOWN = {"u1": 255, "i1": -128, "i2": -32768, "i4": -1}  # the value of a token of which it is not known


@dataclass(frozen=True)
class Budget:
    """What the samples of a run may take in the page."""

    num_bytes: int
    bytes_per_byte: float = 0.6  # of the page for each of a parquet file, at most: measured with random tokens

    def choose(self, sizes: list[int], num_groups: int) -> tuple[list[int], int]:
        """(indices of the steps that are kept, groups of each), from the files' sizes and the groups of a step."""
        cost = sum(sizes) * self.bytes_per_byte
        if cost <= self.num_bytes:
            return list(range(len(sizes))), num_groups
        num_fitting = max(1, int(self.num_bytes / (cost / len(sizes) / num_groups)))
        num_steps = min(len(sizes), max(1, num_fitting // GROUPS_OF_A_STEP))
        return evenly(len(sizes), num_steps), min(num_groups, num_fitting // num_steps)


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


def pack_samples(folder: Path, config: dict, budget: Budget) -> tuple[dict, dict[str, str]]:
    """(what is there and what was left out, name -> chunk: "tokens", and the number of each step)."""
    files = sorted((folder / "rollouts").glob("step_*.parquet"), key=number_of)
    if not files:
        return {"steps": []}, {}
    num_groups = pc.count_distinct(pq.ParquetFile(files[-1]).read(["group"])["group"]).as_py()
    kept, groups = budget.choose([file.stat().st_size for file in files], num_groups)
    tokenizer = find_tokenizer(folder, config)
    columns = COLUMNS if tokenizer else [*COLUMNS, "completion"]
    with ThreadPoolExecutor() as pool:  # zlib and pyarrow compute without Python's lock
        tables = list(pool.map(lambda i: take_groups(pq.ParquetFile(files[i]).read(columns), groups), kept))
        counts = np.bincount(np.concatenate([flat(table["token_ids"]) for table in tables] or [np.zeros(0, int)]))
        ids = np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)]  # the most frequent first
        places = np.zeros(len(counts), np.uint32)
        places[ids] = np.arange(len(ids))
        packed = pool.map(lambda table: pack_step(table, places), tables)
        chunks = dict(zip([str(number_of(files[i])) for i in kept], packed, strict=True))
    if tokenizer:
        pieces = pieces_of(tokenizer, ids.tolist())
        text = np.frombuffer(b"".join(pieces), np.uint8)
        chunks["tokens"] = embed({"ids": ids.tolist(), "lengths": [len(piece) for piece in pieces]}, {"text": text})
    steps = [number_of(files[i]) for i in kept]
    found = {"steps": steps, "num_steps": len(files), "groups": groups, "num_groups": num_groups}
    return found | {"has_tokens": tokenizer is not None}, chunks


def number_of(path: Path) -> int:
    """The N of step_N."""
    return int(re.search(r"step_(\d+)", path.name)[1])


def take_groups(table: pa.Table, wanted: int) -> pa.Table:
    """The completions of so many of the groups."""
    groups = pc.unique(table["group"])
    return table if len(groups) <= wanted else table.filter(pc.is_in(table["group"], groups.take(evenly(len(groups), wanted))))


def flat(column: pa.ChunkedArray) -> np.ndarray:
    """The values of a column of lists, end to end."""
    return pc.list_flatten(column).to_numpy()


def pack_step(table: pa.Table, places: np.ndarray) -> str:
    """The chunk of a step."""
    ids = flat(table["token_ids"])
    lengths = pc.list_value_length(table["token_ids"]).to_numpy()
    group_of_row = table["group"].to_pylist()
    first_rows = np.unique(table["group"].to_numpy(), return_index=True)[1]
    firsts = table.take(first_rows).select(["group", *OF_A_GROUP]).to_pylist()
    rows = {name: table[name].to_pylist() for name in OF_A_COMPLETION}
    rows["reward"] = [rounded(reward) for reward in rows["reward"]]
    rows |= {"group": group_of_row, "parts": [json.loads(text or "{}") for text in table["reward_parts"].to_pylist()]}
    if "completion" in table.column_names:
        rows["text"] = table["completion"].to_pylist()
    planes = places[ids].astype("<u4").view(np.uint8).reshape(-1, 4).T  # bytes of equal weight together: they deflate better
    num_planes = max(1, (int(places.max(initial=0)).bit_length() + 7) // 8)
    arrays = {f"place{i}": np.ascontiguousarray(planes[i]) for i in range(num_planes)}
    values = {name: per_token(table[name], lengths) for name in ("rollout_logprobs", "old_logprobs", "advantages", "versions")}
    scale = float(np.nanmax(np.abs(values["advantages"]), initial=1e-9))
    arrays |= {name: array for name, array in quantized(values, scale).items() if (array != UNKNOWN[array.dtype.str[1:]]).any()}
    header = {"lengths": lengths.tolist(), "rows": rows, "groups": firsts, "num_planes": num_planes}
    return embed(header | {"advantage_scale": scale}, arrays)


def per_token(column: pa.ChunkedArray, lengths: np.ndarray) -> np.ndarray:
    """float32 for each token of the step; nan for completions that have no such list."""
    is_known = pc.fill_null(pc.list_value_length(column), -1).to_numpy() == lengths
    values = np.full(int(lengths.sum()), np.nan, np.float32)
    values[np.repeat(is_known, lengths)] = flat(column.filter(pa.array(is_known)))
    return values


def quantized(values: dict[str, np.ndarray], scale: float) -> dict[str, np.ndarray]:
    """Log-probs by the root of their distance from 0, gaps of probabilities by the root of their size: both are small."""
    sampler, trainer = values["rollout_logprobs"], values["old_logprobs"]
    gap = np.exp(trainer) - np.exp(sampler)
    found = {
        "logprob": ("u1", np.sqrt(np.clip(sampler, LOWEST_LOGPROB, 0) / LOWEST_LOGPROB) * 254),
        "gap": ("i1", np.sign(gap) * np.sqrt(np.abs(gap)) * 127),
        "advantage": ("i2", values["advantages"] / scale * 32767),
        "version": ("i4", values["versions"]),
    }
    return {
        name: np.nan_to_num(array.round(), nan=UNKNOWN[kind]).astype(f"<{kind}") for name, (kind, array) in found.items()
    }


def find_tokenizer(folder: Path, config: dict) -> dict | None:
    """The content of tokenizer.json: of the newest checkpoint, else of the model that was trained."""
    own = sorted(folder.glob("step_*/tokenizer.json"), key=lambda file: number_of(file.parent))
    model = str(config.get("model", ""))
    found = [*own[-1:], Path(model) / "tokenizer.json"]
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model) and not any(file.exists() for file in found):
        from huggingface_hub import try_to_load_from_cache  # a fifth of a second; nothing is downloaded

        found = [Path(try_to_load_from_cache(model, "tokenizer.json") or "/nowhere")]
    files = [file for file in found if file.exists()]
    return json.loads(files[0].read_text()) if files else None


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
