"""A pretrained model from end to end, SmolLM2-135M-Instruct in float32 on one rank: all its weights, and LoRA.

Each run has two steps of 2 prompts x 4 completions of at most 16 tokens. It is killed (-9) when its second step is
logged and not yet saved: the same command repeats that step. What it samples, computes and saves is what transformers
and peft make of the same tokens.
"""

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
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
from batch import Rollout, pack
from data import PromptData
from flags import PromptFormat
from forked import ENVIRONMENT, ROOT, begin, launched, run_ranks
from helpers import command_line, lines, make_row, metrics_of, unpacked_logprobs, wait_for, without_times, write_lines
from helpers import flags as parsed
from instruments.rollout_files import file_of
from policies import policy_of

# Not a correct answer, but a number that differs from completion to completion.
REWARD = "def score(completion, answer, columns):\n    return len(set(completion)) / 10\n"
THINGS = ("bird", "fish", "tree", "king")  # a token each: all prompts are of one length, 21 tokens
KINDS = {
    "full": {"learning_rate": 1e-4, "eval_every": 2, "eval_before_training": True},
    "lora": {"learning_rate": 1e-3, "lora_rank": 8, "eval_data": None},
}
TOLERANCE = {"atol": 1e-4, "rtol": 0}  # of a log-prob


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder of the test run, removed at once: pytest would keep its 5 GB."""
    folder = tmp_path_factory.mktemp("real_model")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def runs(smollm2, place) -> Path:
    """The folder of both runs, and of what evaluate.py wrote: lora_eval/ is of the base, full_eval/ of `final`."""
    system = {"role": "system", "content": "Be brief."}
    talks = {thing: [system, {"role": "user", "content": f"Name a {thing}."}] for thing in THINGS}
    rows = [{"problem": talk, "answer": thing} for thing, talk in talks.items()]
    (place / "reward.py").write_text(REWARD)
    common = {
        "model": smollm2, "train_data": write_lines(place / "train.jsonl", rows[:2]), "dtype": "float32",
        "eval_data": write_lines(place / "heldout.jsonl", rows[2:]), "reward": f"{place}/reward.py:score",
        "reward_workers": 1, "prompts_per_step": 2, "group_size": 4, "max_prompt_tokens": 21,
        "max_completion_tokens": 16, "micro_batch_tokens": 4 * (21 + 16), "total_steps": 2, "save_every": 1,
        "keep_checkpoints": 1, "eval_temperature": 0, "eval_max_completion_tokens": 8, "quiet": True,
    }  # fmt: skip

    def train(kind: str) -> None:
        out_dir, log = place / kind, place / f"{kind}.log"
        command = launched(1, "train_grpo.py", *command_line(common | KINDS[kind] | {"out_dir": out_dir}))
        if kind == "full":  # as a user starts it: how much memory a fork of the tests has is another matter
            with log.open("w") as said:
                options = {"cwd": ROOT, "env": ENVIRONMENT, "stdout": said, "stderr": said}
                run = subprocess.Popen([sys.executable, *command], **options)
        else:
            run = begin(command, log, log, has_own_workers=True)

        def is_logged() -> bool:
            assert run.poll() is None, log.read_text()[-3000:]
            return (out_dir / "metrics.jsonl").exists() and 2 in metrics_of(out_dir)

        wait_for(is_logged, 300)
        os.kill(soak.ranks_of(run)[0], SIGKILL)
        assert run.wait(60) == 1 and not (out_dir / "step_2").exists(), log.read_text()[-3000:]
        again = begin(command, log, log)
        assert again.wait(300) == 0 and f"continues from {out_dir}/step_1" in log.read_text(), log.read_text()[-3000:]

    def evaluate(kind: str, model: Path) -> None:
        flags = {"model": model, "data": common["eval_data"], "like": place / kind, "out_dir": place / f"{kind}_eval"}
        done = run_ranks(1, "evaluate.py", command_line(flags), 300)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

    def train_and_evaluate(kind: str) -> None:
        train(kind)
        evaluate(kind, smollm2 if kind == "lora" else place / "full" / "final")

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(train_and_evaluate, KINDS))
    return place


@pytest.fixture(scope="module")
def base(smollm2):
    return AutoModelForCausalLM.from_pretrained(smollm2)


def sampled(run: Path, step: int, indices: list[int]) -> tuple[Rollout, list[dict]]:
    """These completions of the step as the run has kept them."""
    kept = parquet.read_table(file_of(run, step)).to_pylist()
    rows = [kept[b] for b in indices]
    return Rollout(
        rows=[make_row(row["prompt_ids"]) for row in rows],
        completions=[np.array(row["token_ids"], dtype=np.int32) for row in rows],
        rollout_logprobs=[np.array(row["rollout_logprobs"], dtype=np.float32) for row in rows],
        texts=[row["completion"] for row in rows],
        is_truncated_B=np.zeros(len(rows), dtype=bool),
        loss_weights_B=np.ones(len(rows), dtype=np.float32),
        advantages=[np.zeros(len(row["token_ids"]), dtype=np.float32) for row in rows],
    ), rows


def trained_logprobs(run: Path, model: Path, rollout: Rollout, **lora: object) -> Tensor:
    """By the trainer's own policy, with the parameters of the last step that a resume would have."""
    policy = policy_of(parsed(model=model, **lora))
    trained = {name: each.data for name, each in policy.named_parameters() if each.requires_grad}
    dcp.load({"model": trained}, checkpoint_id=run / "step_2" / "trainer", no_dist=True)
    batch = pack(rollout, list(range(len(rollout.texts))))
    return policy(batch, 1.0)[0][batch.loss_mask_N].detach()


