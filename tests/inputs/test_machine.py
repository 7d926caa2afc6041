"""The launch fits the machine, or is refused; what a machine announces but cannot do is left alone."""

import os
import signal

import pytest
import torch

from inputs.machine import avoid_broken_amx, check_launch


def test_more_visible_gpus_than_ranks_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    with pytest.raises(
        ValueError, match="8 GPUs are visible but the world size is 1: start it with the script or torchrun"
    ):
        check_launch(tp_size=1, dtype="bfloat16")
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    check_launch(tp_size=4, dtype="bfloat16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")
    with pytest.raises(ValueError, match="16 processes were started on this node but only 8 GPUs"):
        check_launch(tp_size=4, dtype="bfloat16")


@pytest.mark.parametrize(("status", "is_avoided"), [(signal.SIGILL, True), (0, False)])
def test_amx_is_avoided_exactly_where_a_child_that_uses_it_dies(status, is_avoided, monkeypatch):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "restored after the test")
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    monkeypatch.setattr(os, "fork", lambda: 12345)
    monkeypatch.setattr(os, "waitpid", lambda pid, options: (pid, int(status)))
    avoid_broken_amx()
    assert torch.cpu._is_amx_tile_supported() is not is_avoided
    assert os.environ.get("ONEDNN_MAX_CPU_ISA") == ("AVX512_CORE_BF16" if is_avoided else None)
