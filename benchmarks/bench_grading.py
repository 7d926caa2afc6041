"""What grading costs a step: sampling with every completion graded as it finishes, against the same sampling without.

    OMP_NUM_THREADS=1 python scripts/launch.py --ranks 2 benchmarks/bench_grading.py

The sampler keeps all cores busy. Meanwhile real mathematical completions (`tests/grading/math_cases.jsonl` without the
hostile ones) are graded in place of those that it samples. The two variants run in turn for several rounds; the ratio
is taken round by round, and the median is reported. Prints a table and, last, one JSON line.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from bench_common import ROOT, make_row, median_ratio, parser_of, print_table, shared_folder, times_row
from flags import EngineSettings, Grading, Sampling
from fsdp_utils import init_world, wait_for_all
from grading import Case
from grading.values import clean, number
from reward import Grader
from rollout import Engine
from warm_start import build_tokenizer

GOAL = 1.05
CASES = ROOT / "tests" / "grading" / "math_cases.jsonl"


def save_random_model(folder: Path, hidden: int, max_tokens: int) -> None:
    """A Qwen2 of 8 layers and the 64 tokens of the CPU job: large enough to keep all cores busy."""
    tokenizer = build_tokenizer()
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=8,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=16 + max_tokens,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def draw_cases(count: int, share_of_numbers: float) -> list[Case]:
    """`count` written completions with their keys, drawn at random."""
    rows = [json.loads(line) for line in CASES.read_text().splitlines()]
    cases = [Case(row["completion"], row["answer"]) for row in rows if "hostile" not in row["kind"]]
    kinds = (
        [case for case in cases if number(clean(case.answer)) is not None],
        [case for case in cases if number(clean(case.answer)) is None],
    )
    rng = np.random.default_rng(0)
    return [kinds[rng.random() >= share_of_numbers][rng.integers(10**9) % 600] for _ in range(count)]


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--hidden", type=int, default=512, help="hidden size of the random model, of 8 layers; larger: longer sampling")
    add("--prompts", type=int, default=512, help="prompts of a step, over all ranks")
    add("--group_size", type=int, default=5, help="completions per prompt")
    limit = "completion limit in tokens; a random model stops after 64 on average"
    add("--max_tokens", type=int, default=128, help=limit)
    # Of 34 rows of MATH-500 that were looked at, 32 have a plain number as their answer.
    numbers = "share of answer keys that are plain numbers; the rest are formulas"
    add("--numbers", type=float, default=0.8, help=numbers)
    add("--rounds", type=int, default=3, help="counted pairs of runs, after one that is not")
    args = parser.parse_args()

    world = init_world(tp_size=1, timeout_minutes=10)
    folder = shared_folder("bench_grading_")
    if world.is_main:
        save_random_model(folder, args.hidden, args.max_tokens)
    wait_for_all()
    rows = [make_row(np.random.default_rng(i).integers(1, 64, 16).astype(np.int32)) for i in range(args.prompts)]
    cases = draw_cases(args.prompts * args.group_size, args.numbers)
    engine = Engine(str(folder), build_tokenizer(), world, EngineSettings(16 + args.max_tokens, load_format="auto"))
    sampling = Sampling(args.group_size, 1.0, args.max_tokens)

    def step(round_index: int, is_graded: bool) -> float:
        # A new grader each time, so that no cache of an earlier round helps.
        grader = Grader(Grading("math"), num_workers=1) if is_graded else None
        wait_for_all()
        start = time.perf_counter()

        def on_finished(b: int, text: str, token_ids: Sequence[int], is_truncated: bool) -> None:
            if grader is not None:
                grader.submit(b, cases[b])

        rollout = engine.sample(rows, sampling, (1, round_index), on_finished=on_finished)
        if grader is not None:
            grades = grader.collect_from_ranks()
            failed = [grade for grade in grades if grade.is_failed]
            assert len(grades) == len(rollout.texts) and not failed, failed
        wait_for_all()
        seconds = time.perf_counter() - start
        if grader is not None:
            grader.close()
        return seconds

    plain, graded = [], []
    for round_index in range(-1, args.rounds):
        pair = step(round_index + 1, False), step(round_index + 1, True)
        if round_index >= 0:
            plain.append(pair[0])
            graded.append(pair[1])
    grader = Grader(Grading("math"), num_workers=1)
    start = time.perf_counter()
    grader.grade(cases)
    alone = time.perf_counter() - start
    grader.close()
    if world.is_main:
        shutil.rmtree(folder)
        rows = [times_row("sampling", plain), times_row("sampling and grading", graded)]
        print_table(["", "median s", "min", "max"], [*rows, ["grading alone, one process", alone, "", ""]])
        summary = {"ratio": round(median_ratio(graded, plain), 3), "goal": GOAL, "graded": len(cases)}
        print(json.dumps(summary | {"rounds": args.rounds, "ranks": world.num_trainers, "device": world.device.type}))
    engine.close()


if __name__ == "__main__":
    main()
