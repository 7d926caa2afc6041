"""Writes the data of scripts/qwen3_0.6b_math_speedrun.sh: 12,000 problems of MATH to train on, and MATH-500.

    python scripts/math_speedrun.py --out_dir data/math_speedrun

It reads both from the hub and puts each problem into the source's prompt. `must_box` says how a completion is read, see
docs/rewards/boxed_math.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from runtime.sources import read_records

PROMPT = (  # rasbt's, which ends without a space
    "You are a helpful math assistant.\nAnswer the question and write the final result on a new line as:\n"
    "\\boxed{{ANSWER}}\n\nQuestion:\n{}\n\nAnswer:"
)
SOURCES = ["rasbt/math_full_minus_math500@train", "HuggingFaceH4/MATH-500@test"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out_dir", type=Path, required=True, help="folder for train.jsonl and test.jsonl")
    parser.add_argument("--sources", nargs=2, default=SOURCES, help="training, test; with the columns problem, answer")
    args = parser.parse_args()
    try:
        splits = [read_records(source, seed=0) for source in args.sources]
    except (ValueError, FileNotFoundError) as error:
        sys.exit(f"error: {error}")
    args.out_dir.mkdir(parents=True, exist_ok=True)
    for name, records in zip(("train", "test"), splits, strict=True):
        with (args.out_dir / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for record in records:
                row = {"problem": PROMPT.format(record.columns["problem"]), "answer": record.columns["answer"]}
                print(json.dumps(row | {"must_box": name == "train"}), file=file)
        print(f"{len(records)} problems in {args.out_dir / name}.jsonl")


if __name__ == "__main__":
    main()
