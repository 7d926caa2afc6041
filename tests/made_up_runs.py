"""Run folders with made-up figures."""

import json
from pathlib import Path

from reporting.history import History

METRICS = ("reward/mean", "completion/tokens_mean", "policy/kl_ref", "policy/entropy")


def history(value: float, seed: int = 1, name: str = "reward/mean") -> History:
    """A run of one step."""
    return History(Path(f"seed{seed}"), {"seed": seed}, [{"step": 1, name: value}])


def write_run(folder: Path, config: dict, records: list[dict]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def write_completions(run: Path, step: int, name: str, scores: list[float], samples: int = 1) -> None:
    """The file of an evaluation: `samples` completions of each problem, with these scores."""
    rows = [
        {"row": f"{name}.jsonl, line {i // samples + 1}", "answer": str(i // samples), "reward_parts": {"math": score}}
        for i, score in enumerate(scores)
    ]
    file = run / "eval" / f"step_{step}" / f"{name}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
