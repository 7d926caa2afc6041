"""train_grpo.py with an engine that samples the training prompts at 0.8 times the temperature that it is told."""

import runpy
from dataclasses import replace
from pathlib import Path

import rollout

play = rollout.play_one_turn


def cooler(engine: rollout.Engine, rows: list, sampling: object, description: str) -> object:
    is_training = not description.startswith("evaluate")
    return play(engine, rows, replace(sampling, temperature=0.8) if is_training else sampling, description)


rollout.play_one_turn = cooler
runpy.run_path(str(Path(__file__).parent.parent / "train_grpo.py"), run_name="__main__")
