"""README and docs: the programs, flags, metrics and links that they name exist, and their examples do what they say."""

import json
import os
import re
import shlex
from pathlib import Path

import pytest

import evaluate
from command_line import parse_flags
from flags import FLAGS
from gate.checks import check_flags
from grading import Case
from grading.score import RewardWorker
from helpers.runs import ROOT, run_script
from other_libraries import PAGE, with_tables
from plan.dry_run import dry_run

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "benchmarks" / "README.md"]
README = PAGES[0].read_text()
SYMPTOMS, RUNS, OTHERS = (ROOT / "docs" / f"{name}.md" for name in ("symptoms", "runs", "from_other_libraries"))
METRIC = re.compile(r"`((?:reward|completion|policy|rollout|sampling|optim|eval|time|memory|perf)/[^`]*[^`/])`")
FILES = [*ROOT.glob("*.py"), *ROOT.glob("*/*.py"), *ROOT.glob("extras/*/*.py")]
PROGRAM = [path for path in FILES if path.relative_to(ROOT).parts[0] != "tests"]
SOURCE = "\n".join(path.read_text() for path in PROGRAM)


def commands(page: Path) -> list[str]:
    """The lines that start a program, in fenced or indented blocks, with their continuation lines."""
    text = re.sub(r" \\\n\s*", " ", page.read_text())
    started = r"^(?:    )*((?:[A-Z_]+=\S+ )*(?:bash|python|torchrun|sbatch) .*?)(?:\s+#.*)?$"
    return [line for line in re.findall(started, text, re.MULTILINE) if "/" in line or ".py" in line]


def blocks(language: str, page: str = README) -> list[str]:
    """The fenced blocks of this language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)


def flags_of(program: str) -> set[str]:
    """The flags of a command. Launch scripts hand theirs on to train_grpo.py."""
    if program == "evaluate.py" or program.startswith("scripts/eval_"):
        return {each.name for group in evaluate.FLAGS.values() for each in group}
    if program == "train_grpo.py" or program.endswith(".sh"):
        return set(FLAGS)
    source = (ROOT / program).read_text()
    own = set(re.findall(r'"(--\w+)"', source))
    return own | set(FLAGS) if "from flags import" in source else own


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_programs_and_flags_of_every_command_exist(page):
    for command in commands(page):
        words = shlex.split(command.rstrip(" .").replace("...", ""))
        programs = [word for word in words if re.fullmatch(r"[\w/.]+\.(py|sh)", word) and "my_" not in word]
        missing = [word for word in programs if not (ROOT / word).exists() and "/X.sh" not in word]
        assert programs and not missing, command
        program = "train_grpo.py"
        for word in words:
            program = word if word in programs else program
            if word.startswith("--") and len(word) > 2 and "/X.sh" not in program:
                assert word.partition("=")[0] in flags_of(program), command


def anchors(page: Path) -> set[str]:
    """The parts of a page that a link can lead to, as GitHub names them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\]\((?!http)([^)]+)\)", page.read_text()):
        file, _, part = target.partition("#")
        assert (page.parent / file).exists(), f"{page.name}: {target}"
        assert not part or part in anchors(page.parent / file if file else page), f"{page.name}: {target}"


def test_every_page_is_named_in_the_readme():
    names = {page.relative_to(ROOT).as_posix() for page in PAGES[1:]}
    assert {name for name in names if f"]({name}" not in README} == set()
    for path in [*PROGRAM, *ROOT.glob("scripts/*.sh")]:
        assert set(re.findall(r"(?<![\w/])(?:docs|benchmarks)/\w+\.md", path.read_text())) <= names, path


def is_made(metric: str) -> bool:
    """Whether the program has the text: with { } for <k>, evaluate.py without eval/<set>/, phases without time/."""
    texts = re.split(r"<\w+>", metric.removeprefix("eval/<set>/"))
    phase = metric.removeprefix("time/").removesuffix("_s")
    return bool(re.search(r"\{[^{}]*\}".join(map(re.escape, texts)), SOURCE)) or f'.phase("{phase}")' in SOURCE


