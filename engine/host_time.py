"""Two short cuts in vLLM's Python, which take a third of its time off a token and change nothing that is sampled.

A step of a small model takes the host longer than the GPU: for each running sequence vLLM asks its cache for room, and
makes lists of its one log-prob. `shorten` answers the first at once where a token needs no block and completes none,
and appends the second. Figures: benchmarks/README.md. vLLM 0.32's own functions do the rest, and all of it for windows,
hybrids, several groups of the cache, drafts, or more log-probs. tests/engine/test_host_time.py names what this relies
on, and compares schedules, caches and log-probs with vLLM's own.
"""

from __future__ import annotations

from vllm import LLM
from vllm.logprobs import FlatLogprobs
from vllm.v1.core.kv_cache_coordinator import UnitaryKVCacheCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import Request

RUNNING = {"num_lookahead_tokens": 0}  # the scheduler's options for a request that runs; a waiting one has more
own_update = LogprobsProcessor._update_sample_logprobs


def shorten(llm: LLM) -> None:
    """Puts both short cuts into this engine, which runs in this process; the second into all that it has."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    if is_plain(scheduler):
        shorten_allocation(scheduler.kv_cache_manager)
    LogprobsProcessor._update_sample_logprobs = append_logprob


def is_plain(scheduler: Scheduler) -> bool:
    """Whether the cache has one group, of full attention, with whole blocks, and no draft runs ahead."""
    manager = scheduler.kv_cache_manager
    kinds = manager.coordinator.single_type_managers
    return (
        type(manager.coordinator) is UnitaryKVCacheCoordinator
        and [type(kind) for kind in kinds] == [FullAttentionManager]
        and kinds[0].block_size == manager.block_pool.hash_block_size
        and scheduler.num_spec_tokens == scheduler.num_lookahead_tokens == 0
        and scheduler.connector is None
    )


def shorten_allocation(manager: KVCacheManager) -> None:
    """Lets `allocate_slots` return no blocks at once if one more token has room, and completes none to be cached."""
    (kind,) = manager.coordinator.single_type_managers
    own, nothing = manager.allocate_slots, manager.empty_kv_cache_blocks
    size, blocks, num_cached = kind.block_size, kind.req_to_blocks, kind.num_cached_block

    def allocate_slots(request: Request, num_new_tokens: int, *more: object, **options: object) -> KVCacheBlocks | None:
        if num_new_tokens == 1 and options == RUNNING and not more:
            name, count = request.request_id, request.num_computed_tokens + 1
            # Steps may run ahead of the tokens that they make: what is not known yet is not cached.
            num_full = min(count, request.num_tokens) // size
            if count <= size * len(blocks.get(name, ())) and num_full <= num_cached.get(name, 0):
                return nothing
        return own(request, num_new_tokens, *more, **options)

    manager.allocate_slots = allocate_slots


def append_logprob(self: LogprobsProcessor, lists: LogprobsLists) -> None:
    """Appends the log-probs of sampled tokens alone, without text, to flat lists: what vLLM's own method would."""
    flat = self.logprobs
    if self.num_logprobs != 0 or self.tokenizer is not None or type(flat) is not FlatLogprobs:
        own_update(self, lists)
        return
    for i, rank in enumerate(lists.sampled_token_ranks):
        logprob = lists.logprobs.item(i, 0)
        self.cumulative_logprob += logprob
        flat.start_indices.append(len(flat.logprobs))
        flat.token_ids.append(lists.logprob_token_ids.item(i, 0))
        flat.logprobs.append(logprob)
        flat.ranks.append(rank.item())
        flat.decoded_tokens.append(None)
        flat.end_indices.append(len(flat.logprobs))
