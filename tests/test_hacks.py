"""Hacks are a few lines in one place each, and those of docs/hacks.md work: all train together, in a copy."""

import math
import re
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from helpers.runs import NO_EVAL, ROOT, metrics_of, run_copy, succeeded, training_flags

QUARTER = '''def quarter(t: Tokens) -> Loss:
    """A quarter for every token."""
    return Loss(0.25 + 0.0 * t.logprobs)\n\n
'''
THREES = '''def verify_threes(case: Case) -> Grade:
    """Three for every completion."""
    return Grade(3.0)\n\n
'''
REWARD = """def score(completion, answer):
    return {'reward': (answer == '7') / 2, 'brevity': 3}
"""
READER = '''def read_lines(path: Path) -> list[Record]:
    """The rows of a file with a problem and its answer on each line, with a bar between them."""
    pairs = [line.split("|") for line in path.read_text().splitlines()]
    return [Record(f"{path}, line {i}", {"problem": a, "answer": b}, path.parent) for i, (a, b) in enumerate(pairs)]


'''
HACKS = {  # what is put before which place of which file
    "policy loss": [
        ("grpo.py", "def reinforce(", QUARTER),
        ("algorithm.py", '        "clip": "grpo:clip",\n', '        "quarter": "grpo:quarter",\n'),
    ],
    "reward": [("my_reward.py", "", REWARD)],
    "verifier": [
        ("grading/verifiers.py", "BUILT_IN = {", THREES),
        ("grading/verifiers.py", '    "math": "grading', '    "threes": "grading.verifiers:verify_threes",\n'),
    ],
    "data source": [
        ("runtime/sources.py", "READERS: ", READER),
        ("runtime/sources.py", '".jsonl": read', '".lines": read_lines, '),
    ],
}  # fmt: skip


def replace(path: Path, before: str, after: str) -> None:
    text = path.read_text() if before else ""
    assert text.count(before) == 1, (path.name, before)
    path.write_text(text.replace(before, after))


def copied(folder: Path) -> Path:
    left_out = shutil.ignore_patterns(".git", ".venv", "runs", "shared", "tests", "docs", "benchmarks", "__pycache__")
    return Path(shutil.copytree(ROOT, folder / "repository", ignore=left_out))


def test_hacks_have_the_files_and_lines_that_the_readme_counts():
    row = r"^\|.*\]\(docs/hacks.md#(.*)\) \| (.*) \| (\d+) \|$"
    rows = re.findall(row, (ROOT / "README.md").read_text(), re.MULTILINE)
    for (anchor, files, lines), (title, num_lines, parts) in zip(rows, hacks_of_page(), strict=True):
        assert (anchor, int(lines)) == (title.lower().replace(" ", "-"), num_lines)
        assert re.findall(r"`(.+?)`", files) == list(dict.fromkeys(file for file, _, _ in parts)), title


def run(copy: Path, *command: str) -> str:
    return succeeded(run_copy(copy, *command)).stdout


def test_all_hacks_together_train_a_step_and_need_no_further_place(tmp_path, policy):
    copy = copied(tmp_path)
    for file, before, lines in sum(HACKS.values(), []):
        replace(copy / file, before, lines + before)
    (tmp_path / "sums.lines").write_text("3+4|7\n1+2|3\n" * 4)
    changes = NO_EVAL | {"save_every": None} | {
        "policy_loss": "quarter", "kl_coef": 0, "total_steps": 1,
        "reward": "threes,my_reward.py:score:2.0", "train_data": tmp_path / "sums.lines",
    }  # fmt: skip
    said = run(copy, "train_grpo.py", *training_flags(policy, tmp_path / "run", **changes))
    found = metrics_of(tmp_path / "run")[1]
    assert found["reward/part/my_reward.py:score"] == 0.25, "every second answer is 7"
    assert (found["reward/part/threes"], found["reward/part/brevity"], found["reward/mean"]) == (3.0, 3.0, 3.5)
    assert found["policy/loss"] == pytest.approx(0.25)
    assert "loss quarter: A quarter" in said


