"""On ranks: vLLM's real engine beside the trainer, and faults between the two."""

from __future__ import annotations

import copy
import functools
import json
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
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
from engine.options import EngineDemand, stop_ids
from extras.models import lora as adapters
from extras.samplers.partial import PartialSampler, num_unfinished_prompts
from flags import MOST_LAG, EngineSettings, Sampling
from fsdp_utils import World, gather_from_ranks
from helpers.distributed import (
    WITH_IMAGES,
    WITHOUT,
    Metrics,
    Tensors,
    lora_flags,
    recorded,
    sharded,
    vision_gradient,
    weights_of,
)
from helpers.made_up import (
    Ear,
    build,
    flags,
    load,
    load_policy,
    make_rollout,
    make_row,
    one_bit,
    pack_with_images,
    policy_of,
    train_once,
    unpacked_logprobs,
    vision_data,
    vision_flags,
    whole_update,
)
from model.sizes import HYBRIDS
from model.weights import load_config
from policy import Policy
from rollout import Engine
from runtime.start import RunError
from sampling import DrawSettings
from update import add_logprobs, logprobs_under

TEMPERATURE = 0.7  # not 1, so that a temperature that only one side applies would show


def start_engine(
    path: str | Path, world: World, dtype: str, head_dtype: str | None = None, max_model_len: int = 64,
    router_replay: bool = False, enforce_eager: bool = True, **options: object,
) -> Engine:  # fmt: skip
    switches = {"router_replay": router_replay, "enforce_eager": enforce_eager}
    settings = EngineSettings(max_model_len, dtype, head_dtype, gpu_memory_utilization=0.3, **switches)
    return Engine(str(path), AutoTokenizer.from_pretrained(path), world, settings, **options)


def trainer_logprobs(policy: Policy, rollout: Rollout) -> Tensor:
    """The trainer's log-probs of the sampled tokens, sequence after sequence."""
    rollout = replace(rollout, loss_weights_B=np.zeros(len(rollout.texts), dtype=np.float32))
    batch = pack_with_images(rollout, list(range(len(rollout.texts))))
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
        self.engine = start_engine(self.path, self.world, self.args.dtype, self.args.head_dtype, **options)
        self.comparison = Comparison(self.policy, self.world, self.engine.llm.apply_model)

    def train(self, rollout: Rollout, **step: object) -> Metrics:
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


def hidden_tensors(model: nn.Module) -> list[str]:
    """module.attribute of what holds a tensor that shares no memory with a parameter or a buffer of the model."""
    known = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    found = []
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in NOT_LOST:
                hidden = [x for x in tensors(value, set()) if x.untyped_storage().data_ptr() not in known]
                found += [f"{path}.{name}"] * bool(hidden)
    return found


def tensors(value: object, seen: set[int]) -> Iterator[torch.Tensor]:
    """The tensors in it: in containers, closures, partial functions and vLLM's own objects; not in other modules."""
    if id(value) in seen or isinstance(value, nn.Module | type):
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, functools.partial):
        yield from tensors([value.func, value.args, value.keywords], seen)
    elif isinstance(value, dict):
        yield from tensors(list(value.values()), seen)
    elif isinstance(value, list | tuple | set | frozenset):
        for each in value:
            yield from tensors(each, seen)
    elif getattr(value, "__closure__", None):
        yield from tensors([cell.cell_contents for cell in value.__closure__], seen)
    elif hasattr(value, "__self__"):
        yield from tensors(value.__self__, seen)
    elif type(value).__module__.startswith("vllm.") and hasattr(value, "__dict__"):
        yield from tensors(vars(value), seen)


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
    """The findings for this model."""
    engine = start_engine(path, world, "bfloat16")
    found = findings(engine)
    engine.close()
    return found


