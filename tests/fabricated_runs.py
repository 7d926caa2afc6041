"""Runs that never ran: what the page reads of their metrics, flags and stored completions is made up."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from transformers.convert_slow_tokenizer import bytes_to_unicode

HOSTILE = "<script>window.hacked=1</script></script><img src=x onerror='window.hacked=2'><!-- <b>bold</b> &amp; \\u003c"
SMILE = "\N{SMILING FACE WITH OPEN MOUTH}"  # four bytes, of which each is a token
SYLLABLES = ["ba", "ce", "di", "fo", "gu", "ha", "je", "ki", "lo", "mu", "na", "pe", "qui", "ro", "su", "ta"]
GROUP_SIZE = 8
BYTE_OF = {character: byte for byte, character in bytes_to_unicode().items()}
CHARACTER_OF = {byte: character for character, byte in BYTE_OF.items()}


def byte_level(text: str) -> str:
    """As byte-level BPE writes a piece of text in its vocabulary."""
    return "".join(CHARACTER_OF[byte] for byte in text.encode())


def make_vocabulary(size: int) -> dict[str, int]:
    """All bytes, then words, as many as a real model has; the last token is hostile."""
    pieces = list(BYTE_OF)
    words = [f" {a}{b}{c}{d}" for a in SYLLABLES for b in SYLLABLES for c in SYLLABLES for d in ["", *SYLLABLES]]
    words += [f"{word}{number}" for word in words for number in (1, 2)]
    pieces += [byte_level(word) for word in words]
    return {piece: i for i, piece in enumerate([*pieces[: size - 1], byte_level(HOSTILE)])}


def make_run(folder: Path, seed: int = 1, steps: int = 500, patch: str = "", **flags: object) -> Path:
    """A folder with config.json, starts.jsonl and metrics.jsonl, and a patch if there are uncommitted changes."""
    folder.mkdir(parents=True)
    config = {"model": f"policies/warm_seed{seed}", "out_dir": str(folder), "seed": seed, "clip_high": 0.2}
    config |= {"learning_rate": 1e-6, "group_size": GROUP_SIZE, "policy_loss": "clip", "system_prompt": HOSTILE} | flags
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    start = {
        "time": "20260101T120000", "resumed_from": 0, "command": ["python", "train_grpo.py"], "world_size": 8,
        "device": "NVIDIA H100 80GB HBM3", "cores": 64, "commit": "a" * 40, "has_uncommitted_changes": bool(patch),
        "python": "3.11.9", "packages": {"torch": "2.13.0", "vllm": "0.32.0"},
    }  # fmt: skip
    (folder / "starts.jsonl").write_text(json.dumps(start) + "\n")
    if patch:
        (folder / f"changes_{start['time']}.patch").write_text(patch)
    records = metrics_of(np.random.default_rng(seed), steps, config["clip_high"])
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def metrics_of(random: np.random.Generator, steps: int, clip_high: float) -> list[dict[str, float | None]]:
    """Step 0 has the evaluation before training; every 25th step has one, too."""
    records = []
    for step in range(steps + 1):
        progress = 1 - np.exp(-step / (steps * (0.35 if clip_high > 0.2 else 0.5)))
        record = {"step": step}
        if step:
            correct = 0.2 + 0.6 * progress + 0.04 * random.normal()
            record |= {
                "policy/entropy": 0.5 * np.exp(-progress) + 0.01 * random.normal(), "policy/kl_ref": 0.1 * progress,
                "policy/clip_frac": 0.01, "policy/clip_frac_low": 0.004 + 0.001 * random.normal(),
                "policy/clip_frac_high": 0.006 + 0.001 * random.normal(), "policy/approx_kl": 0.001,
                "policy/rollout_gap_mean": 0.002 + 0.0002 * random.normal(),
                "optim/grad_norm": None if step == 7 else 0.3 + 0.05 * random.normal(), "optim/lr": 1e-6,
                "reward/mean": correct, "reward/mean_stderr": 0.03, "reward/std": 0.4,
                "reward/part/math": correct, "reward/part/format": 0.9,
                "completion/tokens_mean": 300 + 200 * progress, "completion/frac_truncated": 0.05, HOSTILE: 1,
                "completion/tokens_right_mean": 250 + 200 * progress + 10 * random.normal(),
                "completion/tokens_wrong_mean": 400 + 250 * progress + 20 * random.normal(),
                "time/sample_s": 20 + random.normal(), "time/logprobs_s": 4.0, "time/update_s": 12.0,
                "time/sync_s": 1.0, "time/step_s": 38 + random.normal(), "time/rollout_tail_s": 3.0,
                "perf/tokens_per_s": 9000 + 200 * random.normal(), "perf/update_mfu": 0.41 + 0.01 * random.normal(),
            }  # fmt: skip
        if step % 25 == 0:
            accuracy = 0.25 + 0.5 * progress + 0.015 * random.normal()
            record |= {"eval/math500/avg@4": accuracy, "eval/math500/stderr": 0.015, "time/evaluate_s": 15.0}
            record |= {"eval/math500/pass@4": min(accuracy + 0.1, 1.0), "eval/math500/pass@4_stderr": 0.012}
        records.append(record)
    return records


def make_rollouts(run: Path, steps: list[int], prompts: int, tokens: int, vocabulary: dict[str, int]) -> None:
    """rollouts/step_N.parquet of random words. The first completion is hostile, the second smiles."""
    random = np.random.default_rng(0)
    words = np.arange(256, len(vocabulary))
    texts = [bytes(BYTE_OF[c] for c in piece) for piece in vocabulary]
    frequencies = 1 / np.arange(2, len(words) + 2)  # Zipf's law
    frequencies /= frequencies.sum()
    folder = run / "rollouts"
    folder.mkdir()
    pq.write_table(pa.table({"bytes": pa.array([*texts, b"<|im_end|>"], pa.binary())}), folder / "tokens.parquet")
    for step in steps:
        count = prompts * GROUP_SIZE
        lengths = np.clip(random.normal(tokens, tokens / 5, count), 20, None).astype(int)
        drawn = np.split(random.choice(words, lengths.sum(), p=frequencies), np.cumsum(lengths)[:-1])
        drawn = [np.append(each, len(vocabulary)) for each in drawn]
        text = f"{SMILE} is the answer\nand a new line, {SMILE}"
        drawn[0] = np.append(vocabulary[byte_level(HOSTILE)], drawn[0])
        drawn[1] = np.append([vocabulary[CHARACTER_OF[byte]] for byte in text.encode()], drawn[1])
        lengths = np.array([len(each) for each in drawn])
        correct = random.random(count) < 0.5
        logprobs = [-random.exponential(0.4, n).astype(np.float32) for n in lengths]
        old = [x + random.normal(0, 0.01, len(x)).astype(np.float32) for x in logprobs]
        table = {
            "group": pa.array([b // GROUP_SIZE for b in range(count)], pa.int32()),
            "row": [f"train.jsonl:{step * prompts + b // GROUP_SIZE}" for b in range(count)],
            "prompt": [f"<|im_start|>user\nGroup {b // GROUP_SIZE} {HOSTILE}<|im_end|>\n" for b in range(count)],
            "answer": [f"{b // GROUP_SIZE} {HOSTILE}" for b in range(count)],
            "completion": [b"".join(texts[i] for i in each[:-1]).decode() for each in drawn],
            "token_ids": pa.array([x.astype(np.int32) for x in drawn], pa.large_list(pa.int32())),
            "rollout_logprobs": pa.array(logprobs), "old_logprobs": pa.array(old),
            "reward": pa.array((correct + 0.1).astype(np.float32)),
            "reward_parts": [json.dumps({HOSTILE: float(right), "format": 0.1}) for right in correct],
            "reward_status": [HOSTILE if b == 3 else "ok" for b in range(count)],
            "read_as": [None if b % 5 == 4 else HOSTILE for b in range(count)], "is_correct": correct.tolist(),
            "is_truncated": [b % 4 == 2 for b in range(count)], "is_trained": [b != 3 for b in range(count)],
        }  # fmt: skip
        pq.write_table(pa.table(table), folder / f"step_{step}.parquet", compression="zstd", write_page_checksum=True)
