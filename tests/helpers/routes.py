"""On ranks: the engine's routes, replayed by the trainer."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor, nn

from batch import Rollout
from engine.options import EngineDemand
from flags import Sampling
from fsdp_utils import World, gather_from_ranks
from helpers.engines import GAP, TEMPERATURE, Trial
from helpers.made_up import make_row

SAMPLING = Sampling(4, TEMPERATURE, 12, keeps_routes=True)
RATE = 1e-3
SIZES = {"prompts_per_step": 4, "prompts_per_update": 4, "learning_rate": RATE, "temperature": TEMPERATURE}


def make_noisy(model: nn.Module) -> None:
    """The logits of the engine's routers, some 1 apart, are off by about 0.05: experts that are nearly tied change."""

    def noisy(router: nn.Module, inputs: object, output: tuple[Tensor, None]) -> tuple[Tensor, None]:
        logits, *rest = output
        return logits + 0.05 * torch.randn(logits.shape), *rest

    for name, module in model.named_modules():
        if name.endswith(".mlp.gate"):
            module.register_forward_hook(noisy)


def free(rollout: Rollout) -> Rollout:
    return rollout.with_parts(routes=None)


def begin(trial: Trial) -> list[SimpleNamespace]:
    """Prompts for the trial's engine, which has begun. Two are longer than a cache block: completions find it there."""
    trial.begin(demand=EngineDemand(16), router_replay=True, enforce_eager=trial.args.dtype == "float32")
    trial.engine.sync(trial.policy.full_weights())
    rng = np.random.default_rng(0)
    return [make_row(rng.integers(0, 64, length)) for length in (3, 45, 40, 20)]


def replayed(world: World, path: str, dtype: str = "float32") -> dict[str, object]:
    """Gaps of an update, by what was sampled and how it was replayed; noise and training in fp32 alone."""
    sizes = SIZES | {"gradient_checkpointing": True, "share_prompts": True, "dtype": dtype}
    trials = [Trial(world, path, **sizes) for _ in range(2)]
    rows, engine, found = begin(trials[0]), trials[0].engine, {}

    def gap(rollout: Rollout) -> float:
        metrics = trials[0].train(rollout, rate=0.0)
        assert metrics["optim/skipped_updates"] == 0
        return metrics[GAP]

    clean = engine.sample(rows, SAMPLING, (1, 1))
    wrong = [None if each is None else (each + 1) % 6 for each in clean.parts["routes"]]
    routes = {b: each for b, each in enumerate(clean.parts["routes"]) if each is not None}
    found |= {"routes here": gather_from_ranks([*routes]), "routes": [*routes.values()]}
    found["lengths"] = clean.sequence_lengths_B.tolist()
    found |= {"clean": gap(clean), "clean, free": gap(free(clean)), "wrong": gap(clean.with_parts(routes=wrong))}
    if dtype != "float32":
        engine.close()
        return found
    engine.llm.apply_model(make_noisy)
    noisy = engine.sample(rows, SAMPLING, (1, 1))
    found |= {"noisy": gap(noisy), "noisy, free": gap(free(noisy))}
    for name, trial, change in (("trained", trials[0], lambda x: x), ("trained, free", trials[1], free)):
        gaps = []
        for step in range(3):
            engine.sync(trial.policy.full_weights())
            gaps.append(trial.train(change(engine.sample(rows, SAMPLING, (2, step))), rate=RATE)[GAP])
        found[name] = gaps
    found["moved"] = gap(clean)
    engine.close()
    return found


def stopped(world: World, path: str, dtype: str) -> dict[str, list[float]]:
    """Three steps in which a token that half of the completions draw ends them: the shares so ended, and gaps.

    The last completion of a call may end so, while the engine prepares one token more.
    """
    trial = Trial(world, path, **SIZES, dtype=dtype)
    rows, engine = begin(trial), trial.engine
    drawn = [set(completion.tolist()) for completion in engine.sample(rows, SAMPLING, (1, 0)).completions]
    shares = {token: np.mean([token in each for each in drawn]) for token in set.union(*drawn)}
    engine.stop_ids = [min(shares, key=lambda token: abs(shares[token] - 0.5))]
    found: dict[str, list[float]] = {"ended": [], "gaps": []}
    for step in range(3):
        rollout = engine.sample(rows, SAMPLING, (1, step))
        found["ended"].append(1 - rollout.is_truncated_B.mean().item())
        found["gaps"].append(trial.train(rollout, rate=RATE)[GAP])
        engine.sync(trial.policy.full_weights())
    engine.close()
    return found
