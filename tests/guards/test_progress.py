"""Bars of bytes, on a terminal of our own."""

import io
import re
import sys
import time

from guards import progress as module
from guards.progress import OFF, moving


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def bar_of(monkeypatch, folder, num_bytes: int) -> str:
    """What the terminal shows while files of 3 MB are written, of so many expected bytes."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.2)
    monkeypatch.delenv(OFF, raising=False)
    monkeypatch.setenv("RANK", "0")
    with moving("write", num_bytes):
        for i in range(30):
            (folder / f"{i}").write_bytes(b"\0" * 100_000)
            time.sleep(0.1)
    return terminal.getvalue()


def test_a_bar_follows_the_bytes_and_says_how_long_it_takes(tmp_path, monkeypatch):
    shown = bar_of(monkeypatch, tmp_path, 4_000_000)
    assert "write:" in shown and "/4.00M [" in shown and "B/s" in shown
    shares = [int(share) for share in re.findall(r"(\d+)%", shown)]
    assert shares == sorted(shares) and 65 <= shares[-1] <= 77, "3 of 4 MB, at the last look"


def test_more_bytes_than_expected_fill_it_and_no_more(tmp_path, monkeypatch):
    shown = bar_of(monkeypatch, tmp_path, 2_400_000)
    assert "100%" in shown and "2.40M/2.40M" in shown