def next_logprobs(world: World, folder: str, prompt: str) -> dict[int, float]:
    """Token -> log-probability after the prompt (JSON), the likeliest five and the sampled one, by vLLM alone."""
    from vllm import LLM, SamplingParams, TokensPrompt  # here, not above: rollout.py prepares what vLLM reads

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
    engine = start_engine(path, world, dtype, head_dtype, demand=EngineDemand(most_sequences))
    engine.sync(policy.full_weights())
    tokenizer = engine.tokenizer
    rows = load(f"{path}/heldout.jsonl", tokenizer, max_prompt_tokens=8).rows
    long_rows = [replace(row, ids=np.resize(row.ids, 45)) for row in rows]
    sampling, greedy = Sampling(4, TEMPERATURE, 12), Sampling(1, 0.0, 12)

    sample = functools.partial(engine.sample, rows, sampling)

    def gap(rollout: Rollout) -> float:
        return gaps(policy, rollout).mean().item()

    heard: dict[int, tuple[str, int, bool]] = {}
    still_running = []

    def on_finished(b: int, text: str, token_ids: Sequence[int], is_truncated: bool, grade: None) -> None:
        heard[b] = (text, len(token_ids), is_truncated)
        still_running.append(engine.llm.llm_engine.has_unfinished_requests())

    first = sample((1, 1), on_finished=on_finished)
    completions = [completion.tolist() for completion in first.completions]
    lengths, is_cut = first.completion_lengths_B.tolist(), first.is_truncated_B.tolist()
    returned = list(zip(first.texts, lengths, is_cut, strict=True))
    found = {
        "prompts": [row.ids.tolist() for row in first.rows],
        "sequences_of_an_engine_at_once": most_sequences or 256 * world.tp_size,
        "sequences_its_cache_holds": engine.llm.llm_engine.vllm_config.cache_config.kv_cache_max_concurrency,
        "dtype": dtype,
        "head_dtype": head_dtype,
        "num_tokens": int(first.completion_lengths_B.sum()),
        "mean_probability": float(np.exp(np.concatenate(first.rollout_logprobs)).mean()),
        "gap_before": gap(first),
        "gap_of_long_prompts": gap(engine.sample(long_rows, sampling, (1, 4))),
        "same_seed_same_completions": sample((1, 1)).texts == first.texts,
        "heard_what_is_returned": all(returned[b] == heard[b] for b in heard),
        "heard_on_all_leaders": sum(gather_from_ranks(len(heard))),
        "heard_while_others_are_sampled": any(still_running),
        "other_seed_same_completions": sample((1, 2)).texts == first.texts,
        "greedy_twice_equal": engine.sample(rows, greedy, (1,)).texts == engine.sample(rows, greedy, (2,)).texts,
        "texts_are_the_tokens": first.texts == tokenizer.batch_decode(completions, skip_special_tokens=True),
        "truncated_are_the_long_ones": first.is_truncated_B.tolist()
        == [len(c) == 12 and c[-1] != tokenizer.eos_token_id for c in completions],
    }
    stop = completions[0][len(completions[0]) // 2]
    engine.stop_ids = stop_ids(tokenizer, [tokenizer.convert_ids_to_tokens(stop)])
    stopped = sample((1, 1))
    engine.stop_ids = []
    found["passes_stop_token"] = any(stop in c[:-1] for c in stopped.completions)
    found["passed_it_before"] = any(stop in c[:-1] for c in completions)
    is_stopped_B = [c[-1] == stop for c in stopped.completions]
    found["stopped"] = stopped.is_truncated_B[is_stopped_B].tolist()
    greedy_before = engine.sample(rows, greedy, (1,)).texts
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.3)
    found["gap_of_stale_engine"] = gap(sample((1, 3)))
    engine.sync(policy.full_weights())
    found["gap_after"] = gap(sample((1, 3)))
    found["sync_changes_greedy_output"] = engine.sample(rows, greedy, (1,)).texts != greedy_before
    found |= findings(engine)
    engine.close()
    return found


# One engine after the other, of tiny models of many families, each with its trainer -----------------------------------


