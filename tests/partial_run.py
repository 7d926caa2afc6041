"""Run under torchrun: an epoch of partial rollouts with other weights at each step. Writes what was found as JSON.

torchrun --nproc_per_node 2 tests/partial_run.py POLICY_FOLDER TP_SIZE OUTPUT_FILE
"""

import copy
import json
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from data import PromptData
from flags import EngineSettings, PromptFormat, Sampling, take
from fsdp_utils import close_world, gather_from_ranks, init_world
from generation.partial_sampler import PartialSampler
from helpers import flags, make_grade, unpacked_logprobs
from model.sizes import prompts_in_the_air
from rollout import Engine
from sampling import Draws

PROMPTS, GROUP, LIMIT, TEMPERATURE, STEPS = 8, 2, 110, 0.7, 5


class Lengths:
    """A grader: the reward of a completion is its number of tokens. Heard of twice, it raises."""

    def __init__(self) -> None:
        self.heard: dict[int, SimpleNamespace] = {}

    def submit_to(self, rows, sampling):
        def on_finished(b, text, token_ids, is_truncated):
            assert b not in self.heard
            self.heard[b] = make_grade(len(token_ids), is_truncated)
            self.heard[b].answer = rows[b // sampling.num_samples].where

        return on_finished

    def collect_from_ranks(self):
        grades = {b: grade for share in gather_from_ranks(self.heard) for b, grade in share.items()}
        self.heard = {}
        return [grades[b] for b in range(PROMPTS * GROUP)]


def weights_of(model):
    return ((name, tensor.detach()) for name, tensor in model.named_parameters())


def gaps_per_version(models, rollout):
    """Version -> the largest difference of recorded log-probs to those under these weights, over their tokens."""
    gaps = {}
    versions = np.concatenate(rollout.versions)
    recorded = torch.from_numpy(np.concatenate(rollout.rollout_logprobs))
    for version in sorted({*versions.tolist()}):
        with torch.no_grad():
            difference = (unpacked_logprobs(models[version], rollout, TEMPERATURE) - recorded).abs()
        gaps[version] = difference[torch.from_numpy(versions == version)].max().item()
    return gaps


def main(path: str, tp_size: str, output: str) -> None:
    world = init_world(int(tp_size), timeout_minutes=2)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    at_once = prompts_in_the_air(PROMPTS, world.num_engines) // world.num_engines * GROUP
    engine = Engine(path, tokenizer, world, EngineSettings(128, "float32"), most_sequences=at_once)
    data = PromptData.load(f"{path}/train.jsonl", PromptFormat(max_prompt_tokens=8), tokenizer, seed=0)
    data.rows[:] = [replace(row, where=f"row {i}") for i, row in enumerate(data.rows[: PROMPTS * STEPS])]
    draws = take(Draws, flags(prompts_per_step=PROMPTS, group_size=GROUP, partial_rollouts=True))
    run = SimpleNamespace(last_step=STEPS, phase=lambda _: nullcontext(), reward_failures=lambda *_: None)
    sampler = PartialSampler(engine, Lengths(), data, draws, Sampling(GROUP, TEMPERATURE, LIMIT), run)
    models, steps = [], []
    for step in range(1, STEPS + 1):
        models.append(copy.deepcopy(model))
        engine.sync(weights_of(model))
        rollout, metrics = sampler.collect(step)
        engine.sample(data.rows[:3], Sampling(1, 0.0, 5), (step,))  # as an evaluation between two steps
        if world.is_main:
            full = replace(rollout, lags=None)
            steps.append({
                "rows": [row.where for row in rollout.rows[::GROUP]],
                "answers": [grade.answer for grade in rollout.grades],
                "rewards": [grade.reward for grade in rollout.grades],
                "lengths": rollout.completion_lengths_B.tolist(),
                "ends": [int(ids[-1]) for ids in rollout.completions],
                "truncated": rollout.is_truncated_B.tolist(),
                "are_texts_the_tokens": rollout.texts
                == tokenizer.batch_decode([ids.tolist() for ids in rollout.completions], skip_special_tokens=True),
                "versions": [versions.tolist() for versions in rollout.versions],
                "lags": [lags.tolist() for lags in rollout.lags],
                "gaps": gaps_per_version(models, full),
                "metrics": metrics,
                "state": sampler.state(step),
            })  # fmt: skip
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.04)
    if world.is_main:
        stale = gaps_per_version([*models[1:], model], full)  # as if each token were of the next version
        Path(output).write_text(json.dumps({"steps": steps, "stale": stale, "eos": tokenizer.eos_token_id}))
    engine.close()
    close_world()


if __name__ == "__main__":
    main(*sys.argv[1:])
