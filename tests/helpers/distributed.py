"""Work on several ranks: `on_ranks`, and what the trainer does there on the real FSDP model.

    python scripts/launch.py --ranks N tests/helpers/distributed.py FILE:FUNCTION RANKS_OF_AN_ENGINE MINUTES OUTPUT ...

A work takes the world and texts; what it returns on the first rank is what the test looks at.
"""

from __future__ import annotations

import itertools
import pkgutil
import sys
import tempfile
import threading
import weakref
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import AutoModelForCausalLM

import checkpoint
import fsdp_utils
from algorithm import algorithm_of
from batch import NO_IDS, Batch, Rollout, Row, Update
from command_line import parse_flags
from extras.models.adamw import ChunkedAdamW, join
from extras.teacher.moving import move_references
from flags import Saving
from fsdp_utils import World, full_tensors, gather_from_ranks, local_shard, shard
from gate.checks import check_flags
from helpers import made_up
from helpers.made_up import RAGGED, build, flags, load_policy, make_rollout, policy_of, train_once, whole_update
from helpers.runs import largest_file, torchrun
from model.optimizer import parameters_of
from policy import Policy, empty_policy, shard_and_fill
from runtime.files import DiskError
from schedule import UpdateStep, make_plan
from update import add_logprobs, add_reference, logprobs_under, with_advantages

Metrics = dict[str, float]
Tensors = dict[str, torch.Tensor]
Result = tuple[Metrics, Tensors]  # metrics and gradients of an update
Trained = tuple[Policy, Policy | None, torch.optim.Optimizer]  # as `build` returns it


def on_ranks(num_ranks: int, work: str, *arguments: object, tp_size: int = 1) -> object:
    """What the work (`file:function` of this folder) returns on the first rank."""
    with tempfile.TemporaryDirectory() as folder:
        output = f"{folder}/found.pt"
        torchrun(num_ranks, "tests/helpers/distributed.py", work, tp_size, 10, output, *arguments)
        return torch.load(output, weights_only=False)


def parsed(words: str, num_trainers: int = 1) -> Namespace:
    """The program's flags of such a work, checked."""
    sizes = "--total_steps 1 --max_prompt_tokens 4 --max_completion_tokens 12 --micro_batch_tokens 40"
    args = parse_flags(f"--model m --train_data d --out_dir o {sizes} {words}".split())
    check_flags(args, num_trainers)
    return args


def sharded(policy: Policy, world: World, dtype: torch.dtype = torch.float32, **options: bool) -> Policy:
    """The policy itself; its arithmetic has this dtype."""
    shard(policy, policy.layers, world, dtype, **options)
    return policy


def weights_of(policy: Policy) -> Tensors:
    """As the engine gets them, on the host."""
    return {name: full.to("cpu", copy=True) for name, full in policy.full_weights()}


def kept_gradients(policy: Policy, optimizer: torch.optim.Optimizer) -> Tensors:
    """Whole gradients, by name: those of the last step that the optimizer has made."""
    gradients: Tensors = {}

    def keep(*_: object) -> None:
        for name, parameter in policy.named_parameters():
            if parameter.requires_grad:
                gradient = parameter.grad
                gradients[name] = (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).clone()

    optimizer.register_step_pre_hook(keep)
    return gradients


