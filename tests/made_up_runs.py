"""Run folders with made-up figures and completions."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from batch import Rollout, Sampled
from grading import Grade
from helpers import make_row, write_lines
from instruments.rollout_files import Keeper

HOSTILE = "<script>window.hacked=1</script></script><img src=x onerror='window.hacked=2'><!-- <b>bold</b> &amp; \\u003c"
SMILE = "\N{SMILING FACE WITH OPEN MOUTH}"  # four bytes, of which each is a token
SYLLABLES = ["ba", "ce", "di", "fo", "gu", "ha", "je", "ki", "lo", "mu", "na", "pe", "qui", "ro", "su", "ta"]
GROUP_SIZE = 8
OF_A_STEP = {  # metric -> its value but for the noise
    "policy/entropy": 0.3, "policy/kl_ref": 0.05, "policy/clip_frac": 0.01, "policy/clip_frac_low": 0.004,
    "policy/clip_frac_high": 0.006, "policy/rollout_gap_mean": 0.002, "optim/grad_norm": 0.3,
    "reward/mean": 0.8, "reward/mean_stderr": 0.03, "reward/part/math": 0.7, "reward/part/format": 0.9,
    "completion/tokens_mean": 400, "completion/tokens_right_mean": 350, "completion/tokens_wrong_mean": 500,
    "time/sample_s": 20, "time/update_s": 12, "time/sync_s": 1, "time/step_s": 38, "time/rollout_tail_s": 3,
    "perf/tokens_per_s": 9000, "perf/update_mfu": 0.41, HOSTILE: 1,
}  # fmt: skip
OF_AN_EVALUATION = {
    "eval/math500/avg@4": 0.6, "eval/math500/stderr": 0.015, "eval/math500/pass@4": 0.7,
    "eval/math500/pass@4_stderr": 0.012, "time/evaluate_s": 15,
}  # fmt: skip


def write_run(folder: Path, config: dict, records: list[dict]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_lines(folder / "metrics.jsonl", records)
    return folder


def write_completions(run: Path, step: int, name: str, scores: list[float]) -> None:
    """The file of an evaluation: a completion of each problem, with these scores."""
    file = run / "eval" / f"step_{step}" / f"{name}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_lines(file, [
        {"row": f"{name}.jsonl, line {i + 1}", "answer": str(i), "reward_parts": {"math": score}}
        for i, score in enumerate(scores)
    ])  # fmt: skip


def make_run(folder: Path, seed: int = 1, steps: int = 500, patch: str = "", **flags: object) -> Path:
    """A run with an evaluation before training and at every 25th step, and a patch if there are uncommitted changes."""
    config = {"model": f"policies/warm_seed{seed}", "out_dir": str(folder), "seed": seed, "clip_high": 0.2}
    random, records = np.random.default_rng(seed), []
    for step in range(steps + 1):
        levels = (OF_A_STEP if step else {}) | (OF_AN_EVALUATION if step % 25 == 0 else {})
        records.append({"step": step} | {name: x * (1 + 0.05 * random.normal()) for name, x in levels.items()})
        records[-1] |= {"completion/frac_truncated": 0.05} if step else {}
        records[-1] |= {"optim/grad_norm": None} if step == 7 else {}
    write_run(folder, config | {"group_size": GROUP_SIZE, "system_prompt": HOSTILE} | flags, records)
    start = {"time": "20260101T120000", "world_size": 8, "device": "NVIDIA H100 80GB HBM3", "commit": "a" * 40}
    write_lines(folder / "starts.jsonl", [start | {"packages": {"torch": "2.13.0"}}])
    if patch:
        (folder / f"changes_{start['time']}.patch").write_text(patch)
    return folder


def make_vocabulary(size: int) -> list[bytes]:
    """All bytes, then words, as many as a real model has; the last token is hostile."""
    words = [f" {a}{b}{c}{d}" for a in SYLLABLES for b in SYLLABLES for c in SYLLABLES for d in ["", *SYLLABLES]]
    words += [f"{word}{number}" for word in words for number in (1, 2)]
    pieces = [*(bytes([byte]) for byte in range(256)), *map(str.encode, words)]
    return [*pieces[: size - 1], HOSTILE.encode()]


def make_rollouts(run: Path, steps: list[int], prompts: int, tokens: int, vocabulary: list[bytes]) -> None:
    """The rollouts of these steps, of random words. The first completion is hostile, the second smiles."""
    random, count = np.random.default_rng(0), prompts * GROUP_SIZE
    words, end = np.arange(256, len(vocabulary)), len(vocabulary)
    frequencies = 1 / np.arange(2, len(words) + 2)  # Zipf's law
    keeper = Keeper(run, 100.0, [*vocabulary, b"<|im_end|>"])
    for step in steps:
        lengths = np.clip(random.normal(tokens, tokens / 5, count), 20, None).astype(int)
        drawn = random.choice(words, lengths.sum(), p=frequencies / frequencies.sum())
        completions = [np.append(each, end) for each in np.split(drawn, np.cumsum(lengths)[:-1])]
        completions[0] = np.append(end - 1, completions[0])
        smiling = f"{SMILE} is the answer\nand a new line, {SMILE}"
        completions[1] = np.append(list(smiling.encode()), completions[1])
        rows = [
            make_row(
                [1], text=f"<|im_start|>user\nGroup {group} {HOSTILE}<|im_end|>\n", answer=f"{group} {HOSTILE}",
                where=f"train.jsonl:{step * prompts + group}",
            )
            for group in range(prompts)
        ]  # fmt: skip
        grades = [
            Grade(0.1 + right, HOSTILE if b == 3 else "ok", {HOSTILE: right, "format": 0.1}, HOSTILE if b % 5 else None)
            for b, right in enumerate((random.random(count) < 0.5).astype(float).tolist())
        ]
        rollout = Rollout(
            rows=[rows[b // GROUP_SIZE] for b in range(count)],
            completions=completions,
            rollout_logprobs=[-random.exponential(0.4, len(each)).astype(np.float32) for each in completions],
            texts=[b"".join(vocabulary[i] for i in each[:-1]).decode() for each in completions],
            is_truncated_B=np.arange(count) % 4 == 2,
            is_sampled=[np.ones(len(each), dtype=bool) for each in completions],
            is_trained_B=np.ones(count, dtype=bool),
            grades=grades,
        )
        keeper.keep(Sampled(step, GROUP_SIZE, rollout, np.zeros(count), np.arange(count), None, {}))
    keeper.wait()
