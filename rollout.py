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
from typing import Protocol, TypeVar

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # in this process: its weights and its seed are ours
# The first rank's warnings are enough: what vLLM falls back to is the same on all.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING" if os.environ.get("RANK", "0") == "0" else "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# CUDA: FlashInfer compiles at its first call, with a toolkit that pip does not bring. docs/hardware.md
os.environ.setdefault("VLLM_ALLREDUCE_USE_FLASHINFER", "0")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")  # `sizes.check_config` has checked the length
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # binding would put the ranks on the same cores
warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
logging.getLogger("torch._library.triton").setLevel(logging.ERROR)  # on CPU there is none, as it should be

import numpy as np
import torch
import torch._dynamo
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed
from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel, get_tp_group
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from batch import Completion, OnFinished, Rollout, Row, rollout_of
from engine.options import (
    NOISE,
    NOISE_ON_CPU,
    check_head,
    engine_options,
    head_dtypes,
    memory_errors,
    stop_ids,
)
from flags import EngineSettings, Sampling
from fsdp_utils import World, end_if_requested, gather_from_ranks, set_allocator
from model.vision import Vision, decode
from runtime.progress import progress
from runtime.stall import beat
from runtime.start import launch_name, requested

for _name, _beginning in NOISE + ([] if torch.cuda.is_available() else NOISE_ON_CPU):
    logging.getLogger(_name).addFilter(lambda record, noise=_beginning: not record.msg.startswith(noise))

# CPU: the ranks of an engine share memory. vLLM gives it the same name in every run on a machine, so another run, or
# what a killed one has left, would get in the way: the run's name is added.
_name_by_vllm = _CPUSHMDistributed.make_group_name
_CPUSHMDistributed.make_group_name = staticmethod(lambda communicator: f"{_name_by_vllm(communicator)}-{launch_name()}")