def kept_masters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The fp32 numbers that this rank trains, as one vector on the host: those of now, and those after each step."""
    masters: list[torch.Tensor] = []

    def keep(*_: object) -> None:
        vectors = []
        for parameter in parameters_of(optimizer):
            local = local_shard(parameter.detach())
            if local.dtype == torch.bfloat16:
                local = join(local.cpu(), local_shard(optimizer.state[parameter]["remainder"]).cpu())
            vectors.append(local.flatten().to("cpu", copy=True))
        masters.append(torch.cat(vectors))

    keep()
    optimizer.register_step_post_hook(keep)
    return masters


def check_same_training(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    """Two kernels of AdamW gave these `kept_masters` of three steps, on the same gradients in the first.

    They differ in the last place. Key biases have gradients of rounding noise alone, which AdamW makes as large as
    others: from the second step on, single numbers of two right programs are steps apart. So the bounds are 8 units in
    the last place (of the larger of a number and its change) after one step, and 5 % of the whole change after three.
    """
    start, first, _, last = wanted
    assert found[0].equal(start)
    unit = torch.maximum(start.abs(), first.abs()).clamp(min=1e-12) * 2**-23
    units = ((found[1] - first).abs() / unit).max().item()
    assert units <= 8, f"{units:.0f} units in the last place after one step"
    share = ((found[3] - last).norm() / (last - start).norm()).item()
    assert share < 0.05, f"{share:.3f} of the change after three steps"


def scored(rollout: Rollout, policy: Policy, reference: Policy | None, args: Namespace, world: World) -> Update:
    """The rollout as one update, after its passes for log-probs."""
    return add_logprobs([whole_update(rollout, args, policy, world)], policy, reference, algorithm_of(args))[0]


def recorded(policy: Policy, update: Update, args: Namespace, world: World, **changes: object) -> Result:
    """An update by plain gradient descent, at the rate 0 if nothing else is given."""
    optimizer = torch.optim.SGD(x for x in policy.parameters() if x.requires_grad)
    gradients = kept_gradients(policy, optimizer)
    return train_once(policy, optimizer, update, args, world, **changes), gradients


def train(trained: Trained, args: Namespace, world: World, count: int) -> list[Metrics]:
    """So many updates on one rollout."""
    policy, reference, optimizer = trained
    metrics = []
    for index in range(count):
        update = scored(make_rollout(), policy, reference, args, world)
        metrics.append(train_once(policy, optimizer, update, args, world, rate=1e-3, index=index))
    return metrics


def watched(name: str, note: Callable[..., None]) -> AbstractContextManager:
    """Notes each call of this collective, with its arguments; a mock would keep all buffers."""
    collective = getattr(dist, name)

    def call(*arguments: object, **options: object) -> object:
        note(*arguments)
        return collective(*arguments, **options)

    return patch.object(dist, name, call)


# One update's loss and gradient, for several algorithms, caps and orders ----------------------------------------------

ALGORITHMS = {  # name -> flags
    "clip": "--kl_coef 0.1 --clip_high 0.3",
    "gspo": "--policy_loss gspo --clip_low 0.02 --clip_high 0.02 --loss_aggregation seq_mean_token_mean "
    "--rollout_correction sequence_truncate:largest=1.5",
    "gspo_token": "--policy_loss gspo_token --clip_low 0.02 --clip_high 0.02 --dual_clip 1.05",
    "cispo": "--policy_loss cispo --clip_high 0.15 --loss_aggregation seq_mean_token_sum_norm --entropy_coef 0.5 "
    "--rollout_correction token_mask",
    "sapo": "--policy_loss sapo --loss_aggregation seq_mean_token_mean --kl_coef 0.1 --kl_estimator k3+",
    "reinforce": "--policy_loss reinforce --loss_aggregation seq_mean_token_mean",
    "distill": "--kl_coef 0.5 --kl_over vocabulary --kl_direction jsd:beta=0.3 --entropy_coef 0.1",
}
LEFT_OUT = [1, 4]  # sequences that "reinforce" leaves out of the loss


def args_of(algorithm: str, more: str = "") -> Namespace:
    return parsed(f"--max_grad_norm 1e9 --group_size 4 {ALGORITHMS[algorithm]} {more}")


def rollout_of(algorithm: str, lengths: list[int] | None = None) -> Rollout:
    rollout = make_rollout(lengths or RAGGED, group_size=4)
    is_trained_B = np.isin(np.arange(len(rollout.texts)), LEFT_OUT, invert=True)
    return replace(rollout, is_trained_B=is_trained_B) if algorithm == "reinforce" else rollout


def off_policy(batch: Batch) -> Batch:
    """The batch with other old log-probs, which clip half of the tokens; trainer / sampler is 0.45 or 1.42."""
    old_logprobs_N = batch.old_logprobs_N + torch.where(batch.labels_N % 2 == 0, -0.3, 0.1) * batch.advantages_N.sign()
    rollout_logprobs_N = old_logprobs_N + torch.where(batch.labels_N % 3 == 0, 0.8, -0.35)
    return replace(batch, old_logprobs_N=old_logprobs_N, rollout_logprobs_N=rollout_logprobs_N)


def reference_of(path: Path | str) -> Policy:
    """The policy with noise on its weights: otherwise the KL term has no gradient."""
    reference = load_policy(path).requires_grad_(False)
    torch.manual_seed(1)
    for parameter in reference.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.02)
    return reference


def gradients(world: World, path: str) -> dict[str, dict[str, Result]]:
    """Algorithm -> case -> result."""
    policy, reference = (sharded(model, world) for model in (load_policy(path), reference_of(path)))
    results = {}
    for algorithm in ALGORITHMS:
        rollout = rollout_of(algorithm)
        # A micro-batch has a sequence, one or two, all.
        cases = {f"cap {cap}": (rollout, f"{cap}") for cap in (16, 23, 1000)}
        cases["shuffled"] = rollout.select(np.array([7, 4, 6, 5, 2, 0, 3, 1])), "23"
        cases["prompts shared"] = rollout, "1000 --share_prompts"
        # A micro-batch each: with two ranks the fourth one is empty.
        cases["three sequences"] = rollout_of(algorithm, [12, 11, 9]), "16 --group_size 2"
        results[algorithm] = {}
        for name, (rollout, cap) in cases.items():
            args = args_of(algorithm, f"--micro_batch_tokens {cap}")
            update = whole_update(rollout, args, policy, world)
            update = logprobs_under(policy, "old_logprobs_N", update, algorithm_of(args))
            update = replace(update, batches=[off_policy(batch) for batch in update.batches])
            if args.kl_coef:
                update = add_reference(update, reference, algorithm_of(args))
            results[algorithm][name] = recorded(policy, update, args, world, is_first=False)
    return results


# Copies of the policy (--shard_ranks), on four ranks ------------------------------------------------------------------

COPIES = (  # flags
    "--dtype float32 --kl_coef 0.1 --micro_batch_tokens 20 --communicate_once",
    "--param_dtype bfloat16 --offload optimizer",
    "--dtype float32 --kl_coef 0.1 --lora_rank 3 --offload all",
)


def copies(whole: World, path: str) -> dict[str, dict[int | None, tuple]]:
    """Flags -> --shard_ranks -> metrics of two updates, gradients of the last one, and weights."""
    results = {case: {} for case in COPIES}
    for shard_ranks in (None, 2, 1):
        world = replace(whole, shard_ranks=shard_ranks)
        check_unequal_parts(world)
        for group in world.mesh.get_all_groups():
            assert group._get_backend(world.device).options._timeout == timedelta(minutes=10), "that of the run"
        shape = (4,) if shard_ranks is None else (4 // shard_ranks, shard_ranks)
        placements = (Shard(0),) if shard_ranks is None else (Replicate(), Shard(0))
        for case in COPIES:
            args = parsed(f"--model {path} --prompts_per_step 4 --group_size 2 --max_grad_norm 0.05 {case}", 4)
            policy, reference, optimizer = build(args, world)
            for parameter in policy.parameters():
                assert parameter.device_mesh.shape == shape and parameter.placements == placements
                assert len(local_shard(parameter)) <= -(-len(parameter) // shape[-1])
            last = kept_gradients(policy, optimizer)
            metrics = train((policy, reference, optimizer), args, world, 2)
            results[case][shard_ranks] = metrics, last, weights_of(policy)
    return results


def check_unequal_parts(world: World) -> None:
    """Seven rows over the shards: what is filled comes back whole, in fp32 and bf16."""
    torch.manual_seed(0)
    wanted, linear = [torch.randn(7, 3), torch.randn(7)], torch.nn.Linear(3, 7)
    shard(linear, [], world, torch.float32)
    for parameter, values in zip(linear.parameters(), wanted, strict=True):
        fsdp_utils.fill_from_main(parameter, values if world.is_main else None)
    for dtype in (torch.float32, torch.bfloat16):
        found = full_tensors((parameter, dtype) for parameter in linear.parameters())
        assert all(full.equal(values.to(dtype)) for full, values in zip(found, wanted, strict=True))


# Three updates under every memory policy ------------------------------------------------------------------------------

SMALL = "--micro_batch_tokens 20"  # several micro-batches an update
ONCE = f"{SMALL} --communicate_once"
OFFLOADS = "none", "optimizer", "all --offload_reference"
MEMORY_POLICIES = [f"--param_dtype {dtype} --offload {each}" for dtype in ("float32", "bfloat16") for each in OFFLOADS]
MEMORY_POLICIES += [SMALL, ONCE, f"{ONCE} --gradient_checkpointing --offload all"]


def is_on_host(policy: Policy) -> bool:
    """Whether FSDP keeps the shards in host RAM, by its own state: on a CPU they are there anyway."""
    if not isinstance(policy, FSDPModule):  # one rank alone keeps plain tensors
        return False
    groups = [group for unit in (policy, *policy.layers) for group in unit._get_fsdp_state()._fsdp_param_groups]
    (answer,) = {isinstance(group.offload_policy, CPUOffloadPolicy) for group in groups}
    are_on_gpu = {local_shard(parameter).is_cuda for parameter in policy.parameters()}
    assert are_on_gpu == {torch.cuda.is_available() and not answer}
    return answer


def memory_policies(world: World, path: str) -> dict[str, tuple]:
    """Flags -> metrics, parameters, optimizer state, numbers of collectives, `kept_masters`."""
    return {words: under_policy(path, words, world) for words in MEMORY_POLICIES}


def under_policy(path: str, words: str, world: World) -> tuple:
    args = parsed(f"--model {path} --group_size 2 --kl_coef 0.1 {words}", world.num_trainers)
    policy, reference, optimizer = build(args, world)
    assert isinstance(optimizer, ChunkedAdamW) is (args.offload != "none" or args.param_dtype == "bfloat16")
    if isinstance(optimizer, ChunkedAdamW):
        assert optimizer.is_state_on_host is (args.offload == "optimizer")
    assert is_on_host(policy) is (args.offload == "all")
    assert is_on_host(reference) is args.offload_reference
    collectives = "reduce_scatter_single", "all_gather_single"  # what FSDP calls
    calls, masters = Counter(), kept_masters(optimizer)
    with ExitStack() as watches:
        for name in collectives:
            watches.enter_context(watched(name, lambda *_, name=name: calls.update([name])))
        metrics = train((policy, reference, optimizer), args, world, 3)
    states = enumerate(optimizer.state.values())
    state = {f"{index} {name}": local_shard(tensor) for index, state in states for name, tensor in state.items()}
    if torch.cuda.is_available():
        big = [tensor for tensor in state.values() if tensor.dim()]
        assert {tensor.is_cuda for tensor in big} == {args.offload == "none"}
        assert args.offload != "optimizer" or all(tensor.is_pinned() for tensor in big)
    policy.dtype, state = torch.float32, {name: tensor.cpu() for name, tensor in state.items()}
    return metrics, weights_of(policy), state, [calls[name] for name in collectives], masters


def with_optimizer(world: World, path: str, optimizer: str) -> tuple[list[Metrics], Tensors]:
    """(metrics, weights) of three updates by an optimizer of the user's."""
    args = parsed(f"--model {path} --group_size 2 --optimizer {optimizer}", world.num_trainers)
    trained = build(args, world)
    return train(trained, args, world, 3), weights_of(trained[0])


