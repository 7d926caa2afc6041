"""The short cuts of engine/host_time.py change nothing: in vLLM's real engine, whose forward pass alone is replaced.

They rely on vLLM's `KVCacheManager.allocate_slots` (its arguments for a running request; that it only allocates and
caches), `FullAttentionManager.req_to_blocks` and `.num_cached_block`, and `LogprobsProcessor._update_sample_logprobs`.
"""

import hashlib

import numpy as np
import pytest
import torch
from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager

from fsdp_utils import World
from helpers.distributed import on_ranks

WAVES = ((128, 80), (256, 60))  # completions, their mean tokens: the first fit into the cache, the others do not


class Digest:
    """What vLLM decides, step by step: who computes what, in which blocks, and which are cached under which hash."""

    def __init__(self, pool: object) -> None:
        self.pool, self.sha, self.names, self.num_resumed = pool, hashlib.sha256(), {}, 0

    def named(self, ids: object) -> list[list[int]] | None:
        """Blocks by the order in which they are first used: a run begins with others than the one before."""
        return ids and [[self.names.setdefault(i, len(self.names)) for i in group] for group in ids]

    def add(self, scheduled: SchedulerOutput) -> None:
        cached = scheduled.scheduled_cached_reqs
        new = [(self.named(request.block_ids), request.num_computed_tokens) for request in scheduled.scheduled_new_reqs]
        decided = [*scheduled.num_scheduled_tokens.values()], new, cached.num_computed_tokens
        blocks = [self.named(ids) for ids in cached.new_block_ids], len(self.pool.cached_block_hash_to_block._cache)
        self.sha.update(repr((decided, blocks)).encode())
        self.num_resumed += len(cached.resumed_req_ids)

    def add_hashes(self) -> None:
        for key, found in self.pool.cached_block_hash_to_block._cache.items():
            ids = sorted(found) if isinstance(found, dict) else [found.block_id]
            self.sha.update(repr((key, self.named([ids]))).encode())


def compared(world: World, steps: str) -> dict[str, object]:
    """Kind -> (digest, what was sampled, calls of vLLM's own `allocate_slots`, preempted requests, tokens)."""
    from bench_host import VOCABULARY, Host
    from engine import host_time

    host = Host(steps == "queued", num_gpu_blocks_override=450)
    manager, allocate, found = host.core.scheduler.kv_cache_manager, host.allocate, {}
    calls = []

    def counted(*given: object, **options: object) -> object:
        calls.append(given[1])
        return allocate(*given, **options)

    host.allocate = counted
    for kind, short_cuts in (("own", (False, False)), ("again", (False, False)), ("short", (True, True))):
        host.set_short_cuts(*short_cuts)
        host.rng, sampled, num_tokens = np.random.default_rng(5), [], 0
        digest = Digest(manager.block_pool)
        host.listen = digest.add
        calls.clear()
        prompts = []
        for count, mean in WAVES:
            groups = host.rng.integers(0, VOCABULARY, (count // 8, 45)).tolist()
            limits = host.rng.integers(mean // 2, 3 * mean // 2, count).tolist()
            prompts = [ids for ids in groups for _ in range(8)]
            sampled += host.run(prompts, limits)[0]
            digest.add_hashes()
            num_tokens += sum(limits)
        # Some go on after what was sampled, which is found in the cache.
        longer = [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in sampled[-64:]]
        sampled += host.run(longer, [30] * len(longer))[0]
        digest.add_hashes()
        assert host.llm.reset_prefix_cache()
        said = [(x.outputs[0].token_ids, x.outputs[0].logprobs, x.outputs[0].cumulative_logprob) for x in sampled]
        found[kind] = digest.sha.hexdigest(), said, len(calls), digest.num_resumed, num_tokens + 30 * len(longer)
    host.set_short_cuts(False, False)
    return found | {"off": switched_off(host, host_time)}


def switched_off(host: object, host_time: object) -> list[bool]:
    """Whether the engine is plain: as it is, with a window, with two groups, as a hybrid, with drafts."""
    scheduler = host.core.scheduler
    coordinator = scheduler.kv_cache_manager.coordinator
    managers = coordinator.single_type_managers
    found = [host_time.is_plain(scheduler)]
    for owner, name, value in (
        (managers[0], "__class__", SlidingWindowManager),
        (coordinator, "single_type_managers", managers * 2),
        (coordinator, "__class__", HybridKVCacheCoordinator),
        (scheduler, "num_spec_tokens", 1),
        (scheduler, "num_lookahead_tokens", 1),
    ):
        before = getattr(owner, name)
        setattr(owner, name, value)
        found.append(host_time.is_plain(scheduler))
        setattr(owner, name, before)
    host_time.shorten(host.llm)
    return [*found, "allocate_slots" in vars(scheduler.kv_cache_manager)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in is for the CPU's executor")
@pytest.mark.parametrize("steps", ["one by one", "queued"])
def test_short_cuts_change_no_schedule_cache_or_logprob(steps):
    """Exactly, over 27,000 tokens, with preemptions and prefixes that are found; queued: as on a GPU."""
    found = on_ranks(1, compared, steps)
    assert found["own"][0] == found["again"][0], "the digest does not depend on what ran before"
    assert found["short"][:2] == found["own"][:2]
    assert found["short"][2] < 0.2 * found["own"][2], "vLLM is asked for the others alone"
    assert found["own"][3] > 10 and found["own"][4] > 25_000
    assert found["off"] == [True, *[False] * 5, True]
