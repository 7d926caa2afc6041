"""Does the engine hold and sample what the policy trains? The engine's side of `guards/drift.py`.

Before each call of `Engine.sample` the weights of every engine are compared with the policy's own shards, not with what
a sync sent, and the caches must be empty. After a step's updates their gap of log-probs is looked at. On an alarm: a
new sync, a probe, a verdict, the evidence; then the run stops or goes on. What is not compared: a vision tower, which
is frozen, and layers that vLLM lays out in other ways than those of `parts_of`; their names are said once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from batch import Rollout, Row, pack
from flags import DriftBounds, Sampling
from fsdp_utils import gather_from_ranks, release_gathered, sum_over_trainers
from grpo import temperature_terms
from guards.drift import (
    DriftError,
    Findings,
    Gap,
    add_sums,
    differing,
    gap_in,
    is_mended,
    keep_evidence,
    no_sums,
    sentence,
    temperature_of,
)
from guards.files import tolerated
from model.lora import adapted_layers
from model.weights import in_files
from policy import add_images, add_packing

if TYPE_CHECKING:
    from policy import Policy
    from rollout import Engine
    from run import Run

ROWS = 1024  # of a matrix whose sums are made at a time
PROBE = 8  # completions of a probe, and of a step that are kept as evidence
PROBE_TOKENS = 64  # of each
# The name that a tensor has in the policy and in the engine, whatever stands before it.
COMMON_NAME = re.compile(r"(layers\.\d+\..+|embed_tokens\.weight|lm_head\..+|norm\.weight)$")


def common_name(name: str) -> str | None:
    found = None if "visual." in name else COMMON_NAME.search(name)
    return found and found[1]


# The engine's weights -------------------------------------------------------------------------------------------------


def rows_of(module: nn.Module) -> list[tuple[int, int, bool]]:
    """(rows, index of the first, is it counted) of each part of this rank's tensors of a layer; [] : all of one part.

    Of what several ranks of an engine hold alike, the first one's counts.
    """
    if isinstance(module, QKVParallelLinear):
        rank, copies = module.tp_rank, module.num_kv_head_replicas
        q, kv = module.num_heads * module.head_size, module.num_kv_heads * module.head_size
        of_keys = (kv, rank // copies * kv, rank % copies == 0)
        return [(q, rank * q, True), of_keys, of_keys]
    if isinstance(module, MergedColumnParallelLinear):
        sizes = [size // module.tp_size for size in module.output_sizes]
        return [(size, module.tp_rank * size, True) for size in sizes]
    if isinstance(module, ColumnParallelLinear):
        size = module.output_size_per_partition
        return [(size, module.tp_rank * size, True)]
    if isinstance(module, VocabParallelEmbedding):
        indices = module.shard_indices
        return [(indices.num_org_elements, indices.org_vocab_start_index, True)]
    return []


def parts_of(name: str, module: nn.Module, packed: dict[str, list[str]]) -> Iterator[tuple[str, Tensor, int, int]]:
    """(name in the policy, this rank's part of the tensor, its first row, its first column) of a layer's tensors."""
    before, _, own = name.rpartition(".")
    for kind, tensor in module.named_parameters(recurse=False):
        is_split = isinstance(module, RowParallelLinear) and kind == "weight"
        column = module.tp_rank * module.input_size_per_partition if is_split else 0
        is_counted = is_split or get_tensor_model_parallel_rank() == 0
        start = 0
        places = rows_of(module) or [(len(tensor), 0, is_counted)]
        names = packed.get(own, [own])
        if len(names) != len(places):  # several tensors that are one in the files
            return
        for part, (count, first, counts) in zip(names, places, strict=True):
            rows = tensor.detach()[start : start + (count if counts else 0)]
            yield f"{before}.{part}.{kind}".removeprefix("."), rows, first, column
            start += count


Sums = dict[str, Tensor]  # common name -> [BUCKETS] int64, of what one rank holds


def sums_of_layer(name: str, module: nn.Module, packed: dict[str, list[str]], dtype: torch.dtype) -> Sums:
    """Some rows at a time, which bounds the memory."""
    sums: Sums = {}
    for part, tensor, first_row, first_column in parts_of(name, module, packed):
        if (common := common_name(part)) is not None:
            sums[common] = no_sums(tensor.device)
            for start in range(0, len(tensor), ROWS):
                rows = tensor[start : start + ROWS].to(dtype)  # kernels for CPUs keep biases in fp32
                add_sums(sums[common], rows, first_row + start, first_column)
    return sums


def watch_packing(model: nn.Module, dtype: torch.dtype) -> None:
    """CPU: vLLM multiplies by packed copies that cannot be read: their sums are made when they are.

    Until the first sync there are none: the engine holds nothing of the policy.
    """
    for name, module in model.named_modules():
        if isinstance(module, LinearBase | ParallelLMHead):
            module.packed_sums = {}
            pack_weights = module.quant_method.process_weights_after_loading
            find_sums = partial(sums_of_layer, name, packed=model.packed_modules_mapping, dtype=dtype)
            module.quant_method.process_weights_after_loading = partial(sum_and_pack, find_sums, pack_weights)


def sum_and_pack(find_sums: Callable[..., Sums], pack_weights: Callable[..., None], layer: nn.Module) -> None:
    layer.packed_sums = find_sums(layer)
    pack_weights(layer)


def sums_of_engine(model: nn.Module, dtype: torch.dtype) -> Sums:
    """Of what this rank's part of the engine multiplies by, in the policy's dtype."""
    sums: Sums = {}
    for name, module in model.named_modules():
        packed = getattr(module, "packed_sums", None)
        sums |= sums_of_layer(name, module, model.packed_modules_mapping, dtype) if packed is None else packed
    return sums


# The comparison -------------------------------------------------------------------------------------------------------


class DriftGuard:
    """Called by `Engine`, on every rank alike: each rank comes to the same verdict."""

    def __init__(self, engine: Engine, policy: Policy, run: Run, bounds: DriftBounds) -> None:
        self.engine, self.policy, self.run, self.bounds = engine, policy, run, bounds
        self.is_busy = False  # samples and syncs by itself
        self.rollout: Rollout | None = None  # of the last call of `Engine.sample`
        self.most_tokens = PROBE_TOKENS  # that it asked for
        self.blocks = 0  # that were cached when it began
        self.step_of_alarm: int | None = None
        (held,) = engine.llm.apply_model(partial(sums_of_engine, dtype=self.policy.dtype))
        of_policy = {common for name, _ in policy.model.named_parameters() if (common := common_name(in_files(name)))}
        self.names = sorted(held.keys() & (of_policy | {"lm_head.weight"}))  # of a tied head the policy has no tensor
        if rest := sorted(name for name in of_policy - held.keys() if ".lora_" not in name):
            run.say(f"the engine's {', '.join(rest[:3])} and {len(rest)} tensors in all cannot be compared bit by bit")
        layers = adapted_layers(policy.model)
        self.adapted = {common_name(f"{name}.weight"): each.base_layer.weight.numel() for name, each in layers.items()}
        if run.world.device.type == "cpu":
            engine.llm.apply_model(partial(watch_packing, dtype=policy.dtype))

    def before_sample(self, rows: list[Row], sampling: Sampling) -> None:
        """Weights and caches, when the engine is about to sample: it may have been changed since the last sync."""
        self.blocks = self.cached_blocks()
        if self.is_busy:
            return
        self.most_tokens = sampling.max_completion_tokens
        with self.run.phase("drift"):
            names = self.different_tensors()
        if names or self.blocks:
            self.investigate(names, None, rows)

    def after_sample(self, rollout: Rollout) -> None:
        if not self.is_busy:
            self.rollout = rollout

    def after_sync(self) -> None:
        """The log-probs of the step's updates, which the trainer has computed anyway."""
        if self.bounds.partial_rollouts:
            return
        if not self.is_busy and self.run.updates and self.step_of_alarm != self.run.step:
            gaps = [gap for each in self.run.updates if (gap := gap_in(each)).is_beyond(self.bounds.max_rollout_gap)]
            if gaps:
                self.blocks = 0
                self.investigate([], gaps[0], self.rollout.rows)

    def cached_blocks(self) -> int:
        """Blocks of keys and values that a prompt could find in the prefix cache of an engine: the most of all."""
        scheduler = self.engine.llm.llm_engine.engine_core.engine_core.scheduler
        return max(gather_from_ranks(len(scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block)))

    @torch.no_grad()
    def different_tensors(self, with_adapter: bool = True) -> list[str]:
        """Names of the tensors that are not the policy's in an engine."""
        (held,) = self.engine.llm.apply_model(partial(sums_of_engine, dtype=self.policy.dtype))
        world = self.run.world
        tables = no_sums(world.device, 1 + world.num_engines, len(self.names))  # of the policy, and of each engine
        self.add_sums_of_policy(dict(zip(self.names, tables[0], strict=True)), with_adapter)
        for sums, name in zip(tables[1 + world.engine_index], self.names, strict=True):
            if name in held:  # not before the first sync
                sums.copy_(held[name])
        own, *engines = sum_over_trainers(tables)
        merged_sizes = torch.tensor([self.adapted.get(name, 0) for name in self.names], device=world.device)
        is_different = differing(own, torch.stack(engines), merged_sizes).tolist()
        return [name for name, differs in zip(self.names, is_different, strict=True) if differs]

    def add_sums_of_policy(self, sums: Sums, with_adapter: bool) -> None:
        """Adds those of the rows that this rank answers for. A head without a tensor is the embedding."""
        has_head = False
        for name, pieces in self.policy.own_rows(with_adapter):
            common = common_name(name)
            has_head = has_head or common == "lm_head.weight"
            for rows, first in pieces:
                if common in sums:
                    add_sums(sums[common], rows, first)
        if not has_head and "lm_head.weight" in sums:
            sums["lm_head.weight"] += sums["embed_tokens.weight"]

    # An alarm ---------------------------------------------------------------------------------------------------------

    def investigate(self, names: list[str], gap: Gap | None, rows: list[Row]) -> None:
        """A new sync, a probe, the verdict, the evidence.

        At its end the engine is awake, with the policy's weights and empty caches. Raises DriftError if that did not
        help and the run is to stop.
        """
        self.is_busy, self.step_of_alarm = True, self.run.step
        is_unmerged = bool(names) and not {*names} & {*self.different_tensors(with_adapter=False)}
        arrays = {} if gap is None else self.compare("step", self.rollout)[1]
        blocks = self.blocks
        self.sync()
        names_after = self.different_tensors()
        count = max(PROBE, self.run.world.num_engines)  # an engine without a prompt would have nothing to show
        sampling = Sampling(1, self.bounds.temperature, min(PROBE_TOKENS, self.most_tokens))
        probe = self.engine.sample(rows[:count], sampling, (self.run.step, PROBE))
        probe_gap, of_probe = self.compare("probe", probe)
        self.sync()
        self.engine.llm.reset_prefix_cache()
        self.is_busy = False
        self.report(Findings(names, is_unmerged, blocks, gap, names_after, self.blocks, probe_gap), arrays | of_probe)

    def sync(self) -> None:
        self.engine.sleep()
        self.engine.sync(self.policy.full_weights())

    def compare(self, name: str, rollout: Rollout) -> tuple[Gap, dict[str, np.ndarray]]:
        """The gap over some tokens of the rollout, and the tokens with both log-probs. The engine sleeps afterwards."""
        self.engine.sleep()
        rollout = beginning_of(rollout)
        batch = add_images(pack(rollout, list(range(len(rollout.rows)))), [row.images for row in rollout.rows])
        batch = add_packing(batch.to(self.run.world.device))
        with torch.no_grad():
            logprobs_N, entropies_N = self.policy(batch, self.bounds.temperature)
        release_gathered(self.policy)
        mask, of_engine_N = batch.loss_mask_N, batch.rollout_logprobs_N
        mean = (logprobs_N.exp() - of_engine_N.exp()).abs()[mask].mean().item()
        terms = temperature_terms(logprobs_N, of_engine_N, entropies_N)
        values = [mean, *(values_N[mask].mean().item() for values_N in terms)]
        mean, slope, spread, squares = gather_from_ranks(values)[0]  # all ranks come to the same verdict
        arrays = {
            "prompts": np.concatenate([row.ids for row in rollout.rows]),
            "prompt_lengths": np.array([len(row.ids) for row in rollout.rows]),
            "completions": np.concatenate(rollout.completions),
            "completion_lengths": rollout.completion_lengths_B,
            "engine_logprobs": of_engine_N[mask].cpu().numpy(),
            "policy_logprobs": logprobs_N[mask].cpu().numpy(),
        }
        return Gap(mean, *temperature_of(slope, spread, squares)), {
            f"{name}_{kind}": values for kind, values in arrays.items()
        }

    def report(self, found: Findings, arrays: dict[str, np.ndarray]) -> None:
        """The evidence, and the sentence: of the console, or of the end of the run."""
        bound, folder = self.bounds.max_rollout_gap, self.run.out_dir / f"drift_step_{self.run.step}"
        if self.run.world.is_main:
            with tolerated(str(folder)):
                keep_evidence(folder, found, bound, arrays)
        said = f"step {self.run.step}: {sentence(found, bound, folder)}"
        if self.bounds.on_rollout_gap == "stop" and not is_mended(found, bound):
            raise DriftError(f"{said}; --on_rollout_gap go_on would train on.")
        self.run.say(f"{said}.")


def beginning_of(rollout: Rollout) -> Rollout:
    """The first tokens of the first completions, none of them of any weight in a loss."""
    count = min(PROBE, len(rollout.rows))
    return Rollout(
        rows=rollout.rows[:count],
        completions=[ids[:PROBE_TOKENS] for ids in rollout.completions[:count]],
        rollout_logprobs=[logprobs[:PROBE_TOKENS] for logprobs in rollout.rollout_logprobs[:count]],
        texts=rollout.texts[:count],
        is_truncated_B=rollout.is_truncated_B[:count],
        loss_weights_B=np.zeros(count, dtype=np.float32),
    )