# An update with --compile beside the same one in eager mode -----------------------------------------------------------

COMPILED = {  # name -> flags
    "kernels": {},
    "all weights": {"kl_coef": 0.1, "num_iterations": 2},
    "prompts shared": {"share_prompts": True},
    "teacher": {"kl_coef": 0.5, "kl_over": "vocabulary"},
    "LoRA, recomputed": {
        "lora_rank": 3, "kl_coef": 0.1, "gradient_checkpointing": True, "communicate_once": True,
        "lora_targets": "v_proj",
    },
    "images": {"kl_coef": 0},
}  # fmt: skip
TRACED = {*COMPILED} - {"kernels"}


def compiled(world: World, path: str, vision: str) -> dict[str, object]:
    """Case -> (graphs that were compiled, update in eager mode, compiled update); "counts": those of the benchmark.

    An update: metrics, gradients, new weights. The backend of `TRACED` traces and differentiates as inductor does, and
    leaves the arithmetic to torch: their kernels would be half a minute of the C++ compiler each.
    """
    from torch._dynamo.utils import counters

    from bench_common import Trainer, flags_of
    from bench_update import count_compilations

    def train_one(args: Namespace, rollout: Rollout) -> tuple[Metrics, Tensors, Tensors]:
        policy, reference, _ = build(args, world)
        names = list(policy.state_dict())
        # Adam makes a step of a gradient that is rounding.
        result = recorded(policy, scored(rollout, policy, reference, args, world), args, world, rate=0.1)
        assert names == list(policy.state_dict()) and not any("_orig_mod" in name for name in names)
        return *result, weights_of(policy)

    torch._dynamo.config.disable = True  # as an engine on CPUs does
    lengths = np.random.default_rng(0).permutation(np.arange(2, 100, 12)).tolist()
    with patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        trainer = Trainer(flags_of(path, "--dtype", "float32", "--compile"), world)
        found = {"counts": count_compilations(trainer, 64, lengths)}
    common = {"dtype": "float32", "group_size": 2, "prompts_per_step": 4, "micro_batch_tokens": 40}
    for name, changes in COMPILED.items():
        args, rollout = flags(model=path, **common | changes), make_rollout(group_size=2)
        if name == "images":
            args = made_up.vision_flags(vision, **changes)
            rollout = made_up.vision_rollout(made_up.vision_data(args))
        eager, before = train_one(args, rollout), counters["stats"]["unique_graphs"]
        args.compile = True
        backend = "aot_eager" if name in TRACED else "inductor"
        with patch.object(torch, "compile", partial(torch.compile, backend=backend)):
            update = train_one(args, rollout)
        found[name] = counters["stats"]["unique_graphs"] - before, eager, update
    return found


