"""Is the engine what is trained? Its weights are compared before each sampling, its log-probs after it.

Two comparisons, because neither sees everything. Weights are compared bit by bit, through sums: a
tensor that is one small step old does not show in the log-probs of a few thousand tokens. Log-probs
show what no sum of weights does: another temperature, a kernel that computes something else. A
difference ends the run.

The engine's tensors are known by their names and shapes, without vLLM. Not compared are a vision
tower, which is frozen, and layers that vLLM lays out in other ways than `parts_of` knows; the run
says which at its start.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import cache, partial

import torch
from torch import Tensor, nn

from batch import Metrics
from fsdp_utils import World, gather_from_ranks, sum_over_trainers
from runtime.stall import BOARD
from runtime.start import RunError
from schedule import UpdateStep

Sums = dict[str, Tensor]  # common name -> [BUCKETS] int64
ApplyModel = Callable[[Callable[[nn.Module], Sums]], list[Sums]]  # asks the model of this rank's engine

BUCKETS = 16  # sums of a tensor
ROWS = 1024  # rows of a matrix whose sums are made at a time: this bounds the memory
MOST_ROUNDED = 4  # sums that may differ where LoRA is merged, however small the tensor
MOST_ROUNDED_SHARE = 1e-4  # share of its numbers that may be rounded in another way
HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"  # common names
INTEGERS = {2: torch.int16, 4: torch.int32}  # bytes of a number -> the integer with the same bits
# The name that a tensor has in the policy and in the engine, whatever stands before it.
COMMON_NAME = re.compile(r"(layers\.\d+\..+|embed_tokens\.weight|lm_head\..+|norm\.weight)$")


# Before sampling: weights ---------------------------------------------------------------------------------------------


class DriftGuard:
    """Compares every engine with the shards of a `policy.Policy`, not with what a sync sent; on every rank the same."""

    def __init__(
        self, policy: nn.Module, world: World, phase: Callable[[str], AbstractContextManager], apply_model: ApplyModel
    ) -> None:
        """`phase`: what the comparison runs in, so that its time is known."""
        self.policy, self.world, self.phase, self.apply_model = policy, world, phase, apply_model
        weights = policy.describe_weights()
        # Common name -> shape of the whole. None: those of a vision tower.
        self.shapes = dict(zip(map(common_name, weights["names"]), weights["shapes"], strict=True))
        self.shapes.pop(None, None)
        common_names = set(self.shapes)
        self.has_head = HEAD in self.shapes  # otherwise the embedding is the head, too
        if not self.has_head and EMBEDDING in self.shapes:
            self.shapes[HEAD] = self.shapes[EMBEDDING]
        (engine_sums,) = apply_model(self.sums_of_engine)
        self.names = sorted(engine_sums)
        self.not_compared = sorted(common_names - engine_sums.keys())
        if world.device.type == "cpu":
            apply_model(self.watch_packing)

    def before_sample(self, cached_blocks: int) -> None:
        """Raises RunError if an engine has other weights than the policy, or keys and values of an earlier call."""
        with self.phase("drift"):
            names = self.different_tensors()
            most_blocks = max(gather_from_ranks(cached_blocks))
        if names:
            rest = f" and {len(names) - 4} more" if len(names) > 4 else ""
            fault = f"the engine's weights are not the policy's: {', '.join(names[:4])}{rest}"
        elif most_blocks:
            fault = f"the engine has kept {most_blocks} blocks of keys and values of old weights"
        else:
            return
        raise RunError(f"step {BOARD.step}: {fault}; nothing was sampled with them; the same command continues.")

    @torch.no_grad()
    def different_tensors(self) -> list[str]:
        """The names of the tensors in which an engine is not the policy."""
        world = self.world
        # The sums of the policy, then of each engine: a rank fills in its parts, and the ranks add
        # them up.
        tables = no_sums(world.device, 1 + world.num_engines, len(self.names))
        merged = self.add_sums_of_policy(dict(zip(self.names, tables[0], strict=True)))
        (engine_sums,) = self.apply_model(self.sums_of_engine)
        for name, sums in zip(self.names, tables[1 + world.engine_index], strict=True):
            if name in engine_sums:  # not before the first sync
                sums.copy_(engine_sums[name])
        tables = sum_over_trainers(tables)
        sizes = [math.prod(self.shapes[name]) if name in merged else 0 for name in self.names]
        is_different = differing(tables[0], tables[1:], torch.tensor(sizes, device=world.device))
        return [name for name, differs in zip(self.names, is_different.tolist(), strict=True) if differs]

    def add_sums_of_policy(self, sums: Sums) -> set[str]:
        """Adds the sums of the rows that belong to this rank. Returns the names of what LoRA is merged into."""
        merged = set()
        for name, is_merged, pieces in self.policy.own_rows():
            name = common_name(name)
            if is_merged:
                merged.add(name)
            for rows, first in pieces:  # also of tensors that are not compared: the ranks gather together
                if name in sums:
                    add_sums(sums[name], rows, first)
        if not self.has_head and HEAD in sums:
            sums[HEAD] += sums[EMBEDDING]
        return merged

    # The engine's side ------------------------------------------------------------------------------------------------

    def sums_of_engine(self, model: nn.Module) -> Sums:
        """The sums of what this rank's part of the engine multiplies by."""
        self.fused = model.packed_modules_mapping  # for example qkv_proj -> q_proj, k_proj, v_proj
        sums: Sums = {}
        for name, module in model.named_modules():
            if hasattr(module, "packed_sums"):
                sums |= module.packed_sums
            else:
                sums |= self.sums_of_layer(name, module)
        return sums

    def watch_packing(self, model: nn.Module) -> Sums:
        """CPU: vLLM multiplies by packed copies that cannot be read. Their sums are made while a sync packs them."""
        for name, module in model.named_modules():
            method = getattr(module, "quant_method", None)
            kernel = getattr(method, "moe_kernel", None)
            packer = method if kernel is None else kernel.fused_experts
            pack = getattr(packer, "process_weights_after_loading", None)
            if pack is not None and not name.endswith("embed_tokens"):  # its rows are looked up in the tensor itself
                module.packed_sums = {}
                packer.process_weights_after_loading = partial(self.sum_and_pack, name, pack)
        return {}

    def sum_and_pack(self, name: str, pack: Callable[[nn.Module], None], module: nn.Module) -> None:
        module.packed_sums = self.sums_of_layer(name, module)
        pack(module)

    def sums_of_layer(self, name: str, module: nn.Module) -> Sums:
        """The sums of this rank's parts of a layer, in the policy's dtype: kernels for CPUs keep biases in fp32."""
        sums: Sums = {}
        for part, tensor, first_row, first_column in self.parts_of(name, module):
            sums.setdefault(part, no_sums(tensor.device))
            for start in range(0, len(tensor), ROWS):
                rows = tensor[start : start + ROWS].to(self.policy.dtype)
                add_sums(sums[part], rows, first_row + start, first_column)
        return sums

    def parts_of(self, name: str, module: nn.Module) -> Iterator[tuple[str, Tensor, int, int]]:
        """(name in the policy, this rank's rows, index of the first row, of the first column) of a layer's tensors.

        Of rows that several ranks hold alike the first one's count; rows beyond the policy's are
        padding.
        """
        before, _, own_name = name.rpartition(".")
        tp_rank, tp_size = self.world.trainer_rank % self.world.tp_size, self.world.tp_size
        if own_name == "routed_experts":
            yield from parts_of_experts(before, module, tp_rank, tp_size)
        for kind, tensor in module.named_parameters(recurse=False):
            parts = [common_name(f"{before}.{part}.{kind}") for part in self.fused.get(own_name, [own_name])]
            rows_of_parts = getattr(module, "output_partition_sizes", [len(tensor)])
            if own_name == "conv1d":  # that of linear attention: vLLM divides each of queries, keys and values
                values = self.shapes[common_name(f"{before}.in_proj_z.weight")][0]
                keys = (self.shapes[parts[0]][0] - values) // 2
                rows_of_parts = [keys // tp_size, keys // tp_size, values // tp_size]
            if own_name in ("conv1d", "in_proj_qkvz"):  # they are one tensor in the policy
                parts = [parts[0]] * 3 + parts[1:]
            if len(parts) != len(rows_of_parts) or not self.shapes.keys() >= set(parts):
                continue  # for example several tensors that are one in the policy, too
            # Each rank holds some columns of all rows, or all columns of some rows.
            is_cut = tensor.ndim > 1 and list(tensor.shape[1:]) != self.shapes[parts[0]][1:]
            first_column = tp_rank * tensor.shape[1] if is_cut else 0
            start, before_part = 0, Counter()  # the latter: rows of the policy's tensor before this part of it
            for part, num_rows in zip(parts, rows_of_parts, strict=True):
                size = min(self.shapes[part][0], num_rows * tp_size)
                has_copies = num_rows == size or len(parts) > 1
                copies = num_rows * tp_size // size if has_copies else 1  # ranks that hold the same rows
                first_row = tp_rank // copies * num_rows
                counts = is_cut or tp_rank % copies == 0
                num_real = min(num_rows, max(size - first_row, 0)) if counts else 0
                yield part, tensor.detach()[start : start + num_real], before_part[part] + first_row, first_column
                start += num_rows
                before_part[part] += size


def parts_of_experts(
    name: str, module: nn.Module, tp_rank: int, tp_size: int
) -> Iterator[tuple[str, Tensor, int, int]]:
    """The same of experts, whose matrices lie one below the other: a rank has rows of each gate and up, and columns
    of all downs.
    """
    width = module.w2_weight.shape[-1]
    for i, rows in enumerate(module.w13_weight.detach().flatten(0, 1).split(width)):
        yield common_name(f"{name}.gate_up_proj"), rows, (i * tp_size + tp_rank) * width, 0
    yield common_name(f"{name}.down_proj"), module.w2_weight.detach().flatten(0, 1), 0, tp_rank * width


def common_name(name: str) -> str | None:
    """The name without what stands before it; None if it is no tensor that is compared."""
    match = COMMON_NAME.search(name)
    return match[1] if match and "visual." not in name else None


# Sums -----------------------------------------------------------------------------------------------------------------


@cache
def factors(count: int, start: int, seed: int, device: torch.device) -> Tensor:
    """[count] int32 from 1 to 2^15: a fixed pseudo-random function of start, start + 1, ..."""
    mixed = (torch.arange(start + 1, start + 1 + count, device=device) * 0x9E3779B1 + seed) * 0x85EBCA6B
    return ((mixed >> 15) % 2**15 + 1).int()


def no_sums(device: torch.device, *shape: int) -> Tensor:  # [*shape, BUCKETS] int64
    return torch.zeros(*shape, BUCKETS, dtype=torch.int64, device=device)


def add_sums(sums: Tensor, rows: Tensor, first_row: int = 0, first_column: int = 0) -> None:
    """Adds to `sums`, [BUCKETS] int64, modulo 2^64: the bits of some rows of a tensor, times factors of row and column.

    Row i counts in sum i % BUCKETS. The sums of the parts of a tensor, cut anyhow, add up to those
    of the whole, to the last bit. A number that changes or moves changes them. A vector is a
    column; further dimensions count as columns.
    """
    bits = (rows.flatten(1) if rows.ndim > 1 else rows[:, None]).view(INTEGERS[rows.itemsize]).int()
    columns = factors(bits.shape[1], first_column, 1, rows.device)
    row_sums = (bits * columns).sum(1) * factors(len(bits), first_row, 2, rows.device)
    buckets = torch.arange(first_row, first_row + len(bits), device=rows.device) % BUCKETS
    sums.index_add_(0, buckets, row_sums)


def differing(own: Tensor, engines: Tensor, merged_sizes: Tensor) -> Tensor:
    """bool [tensors]: in one of the engines the sums are not those of the policy.

    `own` [tensors, BUCKETS], `engines` [engines, tensors, BUCKETS]. `merged_sizes` [tensors]:
    numbers in a tensor that LoRA is merged into, otherwise 0. There two orders of summation round
    some numbers to neighbours, about 2^-16 of them at most. How many have moved by one step follows
    from the squares of the differences: factors are uniform, so the mean of their products' squares
    is 2^60 / 9.
    """
    differences = engines - own  # [engines, tensors, BUCKETS]
    num_moved = differences.double().square().sum(-1) / (2**60 / 9)
    num_different = (differences != 0).sum(-1)
    is_rounding = (num_different <= MOST_ROUNDED) | (num_moved < MOST_ROUNDED_SHARE * merged_sizes)
    is_allowed = (merged_sizes > 0) & is_rounding
    return ((num_different > 0) & ~is_allowed).any(0)


# After sampling: log-probs --------------------------------------------------------------------------------------------


def check_gap(metrics: Metrics, step: UpdateStep) -> None:
    """Raises RunError if what an update is to train on was sampled by something else than the policy.

    The mean gap or the temperature is farther off than the bound, or not a number. The temperature
    counts by the share of the gap that it explains: over two hundred tokens of an uncertain policy
    rounding alone has looked like 0.94, which explained half. Faults explain three quarters and
    more. Where the loss is not finite, log-probs say nothing.
    """
    bound = step.max_rollout_gap
    gap, temperature = metrics["policy/rollout_gap_mean"], metrics["policy/rollout_temperature"]
    share = metrics["policy/rollout_temperature_r2"]
    is_within = gap <= bound and abs(temperature - 1.0) * share <= bound
    if bound > 0 and math.isfinite(metrics["policy/loss"]) and not is_within:
        raise RunError(
            f"step {step.step}, update {step.number} is not made: sampler and trainer give other log-probs to the same "
            f"tokens: policy/rollout_gap_mean {gap:.4f}, policy/rollout_temperature {temperature:.3f} "
            f"(it explains {share:.0%}); --max_rollout_gap {bound:g}."
        )
