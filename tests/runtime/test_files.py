"""Files on a disk that refuses them: whole or not at all, told once, or the end of the run."""

import errno
import json

import pytest

from helpers.runs import largest_file
from runtime.files import DiskError, append, best_effort, cause, checkpoints, must_write, numbered, write

LINE = json.dumps({"text": "x" * 30_000}) + "\n"


def test_a_refused_line_that_must_be_written_ends_the_run(tmp_path):
    file = tmp_path / "metrics.jsonl"
    with largest_file(100_000):
        for number in range(3):
            append(file, f"{number}{LINE}")
        sentence = r"metrics.jsonl could not be written: File too large \(.*GiB are free in .*\); make room, and"
        with pytest.raises(DiskError, match=sentence), must_write(file):
            append(file, f"3{LINE}")
    assert file.read_text() == "".join(f"{number}{LINE}" for number in range(3))
    append(file, f"4{LINE}")
    with file.open("a") as cut_off:  # by a kill
        cut_off.write('{"st')
    append(file, "5\n")
    assert [line[:4] for line in file.read_text().splitlines()[3:]] == ['4{"t', '{"st', "5"]


def test_a_refused_whole_file_leaves_the_old_one_alone(tmp_path):
    write(tmp_path / "a.jsonl", "old")
    with largest_file(20_000):
        with pytest.raises(OSError, match="File too large"):
            write(tmp_path / "a.jsonl", LINE)
        write(tmp_path / "b.jsonl", "small \udc80")  # what fits is written, also half of a character
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert found == {"a.jsonl": "old", "b.jsonl": "small \\udc80"}


STRAY = ("step_5_copy", "step_5 (1)", "step_x", "step_", "step_05", "step_-1", "step_²", "step_5.bak", "my_step_9")


def test_copies_and_other_files_of_somebody_are_no_steps(tmp_path):
    (tmp_path / "rollouts").mkdir()
    for name in (*STRAY, "step_10", "step_9", "step_0"):
        (tmp_path / name).mkdir()
        (tmp_path / "rollouts" / f"{name}.parquet").write_bytes(b"")
    (tmp_path / "rollouts" / "step_3.parquet.tmp").write_bytes(b"")
    assert checkpoints(tmp_path) == [(step, tmp_path / f"step_{step}") for step in (0, 9, 10)]
    assert [*numbered(tmp_path / "rollouts", ".parquet")] == [0, 9, 10]


def test_what_a_run_can_miss_is_reported_once(tmp_path, capsys):
    for name in ("a.png", "a.png", "b.png"):
        with best_effort(str(tmp_path / name), ValueError):
            raise ValueError("damaged") if name == "b.png" else OSError(errno.EDQUOT, "Disk quota exceeded")
    assert capsys.readouterr().out.splitlines() == [
        f"warning: {tmp_path}/{name} could not be written: {why}; the run continues without."
        for name, why in (("a.png", "Disk quota exceeded"), ("b.png", "damaged"))
    ]
    with pytest.raises(ZeroDivisionError), best_effort("c.png"):
        raise ZeroDivisionError


def test_the_systems_reason_is_found_below_a_librarys():
    error = RuntimeError("unexpected pos 704 vs 598\nsecond line")
    assert cause(error) == "unexpected pos 704 vs 598"
    error.__context__ = OSError(errno.ENOSPC, "No space left on device")  # as of what is raised in an `except`
    assert cause(error) == "No space left on device"