# Updates that follow a reference, of its own or the policy without its adapter ----------------------------------------

WHOLE, TINY = {"kl_over": "vocabulary"}, {"micro_batch_tokens": 24}
LORA, HINTS = WHOLE | {"lora_rank": 3}, WHOLE | {"hint_column": "@group"}
TAUGHT = {  # name -> flags
    "sampled, with hints": {"kl_estimator": "k2"} | TINY,
    "hints of the step": HINTS | TINY,
    "hints of the step, shared": HINTS | {"share_prompts": True},
    "whole": WHOLE,
    "small, on the host": WHOLE | TINY | {"offload_reference": True},
    "shared, communicates once": WHOLE | {"share_prompts": True, "communicate_once": True},
    "LoRA": LORA,
    "LoRA, small": LORA | TINY,
    "LoRA, small, communicates once": LORA | TINY | {"communicate_once": True},
    "LoRA, shared, recomputed": LORA | {"share_prompts": True, "gradient_checkpointing": True},
}


def with_hints(rollout: Rollout) -> Rollout:
    """Two completions to a prompt; hints of different lengths."""
    rng, ids = np.random.default_rng(3), [row.ids for row in rollout.rows[::2]]
    hinted = [np.append(each, rng.integers(0, 64, 2 + i)) for i, each in enumerate(ids)]
    rows = [Row([], "", {}, "", ids=each, hinted_ids=more) for each, more in zip(ids, hinted, strict=True)]
    return replace(rollout, rows=[row for row in rows for _ in range(2)])


