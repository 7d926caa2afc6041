"""Hacks in one place each: a new loss, reward, reader, metric or flag is a few lines in one or two files, and works.

Each is made in a copy of the repository, as a user would make it; then all of them train one step together.
"""

import difflib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers import ENVIRONMENT, ROOT, metrics_of, training_flags

HACKS: dict[str, Callable[[Path], None]] = {}


def hack(function: Callable[[Path], None]) -> Callable[[Path], None]:
    HACKS[function.__name__] = function
    return function


def insert(path: Path, before: str, lines: str) -> None:
    """Puts the lines before the one line that begins like this."""
    text = path.read_text()
    assert len(re.findall(rf"^{re.escape(before)}", text, flags=re.MULTILINE)) == 1, (path.name, before)
    path.write_text(re.sub(rf"^{re.escape(before)}", lambda match: lines + match[0], text, flags=re.MULTILINE))


def add_entry(path: Path, dictionary: str, entry: str) -> None:
    """Puts the entry first into the dict of this name."""
    text, count = re.subn(rf"^({dictionary}\b[^\n]*= \{{)", rf"\1{entry}, ", path.read_text(), flags=re.MULTILINE)
    assert count == 1, (path.name, dictionary)
    path.write_text(text)


@hack
def policy_loss(copy: Path) -> None:
    function = '''def quarter(t: Tokens) -> Loss:
    """A quarter of the advantage, whatever the log-probs."""
    return Loss(0.25 * t.advantages + 0.0 * t.logprobs)


'''
    insert(copy / "grpo.py", "LOSSES", function)
    add_entry(copy / "grpo.py", "LOSSES", '"quarter": quarter')


@hack
def advantage(copy: Path) -> None:
    function = '''def one(g: Graded) -> Tensor:
    """One for every completion."""
    return torch.ones_like(g.rewards_PG)


'''
    insert(copy / "grpo.py", "ADVANTAGES", function)
    add_entry(copy / "grpo.py", "ADVANTAGES", '"one": one')


@hack
def kl_estimator(copy: Path) -> None:
    function = '''def seven(x: Tensor) -> Tensor:
    """Seven at every token."""
    return 0.0 * x + 7.0


'''
    insert(copy / "grpo.py", "KL:", function)
    add_entry(copy / "grpo.py", "KL", '"seven": seven')


@hack
def reward(copy: Path) -> None:
    (copy / "my_reward.py").write_text(
        "def score(completion, answer):\n    return {'reward': (answer == '7') / 2, 'brevity': 3}\n"
    )


@hack
def verifier(copy: Path) -> None:
    function = '''def verify_threes(case: Case) -> Verdict:
    """Three for every completion."""
    return 3.0, None


'''
    insert(copy / "grading" / "verifiers.py", "BUILT_IN", function)
    add_entry(copy / "grading" / "verifiers.py", "BUILT_IN", '"threes": verify_threes')


@hack
def data_source(copy: Path) -> None:
    function = '''def read_lines(path: Path) -> list[Record]:
    """The rows of a file with a problem and its answer on each line, with a bar between them."""
    pairs = [line.split("|") for line in path.read_text().splitlines()]
    return [Record(f"{path}, line {i}", {"problem": a, "answer": b}, path.parent) for i, (a, b) in enumerate(pairs)]


'''
    insert(copy / "inputs" / "records.py", "READERS", function)
    add_entry(copy / "inputs" / "records.py", "READERS", '".lines": read_lines')


@hack
def metric(copy: Path) -> None:
    insert(
        copy / "metrics.py", '        "completion/tokens_max"', '        "completion/tokens_min": lengths_B.min(),\n'
    )


@hack
def flag_of_the_algorithm(copy: Path) -> None:
    line = '    flag("--rloo_scale", 1.0, "advantages of rloo are multiplied by this", (0, INF)),\n'
    insert(copy / "flags.py", '    flag("--advantage_ddof"', line)
    text = (copy / "grpo.py").read_text()
    text = text.replace("def rloo(g: Graded)", "def rloo(g: Graded, *, rloo_scale: float)")
    (copy / "grpo.py").write_text(
        text.replace("return centred(g.rewards_PG) * g", "return rloo_scale * centred(g.rewards_PG) * g")
    )


@hack
def flag_of_memory(copy: Path) -> None:
    line = '    flag("--report_updates", False, "print the length of each update", free_on_resume=True),\n'
    insert(copy / "flags.py", '    flag("--timeout_minutes"', line)
    insert(copy / "flags.py", "    share_prompts: bool", "    report_updates: bool\n")
    insert(
        copy / "update.py",
        "    if memory.communicate_once:\n        release_gathered",
        ('    if memory.report_updates:\n        print(f"an update of {update.num_tokens} tokens")\n'),
    )


