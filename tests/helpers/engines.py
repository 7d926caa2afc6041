"""On ranks: vLLM's real engine beside the trainer, and faults between the two."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import json
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import BuiltinMethodType, CellType, FunctionType, MethodType, SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import checkpoint
import rollout as rollout_module
from algorithm import algorithm_of
from batch import Rollout, Row
from compare_weights import Comparison
from engine.options import ANY_TEXT, EngineDemand, stop_ids
from extras.models.lora import Adapter
from extras.samplers.partial import PartialSampler, num_unfinished_prompts
from flags import MOST_LAG, EngineSettings, Sampling
from fsdp_utils import World, gather_from_ranks
from helpers import made_up
from helpers.distributed import WITH_IMAGES, WITHOUT, lora_flags, recorded, scored, sharded, vision_gradient, weights_of
from helpers.made_up import Ear, build, flags, load, load_policy, make_rollout, policy_of, train_once, whole_update
from model.sizes import HYBRIDS
from model.weights import load_config
from policy import Policy
from rollout import Engine
from runtime.rank import RunError
from schedule import make_plan
from update import logprobs_under

TEMPERATURE = 0.7  # not 1, so that a temperature that only one side applies would show


def start_engine(path: Path | str, world: World, demand: EngineDemand = ANY_TEXT, **changes: object) -> Engine:
    settings = {"max_model_len": 64, "gpu_memory_utilization": 0.3, "enforce_eager": True} | changes
    return Engine(str(path), AutoTokenizer.from_pretrained(path), world, EngineSettings(**settings), demand)


def trainer_logprobs(policy: Policy, rollout: Rollout) -> Tensor:
    """The trainer's log-probs of the sampled tokens, sequence after sequence."""
    rollout = replace(rollout, loss_weights_B=np.zeros(len(rollout.texts), dtype=np.float32))
    batch = made_up.pack_with_images(rollout, list(range(len(rollout.texts))))
    with torch.no_grad():
        scores = policy(batch.to(next(policy.parameters()).device), TEMPERATURE)
    return scores.logprobs_N.cpu()[batch.loss_mask_N]


def sampler_logprobs(rollout: Rollout) -> Tensor:
    return torch.from_numpy(np.concatenate(rollout.rollout_logprobs))


def gaps(policy: Policy, rollout: Rollout) -> Tensor:
    """Absolute differences of token probabilities, sampler against trainer."""
    return (trainer_logprobs(policy, rollout).exp() - sampler_logprobs(rollout).exp()).abs()


class Trial:
    """Steps of GRPO by hand on the model in a folder: `begin`, then sample, train, sync."""

    def __init__(self, world: World, path: str | Path, **changes: object) -> None:
        self.world, self.path = world, path
        self.args = flags(model=path, group_size=4, head_dtype="float32", **changes)
        self.policy, _, self.optimizer = build(self.args, world)

    def begin(self, **options: object) -> None:
        dtypes = {"dtype": self.args.dtype, "head_dtype": self.args.head_dtype}
        self.engine = start_engine(self.path, self.world, **dtypes, **options)
        self.comparison = Comparison(self.policy, self.world, self.engine.llm.apply_model)

    def train(self, rollout: Rollout, **step: object) -> dict[str, float]:
        """The metrics of an update by which every second completion becomes less likely."""
        advantages = [np.full(len(c), (-1) ** b, dtype=np.float32) for b, c in enumerate(rollout.completions)]
        weights = np.full(len(advantages), 1e-2, dtype=np.float32)
        rollout = replace(rollout, advantages=advantages, loss_weights_B=weights)
        update = whole_update(rollout, self.args, self.policy, self.world)
        return train_once(self.policy, self.optimizer, update, self.args, self.world, **step)


# What a sleep of level 2 loses: tensors of the engine's model that are neither parameters nor buffers. On CUDA all that
# is allocated while vLLM loads a model lies in the memory that this sleep drops. A sync brings the parameters back and
# vLLM itself the buffers (`gpu_worker.Worker.sleep`); whatever else there is holds garbage then. ----------------------

