"""The engine: vLLM inside every rank. It samples completions, takes the policy's new weights after each step, and sleeps in between.

Each tensor-parallel group of ranks is one engine (`distributed_executor_backend="external_launcher"`); the engines share the
prompts of a step. Randomness is a function of the seed a call is given: nothing hidden lives in the engine, so a resumed run samples
what the uninterrupted one would have. On CPU and CUDA this is the same code; what CUDA adds is sleep mode.

    engine = Engine(path, tokenizer, world, ...)
    engine.sync(merged_parameters(policy.model, dtype))     # it starts with no weights of its own
    rollout = engine.sample(prompts, num_samples=8, seed=..., ...)
    engine.sleep()                                        # CUDA: gives its memory to the trainer until the next sync
"""

from __future__ import annotations

import gc
import logging
import math
import os
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace

os.environ.setdefault(
    "VLLM_ENABLE_V1_MULTIPROCESSING", "0"
)  # the engine runs in this process: its weights and its seed are ours
os.environ.setdefault(
    "VLLM_LOGGING_LEVEL", "ERROR"
)  # its warnings are about tuning, dozens of lines per rank; one exception below
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault(
    "VLLM_CPU_OMP_THREADS_BIND", "nobind"
)  # CPU: several ranks share the cores; binding would put them on the same one

warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
logging.getLogger("torch._library.triton").setLevel(
    logging.ERROR
)  # on CPU there is no triton, which is as it should be

import numpy as np
import torch
import torch._dynamo
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoConfig, PretrainedConfig, PreTrainedTokenizerBase
from vllm import LLM, CompletionOutput, SamplingParams, TokensPrompt
from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

logging.getLogger("vllm.model_executor.model_loader.reload.inplace").setLevel(
    logging.WARNING
)  # "weights were not loaded"

from batch import Rollout
from fsdp_utils import World, gather_from_ranks
from model.vision import PromptImages, Vision

MOST_AT_ONCE = 256  # sequences for each rank of an engine that run at a time, vLLM's default for offline use on CPU
CPU_BLOCK = 32  # tokens of a block of vLLM's cache on CPU, the fewest that its attention takes: its 128 are no faster (benchmarks/README.md)
CPU_CACHE = (
    2**30
)  # bytes of that cache in a rank, at most; the environment's VLLM_CPU_KVCACHE_SPACE, in GiB, takes its place


