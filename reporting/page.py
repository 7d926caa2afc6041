"""The page that compares runs: one HTML file that needs neither a server nor a network. `report.py` is its door.

Read on here for runs and their differences, in `samples.py` for the stored completions. `template.html`, `page.css` and
the scripts show them; the curves are drawn by uPlot (`vendor/`).

What a model has written cannot run as code: all data is embedded in base64, which has no character of HTML; the scripts
write text as text; and the page's Content-Security-Policy admits no others, by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path

from guards.files import write
from reporting.history import History, but_for_the_seed, read_config, read_lines
from reporting.reference import published_curves
from reporting.samples import embed, pack_samples, rounded

FOLDER = Path(__file__).parent
FILES = ("vendor/uPlot.min.css", "vendor/uPlot.iife.min.js", "page.css")
SCRIPTS = ("curves.js", "tables.js", "samples.js", "page.js")  # together one script, which the last one starts
BYTES_OF_DATA = 19_500_000  # so that a page stays below 20 MB
CHARACTERS_OF_CODE = 300_000  # of a patch, or of the difference between two commits


def write_page(file: Path, records: dict[Path, list[dict[str, float]]]) -> None:
    """Writes the page of these runs: folder -> the lines of its metrics.jsonl."""
    runs = [describe(folder, lines) for folder, lines in records.items()]
    commits = [run["starts"][-1].get("commit") if run["starts"] else None for run in runs]
    for run, name, commit in zip(runs, short_names(list(records)), commits, strict=True):
        run |= {"name": name, "code_difference": difference_of_commits(commits[0], commit)}
    chunks, samples = {"runs": embed({"runs": runs, "seed_groups": seed_groups(runs)})}, []
    num_sampled = sum(any((folder / "rollouts").glob("step_*.parquet")) for folder in records)
    num_bytes = max(BYTES_OF_DATA - len(chunks["runs"]), 0) // max(num_sampled, 1)
    for index, folder in enumerate(records):
        found, own = pack_samples(folder, num_bytes)
        samples.append(found)
        chunks |= {f"samples-{index}-{name}": chunk for name, chunk in own.items()}
    write(file, fill_template(chunks | {"stored": embed({"runs": samples})}))


def fill_template(chunks: dict[str, str]) -> str:
    """template.html with style, scripts and data in their places."""
    texts = {Path(name).name: (FOLDER / name).read_text() for name in FILES}
    texts["scripts"] = "\n".join((FOLDER / name).read_text() for name in SCRIPTS)
    hashes = [hashlib.sha256(texts[name].encode()).digest() for name in ("uPlot.iife.min.js", "scripts")]
    texts["hashes"] = " ".join(f"'sha256-{base64.b64encode(each).decode()}'" for each in hashes)
    data = (f'<script type="text/plain" id="{name}">{chunk}</script>' for name, chunk in chunks.items())
    texts["data"] = "\n".join(data)
    return re.sub(r"\{\{ (.+?) \}\}", lambda match: texts[match[1]], (FOLDER / "template.html").read_text())


def describe(folder: Path, records: list[dict[str, float]]) -> dict:
    """What the page shows of a run beside its samples."""
    starts = read_lines(folder / "starts.jsonl")
    for start in starts:
        patch = folder / f"changes_{start.get('time')}.patch"
        start["patch"] = patch.read_text(errors="replace")[:CHARACTERS_OF_CODE] if patch.exists() else ""
    names = dict.fromkeys(name for record in records for name in record if name != "step")
    flags = read_config(folder)
    return {
        "folder": str(folder),
        "config": flags,
        "starts": starts,
        "steps": [record["step"] for record in records],
        "metrics": {name: [rounded(record.get(name)) for record in records] for name in names},
        "published": published_curves(History(folder, flags, records)),
    }


def short_names(folders: list[Path]) -> list[str]:
    """The last part of each path, or the whole path where others have that part, too."""
    parts = [folder.absolute().name for folder in folders]
    return [name if parts.count(name) == 1 else str(folder) for folder, name in zip(folders, parts, strict=True)]


def seed_groups(runs: list[dict]) -> list[list[int]]:
    """Indices of the runs that differ by their seed alone: same code, same flags but for seed and folders."""
    groups: dict[str, list[int]] = {}
    for index, run in enumerate(runs):
        flags, start = but_for_the_seed(run["config"]), run["starts"][-1] if run["starts"] else {}
        text = json.dumps([flags, start.get("commit"), start.get("patch")], sort_keys=True)
        groups.setdefault(text if flags else f"run {index}", []).append(index)
    return list(groups.values())


def difference_of_commits(old: str | None, new: str | None) -> str:
    """What git says; "" if it does not know both, or they are the same."""
    git = shutil.which("git")
    if old == new or not git or not all(re.fullmatch("[0-9a-f]{40,64}", commit or "") for commit in (old, new)):
        return ""
    command = [git, "-C", str(FOLDER), "diff", "--no-color", "--no-ext-diff", old, new, "--", ":/"]
    found = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    return found.stdout[:CHARACTERS_OF_CODE]