def taught(world: World, path: str, teacher: str) -> dict[str, Result]:
    """Case -> result. Eight completions, of which a rank may have none in a micro-batch."""
    found = {}
    for name, changes in TAUGHT.items():
        args = flags(model=path, max_grad_norm=1e9, group_size=2, kl_coef=0.5, prompts_per_step=4, **changes)
        reference = policy = sharded(policy_of(args), world, stays_gathered=args.communicate_once)
        if not args.lora_rank:
            own = load_policy(teacher).requires_grad_(False)
            reference = sharded(own, world, on_host=args.offload_reference)
        rollout = with_hints(make_rollout(group_size=2))
        if args.hint_column:  # every third completion has none
            without = range(1, len(rollout.rows), 3)
            rows = [replace(row, hinted_ids=NO_IDS) if b in without else row for b, row in enumerate(rollout.rows)]
            rollout = replace(rollout, rows=rows).with_parts(is_hinted=[b not in without for b in range(len(rows))])
        update = add_reference(whole_update(rollout, args, policy, world), reference, algorithm_of(args))
        found[name] = recorded(policy, update, args, world)
    return found


MOVED = {  # name -> flags of a reference that moves
    "replaced": {"reference_every": 2, "reset_optimizer": True},
    "replaced, bf16": {"reference_every": 2, "dtype": "bfloat16"},
    "mean": {"reference_every": 1, "reference_mixup": 0.05, "offload_reference": True},
    "mean, bf16": {"reference_every": 1, "reference_mixup": 0.05, "dtype": "bfloat16"},
}


