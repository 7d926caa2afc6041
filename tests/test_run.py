"""The run folder: whose it is, the append-only log and what observers add to it, the clock, what describes a start."""

import errno
import hashlib
import json
import math
import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import run as run_module
import runtime.files
from fsdp_utils import World
from gate.checks import free_on_resume
from gate.digests import digest, samples_of
from gate.inputs import check_replayed
from helpers.made_up import flags
from helpers.runs import lines
from run import Observer, Run, open_run_folder
from runtime.files import DiskError
from runtime.history import read_metrics


def make_run(folder, *observers: Observer, rank: int = 0) -> Run:
    world = World(trainer_rank=rank, num_trainers=4, tp_size=1, device=torch.device("cpu"))
    return Run(folder, None, world, 10, {}, list(observers))


# Whose folder it is -------------------------------------------------------------------------------------------------


def opened(folder: Path, **changes: object) -> TextIO:
    args = flags(**changes)
    return open_run_folder(folder, vars(args), free_on_resume(args), {})


def refused(folder: Path, words: str, **changes: object) -> None:
    with pytest.raises(ValueError, match=words):
        opened(folder, **changes)


def test_a_full_disk_at_a_new_start_is_reported_with_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr("run.write", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(DiskError, match=r"config\.json could not be written: No space left on device .*; make room"):
        open_run_folder(tmp_path, {"out_dir": "x"}, set(), {})


@pytest.mark.parametrize("trace", ["metrics.jsonl", "step_20"])
@pytest.mark.parametrize(("given", "change", "said"), [
    ({}, {"group_size": 4}, "--group_size 8 there, 4 now"),
    ({"lr_schedule": "cosine"}, {"total_steps": 8}, "--total_steps 10 there, 8 now"),  # the rate depends on it
])  # fmt: skip
def test_a_folder_of_other_flags_is_left_alone_once_it_trained(trace, given, change, said, tmp_path):
    opened(tmp_path, group_size=16).close()
    (tmp_path / "starts.jsonl").write_text("{}\n")
    opened(tmp_path, **given).close()  # a first start may be corrected
    (tmp_path / trace).mkdir()
    before = (tmp_path / "config.json").read_bytes()
    refused(tmp_path, f"another configuration.*{said}.*another --out_dir", **given | change)
    assert (tmp_path / "config.json").read_bytes() == before
    may_change = {"save_every": 1, "micro_batch_tokens": 64, "eval_data": "more.jsonl", "eval_samples": 4}
    may_change |= {"after_step": "my.py:f"} | ({} if given else {"total_steps": 20})
    opened(tmp_path, **given | may_change).close()
    assert json.loads((tmp_path / "config.json").read_text())["save_every"] == 1, "of the last start"


THEN = {
    "model": "m", "reference": None, "train_data": ["a.jsonl", "b.jsonl#5"], "eval_data": [],
    "reward": "exact,my.py:f:.5", "policy_loss": "my.py:loss", "tools": None, "system_prompt": "p.txt",
}  # fmt: skip
HELD = {"--model": "1", "--system_prompt": "2", "a.jsonl": "3", "b.jsonl#5": "4", "my.py": "5", "helper.py": "6"}


def moved(change: dict[str, str]) -> dict[str, str]:
    return {change.get(name, name): digest for name, digest in HELD.items()}


SAME = [  # flags and inputs under which the run of `THEN` and `HELD` continues
    ({"model": "/elsewhere/m/"}, HELD),
    ({"train_data": ["x/a.jsonl", "/y/c.jsonl#5"]}, moved({"a.jsonl": "x/a.jsonl", "b.jsonl#5": "/y/c.jsonl#5"})),
    ({"reward": "exact,x/my.py:f:.5", "policy_loss": "x/my.py:loss"},
     moved({"my.py": "x/my.py", "helper.py": "x/helper.py"})),
    ({"reward": "exact,./my.py:f:.5"}, HELD),
    ({"system_prompt": "q.txt"}, HELD),
]  # fmt: skip
OTHER = [  # and is refused, with the words of the sentence
    ({"model": "other"}, HELD | {"--model": "9"}, "--model 'm' there, 'other' now"),
    ({"train_data": ["b.jsonl#5", "a.jsonl"]}, HELD, "--train_data .* there, "),
    ({"train_data": ["x/a.jsonl", "b.jsonl#5"]}, moved({"a.jsonl": "x/a.jsonl"}) | {"x/a.jsonl": "9"}, "--train_data"),
    ({"eval_data": ["a.jsonl"]}, HELD, "--eval_data"),
    ({"reward": "exact,my.py:g:.5"}, HELD, "--reward"),
    ({"reward": "exact:1.5,my.py:f:.5"}, HELD, "--reward 'exact,my.py:f:.5' there, 'exact:1.5,my.py:f:.5' now"),
    ({"reward": "my.py:f:.5,exact"}, HELD, "--reward"),  # the first one says what is correct
    ({"reward": "exact,x/my.py:f:.5"}, moved({"my.py": "x/my.py"}) | {"x/my.py": "9"}, "--reward"),
    ({"reward": "exact,x/my.py:f:.5", "policy_loss": "x/my.py:loss"},
     moved({"my.py": "x/my.py", "helper.py": "x/helper.py"}) | {"x/helper.py": "9"}, "^helper.py: not the same"),
    ({"system_prompt": "q.txt"}, HELD | {"--system_prompt": "9"}, "--system_prompt"),
    ({}, HELD | {"--model": "9"}, "^--model: not the same.*delete .*inputs.json if"),
    ({}, HELD | {"a.jsonl": "9"}, "^a.jsonl: not the same"),
    ({}, HELD | {"helper.py": "9"}, "^helper.py: not the same"),
    ({"tools": "my.py:f"}, HELD, "--tools None there, 'my.py:f' now"),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "inputs", "said"), [*((*each, "") for each in SAME), *OTHER])
