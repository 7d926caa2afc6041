"""Shows data as training would see it: rows, exclusions, lengths, rendered prompts.

    python scripts/show_data.py --data hiyouga/math12k@test#100 --model Qwen/Qwen2.5-7B [--prompt_column ...]

It reads the tokenizer of the model, not the weights. With --environment or --tools it plays an episode on the terminal,
with you in the model's place.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

sys.path.insert(0, str(Path(__file__).parent.parent))

from command_line import parser_of
from data import PromptData
from extras.turns.episode import Turn, columns_for
from extras.turns.turns import Turns
from flags import FLAGS as TRAINING_FLAGS
from flags import GROUPS, INF, Grading, PromptFormat, TurnLimits, flag
from gate.checks import check_ranges, check_turns
from gate.describe import describe_set, describe_template, prompt_text
from gate.inputs import check_template, load_reader, read_system_prompt
from gate.machine import check_temporary_folder
from gate.models import check_path
from grading.pool import Failure

# fmt: off
DATA = [
    flag("--data", None, "sources, each WHAT[@SPLIT][#ROWS]", is_list=True, is_required=True),
    flag("--model", None, "model with the tokenizer: folder or hub id", is_required=True),
    TRAINING_FLAGS["--seed"],
    TRAINING_FLAGS["--reward_timeout"],
    flag("--show", 2, "number of prompts to show of each source", (0, INF)),
]
# fmt: on
FLAGS = {"data": DATA} | {name: GROUPS[name] for name in ("prompts", "turns")}
LONGEST_WAIT = 3600.0  # seconds for a reply; --reward_timeout ends it before


def play(turns: Turns, data: PromptData) -> None:
    """One episode of the first row, until it is over or there is no more input. If it fails, the program ends."""
    row = data.rows[0]
    max_turns = turns.limits.max_turns
    print(f"\n--- an episode of at most {max_turns} turns of yours, each a line\n{row.text}")
    texts: list[str] = []
    for number, text in enumerate(sys.stdin, start=1):
        texts.append(text.rstrip("\n"))
        turn = Turn(0, columns_for(row.columns, row.answer), tuple(texts), is_last=number == max_turns)
        turns.environments.submit(turn)
        reply = turns.environments.pop_replies(LONGEST_WAIT)[0]
        if isinstance(reply, Failure):
            cost = "which training leaves out" if turns.limits.environment else "in training with reward 0"
            sys.exit(f"error: this ends the episode, {cost}: {reply.removeprefix('error: ')}")
        print(*(f"[{message['role']}] {message['content']}" for message in reply.messages), sep="\n", flush=True)
        if not reply.messages:
            print(f"--- the episode is over: {reply.grade or 'graded by --reward'}")
            break


def main() -> None:
    args = parser_of(FLAGS, __doc__).parse_args()
    try:
        config = AutoConfig.from_pretrained(args.model, trust_remote_code=False)
    except (OSError, ValueError, StrictDataclassError):
        config = None  # a folder with a tokenizer alone is enough to look at texts
    try:
        check_ranges(args, FLAGS)
        check_turns(args)
        check_path(args.model)
        prompt_format = PromptFormat.from_flags(args, system_prompt=read_system_prompt(args.system_prompt))
        tokenizer, vision = load_reader(args.model, config, prompt_format)
        check_template(prompt_format, tokenizer)
        parts = [PromptData.load(source, prompt_format, tokenizer, args.seed, vision) for source in args.data]
        turns = None
        if args.environment or args.tools:
            check_temporary_folder()
            grading = Grading(reward_timeout=args.reward_timeout)
            turns = Turns(TurnLimits.from_flags(args), grading, prompt_format, tokenizer, 1)
    except (ValueError, OSError) as error:
        sys.exit("error: " + " ".join(str(error).split()))
    for data in parts:
        print(*describe_template(prompt_format, tokenizer), *describe_set(data), sep="\n")
        lengths = np.percentile([len(row.ids) for row in data.rows], [0, 50, 90, 99, 100], method="nearest")
        print("  prompt tokens: shortest {}, median {}, 90 % {}, 99 % {}, longest {}".format(*lengths))
        for row in data.rows[: args.show]:
            sizes = ", ".join(str(len(image)) for image in row.encoded_images)
            images = f"\n  {len(row.encoded_images)} images of {sizes} bytes" if sizes else ""
            print(f"\n--- {row.where}{images}\n{prompt_text(row, tokenizer)}\n--- answer: {row.answer}\n")
    if turns is not None:
        play(turns, parts[0])


if __name__ == "__main__":
    main()
