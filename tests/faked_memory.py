"""What torch says of the memory of a GPU that is not there."""

import pytest
import torch

GIB = 2**30


class FakeGpu:
    """The device's counters. torch's own figures also hold what a sleeping engine has given back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.total, self.other, self.engine, self.asleep = 80 * GIB, 2 * GIB, 0, 0
        self.reserved = self.reserved_peak = self.allocated_peak = 0
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (self.total - self.taken, self.total))
        monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {
            "reserved_bytes.all.peak": self.reserved_peak + self.engine,
            "reserved_bytes.all.current": self.reserved + self.engine,
            "allocated_bytes.all.peak": self.allocated_peak + self.engine,
        })  # fmt: skip

    @property
    def taken(self) -> int:
        return self.other + self.reserved + self.engine - self.asleep
