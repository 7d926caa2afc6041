"""Hacks in one place each: a new loss, reward, reader, metric or flag is a few lines in one or two files, and works.

Each is made in a copy of the repository, as a user would make it; then all of them train one step together.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import ENVIRONMENT, ROOT, metrics_of, training_flags

QUARTER = '''def quarter(t: Tokens) -> Loss:
    """A quarter for every token."""
    return Loss(0.25 + 0.0 * t.logprobs)


'''
THREES = '''def verify_threes(case: Case) -> Verdict:
    """Three for every completion."""
    return 3.0, None


'''
REWARD = """def score(completion, answer):
    return {'reward': (answer == '7') / 2, 'brevity': 3}
"""
READER = '''def read_lines(path: Path) -> list[Record]:
    """The rows of a file with a problem and its answer on each line, with a bar between them."""
    pairs = [line.split("|") for line in path.read_text().splitlines()]
    return [Record(f"{path}, line {i}", {"problem": a, "answer": b}, path.parent) for i, (a, b) in enumerate(pairs)]


'''
LEAST = '        "completion/tokens_min": lengths_B.min(),\n'
SCALE = '    flag("--rloo_scale", 1.0, "advantages of rloo are multiplied by this", (0, INF)),\n'

HACKS = {  # what is put before which place of which file
    "policy loss": [("grpo.py", "LOSSES: ", QUARTER), ("grpo.py", '    "clip": clip,\n', '    "quarter": quarter,\n')],
    "reward": [("my_reward.py", "", REWARD)],
    "verifier": [
        ("grading/verifiers.py", "BUILT_IN = {", THREES),
        ("grading/verifiers.py", '    "math": verify_math', '    "threes": verify_threes,\n'),
    ],
    "data source": [
        ("inputs/records.py", "READERS: ", READER),
        ("inputs/records.py", '".jsonl": read', '".lines": read_lines, '),
    ],
    "metric": [("metrics.py", '        "completion/tokens_max"', LEAST)],
    "flag of the algorithm": [
        ("flags.py", '    flag("--advantage_ddof"', SCALE),
        ("grpo.py", ') -> Tensor:\n    """r - mean of the group\'s other', ", *, rloo_scale: float"),
        ("grpo.py", "centred(g.rewards_PG) * group_size", "rloo_scale * "),
    ],
}  # fmt: skip


def put(path: Path, before: str, lines: str) -> None:
    text = path.read_text() if before else ""
    assert text.count(before) == 1, (path.name, before)
    path.write_text(text.replace(before, lines + before))


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository with all the hacks."""
    copy = tmp_path_factory.mktemp("hacks") / "repository"
    left_out = shutil.ignore_patterns(".git", ".venv", "runs", "shared", "tests", "docs", "benchmarks", "__pycache__")
    shutil.copytree(ROOT, copy, ignore=left_out)
    for file, before, lines in sum(HACKS.values(), []):
        put(copy / file, before, lines)
    return copy


@pytest.mark.parametrize("name", HACKS)
def test_a_hack_is_at_most_15_lines_in_at_most_2_files(name):
    assert len({file for file, _, _ in HACKS[name]}) <= 2
    assert sum(len(lines.splitlines()) for _, _, lines in HACKS[name]) <= 15


def run(copy: Path, *arguments: str) -> str:
    """What Python says, in the copy."""
    options = {"cwd": copy, "env": ENVIRONMENT | {"PYTHONPATH": str(copy)}, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, *arguments], **options, timeout=300, check=False)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


CHECKS = """
import torch, grpo
from inputs.choices import algorithm_of
from inputs.command_line import parse_flags

def algorithm(*changes):
    return algorithm_of(parse_flags(["--model", "m", "--train_data", "d", "--out_dir", "o", *changes]))

graded = grpo.Graded(torch.tensor([[1.0, 0.0]]), torch.ones(2), torch.tensor([1, 1]), torch.ones(2).bool())
scaled = algorithm("--advantage", "rloo", "--rloo_scale", "3")
assert scaled.advantage(graded).tolist() == [[3.0, -3.0]]
assert "--advantage rloo --rloo_scale 3.0: r - mean" in scaled.description
try:
    algorithm("--rloo_scale", "3")
    raise AssertionError
except ValueError as error:
    assert "--rloo_scale 3.0 has no effect with --advantage grpo, only with --advantage rloo" in str(error)
assert "--policy_loss quarter: A quarter for every token" in algorithm("--policy_loss", "quarter").description
parse_flags(["--help"])  # which ends the program
"""


def test_new_choices_and_flags_need_no_further_place(copy):
    said = run(copy, "-c", CHECKS)
    assert re.search(r"quarter = A\s+quarter\s+for\s+every\s+token", said)
    assert "--rloo_scale float" in said


def test_all_hacks_together_train_a_step(copy, policy, tmp_path):
    (tmp_path / "sums.lines").write_text("3+4|7\n1+2|3\n" * 4)
    choices = {"policy_loss": "quarter", "advantage": "rloo", "rloo_scale": 2.0, "kl_coef": 0}
    choices |= {"reward": "threes,my_reward.py:score:2.0"}
    changes = choices | dict.fromkeys(["eval_data", "eval_every", "eval_before_training", "save_every"])
    changes |= {"total_steps": 1, "train_data": tmp_path / "sums.lines"}
    said = run(copy, "train_grpo.py", *training_flags(policy, tmp_path / "run", **changes))
    found = metrics_of(tmp_path / "run")[1]
    assert found["reward/part/my_reward.py:score"] == 0.25, "every second answer is 7"
    assert (found["reward/part/threes"], found["reward/part/brevity"], found["reward/mean"]) == (3.0, 3.0, 3.5)
    assert found["policy/loss"] == pytest.approx(0.25)
    assert 0 < found["completion/tokens_min"] <= found["completion/tokens_mean"]
    assert "loss quarter: A quarter" in said
    assert json.loads((tmp_path / "run" / "config.json").read_text())["rloo_scale"] == 2.0
