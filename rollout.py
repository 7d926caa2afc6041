"""The engine: vLLM inside every rank. It samples a `Rollout`, takes new weights after each step, and sleeps in between.

Each tensor-parallel group of ranks is one engine; the engines share the prompts of a step. What a
call samples is a function of its seed: a resumed run samples what the uninterrupted one would have.
CPU and CUDA run the same code; CUDA adds sleep mode.

    engine = Engine(path, tokenizer, world, settings)
    engine.sync(policy.full_weights())     # it starts with random weights; each sync wakes it
    rollout = engine.sample(rows, sampling, seed)
    engine.sleep()                         # CUDA: gives its memory to the trainer until the next sync
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache
from typing import TypeVar

from engine.vllm_setup import prepare_vllm

prepare_vllm()  # before the imports: vLLM reads its environment in them

import numpy as np
import torch
import torch._dynamo
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel, get_tp_group

from batch import Completion, OnFinished, Rollout, Row, rollout_of
from engine.cpu_copies import renew_copies
from engine.options import ANY_TEXT, EngineDemand, check_head, engine_options, head_dtypes, stop_ids
from flags import EngineSettings, Sampling
from fsdp_utils import World, end_if_requested, gather_from_ranks, set_allocator
from runtime.parts import part
from runtime.progress import progress
from runtime.rank import beat, requested

Value = TypeVar("Value")
# Samples rows in an engine; yields (index of the row, completion) of each row when it is finished.
EpisodePlayer = Callable[["Engine", list[Row], Sampling, str], Iterator[tuple[int, Completion]]]

# The looks for a signal, in an engine over several ranks: each one costs them a broadcast.
STEPS_BETWEEN_LOOKS = 16
BROKEN = "a change of weights or of memory failed: the engine cannot be used any more"


class Engine:
    """One vLLM engine per tensor-parallel group; this object is the calling rank's part of it."""

    def __init__(
        self,
        model_path: str,
        tokenizer: PreTrainedTokenizerBase,
        world: World,
        settings: EngineSettings,
        demand: EngineDemand = ANY_TEXT,
        play: EpisodePlayer | None = None,
    ) -> None:
        """`play`: `turns.Turns.play` for several turns; None: one."""
        self.world = world
        self.tokenizer = tokenizer
        self.stop_ids = stop_ids(tokenizer, settings.stop_tokens)
        self.play = play or play_one_turn
        # "awake", "asleep"; "broken" during a change between the two, and for ever if that fails.
        self.state = "awake"
        # Number of an unfinished request -> its row, and the tokens of the completion that are there already.
        self.requests: dict[int, tuple[Row, list[int]]] = {}
        self.num_looks = 0
        # The time that each engine took for its share of the last `sample`.
        self.seconds_E = np.zeros(world.num_engines)
        is_cuda = world.device.type == "cuda"
        if not is_cuda:
            # vLLM's log-prob kernel would be compiled for 5 to 25 s, to no gain.
            torch._dynamo.config.disable = True
        options = engine_options(model_path, settings, is_cuda, world.tp_size, demand)
        if "architectures" in options.get("hf_overrides", {}):
            part("extras.models.linear_attention", "--model: linear attention").leave_tower_out()
        # vLLM collects garbage at each stage of its start: a second, unless what is imported is left out.
        gc.freeze()
        beat()
        routes = part("extras.models.routes", "--router_replay") if settings.router_replay else None
        if routes and is_cuda:
            routes.keep_on_each_rank()
        self.llm = LLM(**options)
        self.routes_of = routes and routes.routes_reader(self.llm, is_cuda)
        self.keeps_routes = False
        check_head(*self.llm.apply_model(head_dtypes), settings)
        set_allocator(is_expandable=True)  # only now: vLLM has captured its CUDA graphs

    # Sampling ---------------------------------------------------------------------------------------------------------

    def sample(
        self,
        rows: list[Row],
        sampling: Sampling,
        seed: tuple[int, ...],
        description: str = "sample",
        on_finished: OnFinished | None = None,
    ) -> Rollout:
        """Returns the completions of these rows, prompt-major, on every rank. All ranks call it with the same rows.

        The engines take equal consecutive shares. `seed` is a tuple of non-negative numbers (run,
        step, purpose, round): the result is a function of weights, arguments and number of engines. When
        completion b of the result is finished, the leader of its engine calls `on_finished`. Raises
        Stopped if a signal has come; the engine cannot sample any more then.
        """
        self.prepare(seed)
        self.keeps_routes = sampling.keeps_routes
        rows_B = [row for row in rows for _ in range(sampling.num_samples)]
        # Whole groups: completions of a prompt share its keys and values in one engine's cache.
        indices_PG = np.arange(len(rows_B)).reshape(-1, sampling.num_samples)
        own = np.array_split(indices_PG, self.world.num_engines)[self.world.engine_index].flatten().tolist()
        # All ranks of an engine have the same completions, so its leader alone grades and sends them.
        is_leader = self.world.is_engine_leader
        finished: dict[int, Completion] = {}
        start = time.perf_counter()
        for i, completion in self.play(self, [rows_B[b] for b in own], sampling, description):
            finished[own[i]] = completion
            completion.finish(own[i], self.tokenizer, on_finished if is_leader else None)
        end_if_requested()
        self.empty_queue()
        share = rollout_of([finished[b] for b in own]), time.perf_counter() - start
        rollouts, seconds_E = zip(*filter(None, gather_from_ranks(share if is_leader else None)), strict=True)
        self.seconds_E = np.array(seconds_E)
        routes = None
        if self.keeps_routes:  # they stay with the leader until it is known who trains what
            own_B = finished if is_leader else {}
            routes = [own_B[b].routes if b in own_B else None for b in range(len(rows_B))]
        # One version made all tokens, so none is kept for each.
        return replace(Rollout.concatenate(list(rollouts)), rows=rows_B).with_parts(versions=None, routes=routes)

    def prepare(self, seed: tuple[int, ...]) -> None:
        """Empties the caches and sets the seed: before requests are made."""
        assert self.state == "awake", f"the engine is {self.state}: sync() wakes it, but not after a failure"
        self.empty_queue()
        # The caches hold keys, values and embeddings of images under old weights, or of earlier
        # calls: a cached prefix changes the shapes of the prefill and so the last bits.
        is_reset = self.llm.reset_prefix_cache()
        assert is_reset, "no request is unfinished between two calls"
        self.llm.llm_engine.engine_core.reset_encoder_cache()
        seed_everything(seed, self.world.engine_index)

    # Requests: for `play`, and for partial rollouts -------------------------------------------------------------------

    def add(self, rows: list[Row], so_far: list[list[int]], limits: list[int], sampling: Sampling) -> int:
        """Requests what goes on after a row's prompt and the tokens so far, of at most so many tokens.

        Returns the number of the first request; the others follow.
        """
        # Flat log-probs: plain lists, not an object per token.
        more = {"stop_token_ids": self.stop_ids, "flat_logprobs": True}
        params_of = cache(lambda limit: SamplingParams(**sampling.for_vllm(limit), **more))
        inputs, images = [], {}
        for row, ids in zip(rows, so_far, strict=True):
            prompt, more_data = row.ids, {}
            if row.images is not None:
                prompt = row.images.template_ids  # vLLM repeats the token of each image by itself
                # Decoded once for all completions of a prompt, which share the row.
                if id(row) not in images:
                    images[id(row)] = row.images.decoded()
                more_data = {"multi_modal_data": {"image": images[id(row)]}}
            inputs.append(TokensPrompt(prompt_token_ids=[*prompt.tolist(), *ids], **more_data))
        # The call takes a number; vLLM gives out the next ones.
        first = next(self.llm.request_counter) + 1
        for number, request in enumerate(zip(rows, so_far, strict=True), start=first):
            self.requests[number] = request
        self.llm.enqueue(inputs, [params_of(limit) for limit in limits], use_tqdm=False)
        return first

    def is_busy(self) -> bool:
        """Whether requests are unfinished, and no signal has come."""
        return self.llm.llm_engine.has_unfinished_requests() and not self.is_abandoned()

    def step(self) -> list[tuple[int, Completion]]:
        """One step of the engine. Returns (number, what was sampled) of each request that it has finished."""
        beat()
        finished = []
        for output in self.llm.llm_engine.step():
            if not output.finished:
                continue
            number, (sampled,) = int(output.request_id), output.outputs
            row, ids = self.requests.pop(number)
            # vLLM puts tokens of images into a prompt by itself: the trainer must read the same.
            if output.prompt_token_ids != [*row.ids.tolist(), *ids]:
                raise RuntimeError(f"the engine reads {row.where} with other image tokens than the trainer.")
            logprobs = list(sampled.logprobs.logprobs)
            completion = Completion(list(sampled.token_ids), logprobs, [], sampled.finish_reason)
            if self.keeps_routes:
                completion.routes = self.routes_of(output)
            finished.append((number, completion))
        return finished

    def empty_queue(self) -> None:
        """Waits for the steps that GPUs compute ahead of the outputs; they are thrown away.

        There is one after the last completion of a call, too, if a stop token has ended it.
        """
        engine = self.llm.llm_engine
        while engine.engine_core.engine_core.batch_queue:
            engine.step()

    def is_abandoned(self) -> bool:
        """Whether a signal has come. The answer is the same on all ranks of an engine, which ask the first."""
        self.num_looks += 1
        is_due = self.world.tp_size == 1 or self.num_looks % STEPS_BETWEEN_LOOKS == 0
        return is_due and self.from_leader(requested())

    def from_leader(self, value: Value) -> Value:
        """The value that the first rank of the engine has; all of its ranks call this together."""
        return value if self.world.tp_size == 1 else get_tp_group().broadcast_object(value, src=0)

    # Weights and memory -----------------------------------------------------------------------------------------------

    def sync(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Takes new weights, one full tensor at a time, under their Hugging Face names; wakes the engine if it sleeps.

        On CUDA it takes back the memory of its weights first, and that of its KV cache after the
        transfer: gathered tensors and cache are never held together.
        """
        assert self.state != "broken", BROKEN
        was_asleep = self.state == "asleep"
        self.state = "broken"  # until all of it has succeeded
        if was_asleep:
            torch.cuda.empty_cache()  # what torch holds in reserve is what vLLM needs back
            self.llm.wake_up(tags=["weights"])
        # vLLM fuses and divides them as if they came from files: they have the names of these.
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(named_parameters)})
        if self.world.device.type == "cpu":
            self.llm.apply_model(renew_copies)
        if was_asleep:
            is_awake = self.llm.wake_up(tags=["kv_cache"])
            assert is_awake, "weights and cache are all that sleeps: otherwise requests would wait for ever"
        self.state = "awake"

    def sleep(self) -> None:
        """CUDA: drops weights and KV cache until the next sync (level 2: no copy of the weights). CPU: nothing."""
        if self.world.device.type == "cuda" and self.state != "asleep":
            assert self.state == "awake", BROKEN
            self.state = "broken"
            self.llm.sleep(level=2)
            self.state = "asleep"

    def close(self) -> None:
        """Ends the engine and every process group: vLLM takes the default one, the trainer's, down with its own."""
        self.llm.llm_engine.engine_core.shutdown()
        destroy_model_parallel()
        destroy_distributed_environment()
        # vLLM has just collected garbage; Python does so again at its end, for more than a second.
        gc.freeze()


def play_one_turn(
    engine: Engine, rows: list[Row], sampling: Sampling, description: str
) -> Iterator[tuple[int, Completion]]:
    """The `EpisodePlayer` of one turn: a completion is what one request samples."""
    first = engine.add(rows, [[] for _ in rows], [sampling.max_completion_tokens] * len(rows), sampling)
    with progress(description, total=len(rows), shown_after=0.0) as bar:
        while engine.is_busy():
            for number, completion in engine.step():
                yield number - first, completion
                bar.update()
        bar.refresh()  # full, however short it took


def seed_everything(seed: tuple[int, ...], engine_index: int) -> None:
    """Sets every generator that vLLM may draw from; the ranks of an engine must sample the same."""
    # Not by `hash` or a sum: neighbouring steps, purposes and engines get unrelated streams.
    state = int(np.random.SeedSequence([*seed, engine_index]).generate_state(1)[0])
    random.seed(state)
    np.random.seed(state)  # vLLM on CUDA draws from it  # noqa: NPY002
    torch.manual_seed(state)  # CUDA too
