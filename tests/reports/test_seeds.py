"""scripts/seeds.sh, with launch scripts that do nothing but tell how they were started."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from helpers.runs import GUARD_SECONDS, ROOT, run_command, wait_for

SETUPS = sorted(x.stem for x in ROOT.glob("scripts/*.sh") if '/launch.sh"' in x.read_text())
TELLS = 'echo "$SEED $OUT_DIR $*" >> started\n'


def place(folder: Path, script: str = TELLS) -> None:
    """A repository with seeds.sh and this launch script; the user stands in its root."""
    (folder / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "seeds.sh", folder / "scripts")
    (folder / "scripts" / "my_run.sh").write_text(script)


def seeds(folder: Path, *arguments: str, **environment: str) -> tuple[int, str]:
    without = {name: value for name, value in os.environ.items() if name != "OUT_DIR"}
    done = run_command(["bash", "scripts/seeds.sh", *arguments], without | environment, folder)
    return done.returncode, done.stderr + done.stdout


def started(folder: Path) -> list[str]:
    return (folder / "started").read_text().splitlines()


def test_each_seed_runs_in_its_own_folder_with_the_users_flags(tmp_path):
    place(tmp_path)
    status, said = seeds(tmp_path, "3", "scripts/my_run.sh", "--group_size", "4 x")
    assert status == 0 and "seeds 1 to 3 are done: runs/my_run_seed1 runs/my_run_seed2 runs/my_run_seed3" in said
    assert started(tmp_path) == [f"{seed} runs/my_run_seed{seed} --group_size 4 x --seed {seed}" for seed in (1, 2, 3)]
    seeds(tmp_path, "1", "scripts/my_run.sh", OUT_DIR="runs/other")
    assert started(tmp_path)[-1] == "1 runs/other_seed1 --seed 1"


def test_a_seed_that_fails_stops_no_other_and_is_named(tmp_path):
    place(tmp_path, TELLS + '[ "$SEED" != 2 ] || exit 7\n')
    status, said = seeds(tmp_path, "3", "scripts/my_run.sh")
    assert status == 1 and len(started(tmp_path)) == 3
    assert "seed 2 failed with exit status 7" in said and "of 3 seeds these failed: 2." in said


def test_a_task_of_a_slurm_array_runs_the_seed_of_its_number(tmp_path):
    place(tmp_path, TELLS + "exit 5\n")
    status, said = seeds(tmp_path, "3", "scripts/my_run.sh", SLURM_ARRAY_TASK_ID="2")
    assert status == 5, "the run's own"
    assert started(tmp_path) == ["2 runs/my_run_seed2 --seed 2"] and "seed 2 is that of this array task" in said
    status, said = seeds(tmp_path, "3", "scripts/my_run.sh", SLURM_ARRAY_TASK_ID="4")
    assert status == 2 and "use --array=1-3" in said


def test_a_signal_ends_the_run_and_the_seeds_after_it(tmp_path):
    place(tmp_path, "trap 'echo saved >> started; exit 0' TERM\n" + TELLS + "while true; do sleep 0.1; done\n")
    command = ["bash", str(tmp_path / "scripts" / "seeds.sh"), "3", "scripts/my_run.sh"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    wait_for((tmp_path / "started").exists)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=GUARD_SECONDS)
    assert process.returncode == 0 and "the same command continues" in said
    assert started(tmp_path) == ["1 runs/my_run_seed1 --seed 1", "saved"]


def test_mistakes_are_told_in_a_sentence(tmp_path):
    place(tmp_path)
    for arguments, sentence in {
        "scripts/my_run.sh": "how many seeds?", "3": "which script?", "3 scripts/none.sh": "scripts/none.sh is not",
        "3 scripts/my_run.sh --seed 7": "--seed is set here for each seed",
        "3 scripts/my_run.sh --out_dir=x": "--out_dir=x is set here for each seed",
    }.items():  # fmt: skip
        status, said = seeds(tmp_path, *arguments.split())
        assert status == 2 and said.startswith(f"error: {sentence}"), arguments
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize("name", SETUPS)
def test_every_launch_script_takes_seed_and_folder(tmp_path, name):
    place(tmp_path, "")
    shutil.copy(ROOT / "scripts" / f"{name}.sh", tmp_path / "scripts")
    (tmp_path / "scripts" / "smollm2.py").touch()  # makes the data of the job of that name
    launch = 'launch() { echo "$@" | tr "\\n" " " >> started; echo >> started; }\n'
    (tmp_path / "scripts" / "launch.sh").write_text("NUM_GPUS=0 REPO=\n" + launch)
    assert seeds(tmp_path, "1", f"scripts/{name}.sh", POLICY=".")[0] == 0, "with a policy that is there"
    (run,) = map(str.split, started(tmp_path))
    last = dict(zip(run, run[1:], strict=False))
    assert (last["--out_dir"], last["--seed"]) == (f"runs/{name}_seed1", "1")