NOT_LOST = {
    "_parameters", "_buffers", "_modules",  # every nn.Module has them
    "kv_cache",  # in memory of its own; after a sleep it is empty, and vLLM knows that
    "_rope_by_thw_cache",  # Qwen2.5-VL's tower fills it when it runs: not in the memory that a sleep drops
    "_k_scale_cpu", "_v_scale_cpu",  # read by ROCm's kernels alone
    "_cpu_unpacked_conv_weight",  # read by speculative decoding alone; CPUs with bf16 of their own have it
    "cpu_linear",  # the matrix in the order that the CPU's kernel wants; a GPU has none
}  # fmt: skip
HOLDERS = dict, list, tuple, set, frozenset, functools.partial, CellType, MethodType, BuiltinMethodType


def hidden_tensors(model: nn.Module) -> list[str]:
    """module.attribute of what holds a tensor whose memory is no parameter's and no buffer's."""
    known = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    found = []
    for path, module in model.named_modules():
        for name in vars(module).keys() - NOT_LOST:
            storages = {x.untyped_storage().data_ptr() for x in tensors(vars(module)[name], set())}
            found += [f"{path}.{name}"] * bool(storages - known)
    return found


def tensors(value: object, seen: set[int]) -> Iterator[torch.Tensor]:
    """The tensors in it: in containers, closures, partial functions and vLLM's own objects; not in other modules."""
    if id(value) in seen or isinstance(value, nn.Module | type):
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
    holder = value.__closure__ if isinstance(value, FunctionType) else value  # not the globals of a function
    if isinstance(holder, HOLDERS) or type(value).__module__.startswith("vllm."):
        for each in gc.get_referents(holder):
            yield from tensors(each, seen)


def plant(model: nn.Module) -> None:
    """Hides a tensor where the scan has to find it."""
    first = next(module for module in model.modules() if not list(module.children()))
    first.planted = [functools.partial(torch.add, torch.ones(3))]


def findings(engine: object) -> dict[str, list[str]]:
    """The hidden tensors of the engine's model, as it is and after `plant`."""
    (hidden,) = engine.llm.apply_model(hidden_tensors)
    engine.llm.apply_model(plant)
    (with_planted,) = engine.llm.apply_model(hidden_tensors)
    return {"hidden": hidden, "planted": [name for name in with_planted if name not in hidden]}


def hidden(world: World, path: str) -> dict[str, list[str]]:
    engine = start_engine(path, world, dtype="bfloat16")
    found = findings(engine)
    engine.close()
    return found


def next_logprobs(world: World, folder: str, prompt: str) -> dict[int, float]:
    """Token -> log-prob after the prompt (JSON), the likeliest five and the sampled one: vLLM's."""
    from vllm import LLM, SamplingParams, TokensPrompt  # rollout.py prepares what vLLM reads

    llm = LLM(folder, enforce_eager=True, dtype="bfloat16", max_model_len=32, kv_cache_memory_bytes=2**28)
    params = SamplingParams(max_tokens=1, logprobs=5, temperature=1.0)
    (answer,) = llm.generate([TokensPrompt(prompt_token_ids=json.loads(prompt))], params)
    found = {token: entry.logprob for token, entry in answer.outputs[0].logprobs[0].items()}
    assert len(found) >= 5
    return found


# What the engine samples, checked against the trainer's own log-probs -------------------------------------------------


