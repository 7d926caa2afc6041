"""The engine: vLLM inside every rank. It samples completions, takes new weights after each step, and sleeps in between.

Each tensor-parallel group of ranks is one engine; the engines share the prompts of a step. What a call samples is a
function of its seed: a resumed run samples what the uninterrupted one would have. CPU and CUDA run the same code; CUDA
adds sleep mode.

    engine = Engine(path, tokenizer, world, settings)
    engine.sync(policy.full_weights())     # it starts with no weights of its own
    rollout = engine.sample(rows, sampling, seed)
    engine.sleep()                         # CUDA: gives its memory to the trainer until the next sync
"""

from __future__ import annotations

import gc
import logging
import os
import random
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Protocol

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # in this process: its weights and its seed are ours
# The first rank's warnings are enough: what vLLM falls back to is the same on all.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING" if os.environ.get("RANK", "0") == "0" else "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# CUDA: FlashInfer compiles at its first call, with a toolkit that pip does not bring. docs/hardware.md
os.environ.setdefault("VLLM_ALLREDUCE_USE_FLASHINFER", "0")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # binding would put the ranks on the same cores
warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
logging.getLogger("torch._library.triton").setLevel(logging.ERROR)  # on CPU there is none, as it should be

import numpy as np
import torch
import torch._dynamo
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase
from vllm import LLM, CompletionOutput, RequestOutput, SamplingParams, TokensPrompt
from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed
from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel, get_tp_group
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from batch import OnFinished, Rollout, Row
from flags import EngineSettings, Sampling
from fsdp_utils import World, end_if_requested, gather_from_ranks, set_allocator
from guards.progress import progress
from guards.stall import beat
from guards.start import launch_name, requested
from model.engine_options import (
    AT_START,
    NOISE,
    NOISE_ON_CPU,
    check_head,
    engine_options,
    head_dtypes,
    memory_errors,
    stop_ids,
)
from model.vision import Vision, decode

for _name, _beginning in NOISE + ([] if torch.cuda.is_available() else NOISE_ON_CPU):
    logging.getLogger(_name).addFilter(lambda record, noise=_beginning: not record.msg.startswith(noise))

# CPU: the ranks of an engine share memory. vLLM gives it the same name in every run on a machine, so another run, or
# what a killed one has left, would get in the way: the run's name is added.
_name_by_vllm = _CPUSHMDistributed.make_group_name
_CPUSHMDistributed.make_group_name = staticmethod(lambda communicator: f"{_name_by_vllm(communicator)}-{launch_name()}")


STEPS_BETWEEN_LOOKS = 16  # for a signal, in an engine over several ranks: each look costs them a broadcast


class Guard(Protocol):
    """Checks that the engine samples from the trainer's weights."""

    def before_sample(self, cached_blocks: int) -> None:
        """Raises RunError if its weights differ, or if keys and values of an earlier call are still cached."""


