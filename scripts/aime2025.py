"""Writes AIME 2025 with the prompt and the columns of the DAPO data: what scripts/qwen3_4b_dapo_8gpu.sh evaluates on.

    python scripts/aime2025.py --output data/aime2025.jsonl

It reads opencompass/AIME2025 from the hub, 30 problems.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from runtime.sources import read_records

PROMPT = (  # as in the DAPO data, with the problem in its midst
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n{}\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)
SOURCES = [f"opencompass/AIME2025/AIME2025-{part}@test" for part in ("I", "II")]  # 15 problems each


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help=".jsonl file to write")
    parser.add_argument("--sources", nargs="+", default=SOURCES, help="with the columns question and answer")
    args = parser.parse_args()
    try:
        rows = [record.columns for source in args.sources for record in read_records(source, seed=0)]
    except (ValueError, FileNotFoundError) as error:
        sys.exit(f"error: {error}")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    with args.output.open("w", encoding="utf-8") as file:
        for row in rows:
            prompt = [{"role": "user", "content": PROMPT.format(row["question"])}]
            print(json.dumps({"source_prompt": prompt, "ground_truth": str(row["answer"])}), file=file)
    print(f"{len(rows)} problems in {args.output}")


if __name__ == "__main__":
    main()
