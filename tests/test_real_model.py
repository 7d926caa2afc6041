"""Trial."""
import json, os, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from signal import SIGKILL

import pytest

import soak
from forked import begin, launched, run_ranks
from helpers import command_line, lines, wait_for, write_lines

REWARD = "def score(completion, answer, columns):\n    return len(set(completion)) / 10\n"


@pytest.fixture(scope="module")
def flags(smollm2, tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    rows = [{"problem": f"Say {word}.", "answer": word} for word in ("one", "two", "three", "four")]
    (folder / "reward.py").write_text(REWARD)
    return {
        "model": smollm2, "train_data": write_lines(folder / "train.jsonl", rows),
        "eval_data": write_lines(folder / "heldout.jsonl", rows[:2]), "reward": f"{folder}/reward.py:score",
        "dtype": "float32", "prompts_per_step": 2, "group_size": 4, "max_prompt_tokens": 64,
        "max_completion_tokens": 16, "micro_batch_tokens": 160, "learning_rate": 1e-4, "total_steps": 2,
        "save_every": 1, "eval_temperature": 0, "reward_workers": 1,
    }

T0 = time.time()
def say(*a):
    print(f"{time.time()-T0:.1f}", *a, flush=True)

@pytest.mark.parametrize("kind", ["full", "lora"])
def test_trial(flags, kind, tmp_path):
    more = {"lora_rank": 8, "learning_rate": 1e-3, "eval_data": None} if kind == "lora" else {"eval_every": 2, "eval_before_training": True}
    out = tmp_path / "run"
    command = launched(1, "train_grpo.py", *command_line(flags | more | {"out_dir": out}))
    say("start", kind)
    r = begin(command, tmp_path / "log", tmp_path / "log", has_own_workers=True)
    n = 2 if kind == "lora" else 3
    wait_for(lambda: r.poll() is not None or ((out / "metrics.jsonl").exists() and len(lines(out / "metrics.jsonl")) == n), 200)
    pid = soak.ranks_of(r)[0]
    os.kill(pid, SIGKILL)
    say("killed", r.wait(60))
    print((tmp_path / "log").read_text()[-5000:])
    r = begin(command, tmp_path / "log2", tmp_path / "log2")
    say("resumed", r.wait(200))
    print((tmp_path / "log2").read_text()[-5000:])
    for each in lines(out / "metrics.jsonl"):
        print({k: round(v, 3) for k, v in each.items() if k.startswith(("time/", "memory/", "step"))})
        print(each.get("policy/rollout_gap_mean"), each.get("reward/std"))
    print((out / "starts.jsonl").read_text()[-400:])
    if kind == "full":
        for model in (flags["model"], out / "final"):
            d = run_ranks(1, "evaluate.py", command_line({"model": model, "data": flags["eval_data"], "like": out, "out_dir": tmp_path / model.name}), 200)
            say("evaluated", d.returncode, d.stdout[-600:], d.stderr[-2000:])
