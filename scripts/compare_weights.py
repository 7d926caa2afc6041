"""Has a sync brought every weight? Compares each tensor of an engine with the policy, bit by bit.

For `check_gpu.py` and the tests: once for a model and a machine. The engine's tensors are known by their names and
shapes, without vLLM. Not compared are a vision tower, which is frozen, and layers that vLLM lays out in other ways than
`parts_of_layer` knows.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from extras.models.lora import NAME
from fsdp_utils import World, max_over_trainers
from policy import Policy

HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"  # common names
# The name that a tensor has in the policy and in the engine, whatever stands before it.
COMMON_NAME = re.compile(r"(layers\.\d+\..+|embed_tokens\.weight|lm_head\..+|norm\.weight)$")
UNSEEN, EQUAL, DIFFERENT = 0, 1, 2  # states of a number: no part of the engine holds it, all that do agree, one differs
# Where LoRA is merged, two orders of summation round some numbers to neighbours, about 2^-16 of them at most.
MOST_ROUNDED, MOST_ROUNDED_SHARE = 4, 1e-4
INTEGERS = {2: torch.int16, 4: torch.int32}  # bytes of a number -> the integer with the same bits


class Part(NamedTuple):
    """Some rows of a tensor, or some of their columns, as a rank of an engine holds them."""

    name: str  # the common name of the whole
    values: Tensor  # [rows, columns]
    first_row: int
    first_column: int


class Comparison:
    """Compares all engines with the policy, on every rank the same. Made before the first sync."""

    def __init__(self, policy: Policy, world: World, apply_model: Callable) -> None:
        """`apply_model`: the method of vLLM's LLM."""
        self.policy, self.world, self.apply_model = policy, world, apply_model
        self.shapes = {common_name(name): list(parameter.shape) for name, parameter, _ in policy.named_weights()}
        self.shapes.pop(None, None)
        trained = set(self.shapes)
        self.shapes.setdefault(HEAD, self.shapes.get(EMBEDDING))  # without a head of its own it is the embedding
        (parts,) = apply_model(self.parts)
        self.names = sorted({part.name for part in parts})
        self.not_compared = sorted(trained - set(self.names))
        if world.device.type == "cpu":
            apply_model(self.watch_packing)

    @torch.no_grad()
    def different_tensors(self) -> list[str]:
        """The names of the tensors in which an engine is not the policy."""
        (parts,) = self.apply_model(self.parts)
        different = []
        for name, whole, is_merged in whole_tensors(self.policy):
            if name in self.names:
                states = max_over_trainers(states_of(whole, (part for part in parts if part.name == name)))
                different += [name] * is_different(states, is_merged)
        return sorted(different)

    def parts(self, model: nn.Module) -> list[Part]:
        """All that this rank's part of the engine multiplies by."""
        found = []
        for name, module in model.named_modules():
            packed = getattr(module, "parts_before_packing", None)
            found += self.parts_of_module(model, name, module) if packed is None else packed
        return found

    def parts_of_module(self, model: nn.Module, name: str, module: nn.Module) -> list[Part]:
        world = self.world
        ranks = world.trainer_rank % world.tp_size, world.tp_size
        return list(parts_of_layer(name, module, model.packed_modules_mapping, self.shapes, *ranks))

    def watch_packing(self, model: nn.Module) -> None:
        """CPU: vLLM multiplies by packed copies that cannot be read. What a sync packs is copied before."""
        for name, module in model.named_modules():
            method = getattr(module, "quant_method", None)
            kernel = getattr(method, "moe_kernel", None)
            packer = method if kernel is None else kernel.fused_experts
            pack = getattr(packer, "process_weights_after_loading", None)
            if pack is not None and not name.endswith("embed_tokens"):  # its rows are looked up in the tensor itself
                module.parts_before_packing = []
                packer.process_weights_after_loading = partial(self.copy_and_pack, model, name, pack)

    def copy_and_pack(self, model: nn.Module, name: str, pack: Callable, module: nn.Module) -> None:
        parts = self.parts_of_module(model, name, module)
        module.parts_before_packing = [part._replace(values=part.values.clone()) for part in parts]
        pack(module)


def common_name(name: str) -> str | None:
    """The name without what stands before it; None if it is no tensor that is compared."""
    match = COMMON_NAME.search(name)
    return match[1] if match and "visual." not in name else None


# The policy -----------------------------------------------------------------------------------------------------------


