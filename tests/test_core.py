"""The borders: without the rooms that may be deleted it still trains; and no number rises."""

import ast
import json
import re
import shutil
from pathlib import Path

import pytest

from density import NEVER_ENTERED, closure, crossings, files, imports_of, measured, never_entered
from helpers.runs import ROOT, metrics_of, run_copy, torchrun, without_times

POLICY = ROOT / "scripts" / "tiny_policy"
FLAGS = f"""--model {POLICY} --train_data {POLICY}/train.jsonl --max_prompt_tokens 16 --max_completion_tokens 48
    --prompts_per_step 16 --prompts_per_update 8 --kl_coef 0.001 --learning_rate 3e-4 --lr_schedule linear
    --total_steps 6 --stop_after 2""".split()
NUMBERS = Path(__file__).with_name("core_numbers.json")


def trained(folder: Path, program: str, *flags: str) -> str:
    """What the program of this folder has printed, on one rank."""
    done = run_copy(folder, program, *flags, *FLAGS)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> list[dict[str, float]]:
    """What two steps of train_grpo.py compute in the whole tree."""
    out_dir = tmp_path_factory.mktemp("whole") / "run"
    torchrun(1, "train_grpo.py", *FLAGS, "--out_dir", out_dir, OMP_NUM_THREADS="1")
    return [*map(without_times, metrics_of(out_dir).values())]


def copied(folder: Path, modules: set[str]) -> Path:
    """The folder with these modules, the launcher and what it imports, the tables beside the code."""
    launcher = ROOT / "scripts" / "launch.py"
    needed = set().union(*map(closure, imports_of(ast.parse(launcher.read_text()).body)))
    sources = [launcher, *(files()[module] for module in modules | needed)]
    for source in [*sources, *(ROOT / "runtime").glob("*.json")]:
        target = folder / source.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> tuple[str, dict[str, int]]:
    """What minimal.py says with nothing but what it imports, and the nodes of each function that it never enters."""
    folder = copied(tmp_path_factory.mktemp("alone"), closure("minimal"))
    shutil.copy(ROOT / "scripts" / "entered.py", folder / "scripts")
    said = trained(folder, "scripts/entered.py", f"{folder}/entered.json", "minimal.py", "--out_dir", "-")
    return said, never_entered(json.loads((folder / "entered.json").read_text()))


def test_what_minimal_imports_trains_alone(whole, alone):
    """Two steps have the rewards, losses and norms of the whole tree."""
    said, _ = alone
    form = r"^step \d/6 \| reward (\S+) \| advantage \S+ \| loss (\S+) \| grad (\S+) \| gap \S+$"
    steps = re.findall(form, said, flags=re.MULTILINE)
    expected = [[step[name] for name in ("reward/mean", "policy/loss", "optim/grad_norm")] for step in whole]
    assert [[float(number) for number in step] for step in steps] == expected and len(whole) == 2


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """The program without extras/, plan/ and reports/."""
    folder, gone = tmp_path_factory.mktemp("tree"), ("extras.", "plan.", "reports.")
    return copied(folder, {name for name in files() if not f"{name}.".startswith(gone)})


def test_train_grpo_trains_without_extras_plan_and_reports(whole, tree, tmp_path):
    trained(tree, "train_grpo.py", "--out_dir", str(tmp_path / "run"))
    assert [*map(without_times, metrics_of(tmp_path / "run").values())] == whole


@pytest.mark.parametrize(("flags", "folder"), [
    ("--lora_rank 4", "extras/models"), ("--image_column images", "extras/models"),
    ("--router_replay", "extras/models"), ("--policy_loss gspo_token", "extras/losses"),
    ("--kl_over vocabulary --kl_coef 1", "extras/teacher"), ("--hint_column @group --kl_coef 1", "extras/teacher"),
    ("--partial_rollouts --rollout_correction none", "extras/samplers"), ("--drop_solved 0.9", "extras/samplers"),
    ("--tools docs/environments/calculator.py:calculator", "extras/turns"), ("--template_args a=b", "extras/sources"),
    ("--engine server --generation_gpus 0", "extras/servers"), ("--dry_run", "plan"),
    ("--critic policy", "extras/critic"),
])  # fmt: skip
def test_a_flag_that_needs_a_part_says_which_folder_is_missing(flags, folder, tree, tmp_path):
    done = run_copy(tree, "train_grpo.py", *FLAGS, "--out_dir", str(tmp_path / "run"), *flags.split())
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert flags.split()[0] in done.stderr and done.stderr.endswith(f": the folder {folder} is missing.\n")


def test_the_core_imports_no_room_when_it_loads():
    assert crossings() == []


def test_no_number_rises(alone):
    """Each is lowered when it has fallen by 2 %. A new capability is paid for in its own room."""
    allowed, (_, missed) = json.loads(NUMBERS.read_text()), alone
    found = measured() | {NEVER_ENTERED: sum(missed.values())}  # by scripts/density.py
    assert found.keys() == allowed.keys()
    assert {name: number for name, number in found.items() if number > allowed[name]} == {}
    assert {name: number for name, number in found.items() if number < 0.98 * allowed[name]} == {}, "lower these"