def samples(world: World, path: str, dtype: str, head_dtype: str) -> dict[str, object]:
    policy = load_policy(path)
    policy.dtype, policy.head_dtype = getattr(torch, dtype), getattr(torch, head_dtype)
    sharded(policy, world, policy.dtype)
    most_sequences = 32 if world.num_engines == 2 else None  # 64 are sampled below
    engine = start_engine(path, world, EngineDemand(most_sequences), dtype=dtype, head_dtype=head_dtype)
    engine.sync(policy.full_weights())
    tokenizer = engine.tokenizer
    rows = load(f"{path}/heldout.jsonl", tokenizer, max_prompt_tokens=8).rows
    long_rows = [replace(row, ids=np.resize(row.ids, 45)) for row in rows]
    sampling = Sampling(4, TEMPERATURE, 12)
    sample = functools.partial(engine.sample, rows, sampling)
    heard, still_running = {}, []

    def gap(rollout: Rollout) -> float:
        return gaps(policy, rollout).mean().item()

    def greedy(number: int) -> list[str]:
        return engine.sample(rows, Sampling(1, 0.0, 12), (number,)).texts

    def on_finished(b: int, text: str, token_ids: Sequence[int], is_truncated: bool, grade: None) -> None:
        heard[b] = (text, len(token_ids), is_truncated)
        still_running.append(engine.llm.llm_engine.has_unfinished_requests())

    first = sample((1, 1), on_finished=on_finished)
    completions = [completion.tolist() for completion in first.completions]
    is_cut = first.is_truncated_B.tolist()
    returned = list(zip(first.texts, map(len, completions), is_cut, strict=True))
    is_long = [len(ids) == 12 and ids[-1] != tokenizer.eos_token_id for ids in completions]
    greedy_before = greedy(1)
    found = {
        "prompts": [row.ids.tolist() for row in first.rows],
        "sequences_of_an_engine_at_once": most_sequences or 256 * world.tp_size,
        "sequences_its_cache_holds": engine.llm.llm_engine.vllm_config.cache_config.kv_cache_max_concurrency,
        "num_tokens": int(first.completion_lengths_B.sum()),
        "mean_probability": float(np.exp(np.concatenate(first.rollout_logprobs)).mean()),
        "gap_before": gap(first),
        "gap_of_long_prompts": gap(engine.sample(long_rows, sampling, (1, 4))),
        "same_seed_same_completions": sample((1, 1)).texts == first.texts,
        "heard_what_is_returned": all(returned[b] == heard[b] for b in heard),
        "heard_on_all_leaders": sum(gather_from_ranks(len(heard))),
        "heard_while_others_are_sampled": any(still_running),
        "other_seed_same_completions": sample((1, 2)).texts == first.texts,
        "greedy_twice_equal": greedy(2) == greedy_before,
        "texts_are_the_tokens": first.texts == tokenizer.batch_decode(completions, skip_special_tokens=True),
        "truncated_are_the_long_ones": is_cut == is_long,
    }
    stop = completions[0][len(completions[0]) // 2]
    engine.stop_ids = stop_ids(tokenizer, [tokenizer.convert_ids_to_tokens(stop)])
    stopped = sample((1, 1))
    engine.stop_ids = []
    found["passes_stop_token"] = any(stop in c[:-1] for c in stopped.completions)
    found["passed_it_before"] = any(stop in c[:-1] for c in completions)
    found["stopped"] = stopped.is_truncated_B[[c[-1] == stop for c in stopped.completions]].tolist()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.3)
    found["gap_of_stale_engine"] = gap(sample((1, 3)))
    engine.sync(policy.full_weights())
    found["gap_after"] = gap(sample((1, 3)))
    found["sync_changes_greedy_output"] = greedy(1) != greedy_before
    found |= findings(engine)
    engine.close()
    return found


# One engine after the other, of tiny models of many families, each with its trainer -----------------------------------


