"""The documented set-ups: each script has the values of its source, and runs as it is on a tiny model of its kind."""

import itertools
import json
import os
import re
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import pytest

import aime2025
import evaluate
import math_speedrun
from command_line import parse_flags
from flags import FLAGS
from gate.command import start
from helpers.made_up import command_line
from helpers.runs import ENVIRONMENT, ROOT, as_user, lines, metrics_of, run_command, run_script, succeeded

# By script: what its source says of algorithm, optimizer and lengths; the dry run's numbers with the data's real rows.
SETUPS = json.loads((ROOT / "tests" / "setups.json").read_text())


def launched(name: str, *flags: str, **settings: object) -> tuple[int, int, list[str]]:
    """(nodes, ranks of a node, the program's flags) that the script gives to `launch`, without its start."""
    unused, printing = "REPO=; source() { :; }; python() { :; }", 'printf "%s\\0" "${NNODES:-1}" "$NGPU" "$@"'
    command = f'{unused}; launch() {{ {printing}; }}; . "$0" "$@"'
    done = succeeded(as_user(run_command, "-c", command, f"scripts/{name}.sh", *flags, **settings))
    num_nodes, num_ranks, script, *arguments = done.stdout.split("\0")[:-1]
    assert script == "train_grpo.py"
    return int(num_nodes), int(num_ranks), arguments


@pytest.mark.parametrize("name", SETUPS)
def test_a_script_has_the_values_of_its_source_and_names_it(name):
    args, documented = vars(parse_flags(launched(name)[2])), SETUPS[name]["documented"]
    assert {flag: args[flag] for flag in documented} == documented
    (block,) = re.findall(r"\nARGS=\((.*?)\n\)", (ROOT / "scripts" / f"{name}.sh").read_text(), flags=re.DOTALL)
    for line in block.strip().splitlines():
        where = re.search(r'--(model|out_dir|tensor_parallel_size) "\$', line)
        assert where or re.search(r" # (source: |not in the source)", line), line


ONE_ENGINE = {"STEPS": 1, "NGPU": 1, "TP": 1}  # a rank and a step
SMOKED = dict.fromkeys(SETUPS, ONE_ENGINE) | {  # script -> what is set
    "deepseek32b_lora_8gpu": {},  # as it is: on two ranks, with a stop and a resume
    "qwen25vl72b_lora_8xa100": {"STEPS": 1},  # images, one engine over two ranks, everything offloaded
    "tulu3.1_8b_grpo_8gpu": ONE_ENGINE | {"SERVERS": 1},
}


