"""What our rollout phase costs on top of vLLM: `Engine.sample` against bare `LLM.generate`, same engine, prompts and sampling parameters.

    torchrun --standalone --nproc_per_node 2 benchmarks/bench_rollout.py --model runs/tiny_policy_seed1

The two run in turn, several rounds; the ratio of the speeds (bare seconds / ours) is taken round by round and its median quoted; the goal
is at least 0.97. Prints a table and, last, one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import torch
from transformers import AutoTokenizer

from data import PromptData, PromptFormat
from flags import EngineSettings, Sampling
from fsdp_utils import close_world, init_world, wait_for_all
from policy import load_policy
from rollout import Engine, SamplingParams, TokensPrompt, seed_everything

GOAL = 0.97  # our speed over vLLM's: its seconds over ours


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--model", required=True, help="a folder that scripts/warm_start.py made: policy, tokenizer and train.jsonl"
    )
    parser.add_argument("--prompts", type=int, default=32, help="prompts of a step, over all ranks")
    parser.add_argument("--group_size", type=int, default=8, help="completions per prompt")
    parser.add_argument("--max_tokens", type=int, default=64, help="completion limit in tokens")
    parser.add_argument("--rounds", type=int, default=9, help="counted pairs of runs, after two that are not")
    args = parser.parse_args()

    world = init_world(tp_size=1, timeout_minutes=5)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    data = PromptData.load(f"{args.model}/train.jsonl", PromptFormat(), tokenizer, max_prompt_tokens=64, seed=0)
    prompts = data.prompts[: args.prompts]
    engine = Engine(args.model, tokenizer, world, EngineSettings(64 + args.max_tokens))
    engine.sync(load_policy(args.model, torch.bfloat16).full_weights())
    rows, sampling = (
        [SimpleNamespace(ids=ids, images=None) for ids in prompts],
        Sampling(args.group_size, 1.0, args.max_tokens),
    )
    share = np.array_split(np.arange(len(prompts)), world.num_engines)[world.engine_index]
    bare_prompts = [TokensPrompt(prompt_token_ids=prompts[i].tolist()) for i in share]
    bare_params = SamplingParams(
        n=args.group_size, temperature=1.0, max_tokens=args.max_tokens, logprobs=0, flat_logprobs=True, detokenize=False
    )

    ours, bare = [], []
    for round_index in range(-2, args.rounds):
        for times, run in (
            (bare, lambda seed: engine.llm.generate(bare_prompts, bare_params, use_tqdm=False)),
            (ours, lambda seed: engine.sample(rows, sampling, (1, seed))),
        ):
            seed_everything((1, round_index + 2), world.engine_index)  # so that both sample the same completions
            engine.llm.reset_prefix_cache()
            wait_for_all()
            start = time.perf_counter()
            run(round_index + 2)
            wait_for_all()
            if round_index >= 0:
                times.append(time.perf_counter() - start)
    ratio = statistics.median(a / b for a, b in zip(bare, ours, strict=True))
    if world.is_main:
        print(f"{'':24}{'median s':>10}{'min':>8}{'max':>8}")
        for name, times in (("LLM.generate", bare), ("Engine.sample", ours)):
            print(f"{name:24}{statistics.median(times):10.3f}{min(times):8.3f}{max(times):8.3f}")
        print(
            json.dumps(
                {
                    "ratio": round(ratio, 3),
                    "goal": GOAL,
                    "rounds": args.rounds,
                    "ranks": world.num_trainers,
                    "device": world.device.type,
                }
            )
        )
    engine.close()
    close_world()


if __name__ == "__main__":
    main()
