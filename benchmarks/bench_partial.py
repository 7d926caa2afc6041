"""What --partial_rollouts changes in the time of sampling: whole runs of some steps, with and without, in turn.

    OMP_NUM_THREADS=1 python scripts/launch.py --ranks 2 benchmarks/bench_partial.py

The model is random; each token is the last one with the same probability, so lengths are geometric. "long tail": a
limit of ten times the mean; "short": a limit at which most completions end. A run begins and ends with nothing in the
air and samples the same prompts either way. The ratio of the seconds (without / with) is taken round by round, and the
median is reported; the goal at short answers is at least 0.97: never slower, within the noise. Prints a table and,
last, one JSON line. Sync and update are not run: their time is the same.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from transformers import AutoTokenizer

from bench_common import interleave, median_ratio, parser_of, print_table, save_random_model, shared_folder, times_row
from data import PromptData
from flags import EngineSettings, PromptFormat, Sampling
from fsdp_utils import close_world, gather_from_ranks, init_world, wait_for_all
from generation.partial import PartialSampler
from grading import Grade
from model.sizes import prompts_in_the_air
from policy import load_policy
from rollout import Engine
from sampling import Draws, Sampler

GOAL = 0.97  # at short answers: seconds without over seconds with


class NoGrader:
    """Every completion gets the reward 0, at once."""

    def __init__(self) -> None:
        self.heard: list[int] = []

    def submit_to(self, rows, sampling):
        return lambda b, *_: self.heard.append(b)

    def collect_from_ranks(self) -> list[Grade]:
        count, self.heard = sum(gather_from_ranks(len(self.heard))), []
        return [Grade(0.0, "ok")] * count


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--hidden", type=int, default=256, help="width of the random model")
    add("--layers", type=int, default=4, help="its layers")
    add("--mean_tokens", type=int, default=40, help="mean length of a completion without a limit")
    add("--short_tokens", type=int, default=8, help="the limit of short answers")
    add("--prompts", type=int, default=16, help="prompts of a step, over all ranks")
    add("--group_size", type=int, default=4, help="completions per prompt")
    add("--steps", type=int, default=6, help="steps of a run")
    add("--rounds", type=int, default=5, help="counted pairs of runs, after one that is not")
    args = parser.parse_args()

    world = init_world(tp_size=1, timeout_minutes=10)
    folder = shared_folder("bench_partial_")
    if world.is_main:
        num_rows = args.prompts * args.steps
        save_random_model(
            folder, args.hidden, args.layers, 4 * args.hidden, num_rows=num_rows, mean_tokens=args.mean_tokens
        )
    wait_for_all()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    data = PromptData.load(f"{folder}/train.jsonl", PromptFormat(max_prompt_tokens=64), tokenizer, seed=0)
    limits = {"long tail": 10 * args.mean_tokens, "short": args.short_tokens}
    at_once = prompts_in_the_air(args.prompts, world.num_engines) // world.num_engines * args.group_size
    settings = EngineSettings(64 + limits["long tail"], "float32")
    engine = Engine(str(folder), tokenizer, world, settings, most_sequences=at_once)
    engine.sync(load_policy(str(folder), torch.float32).full_weights())
    draws = Draws(args.prompts, args.group_size, 1, False, "off", 1, "score", 0)
    run = SimpleNamespace(last_step=args.steps, phase=lambda _: nullcontext(), reward_failures=lambda *_: None)

    def steps_with(kind: type[Sampler], limit: int) -> None:
        sampler = kind(engine, NoGrader(), data, draws, Sampling(args.group_size, 1.0, limit), run)
        for step in range(1, args.steps + 1):
            sampler.collect(step)

    found, rows = {}, []
    for name, limit in limits.items():
        variants = {
            f"{name}, without": lambda limit=limit: steps_with(Sampler, limit),
            f"{name}, with": lambda limit=limit: steps_with(PartialSampler, limit),
        }
        seconds = interleave(variants, args.rounds)
        without, partial = seconds.values()
        found[name] = round(median_ratio(without, partial), 3)
        rows += [times_row(each, seconds[each], without) for each in variants]
    if world.is_main:
        print_table(["", "median s", "min", "max", "speed"], rows)
        print(json.dumps({"ratio": found, "goal": GOAL, "rounds": args.rounds, "ranks": world.num_trainers}))
    engine.close()
    close_world()


if __name__ == "__main__":
    main()
