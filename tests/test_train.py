"""The whole program under torchrun on two processes: FSDP2, vLLM, the run folder, stops and resumes."""

import json
import os
import pty
import termios
from pathlib import Path
from select import select

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fsdp_utils import World
from helpers.distributed import on_ranks
from helpers.made_up import write_lines
from helpers.runs import NO_EVAL, begin, copy_at, lines, metrics_of, run_ranks, torchrun, training_flags, without_times

METRICS_OF_A_STEP = {
    "reward": "mean std frac_groups_all_right frac_groups_all_wrong frac_groups_with_signal",
    "completion": "tokens_mean tokens_max frac_truncated", "optim": "grad_norm lr skipped_updates",
    "policy": "loss kl_ref entropy ratio_max ratio_min clip_frac clip_frac_low clip_frac_high approx_kl rollout_kl "
    "rollout_ess rollout_gap_mean rollout_gap_max",
    "perf": "tokens_per_s update_idle_frac sample_tokens_per_s_per_gpu update_tokens_per_s_per_gpu "
    "update_tflops_per_gpu",
    "time": "rollout_tail_s sample_s reward_s sleep_s pack_s advantage_s logprobs_s update_s sync_s log_s step_s",
}  # fmt: skip


@pytest.fixture(scope="module")
def finished_run(policy, reward, tmp_path_factory) -> Path:
    out_dir = tmp_path_factory.mktemp("runs") / "undisturbed"
    torchrun(2, "train_grpo.py", *training_flags(policy, out_dir, reward=reward), GRPO_TEST_PICTURES="1")
    return out_dir


def test_every_step_logs_every_metric_of_a_policy_that_moves(finished_run):
    metrics = metrics_of(finished_run)
    assert list(metrics) == [0, 1, 2, 3, 4]
    for step in (1, 2, 3, 4):
        for room, names in METRICS_OF_A_STEP.items():
            assert {f"{room}/{name}" for name in names.split()} <= set(metrics[step]), (step, room)
        assert metrics[step]["optim/lr"] == 1e-3 and metrics[step]["optim/grad_norm"] > 0
        assert metrics[step]["optim/skipped_updates"] == 0
        assert 0 < metrics[step]["policy/rollout_gap_mean"] < 0.005, "0: not measured; two bf16 programs always differ"
    assert abs(metrics[1]["policy/kl_ref"]) < abs(metrics[4]["policy/kl_ref"])  # an estimate, which may be negative
    assert metrics[4]["policy/ratio_max"] > 1.0, "the second update of a step is off-policy"


def test_the_run_folder_describes_itself_and_keeps_held_out_completions(finished_run, policy):
    metrics = metrics_of(finished_run)
    assert [step for step in metrics if "eval/heldout/avg@1" in metrics[step]] == [0, 2, 4]
    for step in (0, 2, 4):
        rows = lines(finished_run / "eval" / f"step_{step}" / "heldout.jsonl")
        assert len(rows) == 16
        assert metrics[step]["eval/heldout/avg@1"] == pytest.approx(sum(row["is_correct"] for row in rows) / 16)
    config = json.loads((finished_run / "config.json").read_text())
    assert config["model"] == str(policy) and config["group_size"] == 4
    (started,) = lines(finished_run / "starts.jsonl")
    assert started["packages"]["torch"] and "--group_size" in started["command"]
    assert started["world_size"] == 2 and started["resumed_from"] == 0
    samples = lines(finished_run / "samples.jsonl")
    assert {sample["step"] for sample in samples} == {1, 2, 3, 4}
    grade = "reward reward_parts reward_status is_correct read_as num_tokens is_truncated"
    assert samples[0].keys() == {"step", "advantage", "row", "prompt", "answer", "completion", *grade.split()}
    assert (finished_run / "curves.png").stat().st_size > 10_000
    assert sorted(path.name for path in finished_run.glob("*step_*")) == ["step_2", "step_4"]
    assert (finished_run / "final").resolve() == (finished_run / "step_4").resolve()


FAILING_REWARD = """
import os, time

def score(completion, answer):
    if answer == "exit": os._exit(1)
    if answer == "late": time.sleep(3600)
    if answer == "error": raise KeyError("no such thing")
    return 0.5
"""
FAILS = {"exit": "error:", "late": "timeout", "error": "error:"}  # answer of a row -> what the grade of each says


