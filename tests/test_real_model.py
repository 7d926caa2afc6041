"""A pretrained model from end to end, SmolLM2-135M-Instruct in float32 on one rank: all its weights, and LoRA.

That of all weights is killed (-9) when its second step is logged and not yet saved. What they sample, compute and save
is what transformers and peft make of the same tokens.
"""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from signal import SIGKILL

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from peft import PeftModel
from pyarrow import parquet
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import soak
from batch import Rollout
from data import PromptData
from flags import PromptFormat
from helpers.made_up import command_line, make_rollout, make_row, policy_of, unpacked_logprobs, write_lines
from helpers.made_up import flags as parsed
from helpers.runs import GUARD_SECONDS, Started, begin, launched, lines, metrics_of, wait_for, without_times
from packing import pack
from runtime.files import rollouts_file

# Not a correct answer, but a number that differs from completion to completion.
REWARD = "def score(completion, answer, columns):\n    return len(set(completion)) / 10\n"
SYSTEM = {"role": "system", "content": "Be brief."}
THINGS = ("bird", "fish", "tree", "king")  # a token each: all prompts are of one length, 21 tokens
KINDS = {
    "full": {"learning_rate": 1e-4, "eval_every": 2, "eval_before_training": True},
    "lora": {"learning_rate": 1e-3, "lora_rank": 8, "eval_data": None, "save_every": 2},
}
TOLERANCE = {"atol": 1e-4, "rtol": 0}  # for a log-prob


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder of the test run, removed at once: pytest would keep its 5 GB."""
    folder = tmp_path_factory.mktemp("real_model")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def runs(smollm2, place) -> Iterator[tuple[Path, Path, Started]]:
    """The folders of both runs, complete, and evaluate.py of the former's `final`, beside the first tests."""
    talks = {thing: [SYSTEM, {"role": "user", "content": f"Name a {thing}."}] for thing in THINGS}
    rows = [{"problem": talk, "answer": thing} for thing, talk in talks.items()]
    (place / "reward.py").write_text(REWARD)
    common = {
        "model": smollm2, "train_data": write_lines(place / "train.jsonl", rows[:2]), "dtype": "float32",
        "eval_data": write_lines(place / "heldout.jsonl", rows[2:]), "reward": f"{place}/reward.py:score",
        "prompts_per_step": 2, "group_size": 2, "max_prompt_tokens": 21, "max_completion_tokens": 12,
        "micro_batch_tokens": 2 * (21 + 12), "total_steps": 2, "save_every": 1, "keep_checkpoints": 1,
        "eval_temperature": 0, "eval_max_completion_tokens": 8, "quiet": True,
    }  # fmt: skip
    started = []

    def start(name: str, program: str, flags: dict[str, object]) -> Started:
        command, log = launched(1, program, *command_line(flags | {"out_dir": place / name})), place / f"{name}.log"
        started.append(begin(command, log, log, has_own_workers=True))
        return started[-1]

    def end(name: str, run: Started, expected: int = 0) -> str:
        status, said = run.wait(GUARD_SECONDS), (place / f"{name}.log").read_text()
        assert status == expected, said[-3000:]
        return said

    try:
        full, lora = (start(kind, "train_grpo.py", common | flags) for kind, flags in KINDS.items())
        metrics = place / "full" / "metrics.jsonl"
        wait_for(lambda: full.poll() is not None or (metrics.exists() and 2 in metrics_of(place / "full")))
        os.kill(soak.ranks_of(full)[0], SIGKILL)
        end("full", full, 1)
        assert not (place / "full" / "step_2").exists()
        said = end("full", start("full", "train_grpo.py", common | KINDS["full"]))
        assert f"continues from {place}/full/step_1" in said
        flags = {"model": place / "full" / "final", "data": common["eval_data"], "like": place / "full"}
        evaluation = start("eval", "evaluate.py", flags)
        end("lora", lora)
        yield place / "full", place / "lora", evaluation
    finally:
        for each in started:
            each.kill()
            each.wait()


@pytest.fixture(scope="module")
def base(smollm2):
    return AutoModelForCausalLM.from_pretrained(smollm2)


def sampled(run: Path, step: int, indices: list[int]) -> tuple[Rollout, list[dict]]:
    """These completions of the step as the run has kept them."""
    kept = parquet.read_table(rollouts_file(run, step)).to_pylist()
    rows = [kept[b] for b in indices]
    assert all(all(row["is_sampled"]) for row in rows)
    prompts, completions = [make_row(row["prompt_ids"]) for row in rows], [np.array(row["token_ids"]) for row in rows]
    return replace(make_rollout(list(map(len, completions))), rows=prompts, completions=completions), rows