class Engine:
    """One vLLM engine per tensor-parallel group; this object is the calling rank's part of it."""

    def __init__(
        self,
        model_path: str,
        tokenizer: PreTrainedTokenizerBase,
        world: World,
        max_model_len: int,
        dtype: torch.dtype,
        gpu_memory_utilization: float,
        enforce_eager: bool,
        seed: int,
        vision: Vision | None = None,
        max_images: int = 0,
        load_weights: bool = False,
        most_sequences: int | None = None,
    ) -> None:
        """Builds the engine with random weights (`load_format="dummy"`): the first `sync` brings the policy's.

        That way the engine can never sample from anything but the policy, also after a resume, and the weights are read from disk
        once, by the trainer. `load_weights`: there is no trainer, the engine reads them itself. `max_model_len` is in tokens, prompt
        and completion together. `vision` of a model that sees: its prompts have at most `max_images` images, scaled as the trainer's.
        `most_sequences`: completions that a call asks of one engine at most, if that is known; on CPU the cache need not hold more.
        """
        self.world = world
        self.tokenizer = tokenizer
        self.can_sleep = world.device.type == "cuda"
        self.is_asleep = False
        self.seconds_E = np.zeros(world.num_engines)  # what each engine took for its share of the last call of `sample`
        if world.device.type == "cpu":
            torch._dynamo.config.disable = (
                True  # vLLM's log-prob kernel would be compiled for 5 to 25 s, to no gain on CPU
            )
        of_images = {} if vision is None else {
            "limit_mm_per_prompt": {"image": max_images, "video": 0},
            "mm_processor_kwargs": {"size": vision.size},
            "mm_device_do_normalize": False,  # mean and std would be buffers of the model: random ones, with dummy weights
            "mm_processor_cache_gb": 1,  # the completions of a prompt come one after the other; the default is 4 in each rank
        }  # fmt: skip
        if world.device.type == "cpu":
            sizes = (AutoConfig.from_pretrained(model_path), max_model_len, dtype, world.tp_size, most_sequences)
            of_cache = {"kv_cache_memory_bytes": cpu_cache_bytes(*sizes), "block_size": CPU_BLOCK}
        else:
            of_cache = {"gpu_memory_utilization": gpu_memory_utilization}
        gc.freeze()  # vLLM collects garbage at each stage of its start: a second in all, if it looks through what is imported, too
        self.llm = LLM(
            model=model_path,
            load_format="auto" if load_weights else "dummy",
            dtype=str(dtype).removeprefix("torch."),
            tensor_parallel_size=world.tp_size,
            distributed_executor_backend="external_launcher",
            max_model_len=max_model_len,
            enforce_eager=enforce_eager or world.device.type == "cpu",
            enable_sleep_mode=self.can_sleep,
            logprobs_mode="processed_logprobs",  # after the temperature: what the tokens were really drawn from
            seed=seed,  # external_launcher wants the same one on every rank; each call of sample() sets its own
            disable_log_stats=True,
            **of_cache,
            **of_images,
        )

    def sample(
        self,
        prompts: list[np.ndarray],
        num_samples: int,
        seed: tuple[int, ...],
        temperature: float,
        max_tokens: int,
        top_p: float = 1.0,
        description: str = "sample",
        on_finished: Callable[[int, str, int, bool], None] | None = None,
        images: list[PromptImages | None] | None = None,
    ) -> Rollout:
        """`num_samples` completions of each prompt, prompt-major, of at most `max_tokens` tokens; the same on every rank.

        `prompts` are token ids, `images` theirs, the same lists on every rank; the engines take equal consecutive shares. `seed` is any
        tuple of non-negative numbers (run, step, purpose): the result is a function of weights, arguments and number of engines.
        While the others are still sampled, the leader of the engine calls `on_finished(b, text, num_tokens, is_truncated)` for each
        finished completion; b is its index in the result.
        """
        assert not self.is_asleep, "sync() wakes the engine: sample after it"
        share = np.array_split(np.arange(len(prompts)), self.world.num_engines)[self.world.engine_index]
        # Keys and values of old weights, and of earlier calls: a cached prefix changes the shapes of the prefill and so the last bits.
        is_reset = self.llm.reset_prefix_cache()
        assert is_reset, "no request is under way between two calls"
        self.llm.llm_engine.engine_core.reset_encoder_cache()  # embeddings of images: the same holds for them
        seed_everything(seed, self.world.engine_index)
        params = SamplingParams(
            temperature=temperature,
            top_p=top_p,
            max_tokens=max_tokens,
            logprobs=0,  # 0: of the sampled token alone
            flat_logprobs=True,  # plain lists, not an object per token
            detokenize=False,  # decoded when it is finished, in one go
        )
        own_prompts = [prompts[i] for i in share for _ in range(num_samples)]
        inputs = [
            each for i in share for each in [_engine_input(prompts[i], images[i] if images else None)] * num_samples
        ]
        first_b = int(share[0]) * num_samples if len(share) else 0

        def report(own_b: int, done: CompletionOutput, text: str) -> None:
            if on_finished is not None and self.world.is_engine_leader:
                on_finished(first_b + own_b, text, len(done.token_ids), done.finish_reason == "length")

        start = time.perf_counter()
        completions, texts = self._run(own_prompts, inputs, params, description, report)
        seconds = time.perf_counter() - start
        own = Rollout(
            prompts=own_prompts,
            completions=[np.array(done.token_ids, dtype=np.int32) for done in completions],
            rollout_logprobs=[np.array(done.logprobs.logprobs, dtype=np.float32) for done in completions],
            texts=texts,
            is_truncated_B=np.array([done.finish_reason == "length" for done in completions], dtype=bool),
        )
        parts = [
            part
            for part in gather_from_ranks((own, seconds) if self.world.is_engine_leader else None)
            if part is not None
        ]
        self.seconds_E = np.array([seconds for _, seconds in parts])
        everything = Rollout.concatenate([rollout for rollout, _ in parts])
        return replace(
            everything, images=[each for each in images or [] for _ in range(num_samples)] or None
        )  # every rank has them

    def _run(
        self,
        prompts: list[np.ndarray],
        inputs: list[TokensPrompt],
        params: SamplingParams,
        description: str,
        report: Callable[[int, CompletionOutput, str], None],
    ) -> tuple[list[CompletionOutput], list[str]]:
        """One completion per entry of `prompts`, and its text; each is reported when it is finished, with its index.

        One request per completion, not one with n per prompt: vLLM tells when a request is finished. They share the prompt's cache anyway.
        """
        first_id = next(self.llm.request_counter) + 1
        self.llm.enqueue(inputs, params, use_tqdm=False)
        finished: dict[int, tuple[CompletionOutput, str]] = {}
        with tqdm(
            total=len(prompts), desc=description, leave=False, disable=not (self.world.is_main and sys.stderr.isatty())
        ) as bar:
            while self.llm.llm_engine.has_unfinished_requests():
                for output in (output for output in self.llm.llm_engine.step() if output.finished):
                    index, (done,) = int(output.request_id) - first_id, output.outputs
                    if output.prompt_token_ids != prompts[index].tolist():
                        raise RuntimeError(
                            f"the engine reads prompt {index} with other image tokens than the trainer: see vision.py"
                        )
                    finished[index] = done, self.tokenizer.decode(done.token_ids, skip_special_tokens=True)
                    report(index, *finished[index])
                    bar.update()
            bar.refresh()  # full, however short it took
        return [finished[i][0] for i in range(len(prompts))], [finished[i][1] for i in range(len(prompts))]

    def sync(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Takes new weights, one full tensor at a time, under their Hugging Face names; wakes the engine if it sleeps.

        On CUDA the weights' memory is taken back before the transfer and the KV cache's after it, so that the gathered tensors and the
        cache are never held together.
        """
        if self.is_asleep:
            torch.cuda.empty_cache()  # what torch holds in reserve is what vLLM needs back
            self.llm.wake_up(tags=["weights"])
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(named_parameters)})
        if self.world.device.type == "cpu":
            self.llm.apply_model(_repack_head)
        if self.is_asleep:
            self.llm.wake_up(tags=["kv_cache"])
            self.is_asleep = False

    def sleep(self) -> None:
        """CUDA: drops weights and KV cache (level 2: no copy in host RAM) until the next sync. CPU: nothing to give back."""
        if self.can_sleep and not self.is_asleep:
            self.llm.sleep(level=2)
            self.is_asleep = True

    def close(self) -> None:
        """Ends the engine, and with it every process group: vLLM takes the default one, which is the trainer's too, down with its own."""
        self.llm.llm_engine.engine_core.shutdown()
        destroy_model_parallel()
        destroy_distributed_environment()


def _engine_input(prompt: np.ndarray, images: PromptImages | None) -> TokensPrompt:
    """What the engine reads. It repeats the token of each image by itself."""
    if images is None:
        return TokensPrompt(prompt_token_ids=prompt.tolist())
    return TokensPrompt(prompt_token_ids=images.template_ids.tolist(), multi_modal_data={"image": images.decoded()})


def largest_share(calls: list[tuple[int, int]], world: World) -> int:
    """`most_sequences` of an engine that samples so many prompts so many times each, a pair for each call."""
    return max(-(-prompts // world.num_engines) * num_samples for prompts, num_samples in calls)


def cpu_cache_bytes(
    config: PretrainedConfig, max_model_len: int, dtype: torch.dtype, tp_size: int, most_sequences: int | None = None
) -> int:
    """CPU: room for the sequences that vLLM runs at once (`most_sequences`, if there are never so many), and at most `CPU_CACHE`.

    vLLM goes round all the blocks it has, so that all of them would soon be resident, however few are in use.
    """
    config = config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = max(config.num_key_value_heads // tp_size, 1)
    per_token = 2 * config.num_hidden_layers * heads * head_dim * dtype.itemsize
    tokens = -(-max_model_len // CPU_BLOCK) * CPU_BLOCK
    sequences = min(MOST_AT_ONCE * tp_size, most_sequences or math.inf)
    return min(CPU_CACHE, (sequences + 8) * tokens * per_token)


def _repack_head(model: nn.Module) -> None:
    """CPU: vLLM multiplies by a repacked copy of the head, which `reload_weights` leaves as it was if the head is tied to the embedding."""
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def seed_everything(seed: tuple[int, ...], engine_index: int) -> None:
    """Sets every generator that vLLM may draw from. The ranks of an engine get the same state: they must sample the same tokens."""
    state = int(np.random.SeedSequence([*seed, engine_index]).generate_state(1)[0])
    random.seed(state)
    np.random.seed(state)  # vLLM on CUDA draws from it  # noqa: NPY002
    torch.manual_seed(state)  # CUDA too
