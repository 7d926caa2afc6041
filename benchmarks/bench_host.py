"""The host's microseconds a token in vLLM's in-process engine, with and without `engine.host_time.shorten`.

    python benchmarks/bench_host.py            # steps one after the other, as on a CPU
    python benchmarks/bench_host.py --queued   # a step ahead of its outputs, as on a GPU

Real are vLLM's scheduler, output processor and log-probs; random numbers take the place of the model's forward pass.
CPU time of one thread, in interleaved rounds, so that a busy machine changes all alike; the ratios are of pairs.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from statistics import median

sys.path.append(str(Path(__file__).parent.parent))

from engine.vllm_setup import prepare_vllm

prepare_vllm()

import numpy as np
import torch
import torch._dynamo
from vllm import LLM, RequestOutput, SamplingParams, TokensPrompt
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

from engine import host_time
from engine.options import engine_options
from flags import EngineSettings
from fsdp_utils import init_world

POLICY = Path(__file__).parent.parent / "scripts" / "tiny_policy"
VOCABULARY = 60
Prompts = list[list[int]]


class Host:
    """An engine without a forward pass. `listen` is called with each step's schedule."""

    def __init__(self, is_queued: bool, **options: object) -> None:
        torch._dynamo.config.disable = True
        settings = EngineSettings(max_model_len=2048, dtype="float32", gpu_memory_utilization=0.4)
        self.llm = LLM(**engine_options(str(POLICY), settings, False, 1) | {"max_num_seqs": 256} | options)
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.listen: Callable[[SchedulerOutput], None] = lambda scheduled: None
        self.rng = np.random.default_rng(0)
        if is_queued:  # what vLLM does on a GPU
            scheduler, core = self.core.scheduler, self.core
            scheduler.__class__ = AsyncScheduler
            scheduler._spec_token_placeholders, scheduler.pp_size, scheduler.decode_stagger = [], 1, 1
            scheduler.vllm_config.scheduler_config.async_scheduling = core.async_scheduling = True
            core.batch_queue_size, core.batch_queue = 2, deque(maxlen=2)
            core.step_fn = core.step_with_batch_queue
        self.core.model_executor.execute_model = self.execute
        self.core.model_executor.sample_tokens = self.sample_tokens
        self.allocate, self.update = self.core.scheduler.kv_cache_manager.allocate_slots, host_time.own_update

    def execute(self, scheduled: SchedulerOutput, non_block: bool = False) -> object:
        self.scheduled = scheduled
        is_empty = scheduled.total_num_scheduled_tokens == 0
        return self.answer(ModelRunnerOutput(req_ids=[], req_id_to_index={}) if is_empty else None, non_block)

    def sample_tokens(self, grammar: object, non_block: bool = False) -> object:
        self.listen(self.scheduled)
        names = list(self.scheduled.num_scheduled_tokens)
        tokens = self.rng.integers(0, VOCABULARY, len(names))
        logprobs = -self.rng.random((len(names), 1)).astype(np.float32)
        lists = LogprobsLists(tokens[:, None].astype(np.int32), logprobs, np.ones(len(names), np.int32))
        indices = {name: i for i, name in enumerate(names)}
        sampled = [[token] for token in tokens.tolist()]
        output = ModelRunnerOutput(names, indices, sampled_token_ids=sampled, logprobs=lists)
        return self.answer(output, non_block)

    def answer(self, output: object, non_block: bool) -> object:
        future = Future()
        future.set_result(output)
        return future if non_block else output

    def run(self, prompts: Prompts, limits: list[int]) -> tuple[list[RequestOutput], float]:
        """What is sampled, in the order of the prompts, and the microseconds of this thread for each token."""
        common = {"temperature": 1.0, "logprobs": 0, "detokenize": False, "flat_logprobs": True, "ignore_eos": True}
        params = [SamplingParams(max_tokens=limit, **common) for limit in limits]
        self.llm.enqueue([TokensPrompt(prompt_token_ids=ids) for ids in prompts], params, use_tqdm=False)
        start, found = time.thread_time(), []
        while self.llm.llm_engine.has_unfinished_requests():
            found += [output for output in self.llm.llm_engine.step() if output.finished]
        seconds = time.thread_time() - start
        while self.core.batch_queue:
            self.llm.llm_engine.step()
        return sorted(found, key=lambda output: int(output.request_id)), 1e6 * seconds / sum(limits)

    def set_short_cuts(self, allocation: bool, logprobs: bool) -> None:
        manager = self.core.scheduler.kv_cache_manager
        manager.allocate_slots = self.allocate
        if allocation:
            host_time.shorten_allocation(manager)
        LogprobsProcessor._update_sample_logprobs = host_time.append_logprob if logprobs else self.update


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--queued", action="store_true", help="a step is ahead of its outputs, as on a GPU")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=250, help="that each of the 256 sequences gets")
    args = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1"}
    torch.set_num_threads(1)
    init_world(tp_size=1, timeout_minutes=5)
    host = Host(args.queued)
    variants = {"vLLM's own": (False, False), "allocation": (True, False), "allocation, log-probs": (True, True)}
    times: dict[str, list[float]] = {name: [] for name in variants}
    for i in range(args.rounds + 1):  # the first warms up
        for name, short_cuts in variants.items():
            host.set_short_cuts(*short_cuts)
            prompts = [ids for ids in host.rng.integers(0, VOCABULARY, (32, 100)).tolist() for _ in range(8)]
            _, microseconds = host.run(prompts, [args.tokens] * len(prompts))
            host.llm.reset_prefix_cache()
            times[name] += [microseconds] * (i > 0)
    for name, found in times.items():
        ratios = [own / plain for own, plain in zip(found, times["vLLM's own"], strict=True)]
        print(f"{name}: {median(found):.1f} us a token, {median(ratios):.2f} of vLLM's own ({min(ratios):.2f} to "
              f"{max(ratios):.2f}), {args.rounds} rounds")  # fmt: skip
    os._exit(0)  # an engine that has computed nothing need not be taken down


if __name__ == "__main__":
    main()
