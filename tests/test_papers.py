"""Every method of docs/papers.json: its flags go together, say their meaning, and train; page and script name it."""

import json
import math
import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from batch import Rollout, Row
from command_line import parse_flags
from extras import losses
from gate.checks import check_flags
from gate.describe import describe_algorithm
from helpers.made_up import RAGGED, load_policy, make_grade, make_model_of_family, make_rollout, unpacked_logprobs
from helpers.runs import ROOT, Done, run_command
from test_update import train_step

PAPERS = json.loads((ROOT / "docs" / "papers.json").read_text())
TINY = "--prompts_per_step 2 --prompts_per_update 1 --group_size 8 --learning_rate 1e-3 --max_rollout_gap 0"


def test_the_page_names_every_method_and_every_loss_has_one():
    row = r"^\| `(\S+)` \| (?:\[([^|]+)\]\(([^|]+)\)|([^|]+)) \| [^|]+ \|$"
    rows = re.findall(row, (ROOT / "docs" / "papers.md").read_text(), re.M)
    named = {name: (method or plain, link or None) for name, method, link, plain in rows if name != "paper.sh"}
    assert named == {name: (paper["method"], paper.get("link")) for name, paper in PAPERS.items()}
    assert list(named) == list(PAPERS) and len({paper["method"] for paper in PAPERS.values()}) == len(PAPERS) >= 25
    known = {"method", "link", "flags", "batch", "notes"}
    assert all(paper.keys() <= known and paper["notes"] for paper in PAPERS.values())
    chosen = re.split(r"[ :]", " ".join(paper["flags"] for paper in PAPERS.values()))
    assert {*losses.NAMES["--advantage"], *losses.NAMES["--policy_loss"]} <= set(chosen)


def paper(*arguments: str, folder: Path = ROOT, **environment: str) -> Done:
    return run_command(["bash", str(ROOT / "scripts" / "paper.sh"), *arguments], os.environ | environment, folder)


def test_the_script_prints_a_method_or_runs_a_script_with_it(tmp_path):
    """From another folder, too: the path of the script is one's own, that of a loss is the repository's."""
    assert [line.split()[0] for line in paper().stdout.splitlines()] == list(PAPERS)
    *about, flags, batch = paper("vespo").stdout.splitlines()
    assert flags == PAPERS["vespo"]["flags"] and batch == PAPERS["vespo"]["batch"] + " --micro_batch_tokens 16384"
    assert about == [f"# VESPO  {PAPERS['vespo']['link']}", f"# {PAPERS['vespo']['notes']}"]
    assert paper("rloo").stdout.splitlines()[-1] == "# no batch is given"
    (tmp_path / "my.sh").write_text('echo "$OUT_DIR" "$@"\n')
    own = PAPERS["vespo"]["flags"].replace("docs/", f"{ROOT}/docs/")
    assert paper("vespo", "my.sh", "--seed", "3", folder=tmp_path).stdout == f"runs/paper_vespo {own} --seed 3\n"
    chosen = paper("vespo", "my.sh", folder=tmp_path, BATCH="paper", OUT_DIR="runs/x").stdout
    assert chosen == f"runs/x {own} {batch}\n"
    for arguments, said in (("vespa", "vespa is none of the methods, which are grpo, "), ("dapo x.sh", "x.sh is not")):
        done = paper(*arguments.split())
        assert done.returncode == 1 and done.stderr.startswith(f"error: {said}") and done.stderr.count("\n") == 1


@pytest.fixture(scope="module")
def sampled(policy: Path) -> Rollout:
    """Two prompts x 8 completions with the policy's own log-probs, of which every third one is correct."""
    rollout = make_rollout(RAGGED * 2, group_size=8)
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    with torch.no_grad():
        pieces = unpacked_logprobs(model, rollout, 1.0).split(rollout.completion_lengths_B.tolist())
    rewards = [float(b % 3 == 0) for b in range(16)]
    grades = [make_grade(x, is_correct=x > 0, math=x, format=b // 4 % 2) for b, x in enumerate(rewards)]
    for grade in grades:
        grade.turn_rewards = (grade.reward,)
    return replace(rollout, grades=grades, rollout_logprobs=[piece.numpy() for piece in pieces], advantages=[])


@pytest.mark.parametrize("name", PAPERS)
def test_the_flags_of_a_method_go_together_and_train(name, policy, qwen3_policy, sampled, monkeypatch, tmp_path):
    """Two updates, so that the second one is off-policy."""
    monkeypatch.chdir(ROOT)
    required = f"--model {policy} --train_data d --out_dir o --total_steps 10 --micro_batch_tokens 100000"
    given = f"{required} {PAPERS[name]['flags']} {PAPERS[name].get('batch', '')}"
    args = parse_flags(given.split())
    check_flags(args, num_ranks=1)
    assert f"algorithm: --{'critic' if args.critic else 'advantage'} " in describe_algorithm(args)
    tiny, model = parse_flags(f"{given} {TINY}".split()), load_policy(policy)
    reference = load_policy(qwen3_policy) if tiny.reference else None
    for row in sampled.rows:
        row.columns["start_rewards"] = [0.0, 1.0]
    if tiny.router_replay:  # routes of 2 layers, to 2 of 6 experts
        make_model_of_family(tmp_path, "qwen3_moe", num_experts=6, num_experts_per_tok=2, moe_intermediate_size=64)
        model, rng = load_policy(tmp_path), np.random.default_rng(0)
        routes = [rng.permuted(np.tile(np.arange(6), (n, 2, 1)), axis=2)[..., :2] for n in sampled.sequence_lengths_B]
        sampled = sampled.with_parts(routes=routes)
    if tiny.environment:  # the reply to a first turn, then a second one
        sampled = replace(sampled, is_sampled=[np.arange(len(ids)) != 1 for ids in sampled.completions])
    if tiny.hint_column:
        hinted_rows = [Row([], "", {}, "", ids=row.ids, hinted_ids=np.append(row.ids, [5, 9])) for row in sampled.rows]
        sampled = replace(sampled, rows=hinted_rows)
    updates = [metrics for _, metrics in train_step(model, tiny, sampled, reference)]
    assert len(updates) == 2
    for metrics in updates:
        assert metrics["optim/skipped_updates"] == 0 and math.isfinite(metrics["policy/loss"])
        assert metrics["optim/grad_norm"] > 0