@pytest.mark.parametrize("name", SETUPS)
def test_a_script_runs_on_a_tiny_model(name, tmp_path):
    """Each with data of its own columns, a template and reward of its own. As a user starts it: test_main_job.py."""
    command, settings = ("scripts/smoke.sh", f"scripts/{name}.sh"), SMOKED[name]
    step, update = (SETUPS[name]["documented"].get(f"prompts_per_{part}") for part in ("step", "update"))
    fewer = {"prompts_per_step": 4, "prompts_per_update": 4 * (update or step) // step}  # in as many updates
    environment = settings | {"SMOKE_DIR": tmp_path, "OMP_NUM_THREADS": 1}  # more threads wait for each other
    shown = succeeded(as_user(run_script, *command, *command_line(fewer if step > 4 else {}), **environment)).stdout
    (run_dir,) = (tmp_path / name).glob("run_*")
    metrics, steps = metrics_of(run_dir), range(1, settings.get("STEPS", 2) + 1)
    assert [step for step in metrics if step] == [*steps] and ("continues from" in shown) is (len(steps) == 2)
    for step in steps:
        assert metrics[step]["optim/skipped_updates"] == 0 and metrics[step]["policy/rollout_gap_mean"] < 0.005
        assert 0 < metrics[step]["optim/lr"] <= SETUPS[name]["documented"]["learning_rate"]
        assert any(key.startswith("eval/") for key in metrics[step]), "evaluated after each start"
        assert (run_dir / f"step_{step}").exists()
    assert (run_dir / "final" / "model.safetensors").exists()
    assert json.loads((run_dir / "status.json").read_text())["now"] == f"stopped after step {steps[-1]}"
    if name == "qwen7b_simplerl_2x8xh100":
        assert "4 prompts x 8 = 32 completions a step, 4 updates a step, 257 steps an epoch, 100 steps in all" in shown


def planned(name: str, *flags: str, **settings: object) -> dict[str, object]:
    """What the script prints with --dry_run --json: `launch` gives the number of ranks, and the program plans."""
    num_nodes, num_ranks, given = launched(name, "--dry_run", "--json", *flags, **settings)
    command = ["train_grpo.py", *given, "--plan_gpus", str(num_nodes * num_ranks), "--plan_nodes", str(num_nodes)]
    with patch.object(sys, "argv", command), redirect_stdout(shown := StringIO()), pytest.raises(SystemExit) as ended:
        start()
    assert ended.value.code == 0, shown.getvalue()
    return json.loads(shown.getvalue())


@pytest.mark.parametrize("name", SETUPS)
def test_the_dry_run_of_a_set_up_fits_with_5_percent_to_spare(name):
    found = planned(name)
    assert found["fits"] and found["gpu_peak_gib"] <= 0.95 * found["gpu_capacity_gib"]
    planned_by_hand = SETUPS[name]["planned"]
    assert {key: found[key] for key in planned_by_hand} == planned_by_hand


def test_the_models_of_the_one_gpu_set_up_fit_as_documented():
    name = "qwen2.5_3b_gsm8k_lora_1gpu"
    (more,) = re.findall(r"7B fits 24 GB, .*\n.*with\n# +(--.*)\n", (ROOT / "scripts" / f"{name}.sh").read_text())
    small, middle = "RTX4090-24GB", "L40S-48GB"
    as_it_is = [("0.5B", small), ("1.5B", small), ("3B", small), ("3B", "H100-80GB"), ("7B", middle)]
    for size, gpu, flags in [*((*pair, "") for pair in as_it_is), ("7B", small, more)]:
        assert planned(name, "--plan_gpu", gpu, *flags.split(), MODEL=f"Qwen/Qwen2.5-{size}-Instruct")["fits"]


def test_the_data_of_a_script_have_its_prompt_and_columns(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"question": "What is {1}+1?", "answer": 2}\n')
    written = tmp_path / "new" / "aime2025.jsonl"
    with patch.object(sys, "argv", ["aime2025.py", "--sources", str(tmp_path / "in.jsonl"), "--output", str(written)]):
        aime2025.main()
    (row,) = lines(written)
    (message,) = row["source_prompt"]
    assert row["ground_truth"] == "2" and message["role"] == "user"
    assert message["content"].startswith("Solve the following math problem step by step. The last line of your")
    assert '\n\nWhat is {1}+1?\n\nRemember to put your answer on its own line after "Answer:"' in message["content"]
    (tmp_path / "in.jsonl").write_text('{"problem": "What is {1}+1?", "answer": "2"}\n')
    sources = [str(tmp_path / "in.jsonl")] * 2
    with patch.object(sys, "argv", ["math_speedrun.py", "--sources", *sources, "--out_dir", str(tmp_path / "new")]):
        math_speedrun.main()
    (train,), (test,) = (lines(tmp_path / "new" / f"{split}.jsonl") for split in ("train", "test"))
    assert train["answer"] == "2" and train["must_box"] and test == train | {"must_box": False}
    assert train["problem"].endswith("as:\n\\boxed{ANSWER}\n\nQuestion:\nWhat is {1}+1?\n\nAnswer:")


def test_a_task_of_sciknoweval_has_its_data_and_its_reward():
    given = {task: " ".join(launched("qwen3_8b_sciknoweval_4gpu", TASK=task)[2]) for task in ("materials", "tooluse")}
    assert "SDPO/datasets/sciknoweval/material@train" in given["materials"] and ":letter" in given["materials"]
    assert "SDPO/datasets/tooluse@train" in given["tooluse"] and "--system_prompt" not in given["tooluse"]
    assert ":tool_calls" in given["tooluse"] and "--total_steps 1000 " in given["tooluse"]


EVALUATIONS = sorted(path.stem for path in (ROOT / "scripts").glob("eval_*.sh"))
JOB_SCRIPTS = (
    "tiny_cpu", "tiny_turns_cpu", "tiny_ppo_cpu", "tiny_distill_cpu", "tiny_sdpo_cpu", "smollm2_cpu", "smoke",
)  # fmt: skip
KNOWN = {"train_grpo.py": {*FLAGS}, "evaluate.py": {x.name for group in evaluate.FLAGS.values() for x in group}}
TELLS = '() { printf "%s\\0" "$@"; printf "\\1"; }'  # in place of python


@pytest.mark.parametrize("name", [*SETUPS, *EVALUATIONS, *JOB_SCRIPTS])
def test_a_script_runs_from_the_users_folder_and_finds_its_files(name, tmp_path):
    """From another folder: what he types is his; programs and files that the script names are in the repository."""
    (tmp_path / "runs" / "tiny_cpu").mkdir(parents=True)
    (tmp_path / "runs" / "tiny_cpu" / "final").symlink_to(ROOT / "scripts" / "tiny_policy")
    environment = {name: os.environ[name] for name in ("PATH", "HOME")} | {"DEVICE": "cpu", "NNODES": "1"}
    environment |= {"CDPATH": str(ROOT), "BASH_FUNC_python%%": TELLS, "BASH_FUNC_exec%%": '() { "$@"; exit; }'}
    given = ["--reward", "my_reward.py:score", *([] if name in EVALUATIONS else ["--out_dir", "runs/x"])]
    script = [ROOT / "scripts" / f"{each}.sh" for each in ([name, "tiny_cpu"] if name == "smoke" else [name])]
    done = run_command(["bash", *map(str, script), *given], environment, tmp_path)
    assert done.returncode == 0 or name == "smoke", done.stderr
    commands = [command.split("\0")[:-1] for command in done.stdout.split("\1")[:-1]]
    for command in commands:
        paths = [part.partition(".py:")[0] for part in command if part.startswith("/") and part not in given]
        assert paths and all(Path(path).exists() or Path(f"{path}.py").exists() for path in paths)
        for place, program in enumerate(Path(part).name for part in command):
            given_flags = {part for part in command[place:] if part.startswith("--")}
            assert program not in KNOWN or given_flags <= KNOWN[program], "flags that exist"
        assert not [part for part in command if part.startswith(("scripts/", "docs/")) or part == "train_grpo.py"]
        out_dirs = [there for flag, there in itertools.pairwise(command) if flag == "--out_dir"]
        assert all(there.startswith("runs/") for there in out_dirs), "also by default"
    assert name == "smoke" or commands[-1][-len(given) :] == given


def test_a_run_reads_and_writes_in_the_users_folder(tmp_path):
    """A module of his has the name of one of ours. It ends by what his reward returns, before a model is loaded."""
    (tmp_path / "my_reward.py").write_text("from data import PAID\ndef score(completion):\n    return PAID\n")
    (tmp_path / "data.py").write_text("PAID = {'acc': 0.25}\n")
    command = ["bash", str(ROOT / "scripts" / "tiny_cpu.sh"), "--reward", "my_reward.py:score", "--out_dir", "runs/x"]
    done = run_command(command, ENVIRONMENT | {"NGPU": "1"}, tmp_path)
    assert done.returncode == 1 and "my_reward.py:score: score returned {'acc': 0.25}" in done.stderr, done.stderr
    assert (tmp_path / "runs" / "x" / "config.json").exists()
