"""Router replay (R3, arXiv 2510.11370): the trainer sends each token to the experts that took it in the engine."""

from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from algorithm import algorithm_of
from batch import Batch, Completion, Rollout
from engine.options import EngineDemand
from extras.models.experts import add_routes
from extras.turns.turns import Episode
from flags import Sampling
from fsdp_utils import World, gather_from_ranks
from helpers.distributed import GAP, TEMPERATURE, Trial, on_ranks
from helpers.made_up import flags, load_policy, make_model_of_family, make_rollout, make_row
from packing import pack
from policy import Policy
from test_families import FAMILIES, MIXTURES
from update import logprobs_under, with_advantages


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixtures")
    for name in MIXTURES:
        model_type, changes = FAMILIES[name]
        make_model_of_family(folder / name, model_type, **changes)
    return folder


def with_own_routes(policy: Policy, rollout: Rollout) -> Rollout:
    """The rollout with what the policy's routers choose by themselves; a layer without experts has zeros."""
    batch, chosen = pack(rollout, list(range(len(rollout.rows)))), {}
    with torch.no_grad(), ExitStack() as hooks:
        for i, layer in enumerate(policy.layers):
            if hasattr(layer.mlp, "experts"):
                keep = lambda router, inputs, output, i=i: chosen.update({i: output[2]})  # noqa: E731
                hooks.callback(layer.mlp.gate.register_forward_hook(keep).remove)
        policy(batch, 1.0)
    routes_LNA = [chosen.get(i, torch.zeros_like(next(iter(chosen.values())))) for i in range(len(policy.layers))]
    routes = torch.stack(routes_LNA, dim=1).numpy().astype(np.uint8)
    return rollout.with_parts(routes=np.split(routes, np.cumsum(batch.lengths_S)[:-1]))


def changed(rollout: Rollout, dtype: type = np.uint8) -> Rollout:
    return rollout.with_parts(routes=[((x + 1) % 6).astype(dtype) for x in rollout.parts["routes"]])


def batches_of(rollout: Rollout, group_size: int = 1) -> list[Batch]:
    batches = [with_advantages(rollout, pack(rollout, each, group_size)) for each in ([0, 1, 2, 3], [4, 5, 6, 7])]
    return [add_routes(batch, rollout) for batch in batches] if rollout.parts else batches


def scores_and_gradients(policy: Policy, batches: list[Batch]) -> list[torch.Tensor]:
    """Both batches are computed before the first one's backward pass begins."""
    policy.zero_grad()
    logprobs = [policy(batch, 1.0).logprobs_N for batch in batches]
    sum((each * batch.advantages_N).sum() for each, batch in zip(logprobs, batches, strict=True)).backward()
    return [each.detach() for each in logprobs] + [parameter.grad.clone() for parameter in policy.parameters()]


@pytest.mark.parametrize("name", MIXTURES)
def test_own_routes_change_no_bit_and_wrong_ones_do(name, folder):
    """Also where completions share a prompt and layers are computed again; the routers learn."""
    policy, recomputing = (load_policy(folder / name, gradient_checkpointing=x) for x in (False, True))
    equal = partial(torch.testing.assert_close, atol=0, rtol=0)
    sampled = make_rollout([9, 14, 3, 12, 7, 1, 20, 5], prompt_length=6, group_size=4)
    own = with_own_routes(policy, sampled)
    for group_size in (1, 4):
        free = scores_and_gradients(policy, batches_of(sampled, group_size))
        equal(scores_and_gradients(policy, batches_of(own, group_size)), free)
        # More than 256 experts have two bytes.
        forced = scores_and_gradients(policy, batches_of(changed(own, np.uint16), group_size))
        assert (forced[0] - free[0]).abs().max() > 0.1
        equal(scores_and_gradients(recomputing, batches_of(changed(own), group_size)), forced)
        assert policy.layers[1].mlp.gate.weight.grad.abs().max() > 0


def test_the_old_policy_replays_and_the_reference_routes_by_itself(folder):
    policy, algorithm = load_policy(folder / "OLMoE"), algorithm_of(flags())
    sampled = make_rollout([9, 14, 3, 12, 7, 1, 20, 5], prompt_length=6)
    free, wrong = (batches_of(each)[:1] for each in (sampled, changed(with_own_routes(policy, sampled))))
    for field in ("ref_logprobs_N", "old_logprobs_N"):
        both = [logprobs_under(policy, field, each, algorithm)[0] for each in (free, wrong)]
        assert torch.equal(*(getattr(batch, field) for batch in both)) == (field == "ref_logprobs_N")


def test_a_turn_keeps_the_routes_by_which_it_was_sampled():
    """The next turn reads it again, and may find other experts; only what came after it is new."""
    episode = Episode(row=SimpleNamespace(ids=np.arange(3)))
    first, second = (np.full((n, 1, 1), x, dtype=np.uint8) for n, x in ((3 + 2 - 1, 7), (3 + 6 - 1, 8)))
    for routes in (first, None, second):
        episode.add(Completion([1, 2], [0.0] * 2, [], routes=routes), "", is_sampled=routes is not None)
    assert episode.routes.flatten().tolist() == [7, 7, 7, 7, 8, 8, 8, 8]


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


@pytest.fixture(scope="module")
def found(folder):
    """Two ranks, each with an engine: routes have to travel."""
    return on_ranks(2, replayed, folder / "Qwen3-MoE")


def test_the_engine_says_which_experts_took_each_token_and_replay_narrows_the_gap(found):
    """Also in prompts that its cache has. In fp32 they are the trainer's: replay changes no gap."""
    assert found["routes here"] == [list(range(8)), list(range(8, 16))], "each leader has its own"
    assert [each.shape for each in found["routes"]] == [(length, 2, 2) for length in found["lengths"][:8]]
    assert found["clean"] < 1e-6 and abs(found["clean"] - found["clean, free"]) < 1e-9
    assert found["wrong"] > 0.03
    # What is left of noise is in the experts' weights, which are those of the trainer's own logits.
    assert found["noisy"] < 0.6 * found["noisy, free"]
    assert np.mean(found["trained"]) < 0.6 * np.mean(found["trained, free"])
    assert found["moved"] > 0.01, "an update that moves nothing would show nothing"
