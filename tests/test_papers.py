"""Every row of docs/papers.md: its flags go together, say what they mean, and train."""

import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from batch import Rollout, Row
from helpers import RAGGED, ROOT, make_grade, make_rollout, unpacked_logprobs
from inputs.checks import check_flags
from inputs.choices import algorithm_of
from inputs.command_line import parse_flags
from policies import load_policy
from test_update import train_step

LINES = [line for line in (ROOT / "docs" / "papers.md").read_text().splitlines() if re.match(r"\| (?!method|-)", line)]
ROWS = [re.fullmatch(r"\| (.+?)(?: \(\[.*\))? \| `(--[^`]+)` \| (?:`(--[^`]+)`|-) \| (.+) \|", line) for line in LINES]
TINY = "--prompts_per_step 2 --prompts_per_update 1 --group_size 8 --learning_rate 1e-3 --max_rollout_gap 0"


def test_the_page_has_at_least_25_methods_each_with_its_flags_its_batch_and_what_differs():
    assert all(ROWS) and len({row[1] for row in ROWS}) == len(ROWS) >= 25
    files = re.findall(r"docs/losses/(\w+\.py):", "".join(row[2] for row in ROWS))
    assert sorted(files) == sorted(path.name for path in (ROOT / "docs" / "losses").glob("*.py"))


@pytest.fixture(scope="module")
def sampled(policy: Path) -> Rollout:
    """Two prompts x 8 completions with the policy's own log-probs, of which every third one is correct."""
    rollout = make_rollout(RAGGED * 2, group_size=8)
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    with torch.no_grad():
        pieces = unpacked_logprobs(model, rollout, 1.0).split(rollout.completion_lengths_B.tolist())
    rewards = [float(b % 3 == 0) for b in range(16)]
    grades = [make_grade(x, is_correct=x > 0, math=x, format=b // 4 % 2, turn_1=x) for b, x in enumerate(rewards)]
    rollout = replace(rollout, is_sampled=[np.ones(len(each), dtype=bool) for each in rollout.completions])  # one turn
    return replace(rollout, grades=grades, rollout_logprobs=[piece.numpy() for piece in pieces], advantages=None)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[1])
def test_the_flags_of_a_row_go_together_and_train(row, policy, qwen3_policy, sampled, monkeypatch):
    """Two updates, so that the second one is off-policy."""
    monkeypatch.chdir(ROOT)
    required = f"--model {policy} --train_data d --out_dir o --total_steps 10 --micro_batch_tokens 100000"
    given = f"{required} {row[2]} {row[3] or ''}"
    args = parse_flags(given.split())
    check_flags(args, num_ranks=1)
    assert "algorithm: --advantage" in algorithm_of(args).description
    tiny, model = parse_flags(f"{given} {TINY}".split()), load_policy(policy)
    reference = load_policy(qwen3_policy) if tiny.reference else None
    if tiny.hint_column:
        told = [Row([], "", {}, "", ids=row.ids, hinted_ids=np.append(row.ids, [5, 9])) for row in sampled.rows]
        sampled = replace(sampled, rows=told)
    updates = [metrics for _, metrics in train_step(model, tiny, sampled, reference)]
    assert len(updates) == 2
    for metrics in updates:
        assert metrics["optim/skipped_updates"] == 0 and math.isfinite(metrics["policy/loss"])
        assert metrics["optim/grad_norm"] > 0