class Engine:
    """One vLLM engine per tensor-parallel group; this object is the calling rank's part of it."""

    guard: Guard | None = None

    def __init__(
        self,
        model_path: str,
        tokenizer: PreTrainedTokenizerBase,
        world: World,
        settings: EngineSettings,
        vision: Vision | None = None,
        max_images: int = 0,
        most_sequences: int | None = None,
    ) -> None:
        """`max_images`: of a prompt. `most_sequences`: the most completions that a call asks of one engine."""
        self.world = world
        self.tokenizer, self.stop_ids = tokenizer, stop_ids(tokenizer, settings.stop_tokens)
        self.state = "awake"  # or "asleep"; "broken" during a change between the two, and for ever if that fails
        self.num_engine_steps = 0
        self.seconds_E = np.zeros(world.num_engines)  # that each engine took for its share of the last `sample`
        is_cuda = world.device.type == "cuda"
        if not is_cuda:
            torch._dynamo.config.disable = True  # vLLM's log-prob kernel would be compiled for 5 to 25 s, to no gain
        options = engine_options(model_path, settings, is_cuda, world.tp_size, vision, max_images, most_sequences)
        gc.freeze()  # vLLM collects garbage at each stage of its start: a second in all, with what is imported in it
        beat("starts the engine")
        with memory_errors("starts", AT_START):
            self.llm = LLM(**options)
        check_head(*self.llm.apply_model(head_dtypes), settings)
        set_allocator(is_expandable=True)

    def sample(
        self,
        rows: list[Row],
        sampling: Sampling,
        seed: tuple[int, ...],
        description: str = "sample",
        on_finished: OnFinished | None = None,
    ) -> Rollout:
        """Returns the completions of these rows, prompt-major, on every rank. All ranks call it with the same rows.

        The engines take equal consecutive shares. `seed` is a tuple of non-negative numbers (run, step, purpose): the
        result is a function of weights, arguments and number of engines. When completion b of the result is finished,
        the leader of its engine calls `on_finished(b, text, token_ids, is_truncated)`. Raises Stopped if a signal has
        come; the engine cannot sample any more then.
        """
        self.prepare(seed)
        rows_B = [row for row in rows for _ in range(sampling.num_samples)]
        indices_PG = np.arange(len(rows_B)).reshape(-1, sampling.num_samples)
        own = np.array_split(indices_PG, self.world.num_engines)[self.world.engine_index].flatten().tolist()
        is_leader = self.world.is_engine_leader
        finished: dict[int, CompletionOutput] = {}
        beat(f"begins to sample {len(own)} completions")
        start = time.perf_counter()
        for i, done in self._run([rows_B[b] for b in own], sampling, description):
            finished[own[i]] = done
            if on_finished is not None and is_leader:
                on_finished(own[i], done.text, done.token_ids, done.finish_reason == "length")
        end_if_requested()
        result = _rollout_of([finished[b] for b in own]), time.perf_counter() - start
        of_engines = [each for each in gather_from_ranks(result if is_leader else None) if each is not None]
        self.seconds_E = np.array([seconds for _, seconds in of_engines])
        return replace(Rollout.concatenate([rollout for rollout, _ in of_engines]), rows=rows_B)

    def prepare(self, seed: tuple[int, ...]) -> None:
        """Empties the caches, lets the guard check the engine, and sets the seed: before requests are made."""
        assert self.state == "awake", f"the engine is {self.state}: sync() wakes it, but not after a failure"
        # The caches hold keys, values and embeddings of images under old weights, or of earlier calls: a cached prefix
        # changes the shapes of the prefill and so the last bits.
        is_reset = self.llm.reset_prefix_cache()
        assert is_reset, "no request is under way between two calls"
        self.llm.llm_engine.engine_core.reset_encoder_cache()
        if self.guard is not None:
            scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
            self.guard.before_sample(len(scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block))
        seed_everything(seed, self.world.engine_index)

    def params(self, sampling: Sampling, max_tokens: int) -> SamplingParams:
        """vLLM's parameters of a request for one completion of at most `max_tokens` more tokens."""
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=max_tokens,
            stop_token_ids=self.stop_ids,
            logprobs=0,  # 0: of the sampled token alone
            flat_logprobs=True,  # plain lists, not an object per token
            detokenize=False,  # decoded when it is finished, in one go
        )

    def _run(self, rows: list[Row], sampling: Sampling, description: str) -> Iterator[tuple[int, CompletionOutput]]:
        """Yields (index, completion) of each row when it is finished: vLLM tells that of requests, so each has one."""
        params = self.params(sampling, sampling.max_completion_tokens)
        inputs = {id(row): _engine_input(row) for row in rows}  # decoded once for all completions of a prompt
        first_id = next(self.llm.request_counter) + 1
        self.llm.enqueue([inputs[id(row)] for row in rows], params, use_tqdm=False)
        with progress(description, total=len(rows), shown_after=0.0) as bar:
            for index, output in self.finished(rows, first_id):
                if output.prompt_token_ids != rows[index].ids.tolist():
                    raise RuntimeError(f"the engine reads prompt {index} with other image tokens than the trainer.")
                (done,) = output.outputs
                done.text = self.tokenizer.decode(done.token_ids, skip_special_tokens=True)
                yield index, done
                bar.update()
            bar.refresh()  # full, however short it took

    def finished(
        self, rows: list[Row], first_id: int, is_enough: Callable[[], bool] = lambda: False
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Yields (index of the row, output) of each finished request, until it is enough or a signal has come."""
        engine, told = self.llm.llm_engine, None
        while not is_enough() and engine.has_unfinished_requests() and not self.is_abandoned():
            told = self.tell_progress(rows, first_id, told)
            yield from ((int(x.request_id) - first_id, x) for x in engine.step() if x.finished)

    def add(self, rows: list[Row], so_far: list[list[int]], sampling: Sampling) -> int:
        """Requests the rest of unfinished completions. Returns the number of the first request; the others follow.

        The requests return only the new token ids.
        """
        left = [sampling.max_completion_tokens - len(ids) for ids in so_far]
        params = {tokens: self.params(sampling, tokens) for tokens in set(left)}
        prompts = [[*row.ids.tolist(), *ids] for row, ids in zip(rows, so_far, strict=True)]
        first_id = next(self.llm.request_counter) + 1
        inputs = [TokensPrompt(prompt_token_ids=ids) for ids in prompts]
        self.llm.enqueue(inputs, [params[tokens] for tokens in left], use_tqdm=False)
        return first_id

    def withdraw(self) -> list[tuple[int, list[int], list[float]]]:
        """Returns (number, token ids, log-probs) of each unfinished request, and aborts it.

        They are read out of vLLM, which returns a request at its end alone, or else all of it at every token.
        """
        engine = self.llm.llm_engine
        states = dict(engine.output_processor.request_states)
        found = [
            (int(x.external_req_id), list(x.detokenizer.output_token_ids), list(x.logprobs_processor.logprobs.logprobs))
            for x in states.values()
        ]
        engine.abort_request(list(states), internal=True)
        while engine.engine_core.engine_core.batch_queue:  # what is already computed, on GPUs, ahead of its outputs
            engine.step()
        return found

    def is_abandoned(self) -> bool:
        """Whether a signal has come. The answer is the same on all ranks of an engine, which ask the first."""
        if self.world.tp_size == 1:
            return requested()
        self.num_engine_steps += 1
        is_due = self.num_engine_steps % STEPS_BETWEEN_LOOKS == 0
        return is_due and get_tp_group().broadcast_object(requested(), src=0)

    def tell_progress(self, rows: list[Row], first_id: int, before: tuple[int, ...] | None) -> tuple[int, ...]:
        """Returns (oldest unfinished request, its tokens, number of unfinished ones), which changes with progress."""
        states = self.llm.llm_engine.output_processor.request_states
        oldest = next(iter(states.values()))
        index, tokens = int(oldest.external_req_id) - first_id, oldest.detokenizer.num_output_tokens()
        now = index, tokens, len(states)
        if now != before:
            beat(f"samples: {len(states)} requests unfinished, the oldest ({rows[index].where}) has {tokens} tokens")
        return now

    def sync(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Takes new weights, one full tensor at a time, under their Hugging Face names; wakes the engine if it sleeps.

        On CUDA it takes back the memory of its weights first, and that of its KV cache after the transfer: gathered
        tensors and cache are never held together.
        """
        assert self.state != "broken", "a change of weights or of memory failed: the engine cannot be used any more"
        was_asleep, self.state = self.state == "asleep", "broken"  # until all of it has succeeded
        if was_asleep:
            torch.cuda.empty_cache()  # what torch holds in reserve is what vLLM needs back
            with memory_errors("takes back the memory of its weights"):
                self.llm.wake_up(tags=["weights"])
        with memory_errors("takes new weights"):
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(named_parameters)})
        if self.world.device.type == "cpu":
            self.llm.apply_model(_repack_head)
        if was_asleep:
            with memory_errors("takes back the memory of its cache"):
                is_awake = self.llm.wake_up(tags=["kv_cache"])
            assert is_awake, "weights and cache are all that sleeps: otherwise requests would wait for ever"
        self.state = "awake"

    def sleep(self) -> None:
        """CUDA: drops weights and KV cache until the next sync (level 2: no copy of the weights). CPU: nothing."""
        if self.world.device.type == "cuda" and self.state != "asleep":
            assert self.state == "awake", "a change of weights or of memory failed: the engine cannot be used any more"
            self.state = "broken"
            with memory_errors("goes to sleep"):
                self.llm.sleep(level=2)
            self.state = "asleep"

    def close(self) -> None:
        """Ends the engine and every process group: vLLM takes the default one, the trainer's, down with its own."""
        self.llm.llm_engine.engine_core.shutdown()
        destroy_model_parallel()
        destroy_distributed_environment()
        gc.freeze()  # vLLM has just collected garbage; Python does so again at its end, for more than a second


