"""What the benchmarks share: random models of any size, runs of `train_grpo.py`, memory of a process tree, the table and the JSON line."""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "scripts")]

import psutil
import torch
from torch.optim import Optimizer
from transformers import Qwen2Config, Qwen2ForCausalLM

from flags import AdamW, Lora, Memory, take
from fsdp_utils import World
from policy import Policy, build_policy
from warm_start import build_tokenizer

ROOT = Path(__file__).parent.parent
REWARD = """# Costs nothing and differs within a group: the share of a digit in the completion.
def score(completion, answer, columns):
    return completion.count(answer) / max(len(completion), 1)
"""  # a file of its own, because the processes that grade load it: this one would bring torch with it


def build(args: Namespace, world: World) -> tuple[Policy, Policy | None, Optimizer]:
    """What a run with these flags trains."""
    objects = (take(Memory, args), take(Lora, args), take(AdamW, args))
    return build_policy(args.model, *objects, args.kl_coef != 0, args.seed, world)


def save_random_model(
    folder: Path,
    hidden: int,
    layers: int,
    ffn: int,
    vocab: int = 64,
    context: int = 4096,
    num_rows: int = 256,
    mean_tokens: float = 0,
) -> None:
    """A random Qwen2 in fp32, heads of 64, with the tokenizer of the CPU job, `num_rows` sums in train.jsonl and a reward in reward.py.

    It never ends a completion: the end-of-sequence token's logit is 0, the others' have a standard deviation of about 8. So all
    completions have the length of their limit, in every framework. With `mean_tokens` each token is the last one with a probability of
    1 / mean_tokens: lengths are geometric, of about that mean where the limit is far.
    """
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    config = Qwen2Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=max(hidden // 64, 1),
        num_key_value_heads=max(hidden // 64, 1),
        max_position_embeddings=context,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.normal_(std=8.0 / hidden**0.5)
        model.lm_head.weight[tokenizer.eos_token_id] = 0.0
        if mean_tokens:
            _end_after(model, tokenizer.eos_token_id, mean_tokens)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "reward.py").write_text(REWARD)
    sums = [{"problem": f"{100 + i}+{999 - i}", "answer": "1"} for i in range(num_rows)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))


@torch.no_grad()
def _end_after(model: Qwen2ForCausalLM, eos: int, mean_tokens: float) -> None:
    """Gives every hidden state a part in one direction, which the end-of-sequence token's row of the head then turns into its logit.

    The part is eight times the rest, so that the logit hardly depends on the prompt: frameworks draw different ones.
    """
    direction = torch.nn.functional.normalize(torch.randn(model.config.hidden_size), dim=0)
    embeddings = model.get_input_embeddings().weight
    embeddings += 8 * direction * embeddings.norm(dim=1).mean()
    head = model.lm_head.weight
    head.normal_(std=head.shape[1] ** -0.5)
    head -= (head @ direction)[:, None] * direction
    hidden = model.model(torch.randint(head.shape[0], (8, 64))).last_hidden_state
    others = (hidden @ head.T).logsumexp(-1).mean()
    head[eos] = direction * (others - math.log(mean_tokens - 1)) / (hidden @ direction).mean()


def launch(command: list[str], environment: dict[str, str] | None = None) -> float:
    """Runs a program on one thread per process; returns the peak of the memory of its process tree in GiB (PSS: shared pages once).

    Raises RuntimeError with the end of its output if it fails.
    """
    settings = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"} | (environment or {})
    peak = 0
    with tempfile.TemporaryFile("w+") as output:
        root = psutil.Popen(command, cwd=ROOT, env=settings, stdout=output, stderr=subprocess.STDOUT)
        while root.poll() is None:
            total = 0
            for process in [root, *_children(root)]:
                try:
                    total += process.memory_full_info().pss
                except psutil.Error:  # it has ended meanwhile
                    continue
            peak = max(peak, total)
            time.sleep(0.5)
        if root.returncode:
            output.seek(0)
            raise RuntimeError(f"{' '.join(command)} ended with {root.returncode}:\n{output.read()[-4000:]}")
    return peak / 2**30


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


def train(model: Path, out_dir: Path, num_ranks: int, flags: dict[str, object]) -> tuple[list[dict[str, float]], float]:
    """(metrics of every step but the first two, peak memory in GiB) of `train_grpo.py` on `model`, which `save_random_model` made."""
    settings = {
        "model": model, "train_data": model / "train.jsonl", "out_dir": out_dir, "reward": f"{model}/reward.py:score", "reward_workers": 1,
        "max_prompt_tokens": 16, "learning_rate": 1e-6, "dtype": "float32",
    } | flags  # fmt: skip
    arguments = [
        part
        for name, value in settings.items()
        for part in ([f"--{name}"] if value is True else [f"--{name}", str(value)])
    ]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_ranks)]
    peak = launch([*launcher, "train_grpo.py", *arguments])
    lines = (out_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines][2:], peak


def interleave(
    variants: dict[str, Callable[[], object]],
    rounds: int,
    warm_up: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of each variant in each counted round; a round runs all of them in turn, so that what else the machine does meets all.

    With `time.process_time` they are CPU seconds of this process, which other programs disturb less.
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
    """Columns wide enough for their contents; numbers to three digits."""
    cells = [header, *([f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    for row in cells:
        print(
            row[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
            sep="  ",
            flush=True,
        )


def times_row(name: str, seconds: list[float], reference: list[float] | None = None) -> list[object]:
    """A row of the table: median, smallest, largest, and the median ratio of the reference's seconds to these: the relative speed."""
    speed = [] if reference is None else [median_ratio(reference, seconds)]
    return [name, statistics.median(seconds), min(seconds), max(seconds), *speed]
