"""What grading costs a step: sampling with every completion graded as it finishes, against the same sampling without.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 2 benchmarks/bench_grading.py

The sampler is kept busy on all cores while real mathematical completions (`tests/grading/math_cases.jsonl`, hostile ones left out) are graded in
place of what it samples. The two run in turn, several rounds; the ratio is taken round by round and its median quoted. Prints a table and,
last, one JSON line.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "scripts")]

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from evaluate import gather_grades
from flags import EngineSettings, Sampling
from fsdp_utils import gather_from_ranks, init_world, wait_for_all
from grading.math_text import clean, number
from grading.verifiers import Case
from reward import Grader
from rollout import EvaluationEngine
from warm_start import build_tokenizer

GOAL = 1.05
CASES = Path(__file__).parent.parent / "tests" / "grading" / "math_cases.jsonl"


def save_random_model(folder: Path, hidden: int, max_tokens: int) -> None:
    """A Qwen2 of 8 layers and the 64 tokens of the CPU job: large enough to keep all cores busy."""
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=8,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=16 + max_tokens,
        bos_token_id=None,
        eos_token_id=build_tokenizer().eos_token_id,
    )
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--hidden", type=int, default=512, help="hidden size of the random model, of 8 layers; larger: longer sampling"
    )
    parser.add_argument("--prompts", type=int, default=512, help="prompts of a step, over all ranks")
    parser.add_argument("--group_size", type=int, default=5, help="completions per prompt")
    parser.add_argument(
        "--max_tokens",
        type=int,
        default=128,
        help="completion limit in tokens; a random model stops after 64 on average",
    )
    # Of 34 rows of MATH-500 that were looked at, 32 have a plain number as their answer.
    parser.add_argument(
        "--numbers", type=float, default=0.8, help="share of answer keys that are plain numbers; the rest are formulas"
    )
    parser.add_argument("--rounds", type=int, default=3, help="counted pairs of runs, after one that is not")
    args = parser.parse_args()

    world = init_world(tp_size=1, timeout_minutes=10)
    folder = Path(gather_from_ranks(tempfile.mkdtemp(prefix="bench_grading_"))[0])
    tokenizer = build_tokenizer()
    if world.is_main:
        save_random_model(folder, args.hidden, args.max_tokens)
        tokenizer.save_pretrained(folder)
    wait_for_all()
    prompts = [np.random.default_rng(i).integers(1, 64, 16).astype(np.int32) for i in range(args.prompts)]
    cases = [json.loads(line) for line in CASES.read_text().splitlines()]
    cases = [Case(case["completion"], case["answer"]) for case in cases if "hostile" not in case["kind"]]
    kinds = (
        [case for case in cases if number(clean(case.answer)) is not None],
        [case for case in cases if number(clean(case.answer)) is None],
    )
    choose = np.random.default_rng(0)
    cases = [
        kinds[choose.random() >= args.numbers][choose.integers(10**9) % 600]
        for _ in range(args.prompts * args.group_size)
    ]
    engine = EvaluationEngine(str(folder), tokenizer, world, EngineSettings(16 + args.max_tokens))
    rows, sampling = (
        [SimpleNamespace(ids=ids, images=None) for ids in prompts],
        Sampling(args.group_size, 1.0, args.max_tokens),
    )

    def step(round_index: int, is_graded: bool) -> float:
        grader = (
            Grader("math", num_workers=1) if is_graded else None
        )  # fresh, so that no cache of an earlier round helps
        wait_for_all()
        start = time.perf_counter()

        def on_finished(b: int, text: str, num_tokens: int, is_truncated: bool) -> None:
            if grader is not None:
                grader.submit(b, cases[b])

        rollout = engine.sample(rows, sampling, (1, round_index), on_finished=on_finished)
        if is_graded:
            grades = gather_grades(grader)
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
    grader = Grader("math", num_workers=1)
    start = time.perf_counter()
    grader.grade(cases)
    alone = time.perf_counter() - start
    grader.close()
    ratio = statistics.median(a / b for a, b in zip(graded, plain, strict=True))
    if world.is_main:
        shutil.rmtree(folder)
        print(f"{'':28}{'median s':>10}{'min':>8}{'max':>8}")
        for name, times in (("sampling", plain), ("sampling and grading", graded)):
            print(f"{name:28}{statistics.median(times):10.2f}{min(times):8.2f}{max(times):8.2f}")
        print(f"{'grading alone, one process':28}{alone:10.2f}")
        num_graded = args.prompts * args.group_size
        summary = {
            "ratio": round(ratio, 3),
            "goal": GOAL,
            "graded": num_graded,
            "rounds": args.rounds,
            "ranks": world.num_trainers,
        }
        print(json.dumps(summary | {"device": world.device.type}))
    engine.close()


if __name__ == "__main__":
    main()
