"""What docs/symptoms.md and docs/from_other_libraries.md name is there: flags, metrics, files."""

import ast
import re

import pytest

from flags import FLAGS
from helpers import ROOT

DOCS = ROOT / "docs"
PAGES = [DOCS / "symptoms.md", DOCS / "from_other_libraries.md"]
METRIC = re.compile(r"`((?:reward|completion|policy|rollout|sampling|optim|eval|time|memory|perf)/[^`]*[^`/])`")
# Who makes metrics. evaluate.py names what stands behind eval/<set>/.
MAKERS = ["metrics", "grpo", "update", "sampling", "run", "planner/watch", "generation/partial", "guards/updates"]
SOURCES = {path: path.read_text() for path in (*ROOT.glob("*.py"), *ROOT.glob("*/*.py")) if "tests" not in path.parts}


def texts_in(file: str) -> set[str]:
    """The texts of a file of the program; what an f-string fills in is <>."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / f"{file}.py").read_text())):
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        if all(isinstance(part, ast.FormattedValue) or isinstance(getattr(part, "value", 0), str) for part in parts):
            found.add("".join(part.value if isinstance(part, ast.Constant) else "<>" for part in parts))
    return found


def known_metrics() -> set[str]:
    """With <> for what is filled in, but for the names of phases."""
    found = set().union(*map(texts_in, MAKERS)) | {f"eval/<>/{text}" for text in texts_in("evaluate")}
    phases = {name for source in SOURCES.values() for name in re.findall(r'\.phase\("(\w+)"\)', source)}
    return found | {name.replace("<>", phase) for name in found for phase in phases if name[:5] in ("time/", "memor")}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_flag_that_the_page_names_exists(page):
    for line in page.read_text().splitlines():
        beside = "".join((ROOT / script).read_text() for script in re.findall(r"python (scripts/\w+\.py)", line))
        wrong = [flag for flag in re.findall(r"--\w+", line) if flag not in FLAGS and f'"{flag}"' not in beside]
        assert set(wrong) <= {"--help", "--rlhf_type"}, line


@pytest.mark.parametrize("page", [PAGES[0], DOCS / "runs.md"], ids=lambda page: page.name)
def test_every_metric_that_the_page_names_is_made_by_the_program(page):
    known, named = known_metrics(), METRIC.findall(page.read_text())
    assert len(set(named)) > 30
    assert [name for name in named if re.sub(r"<\w+>", "<>", name) not in known] == []


def test_the_files_that_the_page_on_symptoms_names_exist():
    files = set(re.findall(r"`(\w+\.(?:jsonl|png)|\w+/)`", PAGES[0].read_text()))
    listed = (DOCS / "runs.md").read_text()
    assert len(files) >= 5 and [file for file in files if f"`{file}`" not in listed] == []
