"""What our rollout phase costs on top of vLLM: `Engine.sample` against bare `LLM.generate`.

    python scripts/launch.py --ranks 2 benchmarks/bench_rollout.py --model runs/tiny_policy_seed1

Both use the same engine, prompts and sampling parameters. They run in turn for several rounds; the ratio of the speeds
(bare seconds / ours) is taken round by round, and the median is reported; the goal is at least 0.97. Prints a table
and, last, one JSON line.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import torch
from transformers import AutoTokenizer

from bench_common import median_ratio, parser_of, print_table, times_row
from data import PromptData
from flags import EngineSettings, PromptFormat, Sampling
from fsdp_utils import close_world, init_world, wait_for_all
from policy import load_policy
from rollout import Engine, SamplingParams, TokensPrompt, seed_everything

GOAL = 0.97  # our speed over vLLM's: its seconds over ours


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--model", required=True, help="a folder that scripts/warm_start.py made: policy, tokenizer and train.jsonl")
    add("--prompts", type=int, default=32, help="prompts of a step, over all ranks")
    add("--group_size", type=int, default=8, help="completions per prompt")
    add("--max_tokens", type=int, default=64, help="completion limit in tokens")
    add("--rounds", type=int, default=9, help="counted pairs of runs, after two that are not")
    args = parser.parse_args()

    world = init_world(tp_size=1, timeout_minutes=5)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    data = PromptData.load(f"{args.model}/train.jsonl", PromptFormat(max_prompt_tokens=64), tokenizer, seed=0)
    rows = data.rows[: args.prompts]
    engine = Engine(args.model, tokenizer, world, EngineSettings(64 + args.max_tokens))
    engine.sync(load_policy(args.model, torch.bfloat16).full_weights())
    sampling = Sampling(args.group_size, 1.0, args.max_tokens)
    share = np.array_split(np.arange(len(rows)), world.num_engines)[world.engine_index]
    bare_prompts = [TokensPrompt(prompt_token_ids=rows[i].ids.tolist()) for i in share]
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
    if world.is_main:
        table = [times_row("LLM.generate", bare), times_row("Engine.sample", ours)]
        print_table(["", "median s", "min", "max"], table)
        summary = {"ratio": round(median_ratio(bare, ours), 3), "goal": GOAL, "rounds": args.rounds}
        print(json.dumps(summary | {"ranks": world.num_trainers, "device": world.device.type}))
    engine.close()
    close_world()


if __name__ == "__main__":
    main()