def test_a_reward_that_sometimes_fails_costs_those_completions(policy, tmp_path):
    """On two ranks, for three of the step's eight rows. On a busy machine others may run out of time, too."""
    (tmp_path / "my_reward.py").write_text(FAILING_REWARD)
    rows = [{"problem": f"{i}+1", "answer": answer} for i, answer in enumerate([*"12345", *FAILS])]
    write_lines(data := tmp_path / "rows.jsonl", rows)
    changes = {"reward": f"{tmp_path}/my_reward.py:score", "reward_timeout": 2.0, "total_steps": 1, "train_data": data}
    done = torchrun(2, "train_grpo.py", *training_flags(policy, run := tmp_path / "run", **changes | NO_EVAL))
    failures = lines(run / "reward_failures.jsonl")
    statuses = [failure["reward_status"].partition(" ")[0] for failure in failures]
    for status, failure in zip(statuses, failures, strict=True):
        assert status in ("timeout", FAILS.get(failure["answer"])), failure
    answers = [failure["answer"] for failure in failures]
    assert [answers.count(answer) for answer in FAILS] == [4, 4, 4] and set(statuses) == {"timeout", "error:"}
    metrics = metrics_of(run)[1]
    assert metrics["reward/timeouts"] + metrics["reward/errors"] == len(failures)
    assert metrics["reward/mean"] == 0.5 and metrics["reward/left_out"] == len(failures), "what failed counts nowhere"
    assert all(failure["row"].startswith(str(data)) for failure in failures)
    assert any("KeyError" in failure["reward_status"] for failure in failures)
    said = [f"step 1: reward {failure['reward_status']}, of {failure['row']}" for failure in failures[:3]]
    assert all(text in done.stdout for text in [*said, "all are in reward_failures.jsonl"])


def test_a_single_process_needs_no_launcher_and_shows_its_progress(policy, reward, tmp_path):
    flags = training_flags(policy, tmp_path / "run", **NO_EVAL, reward=reward, total_steps=1, kl_coef=0)
    (terminal, stderr), shown = pty.openpty(), b""
    termios.tcsetwinsize(stderr, (24, 120))
    process = begin(["train_grpo.py", *flags], tmp_path / "stdout", Path(os.ttyname(stderr)))
    while (is_ready := select([terminal], [], [], 0.1)[0]) or process.poll() is None:
        shown += os.read(terminal, 4096) if is_ready else b""
    os.close(stderr)
    os.close(terminal)
    assert process.returncode == 0, shown.decode()[-3000:]
    assert b"sample: 100%" in shown
    assert "policy/kl_ref" not in metrics_of(tmp_path / "run")[1], "without a KL term there is no reference"


def next_logprobs(world: World, folder: str, prompt: str) -> dict[int, float]:
    """Token -> log-prob after the prompt (JSON), the likeliest five and the sampled one: vLLM's."""
    from vllm import LLM, SamplingParams, TokensPrompt  # rollout.py prepares what vLLM reads

    llm = LLM(folder, enforce_eager=True, dtype="bfloat16", max_model_len=32, kv_cache_memory_bytes=2**28)
    params = SamplingParams(max_tokens=1, logprobs=5, temperature=1.0)
    (answer,) = llm.generate([TokensPrompt(prompt_token_ids=json.loads(prompt))], params)
    found = {token: entry.logprob for token, entry in answer.outputs[0].logprobs[0].items()}
    assert len(found) >= 5
    return found


def test_the_final_policy_agrees_in_transformers_and_vllm(finished_run):
    final = finished_run / "final"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(final), AutoTokenizer.from_pretrained(final)
    assert model.dtype == torch.float32, "that of the run"
    before = AutoModelForCausalLM.from_pretrained(json.loads((finished_run / "config.json").read_text())["model"])
    assert not model.lm_head.weight.float().equal(before.lm_head.weight.float()), "training changed it"
    prompt = tokenizer("<user>1+2<assistant>")["input_ids"]
    with torch.no_grad():
        logprobs = model(torch.tensor([prompt])).logits[0, -1].float().log_softmax(-1)
    for token, logprob in on_ranks(1, next_logprobs, final, json.dumps(prompt)).items():
        assert logprob == pytest.approx(logprobs[token].item(), abs=0.03)  # vLLM in bf16


def test_a_resume_with_every_option_changes_no_step(policy, reward, tmp_path):
    options = {
        "dynamic_sampling": "reward", "prompts_per_step": 12, "num_iterations": 2, "policy_loss": "gspo_token",
        "advantage": "reinforce++", "kl_in": "reward", "kl_estimator": "k1", "entropy_coef": 0.01, "dual_clip": 3,
        "rollout_correction": "sequence_truncate", "loss_aggregation": "seq_mean_token_mean", "share_prompts": True,
        "lr_schedule": "cosine", "reward": reward,
    } | NO_EVAL  # fmt: skip
    whole = torchrun(2, "train_grpo.py", *training_flags(policy, tmp_path / "whole", **options))
    assert "6 updates a step" in whole.stdout
    parts = copy_at(2, tmp_path / "whole", tmp_path / "parts")
    torchrun(2, "train_grpo.py", *training_flags(policy, parts, **options))
    assert json.loads((parts / "status.json").read_text())["now"] == "done"
    expected, found = metrics_of(tmp_path / "whole"), metrics_of(parts)
    assert [metrics["step"] for metrics in lines(parts / "metrics.jsonl")] == [1, 2, 3, 4, 3, 4]
    for step in range(1, 5):
        assert without_times(found[step]) == without_times(expected[step]), f"step {step} differs"
        assert expected[step]["policy/ratio_max"] > 1.0 > expected[step]["policy/ratio_min"]
        assert expected[step]["sampling/groups_filled"] == 0
    assert sum(metrics["sampling/rounds"] for metrics in expected.values()) > 4, "in some step a group was replaced"
    drawn = sum(metrics["sampling/prompts"] for metrics in expected.values())
    assert sorted(path.name for path in parts.glob("step_*")) == ["step_2", "step_4"]
    progress = json.loads((parts / "step_4" / "trainer" / "progress.json").read_text())
    assert (progress["prompts_drawn"], progress["skipped_in_a_row"]) == (drawn, 0)