def hacks_of_page() -> list[tuple[str, int, list[tuple[str, str, str]]]]:
    """Of each of docs/hacks.md: title, number of lines, and (file, the text there, the text in its place)."""
    page, found = (ROOT / "docs" / "hacks.md").read_text(), []
    for title, diff in re.findall(r"^## (.*?)\n.*?^```diff\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        found.append((title, len(re.findall(r"^\+.*\S", diff, re.MULTILINE)), parts := []))
        for file, lines in re.findall(r"^ # (\S+?\.py).*\n((?:(?! # ).*\n)+)", diff, re.MULTILINE):
            kept = [(line[:1], line[1:]) for line in lines.splitlines()]
            before, after = ("\n".join(text for mark, text in kept if mark in marks) for marks in (" -", " +"))
            parts.append((file, before, after))
    return found


CHECKS = """
from types import SimpleNamespace
import torch
from algorithm import algorithm_of
from command_line import parse_flags
from gate.choices import check_choices
from gate.describe import describe_algorithm

def checked(*changes):
    args = parse_flags(["--model", "m", "--train_data", "d", "--out_dir", "o", "--negative_weight", "3", *changes])
    check_choices(args)
    return args

args = checked("--policy_loss", "reinforce")
tokens = SimpleNamespace(logprobs=torch.ones(2), advantages=torch.tensor([1.0, -1.0]))
assert algorithm_of(args).policy_loss(tokens).per_token.tolist() == [-1.0, 3.0]
assert "--policy_loss reinforce --negative_weight 3.0: -A x logprob" in describe_algorithm(args)
try:
    checked()
    raise AssertionError
except ValueError as error:
    assert "--negative_weight 3.0 has no effect with --policy_loss clip, only with --policy_loss " in str(error)
parse_flags(["--help"])  # which ends the program
"""


def test_the_hacks_of_the_page_train_together(tmp_path, policy):
    copy = copied(tmp_path)
    for file, before, after in sum((parts for _, _, parts in hacks_of_page()), []):
        replace(copy / file, f"{before}\n", f"{after}\n")
    (copy / "checks.py").write_text(CHECKS)
    assert "--negative_weight float" in run(copy, "checks.py")
    (tmp_path / "odd.py").write_text("def odd(completion): return len(completion) % 2\n")  # a random policy gets it
    changes = {"reward": f"{tmp_path}/odd.py:odd", "lr_schedule": "root", "stop_after": 2}
    given = training_flags(policy, tmp_path / "run", **changes)
    assert "done, step 2/4" in run(copy, "train_grpo.py", *given)
    found, updates = metrics_of(tmp_path / "run"), 8
    assert list(found) == [0, 1, 2] and (tmp_path / "run" / "final").readlink() == Path("step_2")
    del found[0]
    assert all(0 < each["completion/tokens_min"] <= each["completion/tokens_mean"] for each in found.values())
    rates = [1e-3 * (1 - math.sqrt((2 * step - 1) / updates)) for step in found]  # the second update of a step has it
    assert [metrics["optim/lr"] for metrics in found.values()] == pytest.approx(rates)
    rollouts = [pq.read_table(tmp_path / "run" / "rollouts" / f"step_{step}.parquet") for step in found]
    first, second = (table["row"].to_pylist() for table in rollouts)
    assert first == second, "the prompts of a step come twice"
    assert max(int(row.rpartition(" ")[2]) for row in first) <= 8 + 64 / 4, "the first of a sorted file of 64, roughly"
    before, after = (load_file(folder / "model.safetensors") for folder in (policy, tmp_path / "run" / "final"))
    changed = {name for name in before if not torch.equal(before[name].float(), after[name].float())}
    assert changed and not any("layers.0." in name or "embed_tokens" in name for name in changed)
    assert any("layers.1." in name for name in changed)
    shown = run(copy, "minimal.py", *training_flags(policy, tmp_path / "mine", **changes | {"stop_after": 1}))
    assert re.search(r"^\{'eval/heldout/avg@4': 0\.\d+, 'eval/heldout/stderr': .*\}\nstep 1/4 \| reward ", shown, re.M)
    assert (tmp_path / "mine" / "step_1" / "heldout.jsonl").read_text().count("\n") == 16 * 4
    mine = load_file(tmp_path / "mine" / "model.safetensors")
    assert all(torch.equal(mine[name], before[name]) != (name in changed) for name in mine), "the same are trained"


NOTED = """
import torch
from grpo import clip, dr_grpo

def loss(t, *, clip_low, clip_high, dual_clip):
    torch.save([x[t.mask].detach() for x in (t.logprobs, t.old_logprobs)], f"{FOLDER}/step_{t.step}.pt")
    return clip(t, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)

def advantage(g):
    spread = g.rewards_PG.amax(dim=1) - g.rewards_PG.amin(dim=1)
    print("groups", g.step, len(spread), int((spread == 0).sum()))
    return dr_grpo(g)
"""


def minimal_with(titles: list[str], policy: Path, folder: Path) -> list[list[int]]:
    """Three steps of minimal.py with these hacks of the page: (step, groups trained on, of these with equal rewards).

    An update has all of a step in one micro-batch; `folder` gets the log-probs of its tokens, and old ones.
    """
    copy = copied(folder)
    for title, _, parts in hacks_of_page():
        for file, before, after in parts if title in titles else ():
            replace(copy / file, f"{before}\n", f"{after}\n")
    (folder / "noted.py").write_text(NOTED.replace("{FOLDER}", str(folder)))
    (folder / "odd.py").write_text("def odd(completion): return len(completion) % 7 == 0\n")
    changes = {
        "reward": f"{folder}/odd.py:odd", "policy_loss": f"{folder}/noted.py:loss", "stop_after": 3, "kl_coef": None,
        "advantage": f"{folder}/noted.py:advantage", "prompts_per_update": None, "micro_batch_tokens": 2048,
    }  # fmt: skip
    said = run(copy, "minimal.py", *training_flags(policy, folder / "run", **NO_EVAL | changes))
    return [[int(number) for number in line.split()] for line in re.findall(r"^groups (.*)$", said, re.MULTILINE)]


def test_dynamic_filtering_trains_on_the_groups_whose_rewards_differ(policy, tmp_path):
    plain = minimal_with([], policy, tmp_path / "plain")
    (_, sampled, equal), *_ = plain
    assert sampled == 8 and 0 < equal < 8, "of random completions"
    filtered = minimal_with(["Dynamic filtering"], policy, tmp_path / "filtered")
    assert filtered[0] == [1, sampled - equal, 0] and all(line[2] == 0 for line in filtered)


def test_a_replay_buffer_trains_on_older_rows_with_their_importance_weight(policy, tmp_path):
    """Their ratio is to the log-probs of the weights that sampled them, which have moved since; new ones have 1."""
    assert [line[1] for line in minimal_with(["A replay buffer"], policy, tmp_path)] == [8, 16, 16]
    for step in (2, 3):
        _, before = torch.load(tmp_path / f"step_{step - 1}.pt")
        logprobs, old = torch.load(tmp_path / f"step_{step}.pt")
        is_older = torch.isin(old, before)
        assert is_older.sum() >= 0.3 * len(old), "about a half, by tokens"
        ratios = (logprobs - old).exp()
        assert (ratios[~is_older] - 1).abs().max() < 1e-3 and (ratios[is_older] - 1).abs().max() > 0.05