def texts(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.py")}


def changed_lines(before: dict[str, str], after: dict[str, str]) -> dict[str, int]:
    """File -> how many lines were added or removed in it."""
    found = {}
    for name in sorted(before.keys() | after.keys()):
        pair = [each.get(name, "").splitlines() for each in (before, after)]
        lines = [line for line in difflib.unified_diff(*pair, n=0) if re.match(r"[+-](?!\+\+ |-- )", line)]
        if lines:
            found[name] = len(lines)
    return found


@pytest.fixture(scope="module")
def hacked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, int]]]:
    """A copy of the repository with all the hacks, and what each of them changed."""
    copy = tmp_path_factory.mktemp("hacks") / "repository"
    left_out = shutil.ignore_patterns(".git", ".venv", "runs", "shared", "tests", "docs", "benchmarks", "__pycache__")
    shutil.copytree(ROOT, copy, ignore=left_out)
    changes, before = {}, texts(copy)
    for name, apply in HACKS.items():
        apply(copy)
        after = texts(copy)
        changes[name], before = changed_lines(before, after), after
    return copy, changes


@pytest.mark.parametrize("name", HACKS)
def test_a_hack_is_at_most_15_lines_in_at_most_2_files(name, hacked):
    changes = hacked[1][name]
    assert 1 <= len(changes) <= 2 and sum(changes.values()) <= 15, changes


def run(copy: Path, *command: object, **environment: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=copy,
        env=ENVIRONMENT | {"PYTHONPATH": str(copy)} | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done


CHECKS = """
import torch, flags, grpo
from inputs.checks import check_flags
from inputs.choices import algorithm_of
from inputs.command_line import parse_flags

def algorithm(*changes):
    args = parse_flags(["--model", "m", "--train_data", "d", "--out_dir", "o", "--total_steps", "1", *changes])
    check_flags(args, num_ranks=1)
    return algorithm_of(args)

graded = grpo.Graded(torch.tensor([[1.0, 0.0]]), torch.ones(2), torch.tensor([1, 1]), torch.ones(2).bool())
assert algorithm("--advantage", "rloo", "--rloo_scale", "3").advantage(graded).tolist() == [[3.0, -3.0]]
scaled = algorithm("--advantage", "rloo", "--rloo_scale", "3")
assert "--advantage rloo --rloo_scale 3.0: r - mean" in scaled.description
try:
    algorithm("--rloo_scale", "3")
    raise AssertionError
except ValueError as error:
    assert str(error) == (
        "--rloo_scale 3.0 has no effect with --advantage grpo, only with --advantage rloo: leave it at 1.0."
    )
assert "--policy_loss quarter: A quarter of the advantage" in algorithm("--policy_loss", "quarter").description
assert flags.Memory().report_updates is False
"""


def test_new_choices_and_flags_need_no_further_place(hacked):
    copy, _ = hacked
    run(copy, "-c", CHECKS)
    said = run(copy, "train_grpo.py", "--help").stdout
    assert re.search(r"quarter = A\s+quarter\s+of\s+the\s+advantage", said)
    assert "--rloo_scale float" in said and "--report_updates" in said


def test_all_hacks_together_train_a_step(hacked, policy, tmp_path):
    copy, _ = hacked
    (tmp_path / "sums.lines").write_text("3+4|7\n1+2|3\n" * 4)
    choices = {"policy_loss": "quarter", "advantage": "one", "kl_estimator": "seven", "kl_coef": 0.1}
    choices |= {
        "train_data": tmp_path / "sums.lines",
        "reward": "threes,my_reward.py:score:2.0",
        "report_updates": True,
    }
    lengths = {
        "total_steps": 1,
        "eval_data": None,
        "eval_every": None,
        "eval_before_training": None,
        "save_every": None,
    }
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    rank |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    done = run(copy, "train_grpo.py", *training_flags(policy, tmp_path / "run", **choices, **lengths), **rank)
    found = metrics_of(tmp_path / "run")[1]
    assert found["reward/part/threes"] == 3.0
    assert found["reward/part/my_reward.py:score"] == 0.25, "every second answer is 7"
    assert found["reward/part/brevity"] == 3.0
    assert found["reward/mean"] == 3.5
    assert found["policy/kl_ref"] == pytest.approx(0, abs=1e-6), "what is shown does not depend on the estimator"
    assert found["policy/loss"] == pytest.approx(0.25 * 1 + 0.1 * 7), "advantage, loss and KL are the new ones"
    assert 0 < found["completion/tokens_min"] <= found["completion/tokens_mean"]
    assert done.stdout.count("an update of ") == 2
    assert "loss quarter: A quarter" in done.stdout
    assert json.loads((tmp_path / "run" / "config.json").read_text())["report_updates"] is True
    assert os.environ.get("RANK") is None
