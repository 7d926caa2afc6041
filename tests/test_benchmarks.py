"""Each benchmark runs at its smallest size, and ends with a JSON line that has its goal."""

import json
import os
import sys
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import bench_gpu
import bench_step
import method_curves
from bench_common import save_random_model
from helpers.runs import begin, torchrun

TINY = "--hidden 64 --layers 1 --rounds 1"
STEP = "--prompts 2 --group_size 2 --max_tokens 4"


def run(script: str, arguments: str = "", num_ranks: int = 1) -> dict[str, object]:
    return json.loads(torchrun(num_ranks, f"benchmarks/{script}", *arguments.split()).stdout.strip().splitlines()[-1])


@pytest.mark.parametrize(("script", "arguments", "num_ranks", "goal"), [
    ("bench_update.py", f"{TINY} --vocab 64 --sequences 4 --mean_length 20 --group_size 2", 1, 0.9),
    ("bench_engine.py", f"sync {TINY} --dtype float32", 2, 0.5),
    ("bench_engine.py", f"sample {TINY} {STEP} --dtype float32", 2, 0.97),
])  # fmt: skip
def test_a_ratio_is_measured_beside_its_goal(script, arguments, num_ranks, goal):
    found = run(script, arguments, num_ranks)
    assert found["goal"] == goal and found["ratio"] > 0 and found.get("ours, prompts shared", 1) > 0


class WarmProgram(psutil.Process):
    """In place of `psutil.Popen`: the command as a fork."""

    def __init__(self, command: list[str], env: dict[str, str], stdout, **_: object) -> None:
        output = Path(f"/proc/{os.getpid()}/fd/{stdout.fileno()}")  # the file has no name
        self.fork = begin(command[1:], output, output, env)
        super().__init__(self.fork.pid)

    def poll(self) -> int | None:
        self.returncode = self.fork.poll()
        return self.returncode


def test_bench_step(monkeypatch, capsys):
    monkeypatch.setattr(psutil, "Popen", WarmProgram)
    monkeypatch.setattr(sys, "argv", f"bench_step.py {TINY} {STEP} --steps 3".split())
    bench_step.main()
    out, err = capsys.readouterr()
    found = json.loads(out.splitlines()[-1])
    assert found["goal"]["trl_best"] == 2.0 and found["rounds"] == 1 and found["seconds"] > 0
    assert "ours, 2 ranks: " in err and " 0.00 GiB" not in err and "completions of 4.0 tokens" in err


def test_bench_gpu(tmp_path, monkeypatch, capsys):
    """All parts, in one process; on CPUs offloading changes no bit."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = AutoConfig.for_model("qwen2", vocab_size=256, num_hidden_layers=2, bos_token_id=None, **sizes)
    config.save_pretrained(tmp_path)
    monkeypatch.setattr(bench_gpu, "apart", lambda find: find())
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    command = f"_ --model {tmp_path} --micro_batch_tokens 64 --micro_batches 2 --length 32"
    monkeypatch.setattr(sys, "argv", command.split())
    bench_gpu.main()
    shown = capsys.readouterr().out
    found = json.loads(shown.splitlines()[-1])
    assert "failed" not in shown and found["goal"] == 0.45 and found["device"] == "CPU"
    eager, compiled, unchecked, once = found["ladder"]
    assert min(min(rung["s"], rung["MFU"], rung["planned MFU"], rung["planned GiB"]) for rung in found["ladder"]) > 0
    assert eager["planned MFU"] < unchecked["planned MFU"] and compiled["planned GiB"] < unchecked["planned GiB"]
    assert eager["grad norm"] == pytest.approx(once["grad norm"], rel=0.03)
    assert all(row["products"] > 0 and 0 < row["busy"] < 1 and row["longest"] for row in found["profile"])
    assert len(found["offload"]) == 4
    assert all(row["largest, 1"] == row["of the change, 3"] == 0 for row in found["offload"])
    assert [row.get("off by", 0) < 0.01 for row in found["head"]] == [True] * 5


@pytest.mark.parametrize(("hidden", "layers", "mean_tokens"), [(256, 4, 20), (512, 8, 40)])
def test_random_models_end_a_completion_at_the_given_rate(hidden, layers, mean_tokens, tmp_path):
    save_random_model(tmp_path, hidden, layers, mean_tokens=mean_tokens)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        logits = model(torch.randint(model.config.vocab_size, (16, 64))).logits
    ends = logits.softmax(dim=-1)[..., model.config.eos_token_id]
    assert ends.mean().item() == pytest.approx(1 / mean_tokens, rel=0.05)
    assert ends.std() < 0.05 * ends.mean(), "after any prompt"


def test_the_plans_of_published_runs_stay_within_their_bounds():
    found = run("plan_vs_published.py")
    assert (found["goal"], found["runs"]) == ([0.15, 0.3], 17)
    assert found["all_median"] <= 0.15 and found["all_worst"] <= 0.3 and found["held_out_median"] <= 0.15


def test_the_curves_of_methods_come_from_complete_runs(tmp_path, monkeypatch, capsys):
    """Accuracy is the last step's; steps count to the first at 0.9; tokens are of all groups drawn."""
    runs = {"grpo_seed1": [0.3, 0.5, 0.92], "grpo_seed2": [0.3, 0.6, 0.8], "gspo_seed1": [0.3, 0.9]}
    for name, accuracies in runs.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text('{"total_steps": 2, "prompts_per_step": 4, "group_size": 2}')
        for step, accuracy in enumerate(accuracies):
            metrics = {"step": step, "eval/heldout/avg@1": accuracy, "completion/tokens_mean": 125.0}
            metrics |= {"sampling/prompts": 8} if step == 2 else {}
            with (folder / "metrics.jsonl").open("a") as file:
                file.write(f"{json.dumps(metrics)}\n")
    picture = tmp_path / "methods.png"
    monkeypatch.setattr(sys, "argv", f"_ --folder {tmp_path} --picture {picture} --methods".split())
    method_curves.main()
    _, _, *rows = capsys.readouterr().out.splitlines()
    assert rows == ["| `grpo` | 0.860 (0.800 to 0.920) | 2, never | 3 |"], "the run of gspo is not complete"
    assert picture.stat().st_size > 10_000