def families(world: World, folder: str, *names: str) -> dict[str, dict[str, object]]:
    """Name of a model in the folder -> findings. Trainers come before engines, as in a run."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda function: function()  # which takes 6 s the first time
    sizes, trials = {"prompts_per_step": 4, "prompts_per_update": 4, "learning_rate": 1e-2}, {}
    for name in names:
        path = f"{folder}/{name}"
        dtype = "bfloat16" if load_config(path).model_type in HYBRIDS else "float32"  # on CPUs
        trials[name] = [Trial(world, path, **sizes, dtype=dtype, lora_rank=rank) for rank in (0, 3)]
    return {name: step_of_family(*pair) for name, pair in trials.items()}


def step_of_family(trial: Trial, adapted: Trial) -> dict[str, object]:
    """`adapted`: the same model with an adapter, which makes a step on the rollout of the first."""
    policy, sampling = trial.policy, Sampling(4, TEMPERATURE, 12)

    def gaps_of(rollout: Rollout, when: str = "") -> dict[str, Tensor]:
        """The largest and the mean difference of sampled log-probs, trainer against sampler."""
        found = (trainer_logprobs(policy, rollout) - sampler_logprobs(rollout)).abs()
        return {f"gap{when}": found.max(), f"mean gap{when}": found.mean()}

    trial.begin(demand=EngineDemand(16))
    engine = trial.engine
    (hidden,) = engine.llm.apply_model(hidden_tensors)
    engine.sync(policy.full_weights())
    rng = np.random.default_rng(0)
    rows = [made_up.make_row(rng.integers(0, 64, length)) for length in (3, 45, 9, 20)]
    rollout = engine.sample(rows, sampling, (1, 1))
    found = gaps_of(rollout) | {"rollout": replace(rollout, texts=[]), "logprobs": trainer_logprobs(policy, rollout)}
    found |= {"hidden": hidden, "not compared": trial.comparison.not_compared}
    found["load"] = trial.train(rollout, rate=1e-2).get("moe/load_max")
    found |= gaps_of(rollout, " of a stale engine") | {"logprobs after": trainer_logprobs(policy, rollout)}
    with patch.object(rollout_module, "repack", lambda model: None):
        engine.sync(policy.full_weights())
    found["unpacked"] = trial.comparison.different_tensors()
    engine.sync(policy.full_weights())
    found |= gaps_of(engine.sample(rows, sampling, (1, 2)), " after")
    adapted.train(rollout, rate=1e-2)
    found["logprobs with LoRA"] = trainer_logprobs(adapted.policy, rollout)
    for trained, name in ((policy, "exported"), (adapted.policy, "with LoRA exported")):
        weights = checkpoint.gather_weights(trained, trial.world)
        files = checkpoint.files_of(str(trial.path), trained.dtype)
        checkpoint.export(trained, weights, files, Path(f"{trial.path} {name}"))
    engine.sync(load_file(f"{trial.path} exported/model.safetensors").items())  # as vLLM reads them
    found["not exported"] = trial.comparison.different_tensors()
    return found


# Faults between sampler and trainer, injected one after the other -----------------------------------------------------

GAP, RATE = "policy/rollout_gap_mean", 1e-5  # a step at it changes no log-prob that one would see
UP, K, V, Q, NEXT_Q, OUT, NORM = (f"model.layers.{place}.weight" for place in (
    "0.mlp.up_proj", "0.self_attn.k_proj", "0.self_attn.v_proj", "0.self_attn.q_proj", "1.self_attn.q_proj",
    "1.self_attn.o_proj", "1.input_layernorm",
))  # fmt: skip


class FaultTrial(Trial):
    def __init__(self, world: World, path: str, lora_rank: int) -> None:
        sizes = {"prompts_per_step": 8, "prompts_per_update": 8, "dtype": "bfloat16"}
        super().__init__(world, path, lora_rank=lora_rank, learning_rate=RATE, **sizes)
        self.begin()
        self.number, self.sampling = 0, Sampling(4, 1.0, 12)
        rows = load(f"{path}/train.jsonl", self.engine.tokenizer, max_prompt_tokens=8).rows
        self.rows = [replace(row, ids=np.resize(row.ids, 45)) for row in rows[:8]]  # longer than a cache block

    def step(self, bound: float = 0.05) -> float:
        """The gap of a step, whose update is not made if it is beyond the bound; then a sync."""
        self.number += 1
        self.optimizer.zero_grad()  # an update that was not made has left its gradient
        rollout = self.engine.sample(self.rows, self.sampling, (1, self.number))
        self.engine.sleep()
        gap = self.train(rollout, rate=RATE, max_rollout_gap=bound)[GAP]
        self.engine.sync(self.policy.full_weights())
        return gap

    def stream(self, change: Callable[[dict[str, Tensor]], object]) -> AbstractContextManager:
        """What the syncs send is changed."""
        full_weights = self.policy.full_weights

        def changed() -> Iterator[tuple[str, Tensor]]:
            named = dict(full_weights())
            change(named)
            return iter(named.items())

        return patch.object(self.policy, "full_weights", changed)


@contextmanager
def another_kernel(trial: FaultTrial) -> Iterator[None]:
    """The engine computes another function with the same weights."""
    (modules,) = trial.engine.llm.apply_model(lambda model: [*model.modules()])
    norms = [module for module in modules if hasattr(module, "variance_epsilon")]
    with ExitStack() as changes:
        for norm in norms:
            changes.enter_context(patch.object(norm, "variance_epsilon", 3.0))
        yield


def faults_of(trial: FaultTrial) -> dict[str, Callable[[], AbstractContextManager]]:
    """By name: while it is open, syncs have the fault."""
    old = {name: tensor.clone() for name, tensor in trial.policy.full_weights()}
    unmerged = lambda adapter, layer, weight, dtype: weight.to(dtype)  # noqa: E731
    lora_fault = {"adapter not merged": lambda: patch.object(Adapter, "merged", unmerged)}  # which leaves the head
    head_fault = {"head not repacked": lambda: patch.object(rollout_module, "repack", lambda model: None)}
    return {
        "k and v swapped": lambda: trial.stream(lambda named: named.update({K: named[V], V: named[K]})),
        "layers swapped": lambda: trial.stream(lambda named: named.update({Q: named[NEXT_Q], NEXT_Q: named[Q]})),
        "scaled": lambda: trial.stream(lambda named: named.update({OUT: named[OUT] * 1.01})),
        "stale": lambda: trial.stream(lambda named: named.update({OUT: old[OUT]})),
        "one bit": lambda: trial.stream(lambda named: named.update({NORM: made_up.one_bit(named[NORM])})),
        "missing": lambda: trial.stream(lambda named: named.pop(UP)),
        "engine not synced": lambda: patch.object(Engine, "sync", lambda engine, weights: list(weights)),
    } | (lora_fault if trial.policy.adapter else head_fault)


def syncs(world: World, path: str, lora_rank: str) -> tuple[dict[str, list[str]], dict[str, float]]:
    """By name of a fault, the tensors that its sync has not brought; of two, the gap of a step."""
    trial = FaultTrial(world, path, int(lora_rank))
    engine, different = trial.engine, trial.comparison.different_tensors
    cache = engine.llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    found, gaps = {"engine without a sync": different()}, {}
    engine.sync(trial.policy.full_weights())
    for name, fault in faults_of(trial).items():
        assert not different()
        with fault():
            trial.step()
            found[name] = different()
            if name in ("scaled", "stale"):
                gaps[name] = trial.step(bound=0.0)
        engine.sync(trial.policy.full_weights())
        engine.prepare((1,))
        assert not len(cache.cached_block_hash_to_block), "keys of old weights would be found"
    assert not different()
    colder = patch.object(trial, "sampling", replace(trial.sampling, temperature=0.9))
    for what_is_no_weight in (colder, another_kernel(trial)):
        with what_is_no_weight, pytest.raises(RunError, match="not made: sampler and trainer give"):
            trial.step()
    engine.close()
    return found, gaps


# An epoch of partial rollouts, other weights at each step -------------------------------------------------------------

PROMPTS, GROUP, LIMIT, STEPS = 8, 2, 80, 4


def largest_gap(models, rollout):
    """Between recorded log-probs and those under the weights whose version the tokens have."""
    versions, found = torch.from_numpy(np.concatenate(rollout.parts["versions"])), []
    for version in versions.unique().tolist():
        with torch.no_grad():
            logprobs = made_up.unpacked_logprobs(models[version], rollout, TEMPERATURE)
        found.append((logprobs - sampler_logprobs(rollout)).abs()[versions == version].max().item())
    return max(found)


def partial_rollouts(world: World, path: str) -> None:
    """Each token has the log-prob of the weights that made it, every prompt is used once, each completion graded."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    at_once = num_unfinished_prompts(PROMPTS, world.num_engines) // world.num_engines * GROUP
    engine = start_engine(path, world, EngineDemand(at_once), dtype="float32", max_model_len=128)
    data = load(f"{path}/train.jsonl", engine.tokenizer, max_prompt_tokens=8)
    data.rows[:] = [replace(row, where=f"row {i}") for i, row in enumerate(data.rows[: PROMPTS * STEPS])]
    plan = make_plan(flags(prompts_per_step=PROMPTS, group_size=GROUP, partial_rollouts=True), PROMPTS)
    run = SimpleNamespace(last_step=STEPS, phase=lambda _: nullcontext(), reward_failures=lambda *_: None)
    sampler = PartialSampler(engine, Ear(), data, plan, Sampling(GROUP, TEMPERATURE, LIMIT), run)
    models, found = [], []
    for step in range(1, STEPS + 1):
        models.append(copy.deepcopy(model))
        engine.sync((name, tensor.detach()) for name, tensor in model.named_parameters())
        rollout, _ = sampler.collect(step)
        engine.sample(data.rows[:3], Sampling(1, 0.0, 5), (step,))  # as an evaluation between two steps
        where, ids = [row.where for row in rollout.rows], [ids.tolist() for ids in rollout.completions]
        assert [grade.where for grade in rollout.grades] == where == [x for x in where[::GROUP] for _ in range(GROUP)]
        assert [grade.reward for grade in rollout.grades] == rollout.completion_lengths_B.tolist()
        assert rollout.texts == engine.tokenizer.batch_decode(ids, skip_special_tokens=True)
        is_cut = [len(each) == LIMIT and each[-1] != engine.tokenizer.eos_token_id for each in ids]
        assert rollout.is_truncated_B.tolist() == is_cut
        versions, lags = (np.concatenate(rollout.parts[name]) for name in ("versions", "lags"))
        assert versions.min() >= 0 and lags.max() <= MOST_LAG and (lags == step - 1 - versions).all()
        assert largest_gap(models, rollout) < 5e-5
        found.append(rollout)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.04)
    assert largest_gap([*models[1:], model], found[-1]) > 0.01, "the log-probs of the next version would show"
    num_mixed = sum(len(np.unique(each)) > 1 for rollout in found for each in rollout.parts["versions"])
    assert num_mixed >= 3, "completions with tokens of several versions"
    assert any(rollout.is_truncated_B.any() for rollout in found)
    assert sorted(row.where for rollout in found for row in rollout.rows[::GROUP]) == sorted(x.where for x in data.rows)
    assert sampler.state(STEPS) == {"prompts_drawn": PROMPTS * STEPS, "in_the_air": []}
    engine.close()