def test_paths_are_compared_by_what_they_hold(flags, inputs, said, tmp_path):
    """Twice, because the next start is compared with the last one. Without inputs.json a run continues on others."""
    config = {"out_dir": str(tmp_path)} | THEN
    open_run_folder(tmp_path, config, set(), HELD | {"my.py": "9"}).close()  # nothing was trained on it yet
    open_run_folder(tmp_path, config, set(), HELD).close()
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    for _ in range(2):
        if said:
            with pytest.raises(ValueError, match=said):
                open_run_folder(tmp_path, config | flags, {"out_dir"}, inputs)
        else:
            open_run_folder(tmp_path, config | flags, {"out_dir"}, inputs).close()
    open_run_folder(tmp_path, config, {"out_dir"}, HELD).close()
    (tmp_path / "inputs.json").unlink()
    open_run_folder(tmp_path, config, {"out_dir"}, HELD | {"a.jsonl": "9"}).close()


def test_a_run_continues_that_is_older_than_some_flags(tmp_path):
    opened(tmp_path).close()
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    config = json.loads((tmp_path / "config.json").read_text())
    del config["stop_tokens"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"on_bad_update": "rollback"}))
    opened(tmp_path).close()
    refused(tmp_path, r"--stop_tokens \[\] there, \['x'\] now", stop_tokens="x")


def test_folders_of_something_else_are_refused(tmp_path):
    for name, content in {"thesis.tex": "precious", "config.json": '{"model_type": "qwen2"}'}.items():
        file = tmp_path / name.partition(".")[0] / name
        file.parent.mkdir()
        file.write_text(content)
        refused(file.parent, rf"holds {name} but no config.json of a run; choose another")
        assert file.read_text() == content
        assert [path.name for path in file.parent.iterdir()] == [name], "not even a .lock is left"
    refused(file / "run", "cannot be written")


def test_two_runs_cannot_share_a_folder_and_the_second_names_the_first_or_waits(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runtime.files, "LOCK_SECONDS", 0.5)
    monkeypatch.setattr(sys, "argv", ["train_grpo.py", "--seed", "1"])
    lock = opened(tmp_path)
    for _ in range(2):  # whoever is refused leaves the name as it is
        refused(tmp_path, f"in use by process {os.getpid()} on .*, since .*: train_grpo.py --seed 1; end that")
    assert capsys.readouterr().out.count("waiting up to 0.5 s for its end") == 2
    lock.close()
    opened(tmp_path).close()
    lock = opened(tmp_path)
    with subprocess.Popen(["sleep", "60"], close_fds=False) as child:
        threading.Timer(0.5, lock.close).start()
        opened(tmp_path).close()
        assert child.poll() is None, "it lives and holds nothing"
        child.kill()


