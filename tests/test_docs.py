"""What docs/symptoms.md and docs/from_other_libraries.md name is there: flags, metrics, files."""

import re

import pytest

from flags import FLAGS
from helpers.runs import ROOT

DOCS = ROOT / "docs"
PAGES = [DOCS / "symptoms.md", DOCS / "from_other_libraries.md"]
METRIC = re.compile(r"`((?:reward|completion|policy|rollout|sampling|optim|eval|time|memory|perf)/[^`]*[^`/])`")
PROGRAM = [*ROOT.glob("*.py"), *ROOT.glob("*/*.py"), *ROOT.glob("extras/*/*.py")]
FILES = [path for path in PROGRAM if "tests" not in path.parts]
SOURCE = "\n".join(path.read_text() for path in FILES)


def is_made(metric: str) -> bool:
    """Whether the program has the text: with { } for <k>, evaluate.py without eval/<set>/, phases without time/."""
    texts = re.split(r"<\w+>", metric.removeprefix("eval/<set>/"))
    phase = metric.removeprefix("time/").removesuffix("_s")
    return bool(re.search(r"\{[^{}]*\}".join(map(re.escape, texts)), SOURCE)) or f'.phase("{phase}")' in SOURCE


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_flag_that_the_page_names_exists(page):
    for line in page.read_text().splitlines():
        beside = "".join((ROOT / script).read_text() for script in re.findall(r"python (scripts/\w+\.py)", line))
        wrong = [flag for flag in re.findall(r"--\w+", line) if flag not in FLAGS and f'"{flag}"' not in beside]
        assert set(wrong) <= {"--help", "--rlhf_type"}, line


@pytest.mark.parametrize("page", [PAGES[0], DOCS / "runs.md"], ids=lambda page: page.name)
def test_every_metric_that_the_page_names_is_made_by_the_program(page):
    named = METRIC.findall(page.read_text())
    assert len(set(named)) > 30 and [name for name in named if not is_made(name)] == []


def test_the_files_that_the_page_on_symptoms_names_exist():
    files = set(re.findall(r"`(\w+\.(?:jsonl|png)|\w+/)`", PAGES[0].read_text()))
    listed = (DOCS / "runs.md").read_text()
    assert len(files) >= 5 and [file for file in files if f"`{file}`" not in listed] == []