# LoRA -----------------------------------------------------------------------------------------------------------------


def lora(world: World, path: str) -> dict[str, object]:
    """Gradients, log-probs and merged weights. Frozen weights are bf16, the adapter fp32."""

    def adapted(args: Namespace, dtype: torch.dtype) -> Policy:
        return sharded(policy_of(args, torch.bfloat16), world, dtype, stays_gathered=args.communicate_once)

    def gradient(policy: Policy, args: Namespace, index: int = 0) -> tuple[dict[str, float], dict[str, Tensor]]:
        """(metrics, gradients) of the update of this index, after a pass of the reference, as in a step."""
        update = scored(make_rollout(group_size=4), policy, policy, args, world)
        assert all(isinstance(x, DTensor) for x in policy.parameters()), "a pass without gradient leaves some gathered"
        return recorded(policy, update, args, world, index=index)

    def logprobs(model: Policy, args: Namespace) -> list[Tensor]:
        update = whole_update(make_rollout(), args, model, world)
        update = logprobs_under(model, "old_logprobs_N", update, algorithm_of(args))
        return [batch.old_logprobs_N for batch in update.batches]

    found: dict[str, object] = {"gradients": [], "bf16": [], "reference": [], "with dropout": {}}
    cases = (16, {}), (40, {}), (16, {"communicate_once": True}), (40, {"share_prompts": True})
    for (cap, changes), checkpointing in itertools.product(cases, (None, True)):
        args = lora_flags(path, micro_batch_tokens=cap, gradient_checkpointing=checkpointing, **changes)
        policy = adapted(args, torch.float32)
        found["gradients"].append(gradient(policy, args))
        assert all(isinstance(parameter, DTensor) for parameter in policy.parameters()), "nothing stays gathered"
    args = lora_flags(path)
    for is_policy_first in (True, False):
        policy = adapted(args, torch.bfloat16)
        if is_policy_first:
            logprobs(policy, args)
        found["bf16"].append(gradient(policy, args)[1])
    for dtype in (torch.float32, torch.bfloat16):
        policy, base = adapted(args, dtype), sharded(load_policy(path, torch.bfloat16), world, dtype)
        with policy.adapter_off():
            reference = logprobs(policy, args)
        found["reference"].append((reference, logprobs(base, args), logprobs(policy, args)))
    for name, checkpointing, index in (("plain", None, 2), ("checkpointed", True, 2), ("other update", None, 3)):
        args = lora_flags(path, lora_dropout=0.4, gradient_checkpointing=checkpointing)
        policy = adapted(args, torch.float32)
        before = logprobs(policy, args)
        found["with dropout"][name] = gradient(policy, args, index)
        found["with dropout"][f"{name}, again"] = gradient(policy, args, index)
        assert all(map(torch.equal, before, logprobs(policy, args))), "the dropout was still on in a later pass"

    policy = policy_of(lora_flags(path), torch.bfloat16)
    found["parameters"] = {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}
    sharded(policy, world, torch.bfloat16)
    engine = start_engine(path, world, dtype="bfloat16", max_model_len=24)
    found["merged"] = weights_of(policy)
    for _ in range(10):
        engine.sync(policy.full_weights())
    found["merged after"] = weights_of(policy)
    found["parameters after"] = {
        name: (x.full_tensor() if isinstance(x, DTensor) else x).detach() for name, x in policy.named_parameters()
    }
    engine.close()
    return found


