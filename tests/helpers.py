"""What the tests share: a tiny random policy with its data, and a way to start programs as a user would."""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import shutil
import subprocess
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from batch import Rollout, Update
from flags import AdamW, Lora, Memory, UpdateStep, make_plan
from forked import ENVIRONMENT, ROOT, run_ranks
from fsdp_utils import World, gather_from_ranks
from inputs.choices import algorithm_of
from inputs.command_line import parse_flags
from policy import Policy, build_policy
from update import UpdateGuard, pack_updates, update_policy, with_advantages
from warm_start import build_tokenizer

RAGGED = [12, 7, 3, 11, 5, 9, 2, 6]  # completion lengths
ALONE = World(trainer_rank=0, num_trainers=1, tp_size=1, device=torch.device("cpu"))


def make_model(folder: Path, tied: bool = True, num_rows: int = 64, **sizes: object) -> Path:
    """A random Qwen2 of 0.3 M parameters with the CPU job's tokenizer, and data (jsonl) of one-digit sums.

    `sizes` of a Qwen3: its norms of queries and keys are random, and all logits are near 13, where bf16 has steps of
    0.06: the first number of hidden states and of the head's rows is large. Log-probs do not depend on it.
    """
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    common = {
        "vocab_size": 64, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2,
        "max_position_embeddings": 128, "tie_word_embeddings": tied,
        "initializer_range": 0.12,  # larger than usual: the distribution is far from uniform, a wrong weight shows
        "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip
    if not sizes:
        model = Qwen2ForCausalLM(Qwen2Config(**common, num_attention_heads=2, num_key_value_heads=2))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**common, **sizes))
        for name, parameter in model.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                torch.nn.init.normal_(parameter, 1.0, 0.3)
        with torch.no_grad():
            model.model.embed_tokens.weight[:, 0] = 4.0
            model.model.norm.weight[1:] = 2.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    rng = np.random.default_rng(0)
    for name, count in (("train", num_rows), ("heldout", 16)):
        sums = rng.integers(0, 5, size=(count, 2)).tolist()
        write_lines(folder / f"{name}.jsonl", [{"problem": f"{a}+{b}", "answer": str(a + b)} for a, b in sums])
    return folder


def write_lines(file: Path, rows: list[dict[str, object]]) -> str:
    """A .jsonl file."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def make_row(ids: list[int] | np.ndarray, **fields: object) -> SimpleNamespace:
    """A stand-in for `data.Row` with this prompt."""
    known = {"text": "", "answer": "", "columns": {}, "where": "", "images": None, "hinted_ids": None}
    return SimpleNamespace(ids=np.array(ids, dtype=np.int32), **known | fields)


def make_grade(reward: float, is_correct: bool = False, status: str = "ok", **parts: float) -> SimpleNamespace:
    """A stand-in for `grading.Grade`."""
    fields = {"status": status, "is_failed": status not in ("ok", "truncated"), "parts": parts, "answer": None}
    return SimpleNamespace(reward=float(reward), is_correct=is_correct, **fields)


class Ear:
    """A grader: the reward of a completion is its length; each is heard once."""

    def __init__(self) -> None:
        self.heard: dict[int, SimpleNamespace] = {}

    def submit_to(self, rows, sampling):
        def on_finished(b, text, token_ids, is_truncated, grade):
            assert b not in self.heard
            self.heard[b] = make_grade(len(token_ids), is_correct=len(token_ids) % 2 == 0)
            self.heard[b].where = rows[b // sampling.num_samples].where

        return on_finished

    def collect_from_ranks(self):
        heard = {b: grade for share in gather_from_ranks(self.heard) for b, grade in share.items()}
        self.heard = {}
        return [heard[b] for b in range(len(heard))]


def make_rollout(lengths: list[int] = RAGGED, prompt_length: int = 4, seed: int = 0, group_size: int = 1) -> Rollout:
    """Random tokens, advantages and sampled log-probs, of these completion lengths; `group_size` per prompt."""
    rng = np.random.default_rng(seed)
    rows = [make_row(rng.integers(0, 64, prompt_length)) for _ in lengths]
    return Rollout(
        rows=[rows[b - b % group_size] for b in range(len(lengths))],
        completions=[rng.integers(0, 64, n).astype(np.int32) for n in lengths],
        rollout_logprobs=[rng.normal(-3, 1, n).astype(np.float32) for n in lengths],
        texts=[""] * len(lengths),
        is_truncated_B=np.zeros(len(lengths), dtype=bool),
        is_sampled=[np.ones(n, dtype=bool) for n in lengths],
        is_trained_B=np.ones(len(lengths), dtype=bool),
        loss_weights_B=np.full(len(lengths), 1 / sum(lengths), dtype=np.float32),
        advantages=[np.full(n, rng.normal(), dtype=np.float32) for n in lengths],
    )


def unpacked_logprobs(model: Callable, rollout: Rollout, temperature: float) -> torch.Tensor:
    """The completion tokens' log-probs, sequence after sequence, by the definition."""
    pieces = []
    for row, completion in zip(rollout.rows, rollout.completions, strict=True):
        tokens = torch.tensor([*row.ids, *completion])[None]
        logprobs = (model(tokens).logits[0] / temperature).log_softmax(-1)
        pieces.append(logprobs[:-1].gather(-1, tokens[0, 1:, None])[len(row.ids) - 1 :, 0])
    return torch.cat(pieces)


