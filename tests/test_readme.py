"""The commands and snippets of README and docs: what they name exists, and the README's own example does what it
says.
"""

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

import evaluate
from flags import FLAGS
from grading import Case
from grading.score import Handler
from helpers import ROOT
from inputs.checks import check_flags
from inputs.command_line import parse_flags
from planner.dry_run import dry_run

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "benchmarks" / "README.md"]
README = PAGES[0].read_text()


def commands(page: Path) -> list[str]:
    """The lines that start a program, in fenced or indented blocks, with their continuation lines."""
    text = re.sub(r" \\\n\s*", " ", page.read_text())
    found = re.findall(
        r"^(?:    )*((?:[A-Z_]+=\S+ )*(?:bash|python|torchrun|sbatch) .*?)(?:\s+#.*)?$", text, flags=re.MULTILINE
    )
    return [line for line in found if "/" in line or ".py" in line]


def blocks(language: str) -> list[str]:
    """The README's fenced blocks of this language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_programs_and_flags_of_every_command_exist(page):
    of_evaluate = {each.name for group in evaluate.FLAGS.values() for each in group}
    for command in commands(page):
        words = shlex.split(command.rstrip(" .").replace("...", ""))
        programs = [word for word in words if re.fullmatch(r"[\w/.]+\.(py|sh)", word)]
        missing = [
            word for word in programs if not (ROOT / word).exists() and "/X.sh" not in word and "my_" not in word
        ]
        assert programs and not missing, command
        known = of_evaluate if "evaluate.py" in programs else set(FLAGS)
        if "train_grpo.py" in programs or "evaluate.py" in programs:
            program = "train_grpo.py" if "train_grpo.py" in programs else "evaluate.py"
            given = [word for word in words[words.index(program) :] if word.startswith("--")]
            assert set(given) <= known, command


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_example_of_ones_own_model_fits_as_the_readme_says_and_its_reward_pays_the_correct_answer(
    tmp_path, monkeypatch, capsys
):
    problems, rewards = blocks("json")[0], blocks("python")[0]
    (tmp_path / "problems.jsonl").write_text(problems)
    (tmp_path / "my_reward.py").write_text(rewards)
    monkeypatch.chdir(tmp_path)
    (command,) = [command for command in commands(PAGES[0]) if "my_reward.py" in command]
    args = parse_flags([*shlex.split(command)[shlex.split(command).index("train_grpo.py") + 1 :], "--dry_run"])
    check_flags(args, 1)
    args.plan_gpus = 1
    assert dry_run(args) == 0
    needed = re.search(r"needs? (\d+\.\d) of\s+(\d+\.\d) GiB", README).groups()
    assert f"{needed[0]} of {needed[1]} GiB" in capsys.readouterr().out
    grade = Handler(args.reward, None)
    for row in map(json.loads, problems.splitlines()):
        columns = {"completion": "So it is easy. Answer: " + row["answer"], "answer": row["answer"], "columns": row}
        assert grade(("grade", Case(**columns))).is_correct
        assert not grade(("grade", Case(**columns | {"completion": "I do not know. Answer: 5"}))).is_correct


def test_the_functions_that_the_page_on_rewards_shows_do_what_it_says(tmp_path):
    page = (ROOT / "docs" / "rewards.md").read_text()
    for i, code in enumerate(re.findall(r"^```python\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)):
        (tmp_path / f"my_reward_{i}.py").write_text(code)
    cases = [Case(text, "4") for text in ("4 of them", "sorry, 4", "5")]
    alone = Handler(f"{tmp_path}/my_reward_0.py:score", None)
    assert [alone(("grade", case)).reward for case in cases] == [1.0, 0.9, 0.0]
    together = Handler(f"{tmp_path}/my_reward_1.py:score_group", None)
    assert [grade.reward for grade in together(("compare", cases))] == [0.0, 1.0, 0.0]


def test_the_dry_run_prints_what_the_page_on_memory_shows():
    command = ["bash", "scripts/qwq32b_8xh100.sh", "--dry_run"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    shown = re.search(r"^```\n(step.*?)^```$", (ROOT / "docs" / "memory.md").read_text(), re.MULTILINE | re.DOTALL)[1]
    assert set(shown.splitlines()) <= set(done.stdout.splitlines())