@torch.no_grad()
def logprobs_in(model: torch.nn.Module, rollout: Rollout) -> Tensor:
    return unpacked_logprobs(model, rollout, 1.0)


def test_the_chat_template_gives_the_tokens_of_transformers(smollm2, tmp_path):
    """Its default system prompt, one of the data and one of a flag, an answer in between, and other scripts."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    system = {"role": "system", "content": "Be brief."}
    question, answer = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": " Because.\n"}
    texts = ["Hi", "  two  spaces ", "naïve 東京 🦜 \u200b", "def f(x):\n\treturn x"]
    talks = [[{"role": "user", "content": text}] for text in texts] + [[system, question], [question, answer, question]]
    file = write_lines(tmp_path / "talks.jsonl", [{"problem": talk, "answer": "1"} for talk in talks])
    for prompt in (None, "Answer in French."):
        found = PromptData.load(file, PromptFormat(system_prompt=prompt), tokenizer, seed=0).rows
        for row, talk in zip(found, talks, strict=True):
            if prompt is not None:
                talk = [system | {"content": prompt}, *(message for message in talk if message["role"] != "system")]
            assert row.ids.tolist() == tokenizer.apply_chat_template(talk, add_generation_prompt=True)["input_ids"]


def test_sampler_trainer_and_transformers_agree(runs, base):
    for kind in KINDS:
        steps = metrics_of(runs / kind)
        assert all(0 < steps[step]["policy/rollout_gap_mean"] < 1e-4 for step in (1, 2)), kind
        rollout, rows = sampled(runs / kind, 1, [0, 3, 4, 7] if kind == "full" else [0])
        expected = logprobs_in(base, rollout)
        for name in ("rollout_logprobs", "old_logprobs"):
            found = torch.tensor([logprob for row in rows for logprob in row[name]])
            torch.testing.assert_close(found, expected, **TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_killed_repeats_its_step_bit_for_bit(runs, kind):
    """Also its evaluation after the update, where there is one."""
    *before, killed, repeated = map(without_times, lines(runs / kind / "metrics.jsonl"))
    assert killed == repeated and killed["step"] == 2 and before[-1]["step"] == 1
    assert killed["reward/std"] > 0 and killed["optim/grad_norm"] > 0 and killed["policy/entropy"] > 1
    assert kind != "full" or "eval/heldout/avg@1" in killed


def test_final_gives_the_log_probs_of_the_run(runs, base, smollm2):
    rollout, _ = sampled(runs / "full", 2, [0, 4])
    final = AutoModelForCausalLM.from_pretrained(runs / "full" / "final")
    assert final.dtype == torch.float32
    found = logprobs_in(final, rollout)
    torch.testing.assert_close(found, trained_logprobs(runs / "full", smollm2, rollout), **TOLERANCE)
    assert (found - logprobs_in(base, rollout)).abs().max() > 0.1, "two steps have moved it"


def test_the_adapter_and_the_merged_policy_give_them_too(runs, base, smollm2):
    rollout, _ = sampled(runs / "lora", 2, [0, 4])
    expected, before = trained_logprobs(runs / "lora", smollm2, rollout, lora_rank=8), logprobs_in(base, rollout)
    assert (expected - before).abs().max() > 0.1, "an adapter that does nothing would go unnoticed"
    merged = AutoModelForCausalLM.from_pretrained(runs / "lora" / "final")
    torch.testing.assert_close(logprobs_in(merged, rollout), expected, **TOLERANCE)
    adapted = PeftModel.from_pretrained(base, runs / "lora" / "final" / "adapter")
    torch.testing.assert_close(logprobs_in(adapted, rollout), expected, **TOLERANCE)
    adapted.unload()  # other tests have the same base


def test_evaluate_finds_what_the_run_found(runs):
    """Greedily, of the base before the first step and of `final` after the last one."""
    found = {}
    for step, folder in ((0, "lora_eval"), (2, "full_eval")):
        found[step] = lines(runs / folder / "heldout.jsonl")
        assert found[step] == lines(runs / "full" / "eval" / f"step_{step}" / "heldout.jsonl")
        figures = json.loads((runs / folder / "results.json").read_text())["sets"]["heldout"]
        assert figures["avg@1"]["mean"] == metrics_of(runs / "full")[step]["eval/heldout/avg@1"]
    assert found[0] != found[2]


def test_the_memory_of_the_run_is_what_was_predicted(runs):
    """Within 10 %, up to the first update. A sync begins with what the allocator has kept of it: now more, now less."""
    predicted, steps = lines(runs / "full" / "starts.jsonl")[0]["predicted_gib"], metrics_of(runs / "full")
    used = steps[0] | steps[1]
    for phase in ("load", "evaluate", "sample", "update", "host"):
        assert predicted[phase] == pytest.approx(used[f"memory/{phase}_gib"], rel=0.1), phase
