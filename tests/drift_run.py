"""train_grpo.py with an engine that samples the training prompts at 0.8 times the temperature that it is told."""

import runpy
from dataclasses import replace
from pathlib import Path

from rollout import Engine

run = Engine._run


def cooler(engine: Engine, rows: list, sampling: object, description: str) -> object:
    is_training = not description.startswith("evaluate")
    return run(engine, rows, replace(sampling, temperature=0.8) if is_training else sampling, description)


Engine._run = cooler
runpy.run_path(str(Path(__file__).parent.parent / "train_grpo.py"), run_name="__main__")
