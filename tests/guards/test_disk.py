"""Records on a disk that refuses them for a while: no line is lost, none is cut."""

import errno
import json

import pytest

from guards.disk import DiskError, Records, append, cause, tolerated
from helpers import largest_file

LINE = json.dumps({"text": "x" * 30_000}) + "\n"


def test_lines_that_a_full_disk_refuses_are_written_later_in_order_and_whole(tmp_path, capsys):
    records = Records(tmp_path)
    with largest_file(100_000):
        for number in range(5):
            records.append("log.jsonl", f"{number}{LINE}")
        kept = (tmp_path / "log.jsonl").read_text()
        assert [line[0] for line in kept.splitlines()] == ["0", "1", "2"] and kept.endswith("\n"), "no half line"
        with pytest.raises(DiskError, match=r"not everything could be written to .*log.jsonl \(.*GiB are free"):
            records.finish()
    records.append("log.jsonl", f"5{LINE}")
    assert (tmp_path / "log.jsonl").read_text().splitlines() == [f"{number}{LINE}"[:-1] for number in range(6)]
    records.finish()
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1 and "log.jsonl: File too large; what is missing is written later" in said[0]


def test_a_whole_file_that_is_refused_leaves_the_old_one(tmp_path):
    records = Records(tmp_path) / "eval" / "step_2"
    records.replace("a.jsonl", "old")
    with largest_file(20_000):
        records.replace("a.jsonl", LINE)
        records.replace("b.jsonl", "small")  # what fits is written
        assert (records.folder / "a.jsonl").read_text() == "old"
    assert sorted(path.name for path in records.folder.iterdir()) == ["a.jsonl", "b.jsonl"]
    Records(tmp_path, records.waiting).finish()
    assert (records.folder / "a.jsonl").read_text() == LINE


def test_after_a_line_that_a_kill_cut_off_a_new_one_begins(tmp_path):
    (tmp_path / "log.jsonl").write_bytes(b'{"step": 1}\n{"st')
    append(tmp_path / "log.jsonl", b'{"step": 2}\n')
    assert (tmp_path / "log.jsonl").read_bytes() == b'{"step": 1}\n{"st\n{"step": 2}\n'


def test_what_a_run_can_miss_is_told_and_other_mistakes_are_raised(capsys):
    with tolerated("curves.png"):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")
    assert "warning: curves.png could not be written: Disk quota exceeded" in capsys.readouterr().out
    with pytest.raises(ZeroDivisionError), tolerated("curves.png"):
        raise ZeroDivisionError


def test_the_reason_of_the_system_is_found_below_that_of_a_library():
    try:
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError:
            raise RuntimeError("unexpected pos 704 vs 598")  # noqa: B904
    except RuntimeError as error:
        assert cause(error) == "No space left on device"
    assert cause(RuntimeError("first line\nsecond")) == "first line"
