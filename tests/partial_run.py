"""Run under torchrun: an epoch of partial rollouts with vLLM, other weights at each step. Raises if something is wrong.

Each token has the log-prob of the weights that made it, every prompt is used once, each completion graded as itself.

torchrun --nproc_per_node 2 tests/partial_run.py POLICY_FOLDER TP_SIZE
"""

import copy
import sys
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from data import PromptData
from engine.options import Demand
from flags import MOST_LAG, EngineSettings, PromptFormat, Sampling
from fsdp_utils import close_world, init_world
from helpers import Ear, flags, unpacked_logprobs
from rollout import Engine
from samplers.partial import PartialSampler, num_unfinished_prompts
from sampling import Draws

PROMPTS, GROUP, LIMIT, TEMPERATURE, STEPS = 8, 2, 110, 0.7, 5


def largest_gap(models, rollout):
    """Between recorded log-probs and those under the weights whose version the tokens have."""
    versions = np.concatenate(rollout.versions)
    recorded, gaps = torch.from_numpy(np.concatenate(rollout.rollout_logprobs)), []
    for version in {*versions.tolist()}:
        with torch.no_grad():
            difference = (unpacked_logprobs(models[version], rollout, TEMPERATURE) - recorded).abs()
        gaps.append(difference[torch.from_numpy(versions == version)].max().item())
    return max(gaps)


def check_step(step, rollout, tokenizer):
    where, lengths = [row.where for row in rollout.rows], rollout.completion_lengths_B.tolist()
    assert [grade.where for grade in rollout.grades] == where == [each for each in where[::GROUP] for _ in range(GROUP)]
    assert [grade.reward for grade in rollout.grades] == lengths
    ids = [ids.tolist() for ids in rollout.completions]
    assert rollout.texts == tokenizer.batch_decode(ids, skip_special_tokens=True)
    is_cut = [len(each) == LIMIT and each[-1] != tokenizer.eos_token_id for each in ids]
    assert rollout.is_truncated_B.tolist() == is_cut
    for versions, lags in zip(rollout.versions, rollout.lags, strict=True):
        assert versions.min() >= 0 and versions.max() < step and lags.max() <= MOST_LAG
        assert lags.tolist() == (step - 1 - versions).tolist()


def main(path: str, tp_size: str) -> None:
    world = init_world(int(tp_size), timeout_minutes=2)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    at_once = num_unfinished_prompts(PROMPTS, world.num_engines) // world.num_engines * GROUP
    engine = Engine(path, tokenizer, world, EngineSettings(128, "float32"), Demand(at_once))
    data = PromptData.load(f"{path}/train.jsonl", PromptFormat(max_prompt_tokens=8), tokenizer, seed=0)
    data.rows[:] = [replace(row, where=f"row {i}") for i, row in enumerate(data.rows[: PROMPTS * STEPS])]
    draws = Draws.from_flags(flags(prompts_per_step=PROMPTS, group_size=GROUP, partial_rollouts=True))
    run = SimpleNamespace(last_step=STEPS, phase=lambda _: nullcontext(), reward_failures=lambda *_: None)
    sampler = PartialSampler(engine, Ear(), data, draws, Sampling(GROUP, TEMPERATURE, LIMIT), run)
    models, found, metrics = [], [], []
    for step in range(1, STEPS + 1):
        models.append(copy.deepcopy(model))
        engine.sync((name, tensor.detach()) for name, tensor in model.named_parameters())
        rollout, of_step = sampler.collect(step)
        engine.sample(data.rows[:3], Sampling(1, 0.0, 5), (step,))  # as an evaluation between two steps
        check_step(step, rollout, tokenizer)
        assert largest_gap(models, rollout) < 5e-5
        found.append(rollout)
        metrics.append(of_step)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.04)
    assert largest_gap([*models[1:], model], found[-1]) > 0.01, "the log-probs of the next version would show"
    assert sum(len({*versions.tolist()}) > 1 for rollout in found for versions in rollout.versions) >= 3, "mixed"
    assert any(rollout.is_truncated_B.any() for rollout in found)
    assert sorted(row.where for rollout in found for row in rollout.rows[::GROUP]) == sorted(x.where for x in data.rows)
    assert sampler.state(STEPS) == {"prompts_drawn": PROMPTS * STEPS, "in_the_air": []}
    assert metrics[0]["rollout/kept_tokens"] > 0 == metrics[-1]["rollout/kept_tokens"]
    engine.close()
    close_world()


if __name__ == "__main__":
    main(*sys.argv[1:])