def whole_tensors(policy: Policy) -> Iterator[tuple[str, Tensor, bool]]:
    """(common name, the tensor as an engine is to hold it [rows, columns], whether LoRA is merged into it).

    Made without `Policy.full_weights`: the comparison is to find a fault in that way, too.
    """
    has_head = False
    for full_name, parameter, layer in policy.named_weights():
        name, whole = common_name(full_name), gathered(parameter)
        if layer is not None:
            a, b = (gathered(adapters[NAME].weight).float() for adapters in (layer.lora_A, layer.lora_B))
            whole = whole.float() + layer.scaling[NAME] * (b @ a)
        whole = as_matrix(whole.to(policy.dtype))
        has_head |= name == HEAD
        if name == EMBEDDING:
            embedding = whole
        if name is not None:
            yield name, whole, layer is not None
    if not has_head:
        yield HEAD, embedding, False


def gathered(parameter: Tensor) -> Tensor:
    parameter = parameter.detach()
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def as_matrix(tensor: Tensor) -> Tensor:
    """[rows, columns]: a vector is a column; the matrices of experts lie one below the other."""
    return tensor[:, None] if tensor.ndim == 1 else tensor.reshape(-1, tensor.shape[-1])


# The engine -----------------------------------------------------------------------------------------------------------


def parts_of_layer(
    name: str, module: nn.Module, fused: Mapping[str, Sequence[str]], shapes: Mapping, tp_rank: int, tp_size: int
) -> Iterator[Part]:
    """This rank's parts of the tensors of a layer; rows beyond the policy's are padding.

    `fused`: name of a layer of the engine -> those of the policy, for example qkv_proj -> q_proj, k_proj, v_proj.
    `shapes`: of the whole tensors, by their common names.
    """
    before, _, own_name = name.rpartition(".")
    if own_name == "routed_experts":
        # A rank has rows of each gate and up, and columns of all downs.
        width = module.w2_weight.shape[-1]
        for i, rows in enumerate(as_matrix(module.w13_weight.detach()).split(width)):
            yield Part(common_name(f"{before}.gate_up_proj"), rows, (i * tp_size + tp_rank) * width, 0)
        yield Part(common_name(f"{before}.down_proj"), as_matrix(module.w2_weight.detach()), 0, tp_rank * width)
    for kind, tensor in module.named_parameters(recurse=False):
        parts = [common_name(f"{before}.{part}.{kind}") for part in fused.get(own_name, [own_name])]
        rows_of_parts = getattr(module, "output_partition_sizes", [len(tensor)])
        if own_name == "conv1d":  # linear attention's: vLLM divides each of queries, keys and values
            values = shapes[common_name(f"{before}.in_proj_z.weight")][0]
            keys = (shapes[parts[0]][0] - values) // 2
            rows_of_parts = [keys // tp_size, keys // tp_size, values // tp_size]
        if own_name in ("conv1d", "in_proj_qkvz"):  # they are one tensor in the policy
            parts = [parts[0]] * 3 + parts[1:]
        if len(parts) != len(rows_of_parts) or not shapes.keys() >= set(parts):
            continue  # for example several tensors that are one in the policy, too
        # Each rank holds some columns of all rows, or all columns of some rows.
        is_cut = tensor.ndim > 1 and list(tensor.shape[1:]) != shapes[parts[0]][1:]
        first_column = tp_rank * tensor.shape[1] if is_cut else 0
        start, before_part = 0, Counter()  # before_part: rows of the policy's tensor before this part
        for part, num_rows in zip(parts, rows_of_parts, strict=True):
            size = min(shapes[part][0], num_rows * tp_size)
            has_copies = num_rows == size or len(parts) > 1
            copies = num_rows * tp_size // size if has_copies else 1  # ranks that hold the same rows
            first_row = tp_rank // copies * num_rows
            num_real = min(num_rows, max(size - first_row, 0))
            rows = as_matrix(tensor.detach()[start : start + num_real])
            yield Part(part, rows, before_part[part] + first_row, first_column)
            start += num_rows
            before_part[part] += size


# Both -----------------------------------------------------------------------------------------------------------------


def states_of(whole: Tensor, parts: Iterable[Part]) -> Tensor:
    """uint8, the state of each number of the whole tensor."""
    states = torch.full_like(whole, UNSEEN, dtype=torch.uint8)
    for part in parts:
        rows = slice(part.first_row, part.first_row + part.values.shape[0])
        columns = slice(part.first_column, part.first_column + part.values.shape[1])
        # In the policy's dtype: kernels for CPUs keep biases in fp32.
        wanted, found = (bits(values) for values in (whole[rows, columns], part.values.to(whole.dtype)))
        states[rows, columns] = states[rows, columns].maximum(torch.where(wanted == found, EQUAL, DIFFERENT).byte())
    return states


def bits(values: Tensor) -> Tensor:
    return values.view(INTEGERS[values.itemsize])


def is_different(states: Tensor, is_merged: bool) -> bool:
    """Whether an engine that holds a tensor so has not the policy's."""
    most = max(MOST_ROUNDED, MOST_ROUNDED_SHARE * states.numel()) if is_merged else 0
    return bool((states == UNSEEN).any() or (states == DIFFERENT).sum() > most)