def moved(world: World, path: str) -> dict[str, list[tuple[torch.Tensor, torch.Tensor, float]]]:
    """Case -> after each of steps 0 to 4: weights of policy and reference, count of Adam's updates."""
    found = {}
    for name, changes in MOVED.items():
        args = flags(model=path, kl_coef=0.5, group_size=1, prompts_per_step=8, learning_rate=1e-2, **changes)
        policy, reference, optimizer = build(args, world)
        plan, steps = make_plan(args, 8), found.setdefault(name, [])
        for number in range(5):
            if number:
                update = scored(make_rollout(), policy, reference, args, world)
                train_once(policy, optimizer, update, args, world, **plan.update(number, 0)._asdict())
            models = [full_tensors((x, torch.float32) for x in model.parameters()) for model in (policy, reference)]
            whole = [torch.cat([x.flatten().cpu() for x in tensors]) for tensors in models]
            steps.append((*whole, *{float(state["step"]) for state in optimizer.state.values()}))
    return found


# Loading: the shards against `from_pretrained`, and the memory that loading and a sync need ---------------------------


def loaded(path: str, dtype: torch.dtype, on_host: bool, world: World) -> Policy:
    return shard_and_fill(empty_policy(path, dtype, dtype), path, world, on_host)


def differences(path: str, dtype: torch.dtype, on_host: bool, world: World) -> list[str]:
    """Names of parameters and buffers that are not, bit for bit, what from_pretrained gives."""
    policy = loaded(path, dtype, on_host, world)
    wanted = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    found = dict(policy.full_weights()) | dict(policy.model.named_buffers())
    expected = dict(wanted.named_parameters()) | dict(wanted.named_buffers())
    assert found.keys() == expected.keys()
    return [name for name, x in expected.items() if found[name].dtype != x.dtype or not found[name].equal(x)]


def most_held_in_a_sync(path: str, world: World) -> float:
    """The most bytes of gathered or streamed parameters alive at a time, in decoder layers."""
    policy = loaded(path, torch.float32, False, world)
    policy.dtype = torch.bfloat16
    alive, most = {}, 0

    def watch(tensor: torch.Tensor, *_: object) -> None:
        nonlocal most
        storage = tensor.untyped_storage()
        if id(storage) not in alive:
            alive[id(storage)] = storage.nbytes()
            weakref.finalize(storage, alive.pop, id(storage))
            most = max(most, sum(alive.values()))

    with watched("all_gather_single", watch):
        for _, tensor in policy.full_weights():
            watch(tensor)
    return most / sum(2 * parameter.numel() for parameter in policy.layers[0].parameters())


def bytes_grown(small: str, large: str, world: World) -> int:
    """By loading the large policy, at most: what a first load imports and starts is not its own."""
    loaded(small, torch.float32, False, world)
    seen, is_over = [], threading.Event()

    def look() -> None:
        """Resident memory without mapped files, which the system takes back when it needs to."""
        _, _, rest = Path("/proc/self/status").read_text().partition("RssAnon:")
        seen.append(int(rest.split()[0]) * 1024)

    def look_again() -> None:
        while not is_over.wait(0.0005):  # as often as Python lets it
            look()

    look()
    thread = threading.Thread(target=look_again)
    thread.start()
    loaded(large, torch.float32, False, world)
    is_over.set()
    thread.join()
    look()
    return max(seen) - seen[0]


def loading(world: World, large: str, *folders: str) -> list[dict[str, object]]:
    """The findings of each rank. Memory comes first, before what others leave."""
    found = {"grown": bytes_grown(folders[0], large, world)}
    cases = itertools.product(folders, (torch.float32, torch.bfloat16), (False, True))
    found |= {str(case): differences(*case, world) for case in cases}
    return gather_from_ranks(found | {"held": most_held_in_a_sync(folders[0], world)})


# Checkpoints from each number of ranks to the next, and a disk that refuses one of two ranks --------------------------

# The last ones are a family with windows and one with experts, in folders beside the runs.
MOVING = "--kl_coef 1 --reference_every 1 --reference_mixup 0.5"
SAVED = (
    f"--param_dtype float32 {MOVING}", "--param_dtype bfloat16", "--lora_rank 3",
    "--model FOLDER/gemma_3 --dtype float32", "--model FOLDER/qwen3_moe",
)  # fmt: skip
STATE = {"prompts_drawn": 12}


def writer(path: str, folder: Path, world: World, said: list[str]) -> checkpoint.Writer:
    folder.mkdir(parents=True, exist_ok=True)
    companions = checkpoint.files_of(path, torch.float32)
    return checkpoint.Writer(folder, companions, Saving(keep_checkpoints=0), world, said.append)