def _rollout_of(finished: list[CompletionOutput]) -> Rollout:
    """The completions, without their rows, which every rank has."""
    return Rollout(
        rows=[],
        completions=[np.array(done.token_ids, dtype=np.int32) for done in finished],
        rollout_logprobs=[np.array(done.logprobs.logprobs, dtype=np.float32) for done in finished],
        texts=[done.text for done in finished],
        is_truncated_B=np.array([done.finish_reason == "length" for done in finished], dtype=bool),
    )


def _engine_input(row: Row) -> TokensPrompt:
    """The prompt for the engine, which repeats the token of each image by itself."""
    if row.images is None:
        return TokensPrompt(prompt_token_ids=row.ids.tolist())
    ids, images = row.images.template_ids.tolist(), [decode(image) for image in row.images.encoded]
    return TokensPrompt(prompt_token_ids=ids, multi_modal_data={"image": images})


def largest_share(calls: list[tuple[int, int]], world: World) -> int:
    """The `most_sequences` of an engine, from the (prompts, samples of each) of every call."""
    return max(-(-prompts // world.num_engines) * num_samples for prompts, num_samples in calls)


def _repack_head(model: nn.Module) -> None:
    """CPU: renews vLLM's repacked copy of the head, which `reload_weights` leaves as it was if the head is tied."""
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def seed_everything(seed: tuple[int, ...], engine_index: int) -> None:
    """Sets every generator that vLLM may draw from; the ranks of an engine must sample the same."""
    state = int(np.random.SeedSequence([*seed, engine_index]).generate_state(1)[0])
    random.seed(state)
    np.random.seed(state)  # vLLM on CUDA draws from it  # noqa: NPY002
    torch.manual_seed(state)  # CUDA too