def families(world: World, folder: str, *names: str) -> dict[str, dict[str, object]]:
    """Name of a model in the folder -> what was found. Trainers come before engines, as in a run."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda function: function()  # it looks at a class of models, for 6 s the first time
    sizes, trials = {"prompts_per_step": 4, "prompts_per_update": 4, "learning_rate": 1e-2}, {}
    for name in names:
        path = Path(folder) / name
        dtype = "bfloat16" if load_config(str(path)).model_type in HYBRIDS else "float32"  # vLLM's on CPUs
        trials[name] = [Trial(world, path, **sizes, dtype=dtype, lora_rank=rank) for rank in (0, 3)]
    return {name: step_of_family(*pair) for name, pair in trials.items()}


def step_of_family(trial: Trial, adapted: Trial) -> dict[str, object]:
    """A rollout, the trainer's log-probs of it before and after an update, and the gaps to the engine's.

    `adapted`: the same model with an adapter, which makes a step on this rollout.
    """
    policy, sampling = trial.policy, Sampling(4, TEMPERATURE, 12)

    def gaps_of(rollout: Rollout) -> Tensor:
        """The differences of the log-probs of sampled tokens, trainer against sampler."""
        return (trainer_logprobs(policy, rollout) - sampler_logprobs(rollout)).abs()

    trial.begin(demand=EngineDemand(16))
    engine = trial.engine
    (hidden,) = engine.llm.apply_model(hidden_tensors)
    engine.sync(policy.full_weights())
    rng = np.random.default_rng(0)
    rows = [make_row(rng.integers(0, 64, length)) for length in (3, 45, 9, 20)]
    rollout = engine.sample(rows, sampling, (1, 1))
    found = {"rollout": replace(rollout, texts=[]), "logprobs": trainer_logprobs(policy, rollout)}
    found |= {"gap": gaps_of(rollout).max(), "mean gap": gaps_of(rollout).mean()}
    found |= {"hidden": hidden, "not compared": trial.comparison.not_compared}
    metrics = trial.train(rollout, rate=1e-2)
    found |= {"gap of a stale engine": gaps_of(rollout).max(), "mean gap of a stale engine": gaps_of(rollout).mean()}
    found["logprobs after"] = trainer_logprobs(policy, rollout)
    found["load"] = metrics.get("moe/load_max")
    with patch.object(rollout_module, "repack", lambda model: None):
        engine.sync(policy.full_weights())
    found["unpacked"] = trial.comparison.different_tensors()
    engine.sync(policy.full_weights())
    gaps_after = gaps_of(engine.sample(rows, sampling, (1, 2)))
    found |= {"gap after": gaps_after.max(), "mean gap after": gaps_after.mean()}
    adapted.train(rollout, rate=1e-2)
    found["logprobs with LoRA"] = trainer_logprobs(adapted.policy, rollout)
    for trained, name in ((policy, "exported"), (adapted.policy, "with LoRA exported")):
        weights = checkpoint.gather_weights(trained, trial.world)
        checkpoint.export(trained, weights, checkpoint.files_of([engine.tokenizer]), Path(f"{trial.path} {name}"))
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
        self.rows = [replace(row, ids=np.resize(row.ids, 45)) for row in rows[:8]]  # longer than a block of the cache

    def step(self, bound: float = 0.05) -> float:
        """The gap of a step, whose update is not made if the gap is beyond the bound; then a sync."""
        self.number += 1
        self.optimizer.zero_grad()  # an update that was not made has left its gradient
        rollout = self.engine.sample(self.rows, self.sampling, (1, self.number))
        self.engine.sleep()
        gap = self.train(rollout, rate=RATE, max_rollout_gap=bound)[GAP]
        self.engine.sync(self.policy.full_weights())
        return gap

    def cached_blocks(self) -> int:
        """Blocks of keys and values of earlier calls that a prompt of the next one would find."""
        self.engine.prepare((1,))
        scheduler = self.engine.llm.llm_engine.engine_core.engine_core.scheduler
        return len(scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block)

    def stream(self, change: Callable[[dict[str, Tensor]], object]) -> AbstractContextManager:
        """What the syncs send is changed."""
        full_weights = self.policy.full_weights

        def changed() -> Iterator[tuple[str, Tensor]]:
            named = dict(full_weights())
            change(named)
            return iter(named.items())

        return patch.object(self.policy, "full_weights", changed)


def another_kernel(trial: FaultTrial) -> AbstractContextManager:
    """The engine computes another function with the same weights."""
    changes = ExitStack()

    def change(model: nn.Module) -> None:
        for module in model.modules():
            if hasattr(module, "variance_epsilon"):
                changes.enter_context(patch.object(module, "variance_epsilon", 3.0))

    trial.engine.llm.apply_model(change)
    return changes


def faults_of(trial: FaultTrial) -> dict[str, Callable[[], AbstractContextManager]]:
    """By name: while it is open, syncs have the fault."""
    old = {name: tensor.clone() for name, tensor in trial.policy.full_weights()}
    unmerged = lambda adapter, layer, weight, dtype: weight.to(dtype)  # noqa: E731
    adapter = adapters.Adapter
    lora_fault = {"adapter not merged": lambda: patch.object(adapter, "merged", unmerged)}  # which leaves the head
    head_fault = {"head not repacked": lambda: patch.object(rollout_module, "repack", lambda model: None)}
    return {
        "k and v swapped": lambda: trial.stream(lambda named: named.update({K: named[V], V: named[K]})),
        "layers swapped": lambda: trial.stream(lambda named: named.update({Q: named[NEXT_Q], NEXT_Q: named[Q]})),
        "scaled": lambda: trial.stream(lambda named: named.update({OUT: named[OUT] * 1.01})),
        "stale": lambda: trial.stream(lambda named: named.update({OUT: old[OUT]})),
        "one bit": lambda: trial.stream(lambda named: named.update({NORM: one_bit(named[NORM])})),
        "missing": lambda: trial.stream(lambda named: named.pop(UP)),
        "engine not synced": lambda: patch.object(Engine, "sync", lambda engine, weights: list(weights)),
    } | (lora_fault if trial.policy.adapter else head_fault)


def syncs(world: World, path: str, lora_rank: str) -> dict[str, object]:
    """Steps with and without a fault: by name of the fault, the tensors that its sync has not brought."""
    trial = FaultTrial(world, path, int(lora_rank))
    engine, different = trial.engine, trial.comparison.different_tensors
    found: dict[str, object] = {"engine without a sync": different(), "clean": [], "gaps": {}}
    engine.sync(trial.policy.full_weights())
    found["blocks left"] = []
    for name, fault in faults_of(trial).items():
        found["clean"].append(different())
        with fault():
            trial.step()
            found[name] = different()
            if name in ("scaled", "stale"):
                found["gaps"][name] = trial.step(bound=0.0)
        engine.sync(trial.policy.full_weights())
        found["blocks left"].append(trial.cached_blocks())
    found["clean"].append(different())
    colder = patch.object(trial, "sampling", replace(trial.sampling, temperature=0.9))
    for name, fault in {"wrong temperature": lambda: colder, "kernel": lambda: another_kernel(trial)}.items():
        with fault():
            try:
                found[name] = trial.step()
            except RunError as error:
                found[name] = str(error)
    engine.close()
    return found


# An epoch of partial rollouts, other weights at each step -------------------------------------------------------------

PROMPTS, GROUP, LIMIT, STEPS = 8, 2, 110, 5


def largest_gap(models, rollout):
    """Between recorded log-probs and those under the weights whose version the tokens have."""
    versions = np.concatenate(rollout.parts["versions"])
    found = []
    for version in {*versions.tolist()}:
        with torch.no_grad():
            logprobs = unpacked_logprobs(models[version], rollout, TEMPERATURE)
        difference = (logprobs - sampler_logprobs(rollout)).abs()
        found.append(difference[torch.from_numpy(versions == version)].max().item())
    return max(found)


def check_step(step, rollout, tokenizer):
    where, lengths = [row.where for row in rollout.rows], rollout.completion_lengths_B.tolist()
    assert [grade.where for grade in rollout.grades] == where == [each for each in where[::GROUP] for _ in range(GROUP)]
    assert [grade.reward for grade in rollout.grades] == lengths
    ids = [ids.tolist() for ids in rollout.completions]
    assert rollout.texts == tokenizer.batch_decode(ids, skip_special_tokens=True)
    is_cut = [len(each) == LIMIT and each[-1] != tokenizer.eos_token_id for each in ids]
    assert rollout.is_truncated_B.tolist() == is_cut
    for versions, lags in zip(rollout.parts["versions"], rollout.parts["lags"], strict=True):
        assert versions.min() >= 0 and versions.max() < step and lags.max() <= MOST_LAG
        assert lags.tolist() == (step - 1 - versions).tolist()


def partial_rollouts(world: World, path: str) -> None:
    """Each token has the log-prob of the weights that made it, every prompt is used once, each completion graded."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    at_once = num_unfinished_prompts(PROMPTS, world.num_engines) // world.num_engines * GROUP
    engine = start_engine(path, world, "float32", max_model_len=128, demand=EngineDemand(at_once))
    data = load(f"{path}/train.jsonl", engine.tokenizer, max_prompt_tokens=8)
    data.rows[:] = [replace(row, where=f"row {i}") for i, row in enumerate(data.rows[: PROMPTS * STEPS])]
    draws = DrawSettings.from_flags(flags(prompts_per_step=PROMPTS, group_size=GROUP, partial_rollouts=True))
    run = SimpleNamespace(last_step=STEPS, phase=lambda _: nullcontext(), reward_failures=lambda *_: None)
    sampler = PartialSampler(engine, Ear(), data, draws, Sampling(GROUP, TEMPERATURE, LIMIT), run)
    models, found, metrics = [], [], []
    for step in range(1, STEPS + 1):
        models.append(copy.deepcopy(model))
        engine.sync((name, tensor.detach()) for name, tensor in model.named_parameters())
        rollout, step_metrics = sampler.collect(step)
        engine.sample(data.rows[:3], Sampling(1, 0.0, 5), (step,))  # as an evaluation between two steps
        check_step(step, rollout, engine.tokenizer)
        assert largest_gap(models, rollout) < 5e-5
        found.append(rollout)
        metrics.append(step_metrics)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.04)
    assert largest_gap([*models[1:], model], found[-1]) > 0.01, "the log-probs of the next version would show"
    assert sum(len({*versions.tolist()}) > 1 for rollout in found for versions in rollout.parts["versions"]) >= 3, (
        "mixed"
    )
    assert any(rollout.is_truncated_B.any() for rollout in found)
    assert sorted(row.where for rollout in found for row in rollout.rows[::GROUP]) == sorted(x.where for x in data.rows)
    assert sampler.state(STEPS) == {"prompts_drawn": PROMPTS * STEPS, "in_the_air": []}
    assert metrics[0]["rollout/kept_tokens"] > 0 == metrics[-1]["rollout/kept_tokens"]
    engine.close()