def reshard(whole: World, path: str, folder: str, step: str, words: str) -> None:
    """Step 1 trains and saves; each later one loads the checkpoint before and saves it again."""
    number = int(step)
    for place, case in enumerate(SAVED):
        given = f"--model {path} --prompts_per_step 4 {case} {words}".replace("FOLDER", folder)
        runs, args = Path(folder) / str(place), parsed(given, whole.num_trainers)
        world = replace(whole, shard_ranks=args.shard_ranks)
        policy, _, optimizer = build(args, world)
        is_plain = world.num_trainers == 1 and (args.dtype == "float32" or args.param_dtype == "bfloat16")
        assert isinstance(policy, FSDPModule) is not is_plain
        if number == 1:
            train((policy, None, optimizer), args, world, 2)
            move_references(policy, optimizer, UpdateStep(0, 0.0, True, 1.0, 0, reference_mixup=0.5))
        else:
            assert checkpoint.latest(runs, world, print) == (number - 1, runs / f"step_{number - 1}")
            assert checkpoint.load(runs / f"step_{number - 1}", policy, optimizer) == STATE
        writer(path, runs, world, said := []).save(number, policy, optimizer, STATE)
        assert not said


def full_disk(world: World, path: str, place: str) -> None:
    """Only the second rank cannot write: both give up the checkpoint, or end if it is required."""
    folder, said, why = Path(place), [], "a file could not be written to its end"
    args = parsed(f"--model {path} --prompts_per_step 4 {SAVED[0]}", world.num_trainers)
    policy, _, optimizer = build(args, world)
    train((policy, None, optimizer), args, world, 1)
    saving = writer(path, folder, world, said)
    saving.save(10, policy, optimizer, STATE)
    with nullcontext() if world.is_main else largest_file(100_000):
        saving.save(20, policy, optimizer, STATE)
        with pytest.raises(DiskError, match=f"step 20 could not be written: {why} .*; make room"):
            saving.save(20, policy, optimizer, STATE, is_required=True)
    assert f"step 20 could not be written: {why} (" in said.pop()
    gather_from_ranks(None)  # the main process has removed what was begun
    assert [each.name for each in folder.iterdir()] == ["step_10"]
    saving.save(21, policy, optimizer, STATE)
    assert checkpoint.latest(folder, world, said.append) == (21, folder / "step_21")
    shards = folder / "step_21" / "trainer" / "__1_0.distcp"
    if world.is_main:
        shards.write_bytes(shards.read_bytes()[:-1])
    assert checkpoint.latest(folder, world, said.append) == (10, folder / "step_10")
    assert len(said) == world.is_main


# What the works with an engine share with tests that have no vLLM -----------------------------------------------------

LORA_RANK = 3  # two ranks share the rows of A unequally


def lora_flags(path: Path | str, **changes: object) -> Namespace:
    limits = {
        "max_grad_norm": 1e9, "max_prompt_tokens": 4, "max_completion_tokens": 12, "kl_coef": 0.1,
        "micro_batch_tokens": 1000, "group_size": 4, "model": path, "lora_rank": LORA_RANK, "lora_alpha": 6,
    }  # fmt: skip
    return flags(**(limits | changes))


WITH_IMAGES, WITHOUT = [[0], [2, 4]], [[1], [3]]  # micro-batches of two ranks: the second has no image at all


def vision_gradient(policy: Policy, args: Namespace, world: World, micros: list[list[int]]) -> Result:
    """Of an update on these micro-batches, after a pass of the reference."""
    rollout = made_up.vision_rollout(made_up.vision_data(args))
    batches = [with_advantages(rollout, made_up.pack_with_images(rollout, x)) for x in micros]
    (update,) = add_logprobs([Update(batches, 29)], policy, policy, algorithm_of(args))
    return recorded(policy, update, args, world)


def main(work: str, tp_size: str, wait_minutes: str, output: str, *arguments: str) -> None:
    world = fsdp_utils.init_world(int(tp_size), timeout_minutes=int(wait_minutes))
    found = pkgutil.resolve_name(f"helpers.{work}")(world, *arguments)
    if world.is_main:
        torch.save(found, output)
    fsdp_utils.close_world()


if __name__ == "__main__":
    main(*sys.argv[1:])
