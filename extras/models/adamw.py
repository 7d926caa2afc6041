"""AdamW in less memory than torch's: bf16 parameters updated as fp32 ones, and state that may live in host RAM.

--param_dtype bfloat16 and --offload ask for it; `model/optimizer.make_optimizer` finds it by name.

A bf16 parameter has 8 significant bits: an update of less than 1/512 of it would be lost. So two
more bytes (`remainder`) keep the lower half of the fp32 number whose rounded upper half is the
parameter: together they are that number, exactly (`join`, `split`). The moments of a bf16 parameter
are bf16, too, and rounded stochastically: rounded to nearest, v * 0.999 is v again, and v never
decays. The arithmetic is torch's own fused AdamW in fp32. No library does this: torch-optimi 0.3.3
rounds both moments to nearest (1,000 updates of 1e-6 did not move parameters between 1 and 2),
torchao's AdamW needs torch.compile, and neither streams its state from the host.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import cycle

import torch
from torch import Tensor, nn
from torch.cuda._pin_memory_utils import pin_memory
from torch.optim.adamw import adamw as fused_adamw
from torch.optim.optimizer import StateDict

from fsdp_utils import local_shard
from model import sizes
from model.optimizer import parameters_of

Group = dict[str, object]  # parameters, with their settings


class ChunkedAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` for bf16 and fp32 parameters, for fp32 ones bit for bit the same.

    `is_state_on_host`: the state lives in host RAM (pinned for CUDA) and passes through the device in chunks. Two
    streams take turns with them, so that the state of one comes while that of the one before goes back.
    """

    def __init__(self, params: Iterable[nn.Parameter], is_state_on_host: bool, **settings: object) -> None:
        super().__init__(params, fused=True, **settings)
        self.is_state_on_host = is_state_on_host
        is_streamed = is_state_on_host and torch.cuda.is_available()
        self.streams = [torch.cuda.Stream(), torch.cuda.Stream()] if is_streamed else [None]  # None: the current one
        for parameter in parameters_of(self):
            self.state[parameter] = self._first_state(parameter)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """One update of every parameter that has a gradient."""
        assert closure is None, "the gradients are there already"
        is_streamed, turns = self.streams != [None], cycle(self.streams)
        if is_streamed:
            for stream in self.streams:
                stream.wait_stream(torch.cuda.current_stream())  # for the gradients
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group, turns)
        if is_streamed:
            # Gradients may be freed then, and what the host reads next, as for a checkpoint, has arrived.
            torch.cuda.synchronize()

    def _update(self, parameter: nn.Parameter, group: Group, turns: Iterator[torch.cuda.Stream | None]) -> None:
        state, device = self.state[parameter], local_shard(parameter).device
        state["step"] += 1
        generator = torch.Generator(device).manual_seed(int(state["step"]))  # a resumed run rounds as it would have
        tensors = {"parameter": parameter, "gradient": parameter.grad} | state
        del tensors["step"]
        # Chunks draw their noise in turn: another size, as with more streams, would give other bits.
        chunks = [local_shard(tensor).view(-1).split(sizes.OPTIMIZER_CHUNK) for tensor in tensors.values()]
        for pieces in zip(*chunks, strict=True):
            with torch.cuda.stream(next(turns)):
                # `fused_adamw` counts it up. Filled on the device: the host would wait for a copy.
                step = torch.full((), float(state["step"]) - 1, device=device)
                self._update_chunk(dict(zip(tensors, pieces, strict=True)), step, group, generator)

    @staticmethod
    def _update_chunk(chunk: dict[str, Tensor], step: Tensor, group: Group, generator: torch.Generator) -> None:
        parameter, moments = chunk["parameter"], ("gradient", "exp_avg", "exp_avg_sq")
        values = {name: chunk[name].to(parameter.device, torch.float32, non_blocking=True) for name in moments}
        values["parameter"], is_split = parameter, parameter.dtype == torch.bfloat16
        if is_split:
            values["parameter"] = join(parameter, chunk["remainder"].to(parameter.device, non_blocking=True))
        fused_adamw(
            *([values[name]] for name in ("parameter", *moments)), [], [step],
            fused=True, amsgrad=False, maximize=False, lr=group["lr"], weight_decay=group["weight_decay"],
            eps=group["eps"], beta1=group["betas"][0], beta2=group["betas"][1],
        )  # fmt: skip
        if is_split:
            for name in ("exp_avg", "exp_avg_sq"):
                values[name] = round_stochastically(values[name], generator)
            values["parameter"], values["remainder"] = split(values["parameter"])
        for name in values.keys() - {"gradient"}:
            chunk[name].copy_(values[name], non_blocking=True)  # nothing to do where it was updated in place

    def _first_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        dtypes = {"exp_avg": parameter.dtype, "exp_avg_sq": parameter.dtype}
        if parameter.dtype == torch.bfloat16:
            dtypes["remainder"] = torch.int16
        device = "cpu" if self.is_state_on_host else None  # None: where the parameter is
        is_pinned = self.is_state_on_host and local_shard(parameter).is_cuda  # copies are fast then
        state = {name: torch.zeros_like(parameter, dtype=dtype, device=device) for name, dtype in dtypes.items()}
        for local in map(local_shard, state.values()):
            if is_pinned and local.numel():  # `Tensor.pin_memory` would round up: to nearly twice the RAM
                pin_memory(local.data_ptr(), local.nbytes)
        return {"step": torch.tensor(0.0)} | state

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Takes the state as it is, in place: torch's would cast it to the parameter's dtype and device."""
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(saved | {"params": group["params"]})
            for parameter, index in zip(group["params"], saved["params"], strict=True):
                for name, tensor in self.state[parameter].items():
                    local_shard(tensor).copy_(local_shard(state_dict["state"][index][name]))


def join(parameter: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 numbers with the rounded upper half `parameter` (bf16) and the signed rest `remainder` (int16)."""
    return ((parameter.view(torch.int16).to(torch.int32) << 16) + remainder).view(torch.float32)


def split(values: Tensor) -> tuple[Tensor, Tensor]:
    """(nearest bf16, halves away from zero; signed rest of the bits, int16) of finite fp32 numbers."""
    bits = values.view(torch.int32)
    upper = (bits + 0x8000) >> 16
    return upper.to(torch.int16).view(torch.bfloat16), (bits - (upper << 16)).to(torch.int16)


def round_stochastically(values: Tensor, generator: torch.Generator) -> Tensor:
    """fp32 -> bf16, up or down with the chances that make the expected value the given one."""
    bits = values.view(torch.int32)
    noise = torch.randint(0, 2**16, bits.shape, dtype=torch.int32, device=bits.device, generator=generator)
    return ((bits + noise) >> 16).to(torch.int16).view(torch.bfloat16)
