"""What our engine costs: `Engine.sample` against bare `LLM.generate`, a sync against memcpy, four turns against one.

    OMP_NUM_THREADS=1 python scripts/launch.py --ranks 2 benchmarks/bench_engine.py sample
    OMP_NUM_THREADS=1 python scripts/launch.py --ranks 2 benchmarks/bench_engine.py turns --max_tokens 256
    OMP_NUM_THREADS=1 python scripts/launch.py --ranks 2 benchmarks/bench_engine.py sync \\
        --hidden 1024 --layers 8 --vocab 8192

`sample`: both use the same engine, prompts, sampling parameters and seeds. The ratio is bare seconds over ours.
`turns`: as many tokens in four turns, with a short reply after each, instead of in one; no completion ends by itself.
The ratio is the seconds of one turn over those of four.
`sync`: `engine.sync(policy.full_weights())` as after every step. fp32 shards of FSDP2 are cast and gathered, and vLLM's
`reload_weights` loads them. Memcpy copies as many bytes as the engine's weights have, tensor by tensor. The row "gather
and cast alone" is the same iterator with nobody at its end. The ratio is memcpy's seconds over ours.

The variants run in turn for several rounds, on all ranks at once. Prints a table and, last, one JSON line.
"""

from __future__ import annotations

import itertools
import json
import shutil
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import torch
from transformers import AutoTokenizer

from bench_common import Trainer, flags_of, interleave, parser_of, print_times, save_random_model
from data import PromptData
from extras.turns.turns import Turns
from flags import DTYPES, EngineSettings, Grading, PromptFormat, Sampling, TurnLimits
from fsdp_utils import World, close_world, gather_from_ranks, init_world, wait_for_all
from policy import Policy
from rollout import Engine, SamplingParams, TokensPrompt, seed_everything

GOALS = {"sample": 0.97, "turns": 1 / 1.35, "sync": 0.5}
NUM_TURNS, REPLY_TOKENS = 4, 8  # a reply has fewer
PROMPT_TOKENS = 64  # at most
Variants = dict[str, Callable[[], object]]


def sampling_variants(engine: Engine, data: PromptData, sampling: Sampling, world: World) -> Variants:
    """Bare vLLM and ours, each of which samples the same completions in a round."""
    share = np.array_split(np.arange(len(data.rows)), world.num_engines)[world.engine_index]
    prompts = [TokensPrompt(prompt_token_ids=data.rows[i].ids.tolist()) for i in share]
    params = SamplingParams(
        n=sampling.num_samples, temperature=1.0, max_tokens=sampling.max_completion_tokens, logprobs=0,
        flat_logprobs=True, detokenize=False,
    )  # fmt: skip

    def seeded(seeds: Iterator[int], run: Callable[[tuple[int, int]], object]) -> None:
        seed = (1, next(seeds))
        seed_everything(seed, world.engine_index)
        engine.llm.reset_prefix_cache()
        run(seed)
        wait_for_all()

    variants = {
        "LLM.generate": lambda _: engine.llm.generate(prompts, params, use_tqdm=False),
        "Engine.sample": lambda seed: engine.sample(data.rows, sampling, seed),
    }
    return {name: partial(seeded, itertools.count(), run) for name, run in variants.items()}


def turn_variants(engine: Engine, data: PromptData, sampling: Sampling, folder: Path) -> Variants:
    """One turn, and four that together are as long."""
    file, one, params = folder / "go_on.py", engine.play, engine.params
    file.write_text("class GoOn:\n    def __init__(self, row): pass\n    def reply(self, completion): return '+'\n")
    turning = TurnLimits(f"{file}:GoOn", None, NUM_TURNS, sampling.max_completion_tokens // NUM_TURNS)
    turns = Turns(turning, Grading(), PromptFormat(), engine.tokenizer, num_workers=1)
    longer = replace(sampling, max_completion_tokens=sampling.max_completion_tokens + NUM_TURNS * REPLY_TOKENS)

    def endless(*given: object) -> SamplingParams:
        request_params = params(*given)
        request_params.ignore_eos = True
        return request_params

    engine.params, seeds = endless, itertools.count()

    def sample(play: Callable, settings: Sampling) -> None:
        engine.play = play
        rollout = engine.sample(data.rows, settings, (1, next(seeds)))
        assert set(rollout.completion_lengths_B.tolist()) == {sampling.max_completion_tokens}
        wait_for_all()

    return {
        "one turn": partial(sample, one, sampling),
        f"{NUM_TURNS} turns": partial(sample, turns.play, longer),
    }


def sync_variants(engine: Engine, policy: Policy) -> Variants:
    """Memcpy, the first half of a sync, and all of it."""
    source = [tensor.clone() for _, tensor in policy.full_weights()]
    target = [torch.zeros_like(tensor) for tensor in source]

    def memcpy() -> None:
        for new, old in zip(source, target, strict=True):
            old.copy_(new)
        wait_for_all()

    def gather() -> None:
        deque(policy.full_weights(), maxlen=0)
        wait_for_all()

    def sync() -> None:
        engine.sync(policy.full_weights())
        wait_for_all()

    return {"memcpy": memcpy, "gather and cast alone": gather, "sync": sync}


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("what", choices=list(GOALS), help="the phase to measure")
    add("--hidden", type=int, default=256, help="hidden size; the FFN has 4 times that")
    add("--layers", type=int, default=4, help="decoder layers")
    add("--vocab", type=int, default=64, help="vocabulary")
    add("--dtype", choices=DTYPES, default="bfloat16", help="dtype of the engine; the policy's parameters are fp32")
    add("--prompts", type=int, default=32, help="sample: prompts of a step, over all ranks")
    add("--group_size", type=int, default=8, help="sample: completions per prompt")
    add("--max_tokens", type=int, default=64, help="sample: completion limit in tokens")
    add("--rounds", type=int, default=9, help="counted rounds, after two that are not")
    args = parser.parse_args()

    world = init_world(tp_size=1, timeout_minutes=10)
    folder = Path(gather_from_ranks(tempfile.mkdtemp(prefix="bench_engine_") if world.is_main else "")[0])
    if world.is_main:
        save_random_model(folder, args.hidden, args.layers, args.vocab, num_rows=args.prompts)
    wait_for_all()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    policy = Trainer(flags_of(folder, "--dtype", args.dtype), world).policy
    longest = PROMPT_TOKENS + args.max_tokens + NUM_TURNS * REPLY_TOKENS
    engine = Engine(str(folder), tokenizer, world, EngineSettings(longest, args.dtype))
    engine.sync(policy.full_weights())
    data = PromptData.load(f"{folder}/train.jsonl", PromptFormat(max_prompt_tokens=PROMPT_TOKENS), tokenizer, 0)
    sampling = Sampling(num_samples=args.group_size, temperature=1.0, max_completion_tokens=args.max_tokens)
    if args.what == "sample":
        variants = sampling_variants(engine, data, sampling, world)
    elif args.what == "turns":
        variants = turn_variants(engine, data, sampling, folder)
    else:
        variants = sync_variants(engine, policy)
    seconds = interleave(variants, args.rounds, warm_up=2)
    if world.is_main:
        shutil.rmtree(folder)
        theirs, *_, ours = seconds
        ratio = 1 / print_times(seconds, theirs)[ours]
        summary = {"ratio": round(ratio, 3), "goal": GOALS[args.what], "rounds": args.rounds}
        print(json.dumps(summary | {"ranks": world.num_trainers, "dtype": args.dtype, "device": world.device.type}))
    engine.close()
    close_world()


if __name__ == "__main__":
    main()