def test_the_tables_of_other_libraries_are_those_of_their_json():
    """And the page has no other one of this form: `python scripts/other_libraries.py` writes them."""
    tables, page = json.loads(PAGE.with_suffix(".json").read_text()), PAGE.read_text()
    assert with_tables(page, tables) == page
    head, *_ = next(iter(tables.values()))
    assert page.count(f"| {' | '.join(head)} |") == len(tables)


def test_every_flag_that_a_page_names_exists():
    for line in (SYMPTOMS.read_text() + OTHERS.read_text()).splitlines():
        beside = "".join((ROOT / script).read_text() for script in re.findall(r"python (scripts/\w+\.py)", line))
        wrong = [flag for flag in re.findall(r"--\w+", line) if flag not in FLAGS and f'"{flag}"' not in beside]
        assert set(wrong) <= {"--help", "--rlhf_type"}, line


def test_every_metric_and_file_that_a_page_names_is_made_by_the_program():
    for page in (SYMPTOMS, RUNS):
        named = METRIC.findall(page.read_text())
        assert len(set(named)) > 30 and [name for name in named if not is_made(name)] == []
    files = set(re.findall(r"`(\w+\.(?:jsonl|png)|\w+/)`", SYMPTOMS.read_text()))
    assert len(files) >= 5 and [file for file in files if f"`{file}`" not in RUNS.read_text()] == []


def test_the_users_own_example_fits_and_pays_correct_answers(tmp_path, monkeypatch, capsys):
    problems, rewards = blocks("json")[0], blocks("python")[0]
    (tmp_path / "problems.jsonl").write_text(problems)
    (tmp_path / "my_reward.py").write_text(rewards)
    monkeypatch.chdir(tmp_path)
    (command,) = [command for command in commands(PAGES[0]) if "my_reward.py" in command]
    said = r"append `([^`]+)`\.\s+With\s+`--dry_run`.*\sneeds?\s+(\d+\.\d)\s+of\s+(\d+\.\d) GiB"
    more, needed, has = re.search(said, README, re.DOTALL).groups()
    flags = shlex.split(command)[shlex.split(command).index("train_grpo.py") + 1 :]
    for more_flags, fits in (("", "fits: "), (more, f"{needed} of {has} GiB")):
        args = parse_flags([*flags, *more_flags.split(), "--dry_run"])
        check_flags(args, 1)
        args.plan_gpus = 1
        assert dry_run(args) == 0
        assert fits in capsys.readouterr().out
    grade = RewardWorker(args.reward, None)
    for row in map(json.loads, problems.splitlines()):
        assert grade(("grade", Case("So it is easy. Answer: " + row["answer"], row["answer"]))).is_correct
        assert not grade(("grade", Case("I do not know. Answer: 5", row["answer"]))).is_correct


def test_the_functions_of_the_rewards_page_do_what_it_says(tmp_path):
    for i, code in enumerate(blocks("python", (ROOT / "docs" / "rewards.md").read_text())):
        (tmp_path / f"my_reward_{i}.py").write_text(code)
    cases = [Case(text, "4") for text in ("4 of them", "sorry, 4", "5")]
    alone = RewardWorker(f"{tmp_path}/my_reward_0.py:score", None)
    assert [alone(("grade", case)).reward for case in cases] == [1.0, 0.9, 0.0]
    together = RewardWorker(f"{tmp_path}/my_reward_1.py:score_group", None)
    assert [grade.reward for grade in together(("compare", cases))] == [0.0, 1.0, 0.0]


def test_the_dry_run_prints_what_the_page_on_hardware_shows():
    done = run_script(["bash", "scripts/qwq32b_8xh100.sh", "--dry_run"], dict(os.environ))
    (shown,) = [block for block in blocks("", (ROOT / "docs" / "hardware.md").read_text()) if block.startswith("step")]
    assert set(shown.splitlines()) <= set(done.stdout.splitlines())


def test_what_is_to_be_read_is_there():
    rows = re.findall(r"^\| `(\S+\.py)` \| (.*) \|$", README.partition("## Read about a thousand lines")[2], re.M)
    assert len(rows) == 11
    for file, names in rows:
        for name in re.findall("`(.+?)`", names):
            assert re.search(rf"(def|class) {name.rpartition('.')[2]}\b", (ROOT / file).read_text()), (file, name)