# Images ---------------------------------------------------------------------------------------------------------------


def images(world: World, path: str, exported: str) -> dict[str, object]:
    """Gradients, and gaps between sampler and trainer. Also exports the policy with LoRA."""
    found = {"gradients": {}}
    for name, changes in (("all weights", {}), ("LoRA", {"lora_rank": 4, "gradient_checkpointing": True})):
        args = made_up.vision_flags(path, **changes)
        policy, micros = sharded(policy_of(args), world), WITHOUT if world.trainer_rank else WITH_IMAGES
        found["gradients"][name] = vision_gradient(policy, args, world, micros)

    data = made_up.vision_data(args)
    vision = data.rows[0].images.vision
    demand = EngineDemand(images=vision.engine_options(3))
    engine = start_engine(path, world, demand, dtype="float32", max_model_len=48)
    engine.sync(policy.full_weights())
    rows = [data.rows[i] for i in (0, 2, 4, 1, 3)]  # the second engine's share is two texts
    rollout = engine.sample(rows, Sampling(2, 0.7, 8), (1, 1))

    def largest_gaps(rows: list[Row]) -> list[float]:
        """The largest gap in each completion, if the trainer sees these rows."""
        seen = replace(rollout, rows=rows)
        return [gaps(policy, seen.select(np.array([b]))).max().item() for b in range(len(rows))]

    found["gaps"] = largest_gaps(rollout.rows)
    three = rows[1].images
    # An image of the same size: only pixels differ.
    swapped = replace(rows[1], images=replace(three, encoded=(three.encoded[0], three.encoded[2], three.encoded[1])))
    found["gaps, images swapped"] = largest_gaps([swapped if row is rows[1] else row for row in rollout.rows])
    found["prompts"] = [row.ids for row in rollout.rows]
    found["on all ranks the same"] = len(set(map(tuple, gather_from_ranks(rollout.texts)))) == 1
    weights = checkpoint.gather_weights(policy, world)
    if world.is_main:
        checkpoint.export(policy, weights, checkpoint.files_of(str(path), policy.dtype), Path(exported))
    found["merged"] = weights_of(policy)
    found |= findings(engine)
    engine.close()
    return found
