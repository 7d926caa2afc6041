"""What the benchmarks share: random models and rollouts, updates, times, tables."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))

import numpy as np
import torch
from pebble import ProcessPool
from transformers import Qwen2Config, Qwen2ForCausalLM

from algorithm import algorithm_of
from batch import Rollout, Row, Update
from command_line import parse_flags
from flags import Lora, Memory
from fsdp_utils import World
from grading import Grade
from policy import build_policy
from schedule import make_plan
from update import UpdateGuard, add_advantages, add_logprobs, pack_updates, update_policy
from warm_start import build_tokenizer

ROOT = Path(__file__).parent.parent
GIB = 2**30
PROGRAM_SECONDS = 900  # for each program: a hang is the classic fault of a new machine
Found = TypeVar("Found")
REWARD = """# Costs nothing and differs within a group: the share of a digit in the completion.
def score(completion, answer, columns):
    return completion.count(answer) / max(len(completion), 1)
"""  # a file of its own, because the processes that grade load it: this one would bring torch with it


def parser_of(docstring: str) -> argparse.ArgumentParser:
    """A parser of flags whose help begins with the first paragraph of the docstring and shows all defaults."""
    description = " ".join(docstring.partition("\n\n")[0].split())
    return argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)


# Random models and rollouts -------------------------------------------------------------------------------------------


def save_random_model(
    folder: Path, hidden: int, layers: int, vocab: int = 64, num_rows: int = 256, mean_tokens: float = 0
) -> None:
    """Saves a random Qwen2 in fp32 (heads of 64, FFN of 4 x hidden), the tokenizer of the CPU job, data and a reward.

    The data are `num_rows` sums in train.jsonl. The model never ends a completion: the logit of the end-of-sequence
    token is 0, those of the others have a standard deviation of about 8. So all completions have the length of their
    limit, in every framework. With `mean_tokens` each token is the last one with a probability of 1 / mean_tokens:
    lengths are geometric, of about that mean where the limit is far.
    """
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    heads = max(hidden // 64, 1)
    config = Qwen2Config(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=4096, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.normal_(std=8.0 / hidden**0.5)
        model.lm_head.weight[tokenizer.eos_token_id] = 0.0
        if mean_tokens:
            _end_after(model, tokenizer.eos_token_id, mean_tokens)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    save_task(folder, num_rows)


def save_task(folder: Path, num_rows: int = 256) -> None:
    """Writes `num_rows` sums, as train.jsonl, and reward.py."""
    (folder / "reward.py").write_text(REWARD)
    sums = [{"problem": f"{100 + i}+{999 - i}", "answer": "1"} for i in range(num_rows)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))


@torch.no_grad()
def _end_after(model: Qwen2ForCausalLM, eos: int, mean_tokens: float) -> None:
    """Makes the logit of the end-of-sequence token hardly depend on the prompt: frameworks draw different ones.

    Every hidden state gets a part in one direction, eight times as large as the rest. The row of that token in the head
    turns it into the logit.
    """
    direction = torch.nn.functional.normalize(torch.randn(model.config.hidden_size), dim=0)
    embeddings = model.get_input_embeddings().weight
    embeddings += 8 * direction * embeddings.norm(dim=1).mean()
    head = model.lm_head.weight
    head.normal_(std=head.shape[1] ** -0.5)
    head -= (head @ direction)[:, None] * direction
    hidden = model.model(torch.randint(head.shape[0], (8, 64))).last_hidden_state
    rest_logit = (hidden @ head.T).logsumexp(-1).mean()
    head[eos] = direction * (rest_logit - math.log(mean_tokens - 1)) / (hidden @ direction).mean()


def make_rollout(lengths: list[int], vocab: int, prompt_tokens: int = 16, group_size: int = 1) -> Rollout:
    """Random prompts and, `group_size` to each, completions of these lengths, with grades and sampled log-probs."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, vocab, (len(lengths), prompt_tokens)).astype(np.int32)
    rows = [Row(messages=[], answer="", columns={}, where="", ids=ids) for ids in prompts]
    return Rollout(
        rows=[rows[b // group_size] for b in range(len(lengths))],
        completions=[rng.integers(0, vocab, n).astype(np.int32) for n in lengths],
        rollout_logprobs=[np.full(n, -np.log(vocab), dtype=np.float32) for n in lengths],
        texts=[""] * len(lengths),
        is_truncated_B=np.zeros(len(lengths), dtype=bool),
        is_sampled=[np.ones(n, dtype=bool) for n in lengths],
        is_trained_B=np.ones(len(lengths), dtype=bool),
        grades=[Grade(rng.normal(), "ok") for _ in lengths],
    )


# Updates --------------------------------------------------------------------------------------------------------------


class Trainer:
    """What a run with these flags trains, and its update of a whole rollout, as in the loop of `train_grpo.py`."""

    def __init__(self, args: argparse.Namespace, world: World, head_growth: int = 1) -> None:
        self.world, self.plan = world, make_plan(args, args.prompts_per_step)
        self.memory = Memory.from_flags(args, head_growth=head_growth)
        self.algorithm = replace(algorithm_of(args), group_size=1)  # the advantage is the reward: groups do not matter
        given = self.memory, Lora.from_flags(args), self.plan
        self.policy, self.reference, self.optimizer = build_policy(args.model, *given, world)

    def prepare(self, rollout: Rollout) -> Update:
        """The rollout as one update: packed, with its advantages and the log-probs that the loss needs."""
        plan = replace(self.plan, completions_per_step=len(rollout.rows))
        updates = pack_updates(rollout, plan, self.algorithm, self.memory, self.policy, self.world)
        updates = add_logprobs(updates, self.policy, self.reference, self.algorithm)
        _, (update,) = add_advantages(rollout, updates, self.algorithm)
        return update

    def train(self, update: Update, **changes: object) -> dict[str, float]:
        """Makes one optimizer step; returns its metrics. `changes`: of the step."""
        step = self.plan.update(step=1, i=0)._replace(**changes)
        guard = UpdateGuard(self.world)
        metrics = update_policy(self.policy, self.optimizer, update, self.algorithm, step, self.memory, guard)
        assert not metrics["optim/skipped_updates"], "nothing was updated"
        return metrics


def flags_of(model: Path | str, *more: str) -> argparse.Namespace:
    """The flags of a run of one step in which the advantage of a completion is its reward."""
    required = ["--model", str(model), "--train_data", "none#1000", "--out_dir", "none", "--total_steps", "1"]
    made_up = ["--max_rollout_gap", "0", "--advantage", "none"]  # no engine has sampled what is trained on
    return parse_flags([*required, *made_up, *more])


# Processes, times and tables -----------------------------------------------------------------------------------------


def apart(find: Callable[[], Found]) -> Found:
    """The result of the function in a process of its own, which leaves nothing on a GPU."""
    with ProcessPool(max_workers=1, context=get_context("spawn")) as pool:
        return pool.schedule(find, timeout=PROGRAM_SECONDS).result()


def synchronize() -> None:
    """Waits for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds_of(work: Callable[[], object], rounds: int = 3, warm_up: int = 1) -> float:
    """The median of so many calls, after those that are not counted."""
    seconds = []
    for _ in range(warm_up + rounds):
        synchronize()
        start = time.perf_counter()
        work()
        synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[warm_up:])


def interleave(
    variants: dict[str, Callable[[], object]], rounds: int, warm_up: int = 1, clock: Callable = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds of each variant in each counted round.

    A round runs all of them in turn, so that whatever else the machine does meets all. With `time.process_time` they
    are CPU seconds of this process, which other programs disturb less.
    """
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for round_index in range(-warm_up, rounds):
        for name, run in variants.items():
            start = clock()
            run()
            if round_index >= 0:
                seconds[name].append(clock() - start)
    return seconds


def median_ratio(above: list[float], below: list[float]) -> float:
    """The median of the ratios of pairs measured in the same round."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def print_table(header: list[str], rows: list[list[object]]) -> None:
    """Prints columns that are wide enough for their contents, and numbers to three digits."""
    cells = [header, *([f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for name, *numbers in cells:
        aligned = [cell.rjust(width) for cell, width in zip(numbers, widths[1:], strict=True)]
        print(name.ljust(widths[0]), *aligned, sep="  ", flush=True)


def print_times(seconds: dict[str, list[float]], reference: str) -> dict[str, float]:
    """Prints a table of `interleave`. Returns the seconds of each variant over the reference's, rounded."""
    ratios = {name: round(median_ratio(times, seconds[reference]), 3) for name, times in seconds.items()}
    rows = [[name, statistics.median(x), min(x), max(x), ratios[name]] for name, x in seconds.items()]
    print_table(["", "median s", "min", "max", f"over {reference}"], rows)
    return ratios