# The records --------------------------------------------------------------------------------------------------------


def test_a_start_is_described_with_its_code_and_hardware(tmp_path, monkeypatch):
    run, patches = make_run(tmp_path), ["+changed\r\n", ""]
    monkeypatch.setattr(run_module, "_git", lambda what, *_: "abc\n" if what == "rev-parse" else patches.pop(0))
    for resumed_from in (4, 8):
        run.describe_start(resumed_from)
    first, second = lines(tmp_path / "starts.jsonl")
    assert (first["resumed_from"], first["commit"]) == (4, "abc")
    assert (second["resumed_from"], second["patch"]) == (8, None)
    assert first["packages"]["numpy"] == np.__version__
    assert {"time", "command", "world_size", "tensor_parallel_size", "device", "cores", "python"} <= first.keys()
    assert [*tmp_path.glob("changes_*.patch")] == [tmp_path / first["patch"]]
    assert (tmp_path / first["patch"]).read_bytes() == b"+changed\r\n"
    monkeypatch.undo()  # and without git there is no commit, and no error
    monkeypatch.setattr(run_module, "__file__", str(tmp_path / "run.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert run_module._git("rev-parse", "HEAD") == ""
    monkeypatch.setenv("PATH", "")
    assert run_module._git("rev-parse", "HEAD") == ""


def test_a_resume_says_that_the_code_has_changed(tmp_path, monkeypatch, capsys):
    """Commit or uncommitted changes; not where both are the same, nor at the first start."""
    run, code, folder = make_run(tmp_path), {}, tmp_path
    monkeypatch.setattr(run_module, "_git", lambda what, *_: code[what])
    said = []
    for commit, changes in (("a", ""), ("a", ""), ("b", ""), ("b", "+x"), ("b", "+x"), ("b", "+y"), ("b", "")):
        code |= {"rev-parse": f"{commit}\n", "diff": changes}
        run.describe_start(2)
        said.append(capsys.readouterr().out)
    x, y = (f"changes_{hashlib.sha256(text).hexdigest()[:10]}.patch" for text in (b"+x", b"+y"))
    form = "warning: the code has changed since the last start: commit {}, {}; now commit {}, {}\n"
    assert said == [
        "", "", form.format("a", "no changes", "b", "no changes"),
        form.format("b", "no changes", "b", x), "", form.format("b", x, "b", y), form.format("b", y, "b", "no changes"),
    ]  # fmt: skip
    (folder / "starts.jsonl").write_text('{"time": "T7", "commit"}\n')  # damaged: it is not needed
    run.describe_start(2)
    assert capsys.readouterr().out == "" and len((folder / "starts.jsonl").read_text().splitlines()) == 2


def test_a_reward_file_unknown_to_git_is_in_the_patch(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "my_reward.py").write_text("def score(completion):\n    return 0.5\n")
    monkeypatch.chdir(tmp_path)
    inputs = {"--model": "0a1b", "owner/name@train": "2c3d", "mine/my_reward.py": "4e5f"}
    run = make_run(tmp_path)
    run.inputs = inputs
    run.describe_start(0)
    (patch,) = tmp_path.glob("changes_*.patch")
    (tmp_path / "elsewhere").mkdir()
    subprocess.run(["git", "apply", "--include=my_reward.py", patch], cwd=tmp_path / "elsewhere", check=True)
    assert (tmp_path / "elsewhere" / "my_reward.py").read_text().endswith("return 0.5\n")
    monkeypatch.setattr(run_module, "_git", lambda what, *_, **__: "my_reward.py\n" if what == "ls-files" else "+")
    assert run_module._own_files(inputs) == "", "git knows it"


def test_the_log_is_append_only_and_ends_all_ranks_where_it_cannot_be_written(tmp_path, monkeypatch):
    before = '{"step": 1, "reward/mean": 0.1}\n{"step": 2, "rewa'  # a run was killed in mid-line
    (tmp_path / "metrics.jsonl").write_text(before)
    run = make_run(tmp_path)
    for step, reward in ((1, 0.2), (2, math.nan)):
        run.log(step, {"reward/mean": reward})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert text.startswith(before + "\n") and len(text.splitlines()) == 4
    found = [(record["step"], record["reward/mean"]) for record in read_metrics(tmp_path)]
    assert found == [(1, 0.2), (2, None)], "nan is no JSON"
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").mkdir()  # a file that nobody can write
    with pytest.raises(DiskError, match="metrics.jsonl could not be written: Is a directory .*; make room, and"):
        run.log(1, {})
    monkeypatch.setattr(run_module, "broadcast_from_main", lambda own: own or "metrics.jsonl could not be written")
    with pytest.raises(DiskError, match="metrics.jsonl could not be written"):
        make_run(tmp_path, rank=1).log(1, {})


class Witness(Observer):
    """Notes what it sees; says what it is told to."""

    def __init__(self, *answers: object) -> None:
        self.answers, self.seen = list(answers), []

    @contextmanager
    def phase(self, name, step):
        self.seen.append(f"{name} {step}")
        yield
        self.seen.append(f"end of {name}")

    def step(self, step, metrics):
        self.seen.append(dict(metrics))
        return self.answers.pop(0)

    def recall(self, step, metrics):
        self.seen.append((step, metrics))
        return self.answers.pop(0)

    def end(self, how):
        self.seen.append(how)


def test_observers_add_to_the_line_and_the_later_ones_see_it(tmp_path):
    first, second = Witness({"mine/a": 1.0}, None), Witness(None, "stop")
    run = make_run(tmp_path, first, second)
    with run.observed("load"):
        pass
    assert run.times() == {"time/step_s": 0.0}, "no clock runs yet"
    for step in run.steps(1, 9):
        run.log(step, {"reward/mean": 0.5, "time/step_s": 2.0})
    run.end("stopped after step 2")
    step = {"reward/mean": 0.5, "time/step_s": 2.0}
    assert first.seen == ["load 0", "end of load", step, step, "stopped after step 2"]
    assert second.seen[2:4] == [step | {"mine/a": 1.0}, step]
    assert run.is_last and read_metrics(tmp_path) == [{"step": 1, "mine/a": 1.0} | step, {"step": 2} | step]


def test_a_continued_run_recalls_its_lines(tmp_path):
    text = [json.dumps({"step": step, "x": None if step == 2 else 1.0}) for step in (0, 1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(text) + "\n")
    witness = Witness("stop", None)
    run = make_run(tmp_path, witness)
    run.recall(2)
    assert [step for step, _ in witness.seen] == [1, 2] and math.isnan(witness.seen[1][1]["x"])
    assert run.is_stopped


# The clock ----------------------------------------------------------------------------------------------------------


def test_phases_add_up_and_start_afresh_each_step(tmp_path):
    run = make_run(tmp_path)
    for step in run.steps(1, 2):
        for _ in range(2):
            with run.phase("sample"), run.phase("reward"):
                pass
        run.log(step, {"reward/mean": 0.5})
    first, second = read_metrics(tmp_path)
    assert first.keys() == second.keys() == {"step", "time/sample_s", "time/reward_s", "time/step_s", "reward/mean"}
    assert 0 <= first["time/sample_s"] + first["time/reward_s"] <= first["time/step_s"]
    assert run.times().keys() == {"time/step_s"}


def test_a_replay_wants_the_weights_of_its_run(tmp_path):
    file, content = tmp_path / "model.safetensors", bytearray(os.urandom(300_000))
    file.write_bytes(content)
    before = digest(samples_of(file))
    (tmp_path / "inputs.json").write_text(json.dumps({"--model": before}))
    check_replayed(flags(replay=tmp_path), {"--model": digest(samples_of(file))})
    content[200_000] ^= 1
    file.write_bytes(content)
    check_replayed(flags(), {"--model": digest(samples_of(file))})
    with pytest.raises(ValueError, match="began with other weights than --model"):
        check_replayed(flags(replay=tmp_path), {"--model": digest(samples_of(file))})
