"""Bars of bytes, on a terminal of our own."""

import io
import re
import sys
import time

import pytest

from guards import progress as module
from guards.progress import OFF, moving


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("num_bytes", "low", "high"), [(4_000_000, 65, 77), (2_400_000, 100, 100)])
def test_a_bar_follows_the_bytes_and_more_than_expected_fill_it(num_bytes, low, high, tmp_path, monkeypatch):
    """Files of 3 MB are written. The last look is a little before their end."""
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.2)
    monkeypatch.delenv(OFF, raising=False)
    monkeypatch.setenv("RANK", "0")
    with moving("write", num_bytes):
        for i in range(30):
            (tmp_path / f"{i}").write_bytes(b"\0" * 100_000)
            time.sleep(0.1)
    shown = terminal.getvalue()
    assert "write:" in shown and f"/{num_bytes / 1e6:.2f}M [" in shown and "B/s" in shown
    shares = [int(share) for share in re.findall(r"(\d+)%", shown)]
    assert shares == sorted(shares) and low <= shares[-1] <= high