logprobs_in = torch.no_grad()(partial(unpacked_logprobs, temperature=1.0))


def trained_logprobs(run: Path, model: Path, rollout: Rollout, **lora: object) -> Tensor:
    """By the trainer's own policy, with the parameters of the last step that a resume would have."""
    policy = policy_of(parsed(model=model, **lora))
    trained = {name: each.data for name, each in policy.named_parameters() if each.requires_grad}
    dcp.load({"model": trained}, checkpoint_id=run / "step_2" / "trainer", no_dist=True)
    batch = pack(rollout, list(range(len(rollout.texts))))
    return policy(batch, 1.0)[0][batch.loss_mask_N].detach()


def test_the_chat_template_gives_the_tokens_of_transformers(smollm2, tmp_path):
    """Its default system prompt, one of the data and one of a flag, an answer in between, and other scripts."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    question, answer = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": " Because.\n"}
    texts = ["Hi", "  two  spaces ", "naïve 東京 🦜 \u200b", "def f(x):\n\treturn x"]
    talks = [[{"role": "user", "content": text}] for text in texts] + [[SYSTEM, question], [question, answer, question]]
    file = write_lines(tmp_path / "talks.jsonl", [{"problem": talk, "answer": "1"} for talk in talks])
    for prompt in (None, "Answer in French."):
        found = PromptData.load(file, PromptFormat(system_prompt=prompt), tokenizer, seed=0).rows
        for row, talk in zip(found, talks, strict=True):
            if prompt is not None:
                talk = [SYSTEM | {"content": prompt}, *(message for message in talk if message["role"] != "system")]
            assert row.ids.tolist() == tokenizer.apply_chat_template(talk, add_generation_prompt=True)["input_ids"]


def test_sampler_trainer_and_transformers_agree(runs, base):
    for run, indices in zip(runs, ([0, 1, 3], [0]), strict=False):
        steps = metrics_of(run)
        assert all(0 < steps[step]["policy/rollout_gap_mean"] < 1e-4 for step in (1, 2)), run
        rollout, rows = sampled(run, 1, indices)
        expected = logprobs_in(base, rollout)
        for name in ("rollout_logprobs", "old_logprobs"):
            found = torch.tensor([logprob for row in rows for logprob in row[name]])
            torch.testing.assert_close(found, expected, **TOLERANCE)


def test_what_was_killed_repeats_its_step_bit_for_bit(runs):
    *before, killed, repeated = map(without_times, lines(runs[0] / "metrics.jsonl"))
    assert killed == repeated and killed["step"] == 2 and before[-1]["step"] == 1
    assert killed["reward/std"] > 0 and killed["optim/grad_norm"] > 0 and killed["policy/entropy"] > 1
    assert "eval/heldout/avg@1" in killed


def test_final_gives_the_log_probs_of_the_run(runs, base, smollm2):
    rollout, _ = sampled(runs[0], 2, [0, 2])
    final = AutoModelForCausalLM.from_pretrained(runs[0] / "final")
    assert final.dtype == torch.float32
    found = logprobs_in(final, rollout)
    torch.testing.assert_close(found, trained_logprobs(runs[0], smollm2, rollout), **TOLERANCE)
    assert (found - logprobs_in(base, rollout)).abs().max() > 0.1, "two steps have moved it"


def test_the_adapter_and_the_merged_policy_give_them_too(runs, base, smollm2):
    rollout, _ = sampled(runs[1], 2, [0, 2])
    expected, before = trained_logprobs(runs[1], smollm2, rollout, lora_rank=8), logprobs_in(base, rollout)
    assert (expected - before).abs().max() > 0.1, "an adapter that does nothing would go unnoticed"
    merged = AutoModelForCausalLM.from_pretrained(runs[1] / "final")
    adapted = PeftModel.from_pretrained(base, runs[1] / "final" / "adapter")
    for model in (merged, adapted):
        torch.testing.assert_close(logprobs_in(model, rollout), expected, **TOLERANCE)
    adapted.unload()  # other tests have the same base


def test_evaluate_finds_what_the_run_found(runs, place):
    """Greedily, of `final` after the last step."""
    full, _, evaluation = runs
    assert evaluation.wait(GUARD_SECONDS) == 0
    before, after = (full / "eval" / f"step_{step}" / "heldout.jsonl" for step in (0, 2))
    assert lines(place / "eval" / "heldout.jsonl") == lines(after) != lines(before)
    figures = json.loads((place / "eval" / "results.json").read_text())["sets"]["heldout"]
    assert figures["avg@1"]["mean"] == metrics_of(full)[2]["eval/heldout/avg@1"]
