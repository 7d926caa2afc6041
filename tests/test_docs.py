"""What docs/symptoms.md and docs/from_other_libraries.md name is there: flags, metrics, files, messages."""

import re
from pathlib import Path

import pytest

from flags import FLAGS
from helpers import ROOT

DOCS = ROOT / "docs"
PAGES = [DOCS / "symptoms.md", DOCS / "from_other_libraries.md"]
METRIC = re.compile(r"`((?:reward|completion|policy|rollout|sampling|optim|eval|time|memory|perf)/[^`]*[^`/])`")
FILES = [path for path in (*ROOT.glob("*.py"), *ROOT.glob("*/*.py")) if "tests" not in path.parts]
SOURCE = "\n".join(path.read_text() for path in FILES)


def is_made(metric: str) -> bool:
    """Whether the program has the text: with { } for <k>, evaluate.py without eval/<set>/, phases without time/."""
    texts = re.split(r"<\w+>", metric.removeprefix("eval/<set>/"))
    phase = metric.removeprefix("time/").removesuffix("_s")
    return bool(re.search(r"\{[^{}]*\}".join(map(re.escape, texts)), SOURCE)) or f'.phase("{phase}")' in SOURCE


def of_ours(page: Path) -> str:
    """The page without what is theirs: the columns behind the first, in tables whose first one is headed "ours"."""
    lines, is_beside = [], False
    for line in page.read_text().splitlines():
        is_beside = line.startswith("| ours |") or (is_beside and line.startswith("|"))
        lines.append(line.split(" | ")[0] if is_beside else line)
    return "\n".join(lines)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_flag_that_the_page_names_exists(page):
    for line in page.read_text().splitlines():
        beside = "".join((ROOT / script).read_text() for script in re.findall(r"python (scripts/\w+\.py)", line))
        wrong = [flag for flag in re.findall(r"--\w+", line) if flag not in FLAGS and f'"{flag}"' not in beside]
        assert set(wrong) <= {"--help", "--rlhf_type"}, line


@pytest.mark.parametrize("page", [*PAGES, DOCS / "runs.md"], ids=lambda page: page.name)
def test_every_metric_that_the_page_names_is_made_by_the_program(page):
    named = METRIC.findall(of_ours(page))
    assert len(set(named)) > 30 and [name for name in named if not is_made(name)] == []


def test_the_files_and_messages_that_the_page_on_symptoms_names_exist():
    page = PAGES[0].read_text()
    files = set(re.findall(r"`(\w+\.(?:jsonl|png)|\w+/)`", page))
    listed = (DOCS / "runs.md").read_text()
    assert len(files) > 5 and [file for file in files if f"`{file}`" not in listed] == []
    rows = re.findall(r"^\| (`.*?) \| ", page.partition("| it says | because |")[2], re.MULTILINE)
    messages = [text for row in rows for text in re.findall("`(.*?)`", row)]
    assert len(messages) > 8 and [text for text in messages if text not in SOURCE] == []
