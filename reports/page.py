"""The page that compares runs: one HTML file that needs neither a server nor a network. `report.py` is its door.

`samples.py` packs the stored completions. `template.html`, `page.css` and the scripts show all of
it, one script for each section; the curves are drawn by uPlot (`vendor/`).

What a model has written cannot run as code: all data is embedded in base64, which has no character
of HTML; scripts write text as text; and the Content-Security-Policy admits only these, by hashes.
"""

import base64
import hashlib
import json
import re
from collections import defaultdict
from pathlib import Path

from reports.samples import embed, pack_samples, rounded
from runtime.files import write
from runtime.history import History, but_for_the_seed, read_lines

FOLDER = Path(__file__).parent
FILES = ("vendor/uPlot.min.css", "vendor/uPlot.iife.min.js", "page.css")
SCRIPTS = ("curves.js", "overview.js", "differences.js", "samples.js", "page.js")  # one script, started by the last
BYTES_OF_SAMPLES = 18_500_000  # so that a page stays below 20 MB


def write_page(file: Path, runs: list[History], published: list[dict[str, dict]]) -> None:
    """Writes the page of these runs. `published`: of each, metric -> published curve."""
    described, chunks = [], {}
    names = [run.folder.absolute().name for run in runs]
    num_sampled = sum((run.folder / "rollouts").exists() for run in runs)
    for index, run in enumerate(runs):
        parts = describe(run) | {"published": published[index]}
        parts["name"] = names[index] if names.count(names[index]) == 1 else str(run.folder)
        parts["samples"], chunks_by_step = pack_samples(run.folder, BYTES_OF_SAMPLES // max(num_sampled, 1))
        described.append(parts)
        chunks |= {f"samples-{index}-{step}": chunk for step, chunk in chunks_by_step.items()}
    chunks["runs"] = embed({"runs": described, "seed_groups": seed_groups(described)})
    write(file, fill_template(chunks))


def describe(run: History) -> dict:
    """The run as the page shows it, without its samples and what was published."""
    folder, lines = run.folder, run.lines
    code, hardware = {}, None
    for start in read_lines(folder / "starts.jsonl")[-1:]:
        code = {"commit": start["commit"], "uncommitted changes": start.get("patch") or "none", **start["packages"]}
        hardware = f"{start['world_size']} × {start['device']}"
    names = dict.fromkeys(name for line in lines for name in line if name != "step")
    return {
        "folder": str(folder),
        "config": run.config,
        "code": code | run.contents,
        "hardware": hardware,
        "steps": [line["step"] for line in lines],
        "metrics": {name: [rounded(line.get(name)) for line in lines] for name in names},
    }


def seed_groups(runs: list[dict]) -> list[list[int]]:
    """Indices of the runs that differ by their seed alone: same code, same flags but for seed and folders."""
    groups = defaultdict(list)
    for index, run in enumerate(runs):
        same = json.dumps([but_for_the_seed(run["config"]), run["code"]], sort_keys=True)
        groups[same if run["config"] else f"run {index}"].append(index)
    return list(groups.values())


def fill_template(chunks: dict[str, str]) -> str:
    """template.html with style, scripts and data in their places."""
    texts = {Path(name).name: (FOLDER / name).read_text("utf-8") for name in FILES}
    texts["scripts"] = "\n".join((FOLDER / name).read_text("utf-8") for name in SCRIPTS)
    hashes = [hashlib.sha256(texts[name].encode()).digest() for name in ("uPlot.iife.min.js", "scripts")]
    texts["hashes"] = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in hashes)
    scripts = [f'<script type="text/plain" id="{name}">{chunk}</script>' for name, chunk in chunks.items()]
    texts["data"] = "\n".join(scripts)
    template = (FOLDER / "template.html").read_text("utf-8")
    return re.sub(r"\{\{ (.+?) \}\}", lambda match: texts[match[1]], template)