# LoRA -----------------------------------------------------------------------------------------------------------------


def lora(world: World, path: str) -> dict[str, object]:
    """Gradients, log-probs and merged weights. Frozen weights are bf16, the adapter fp32."""

    def adapted(args: Namespace, dtype: torch.dtype) -> Policy:
        return sharded(policy_of(args, torch.bfloat16), world, dtype, stays_gathered=args.communicate_once)

    def gradient(policy: Policy, args: Namespace, index: int = 0) -> tuple[Metrics, Tensors]:
        """(metrics, gradients) of the update of this index, after a pass of the reference, as in a step."""
        updates = [whole_update(make_rollout(group_size=4), args, policy, world)]
        (update,) = add_logprobs(updates, policy, policy, algorithm_of(args))
        assert all(isinstance(x, DTensor) for x in policy.parameters()), "a pass without gradient leaves some gathered"
        return recorded(policy, update, args, world, index=index)

    def logprobs(model: Policy, args: Namespace) -> list[torch.Tensor]:
        update = whole_update(make_rollout(), args, model, world)
        update = logprobs_under(model, "old_logprobs_N", update, algorithm_of(args))
        return [batch.old_logprobs_N for batch in update.batches]

    found: dict[str, object] = {"gradients": {}, "bf16": {}, "reference": {}, "with dropout": {}}
    for cap, changes in ((16, {}), (40, {}), (16, {"communicate_once": True}), (40, {"share_prompts": True})):
        for checkpointing in (False, True):
            args = lora_flags(path, micro_batch_tokens=cap, gradient_checkpointing=checkpointing or None, **changes)
            policy = adapted(args, torch.float32)
            found["gradients"][f"cap {cap}, {changes}, checkpointing {checkpointing}"] = gradient(policy, args)
            assert all(isinstance(parameter, DTensor) for parameter in policy.parameters()), "nothing stays gathered"

    for first_pass in ("of the policy", "of the reference"):
        args = lora_flags(path)
        policy = adapted(args, torch.bfloat16)
        if first_pass == "of the policy":
            logprobs(policy, args)
        found["bf16"][first_pass] = gradient(policy, args)[1]

    args = lora_flags(path)
    for dtype in (torch.float32, torch.bfloat16):
        policy, base = adapted(args, dtype), sharded(load_policy(path, torch.bfloat16), world, dtype)
        with policy.adapter_off():
            reference = logprobs(policy, args)
        found["reference"][dtype] = reference, logprobs(base, args), logprobs(policy, args)

    for name, checkpointing, index in (("plain", None, 2), ("checkpointed", True, 2), ("other update", None, 3)):
        args = lora_flags(path, lora_dropout=0.4, gradient_checkpointing=checkpointing)
        policy = adapted(args, torch.float32)
        before = logprobs(policy, args)
        found["with dropout"][name] = gradient(policy, args, index)
        found["with dropout"][f"{name}, again"] = gradient(policy, args, index)
        after = logprobs(policy, args)
        found["with dropout"][f"{name}, passes without"] = [a.equal(b) for a, b in zip(before, after, strict=True)]

    policy = policy_of(lora_flags(path), torch.bfloat16)
    found["parameters"] = {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}
    sharded(policy, world, torch.bfloat16)
    engine = start_engine(path, world, "bfloat16", max_model_len=24)
    found["merged"] = weights_of(policy)
    for _ in range(10):
        engine.sync(policy.full_weights())
    found["merged after"] = weights_of(policy)
    after = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in policy.named_parameters()}
    found["parameters after"] = {name: x.detach() for name, x in after.items()}
    engine.close()
    return found


# Images ---------------------------------------------------------------------------------------------------------------


def images(world: World, path: str, exported: str) -> dict[str, object]:
    """Gradients, and gaps between sampler and trainer. Also exports the policy with LoRA."""
    found: dict[str, object] = {"gradients": {}}
    for name, changes in (("all weights", {}), ("LoRA", {"lora_rank": 4, "gradient_checkpointing": True})):
        args = vision_flags(path, **changes)
        policy = sharded(policy_of(args), world)
        micros = WITHOUT if world.trainer_rank else WITH_IMAGES
        found["gradients"][name] = vision_gradient(policy, args, world, micros)

    data = vision_data(args)
    processor = data.rows[0].images.vision.processor
    demand = EngineDemand(images=data.rows[0].images.vision.engine_options(3))
    engine = start_engine(path, world, "float32", max_model_len=48, demand=demand)
    engine.sync(policy.full_weights())
    order = [0, 2, 4, 1, 3]  # the second engine's share is two texts
    rows = [data.rows[i] for i in order]
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
        checkpoint.export(policy, weights, checkpoint.files_of([processor]), Path(exported))
    found["merged"] = weights_of(policy)
    found |= findings(engine)
    engine.close()
    return found
