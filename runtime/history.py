"""A run as its folder keeps it: flags, metrics, digests of its inputs."""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

INPUTS = "inputs.json"  # in the run folder: digests of what flags name (weights, rows of data, files of one's own)


@dataclass(frozen=True)
class History:
    """A run: its folder, its flags, and the lines of metrics.jsonl by step."""

    folder: Path
    config: dict[str, object]
    lines: list[dict[str, float]]

    @property
    def seed(self) -> object:
        return self.config.get("seed")

    @property
    def last_step(self) -> int:
        return int(self.lines[-1]["step"]) if self.lines else 0

    @property
    def names(self) -> set[str]:
        """The names of all metrics."""
        return set().union(*self.lines)

    @property
    def contents(self) -> dict[str, object]:
        """Digests of what the flags name: weights, rows with their prompts, own files. Without what a seed draws."""
        contents = {}
        for name, digest in digests_of(self.folder).items():
            path = str(self.config.get(name[2:])) if name.startswith("--") else name
            same = but_for_the_seed(self.config | {"path": path})["path"]
            if same == path and not re.search(r"#\d+$", path):
                contents[f"contents of {path}"] = digest
        return contents

    def points(self, name: str) -> dict[int, float]:
        """Step -> value of a metric, where it is a finite number."""
        values = {int(line["step"]): line.get(name) for line in self.lines}
        return {step: value for step, value in values.items() if value is not None and math.isfinite(value)}


def but_for_the_seed(config: dict[str, object]) -> dict[str, object]:
    """The flags that repetitions of a run share.

    A seed in the name of a folder, as in `--model runs/policy_seed2`, is the seed, too: a policy is warm-started by it.
    How far a run has come yet (--stop_after) is no difference.
    """
    out_dir, seed = str(config.get("out_dir") or "\0"), re.escape(str(config.get("seed")))

    def shared(value: object) -> object:
        if isinstance(value, list):
            return [shared(member) for member in value]
        if not isinstance(value, str):
            return value
        return re.sub(rf"(seed[_=-]?){seed}(?!\d)", r"\1*", value.replace(out_dir, "OUT_DIR"))

    return {name: shared(value) for name, value in config.items() if name not in ("seed", "out_dir", "stop_after")}


def digests_of(folder: Path) -> dict[str, str]:
    """Digests of what the run in this folder began with, by name; {} without its inputs.json."""
    file = folder / INPUTS
    return parse(file.read_text("utf-8"), str(file)) if file.exists() else {}


def read_config(folder: Path) -> dict[str, object]:
    """The flags of the run; {} without config.json. Raises ValueError for a damaged file."""
    file = folder / "config.json"
    return parse(file.read_text("utf-8", "replace"), str(file), parse_constant=str) if file.exists() else {}


def read_lines(file: Path) -> list[dict]:
    """The objects of a jsonl file; none without the file. Skips a line that a kill cut off.

    Raises ValueError for a line that is damaged otherwise.
    """
    lines = file.read_text("utf-8", "replace").split("\n") if file.exists() else []  # text may hold other line breaks
    return [parse(line, f"{file}, line {n},") for n, line in enumerate(lines, start=1) if line.endswith("}")]


def parse(text: str, where: str, **options: object) -> dict:
    """The object. Raises ValueError with the place for anything else. `options`: of `json.loads`."""
    try:
        value = json.loads(text, **options)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is damaged: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{where} is damaged: it holds no JSON object")
    return value


def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    """The lines of metrics.jsonl by step, the last one of each; none without the file. ValueError: it is damaged."""
    file = run_dir / "metrics.jsonl"
    lines = read_lines(file)
    for line in lines:
        wrong = [name for name, value in line.items() if not isinstance(value, int | float | None)]
        if wrong or type(line.get("step")) is not int:
            what = f"{wrong[0]} is no number" if wrong else "there is no step"
            raise ValueError(f"{file} is damaged: {what} in the line {str(line)[:50]}; delete that line")
    by_step = {line["step"]: line for line in lines}
    return [by_step[step] for step in sorted(by_step)]


def seconds_of_phases(metrics: dict[str, float]) -> dict[str, float]:
    """Phase -> seconds, from the `time/<phase>_s` of a step."""
    no_phases = ("time/step_s", "time/rollout_tail_s")
    return {name[5:-2]: x for name, x in metrics.items() if name.startswith("time/") and name not in no_phases}


def read_run(run_dir: Path) -> History:
    """The run as it is now. Raises ValueError for a damaged file."""
    return History(run_dir, read_config(run_dir), read_metrics(run_dir))


def read_results(run_dir: Path) -> History:
    """The run as comparisons take it. Raises ValueError if the folder holds no step of a run."""
    run = read_run(run_dir)
    if not run.config or not run.lines:
        missing = "metrics.jsonl with a step" if run.config else "config.json"
        raise ValueError(f"{run_dir} is no run folder with results: it has no {missing}.")
    return run
