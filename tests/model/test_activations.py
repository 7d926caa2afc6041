"""Activations on the host: what goes there, when it comes back, and that no memory is used while it is copied."""

import weakref

import pytest
import torch
from torch import Tensor

from batch import pack
from helpers import RAGGED, make_rollout
from model import activations
from model.activations import Offload, Streams, activations_on_host
from policy import load_policy


class Late:
    """Streams as late as they may be: a copy is made when it is waited for. Until then, its tensors must be alive."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.copies: list[tuple[weakref.ref, weakref.ref]] = []

    def copy(self, source: Tensor, target: Tensor) -> int:
        target.fill_(torch.nan)
        self.copies.append((weakref.ref(source), weakref.ref(target)))
        self.log.append(f"start {len(self.copies) - 1}")
        return len(self.copies) - 1

    def wait(self, copied: int) -> None:
        source, target = (tensor() for tensor in self.copies[copied])
        target.copy_(source)
        self.log.append(f"wait {copied}")


def passes(streams: Late | Streams) -> tuple[Tensor, weakref.ref]:
    """The gradient of sin(sin(sin(x))), which saves three tensors, and what was responsible for them."""
    offload, x = Offload(streams), torch.linspace(0, 1, 5, requires_grad=True)
    log = getattr(streams, "log", [])
    with torch.autograd.graph.saved_tensors_hooks(offload.pack, offload.unpack):
        y = x.sin()
        y.register_hook(lambda _: log.append("gradient of y"))
        z = y.sin()
        z.register_hook(lambda _: log.append("gradient of z"))
        out = z.sin().sum()
    del y, z
    offload.finish()
    log.append("backward")
    out.backward()
    return x.grad, weakref.ref(offload)


def test_copies_are_waited_for_before_their_memory_is_used_and_the_next_one_comes_while_one_is_used():
    streams = Late()
    found, offload = passes(streams)
    assert streams.log == [
        "start 0", "wait 0", "start 1", "wait 1", "start 2", "wait 2",  # x, y, z go
        "backward",
        "start 3", "wait 3", "start 4", "gradient of z",  # z comes, and y after it
        "wait 4", "start 5", "gradient of y",
        "wait 5",
    ]  # fmt: skip
    x = torch.linspace(0, 1, 5, requires_grad=True)
    x.sin().sin().sin().sum().backward()
    assert found.equal(x.grad)
    assert offload() is None, "nothing is kept after the backward pass"
    assert [tensor() for copy in streams.copies for tensor in copy] == [None] * 12


def test_what_came_and_is_not_used_is_waited_for_before_it_is_freed():
    streams, x = Late(), torch.linspace(0, 1, 5, requires_grad=True)
    offload = Offload(streams)
    with torch.autograd.graph.saved_tensors_hooks(offload.pack, offload.unpack):
        unused, out = x.sin(), x.cos()
    offload.finish()
    out.sum().backward()
    assert streams.log[-3:] == ["start 2", "wait 2", "start 3"], "the cosine's; and the sine's, which nobody needs"
    del unused, out, offload
    assert streams.log[-1] == "wait 3"


def test_a_forward_pass_that_fails_leaves_nothing_behind():
    """An update that is out of memory, say, while its caller goes on with another one."""
    offload, x = Offload(Late()), torch.linspace(0, 1, 5, requires_grad=True)
    with pytest.raises(MemoryError), torch.autograd.graph.saved_tensors_hooks(offload.pack, offload.unpack):
        y = x.sin().sin()
        raise MemoryError
    found = weakref.ref(offload)
    del y, offload
    assert found() is None


def test_the_stream_for_copies_begins_after_what_computes_and_what_computes_goes_on_after_the_copy(monkeypatch):
    """With recorders in the place of CUDA's streams and of the tensor that is written."""
    log: list[str] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            log.append(f"{self.name} {{")

        def __exit__(self, *_: object) -> None:
            log.append("}")

        def wait_stream(self, other: "Stream") -> None:
            log.append(f"{self.name} waits for {other.name}")

        def record_event(self) -> str:
            log.append(f"{self.name} records")
            return "the end"

        def wait_event(self, event: str) -> None:
            log.append(f"{self.name} waits for {event}")

    class Target:
        def copy_(self, source: Tensor, non_blocking: bool) -> None:
            log.append(f"copy, {non_blocking=}")

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("copies"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream("compute"))
    streams = Streams(torch.device("cuda"))
    streams.wait(streams.copy(torch.zeros(1), Target()))
    assert log == [
        "copies waits for compute", "copies {", "copy, non_blocking=True", "copies records", "}",
        "compute waits for the end",
    ]  # fmt: skip


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_activations_go_to_the_host_and_weights_and_indices_do_not(policy, gradient_checkpointing, monkeypatch):
    model, moved = load_policy(str(policy), torch.float32, gradient_checkpointing), []
    copy, cpu = Streams.copy, torch.device("cpu")
    monkeypatch.setattr(Streams, "copy", lambda *arguments: moved.append(arguments[1]) or copy(*arguments))
    batch = pack(make_rollout(), list(range(len(RAGGED))))
    with activations_on_host(True, cpu):
        logprobs = model(batch, 1.0)[0]
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    assert not [tensor.shape for tensor in moved if tensor.untyped_storage().data_ptr() in weights]
    assert {tensor.dtype for tensor in moved} == {torch.float32}
    inputs_of_layers = [tensor for tensor in moved if tensor.shape == (1, len(batch.labels_N), 64)]
    assert len(inputs_of_layers) >= 2, "two layers"
    assert (len(moved) < 20) == gradient_checkpointing, "without it, what is inside the layers goes, too"
    logprobs.sum().backward()
    plain = load_policy(str(policy), torch.float32, gradient_checkpointing)
    plain(batch, 1.0)[0].sum().backward()
    for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        assert found.grad.equal(wanted.grad)
    assert activations.streams_of(cpu).copies is None, "a CPU has no second stream"