def one_bit(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with another last bit in its last number."""
    changed = tensor.clone()
    changed.view(torch.uint8).flatten()[-tensor.itemsize] ^= 1
    return changed


def flags(**changes: object) -> argparse.Namespace:
    """The program's flags, with these changed; what it requires is filled in. Made-up rollouts are trained on, too."""
    values = {"model": "m", "train_data": "d", "out_dir": "o", "total_steps": 10, "max_rollout_gap": 0} | changes
    return parse_flags(command_line(values))


def command_line(values: dict[str, object]) -> list[str]:
    """The flags with these values: True is a switch, None is left out."""
    given = [(f"--{name}", value) for name, value in values.items() if value is not None]
    return [part for flag, value in given for part in ([flag] if value is True else [flag, str(value)])]


def build(args: argparse.Namespace, world: World) -> tuple[Policy, Policy | None, torch.optim.Optimizer]:
    """What a run with these flags trains."""
    objects = (Memory.from_flags(args), Lora.from_flags(args), AdamW.from_flags(args))
    reference = (args.reference or args.model) if args.kl_coef else None
    return build_policy(args.model, *objects, reference, args.seed, world)


def whole_update(rollout: Rollout, args: argparse.Namespace, policy: Policy, world: World) -> Update:
    """The whole rollout as one update, with the advantages that it comes with."""
    plan = replace(make_plan(args, args.prompts_per_step), completions_per_step=len(rollout.rows))
    (update,) = pack_updates(rollout, plan, algorithm_of(args), Memory.from_flags(args), policy, world)
    return replace(update, batches=[with_advantages(rollout, batch) for batch in update.batches])


def train_once(
    policy: Policy, optimizer: torch.optim.Optimizer, update: Update, args: argparse.Namespace, world: World = ALONE,
    **changes: object,
) -> dict[str, float]:  # fmt: skip
    """The metrics of one optimizer step, the first of its rollout and at the rate 0, unless `changes` say otherwise."""
    step = UpdateStep(index=0, rate=0.0, is_first=True, max_grad_norm=args.max_grad_norm, seed=args.seed)
    settings = algorithm_of(args), step._replace(**changes), Memory.from_flags(args)
    return update_policy(policy, optimizer, update, *settings, UpdateGuard(world))


def torchrun(
    num_ranks: int, script: str, *arguments: object, timeout: float = 300, **environment: str
) -> subprocess.CompletedProcess[str]:
    """`torchrun --nproc_per_node num_ranks script arguments`, by our launcher; fails the test if it fails."""
    done = run_ranks(num_ranks, script, list(arguments), timeout, ENVIRONMENT | environment)
    assert done.returncode == 0, f"{script} failed:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done


def run_command(
    command: list[str], environment: dict[str, str] = ENVIRONMENT, timeout: float | None = None
) -> subprocess.CompletedProcess[str]:
    """What a command says in the repository's root."""
    options = {"cwd": ROOT, "env": environment, "capture_output": True, "text": True}
    return subprocess.run(command, **options, timeout=timeout, check=False)


def said(command: list[str], environment: dict[str, str] = ENVIRONMENT) -> str:
    """The standard output of a command in the repository's root, which must succeed."""
    done = run_command(command, environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def training_flags(policy: Path, out_dir: Path, **changes: object) -> list[str]:
    """A short run on the tiny policy: 8 prompts x 4 completions, 2 updates a step."""
    flags = {
        "model": policy, "train_data": policy / "train.jsonl", "eval_data": policy / "heldout.jsonl",
        "out_dir": out_dir, "max_prompt_tokens": 8, "max_completion_tokens": 12, "prompts_per_step": 8,
        "group_size": 4, "prompts_per_update": 4, "micro_batch_tokens": 128, "kl_coef": 0.01, "learning_rate": 1e-3,
        "total_steps": 4, "eval_every": 2, "eval_before_training": True, "save_every": 2,
    } | changes  # fmt: skip
    return command_line(flags)


def copy_at(step: int, run_dir: Path, copy: Path) -> Path:
    """A copy of a run folder in which the checkpoint of this step is the last one, as after a kill."""
    shutil.copytree(run_dir, copy, symlinks=True)
    (copy / "final").unlink()
    for folder in copy.glob("step_*"):
        if int(folder.name.removeprefix("step_")) > step:
            shutil.rmtree(folder)
    return copy


def wait_for(condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        time.sleep(0.005)


@contextlib.contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Files of this process cannot grow beyond this: writing fails in the middle, as on a full disk or at a quota."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class HeldInSync:
    """The most bytes of full parameters alive at a time: those that are gathered or streamed to the engine."""

    def __init__(self) -> None:
        self.alive: dict[int, int] = {}
        self.most = 0
        gather = torch.distributed.all_gather_single
        torch.distributed.all_gather_single = lambda whole, *rest, **more: gather(self.watch(whole), *rest, **more)

    def watch(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if id(storage) not in self.alive:
            self.alive[id(storage)] = storage.nbytes()
            weakref.finalize(storage, self.alive.pop, id(storage))
            self.most = max(self.most, sum(self.alive.values()))
        return tensor

    def stream(self, named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in named:
            yield name, self.watch(tensor)
            del tensor


def lines(file: Path) -> list[dict]:
    """The objects of a .jsonl file."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def metrics_of(run_dir: Path) -> dict[int, dict[str, float]]:
    """Step -> its last line of metrics.jsonl."""
    return {record["step"]: record for record in lines(run_dir / "metrics.jsonl")}


def without_times(metrics: dict[str, float]) -> dict[str, float]:
    """What a step computes: the same in every run with the same flags."""
    return {name: value for name, value in metrics.items() if not name.startswith(("time/", "perf/", "memory/"))}


def logprobs_in_vllm(folder: Path, prompt: list[int]) -> dict[int, float]:
    """Token -> log-probability after the prompt, the likeliest five and the sampled one, by a vLLM of its own."""
    with tempfile.TemporaryDirectory() as temporary:
        output = Path(temporary) / "logprobs.json"
        torchrun(1, "tests/vllm_logprobs.py", folder, json.dumps(prompt), output)
        found = dict(json.loads(output.read_text()))
    assert len(found) >= 5
    return found