Value = TypeVar("Value")
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
        self.num_looks = 0
        self.under_way: dict[int, tuple[Row, list[int]]] = {}  # number of a request -> its row, and the tokens after it
        self.told: tuple[int, ...] = ()  # the progress that was told last
        # What yields (index of the row, finished completion) of each of the rows; `turns.Turns` takes its place.
        self.play: Callable[[list[Row], Sampling, str], Iterator[tuple[int, Completion]]] = self._run
        self.seconds_E = np.zeros(world.num_engines)  # that each engine took for its share of the last `sample`
        is_cuda = world.device.type == "cuda"
        if not is_cuda:
            torch._dynamo.config.disable = True  # vLLM's log-prob kernel would be compiled for 5 to 25 s, to no gain
        options = engine_options(model_path, settings, is_cuda, world.tp_size, vision, max_images, most_sequences)
        gc.freeze()  # vLLM collects garbage at each stage of its start: a second in all, with what is imported in it
        beat("starts the engine")
        with memory_errors():
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
        the leader of its engine calls `on_finished`. Raises Stopped if a signal has come; the engine cannot sample any
        more then.
        """
        self.prepare(seed)
        rows_B = [row for row in rows for _ in range(sampling.num_samples)]
        indices_PG = np.arange(len(rows_B)).reshape(-1, sampling.num_samples)
        own = np.array_split(indices_PG, self.world.num_engines)[self.world.engine_index].flatten().tolist()
        is_leader = self.world.is_engine_leader
        finished: dict[int, Completion] = {}
        beat(f"begins to sample {len(own)} completions")
        start = time.perf_counter()
        for i, done in self.play([rows_B[b] for b in own], sampling, description):
            finished[own[i]] = done
            done.tell(own[i], self.tokenizer, on_finished if is_leader else None)
        end_if_requested()
        result = rollout_of([finished[b] for b in own]), time.perf_counter() - start
        of_engines = [each for each in gather_from_ranks(result if is_leader else None) if each is not None]
        self.seconds_E = np.array([seconds for _, seconds in of_engines])
        return replace(Rollout.concatenate([rollout for rollout, _ in of_engines]), rows=rows_B, versions=None)

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

    def _run(self, rows: list[Row], sampling: Sampling, description: str) -> Iterator[tuple[int, Completion]]:
        """Yields (index, completion) of each row when it is finished: vLLM tells that of requests, so each has one."""
        first = self.add(rows, [[] for _ in rows], [sampling.max_completion_tokens] * len(rows), sampling)
        with progress(description, total=len(rows), shown_after=0.0) as bar:
            while self.is_busy():
                for number, done in self.step():
                    yield number - first, done
                    bar.update()
            bar.refresh()  # full, however short it took

    def add(self, rows: list[Row], so_far: list[list[int]], limits: list[int], sampling: Sampling) -> int:
        """Requests what goes on after a row's prompt and the tokens so far, of at most so many tokens.

        Returns the number of the first request; the others follow.
        """
        params = {limit: self.params(sampling, limit) for limit in set(limits)}
        images = {key: _images(row) for key, row in {id(row): row for row in rows}.items()}  # decoded once a prompt
        inputs = [_engine_input(row, ids, images[id(row)]) for row, ids in zip(rows, so_far, strict=True)]
        first = next(self.llm.request_counter) + 1
        self.under_way |= {first + i: given for i, given in enumerate(zip(rows, so_far, strict=True))}
        self.llm.enqueue(inputs, [params[limit] for limit in limits], use_tqdm=False)
        return first

    def is_busy(self) -> bool:
        """Whether requests are unfinished, and no signal has come."""
        return self.llm.llm_engine.has_unfinished_requests() and not self.is_abandoned()

    def step(self) -> list[tuple[int, Completion]]:
        """One step of the engine. Returns (number, what was sampled) of each request that it has finished."""
        self.tell_progress()
        finished = []
        for output in self.llm.llm_engine.step():
            if output.finished:
                number, (done,) = int(output.request_id), output.outputs
                row, ids = self.under_way.pop(number)
                if output.prompt_token_ids != [*row.ids.tolist(), *ids]:
                    raise RuntimeError(f"the engine reads {row.where} with other image tokens than the trainer.")
                logprobs = list(done.logprobs.logprobs)
                finished.append((number, Completion(list(done.token_ids), logprobs, [], done.finish_reason)))
        return finished

    def abort_unfinished(self) -> list[tuple[int, list[int], list[float]]]:
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
        self.under_way.clear()
        while engine.engine_core.engine_core.batch_queue:  # what is already computed, on GPUs, ahead of its outputs
            engine.step()
        return found

    def is_abandoned(self) -> bool:
        """Whether a signal has come. The answer is the same on all ranks of an engine, which ask the first."""
        self.num_looks += 1
        is_due = self.world.tp_size == 1 or self.num_looks % STEPS_BETWEEN_LOOKS == 0
        return is_due and self.from_leader(requested())

    def from_leader(self, value: Value) -> Value:
        """What the first rank of the engine has; all of its ranks call this together."""
        return value if self.world.tp_size == 1 else get_tp_group().broadcast_object(value, src=0)

    def tell_progress(self) -> None:
        """Beats if there is progress: in the oldest unfinished request, or in the number of unfinished ones."""
        states = self.llm.llm_engine.output_processor.request_states
        oldest = next(iter(states.values()))
        number, tokens = int(oldest.external_req_id), oldest.detokenizer.num_output_tokens()
        if (now := (number, tokens, len(states))) != self.told:
            where = self.under_way[number][0].where
            beat(f"samples: {len(states)} requests unfinished, the oldest ({where}) has {tokens} tokens")
        self.told = now

    def sync(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Takes new weights, one full tensor at a time, under their Hugging Face names; wakes the engine if it sleeps.

        On CUDA it takes back the memory of its weights first, and that of its KV cache after the transfer: gathered
        tensors and cache are never held together.
        """
        assert self.state != "broken", "a change of weights or of memory failed: the engine cannot be used any more"
        was_asleep, self.state = self.state == "asleep", "broken"  # until all of it has succeeded
        if was_asleep:
            torch.cuda.empty_cache()  # what torch holds in reserve is what vLLM needs back
            self.llm.wake_up(tags=["weights"])
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(named_parameters)})
        if self.world.device.type == "cpu":
            self.llm.apply_model(_repack_head)
        if was_asleep:
            is_awake = self.llm.wake_up(tags=["kv_cache"])
            assert is_awake, "weights and cache are all that sleeps: otherwise requests would wait for ever"
        self.state = "awake"

    def sleep(self) -> None:
        """CUDA: drops weights and KV cache until the next sync (level 2: no copy of the weights). CPU: nothing."""
        if self.world.device.type == "cuda" and self.state != "asleep":
            assert self.state == "awake", "a change of weights or of memory failed: the engine cannot be used any more"
            self.state = "broken"
            self.llm.sleep(level=2)
            self.state = "asleep"

    def close(self) -> None:
        """Ends the engine and every process group: vLLM takes the default one, the trainer's, down with its own."""
        self.llm.llm_engine.engine_core.shutdown()
        destroy_model_parallel()
        destroy_distributed_environment()
        gc.freeze()  # vLLM has just collected garbage; Python does so again at its end, for more than a second


def _images(row: Row) -> dict[str, object]:
    """What the engine is given of a row beside tokens."""
    images = row.images and [decode(image) for image in row.images.encoded]
    return {"multi_modal_data": {"image": images}} if images else {}


def _engine_input(row: Row, ids: list[int], images: dict[str, object]) -> TokensPrompt:
    """The prompt and these tokens for the engine, which repeats the token of each image by itself."""
    prompt = row.ids if row.images is None else row.images.template_ids
    return TokensPrompt(prompt_token_ids=[*prompt.tolist(), *ids], **images)


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