def test_groups_without_signal_do_not_move_the_policy(policy, tmp_path):
    (tmp_path / "equal.py").write_text("def score(completion, answer, columns):\n    return 0.1\n")
    changes = {"reward": f"{tmp_path}/equal.py:score", "kl_coef": 0, "total_steps": 2, "dynamic_sampling": "reward"}
    torchrun(2, "train_grpo.py", *training_flags(policy, tmp_path / "run", **changes, **NO_EVAL))
    expected = {
        "sampling/rounds": 10, "sampling/prompts": 80, "sampling/groups_filled": 8,
        "policy/loss": 0, "policy/ratio_max": 1, "policy/ratio_min": 1, "optim/grad_norm": 0,
        "optim/skipped_updates": 0, "reward/frac_groups_with_signal": 0,
    }  # fmt: skip
    for step, metrics in metrics_of(tmp_path / "run").items():
        assert {name: metrics[name] for name in expected} == expected, step
    paths = policy, tmp_path / "run" / "final"
    start, final = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).state_dict() for path in paths)
    torch.testing.assert_close(final, start, atol=0, rtol=0)


def test_one_engine_over_both_ranks_trains(policy, tmp_path):
    """Also beside the shared memory of one that was killed; and old checkpoints are removed."""
    left = Path("/dev/shm/-tp:0-[0-1]-cpushm_0")  # vLLM's own name
    left.touch()
    changes = {"tensor_parallel_size": 2, "save_every": 1, "keep_checkpoints": 2, "total_steps": 3}
    done = torchrun(2, "train_grpo.py", *training_flags(policy, tmp_path / "run", **changes, prompts_per_update=8))
    left.unlink(missing_ok=True)
    assert "1 engine of 2" in done.stdout
    metrics = metrics_of(tmp_path / "run")
    assert max(metrics[step]["policy/rollout_gap_mean"] for step in (1, 2, 3)) < 0.005
    assert {metrics[step]["policy/ratio_max"] for step in (1, 2, 3)} == {1.0}, "exactly, with one update a step"
    assert sorted(path.name for path in (tmp_path / "run").glob("step_*")) == ["step_2", "step_3"]


def test_a_complete_run_may_be_prolonged_on_other_ranks(policy, finished_run, reward):
    before = (finished_run / "metrics.jsonl").read_bytes()
    (finished_run / "final").unlink()  # as after a kill between the last checkpoint and the end
    done = torchrun(2, "train_grpo.py", *training_flags(policy, finished_run, reward=reward))
    assert "is complete: it has a checkpoint of step 4" in done.stdout
    assert (finished_run / "final" / "model.safetensors").exists()
    assert (finished_run / "metrics.jsonl").read_bytes() == before
    changes = {"reward": reward, "total_steps": 5, "shard_ranks": 2}
    done = torchrun(4, "train_grpo.py", *training_flags(policy, finished_run, **changes))
    assert "4 ranks on cpu, 2 copies of the policy, 4 engines of 1" in done.stdout
    assert (finished_run / "metrics.jsonl").read_bytes().startswith(before), "the log is only appended to"
    metrics = metrics_of(finished_run)
    assert metrics[5]["policy/rollout_gap_mean"] < 0.005, "the engine samples from the restored policy"
    assert abs(metrics[5]["policy/kl_ref"]) > 0.5 * abs(metrics[4]["policy/kl_ref"])


def test_a_run_that_diverges_stops_with_the_step_number(policy, tmp_path):
    # The first update makes every weight larger than bf16 can hold: what is computed from them is nan.
    flags = training_flags(policy, tmp_path / "run", learning_rate=3.4e38, **NO_EVAL)
    done = run_ranks(2, "train_grpo.py", flags)
    assert done.returncode != 0
    assert "error: step 3, update 1 is left out, as 3 before it: the loss is nan" in done.stderr
    assert f"{tmp_path}/run/rollouts/step_3.parquet holds the step's tokens" in done.stderr
    assert "Traceback" not in done.stderr
