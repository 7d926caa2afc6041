"""The optimizer: torch's AdamW, one that takes less memory (extras/models/adamw.py), or the user's own."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from flags import AdamW, Memory
from runtime.parts import part
from runtime.rank import OwnCodeError


def make_optimizer(named: dict[str, nn.Parameter], adamw: AdamW, memory: Memory) -> Optimizer:
    """torch's AdamW where fp32 masters and their state are on the device; else ours, which takes less memory.

    Or that of --optimizer, whose groups keep their rates relative to --learning_rate, as `relative_lr`; parameters that
    it leaves out are frozen. The state of AdamW is made here: made in the first step, it would lie between activations
    in the GPU's memory. Raises OwnCodeError.
    """
    if adamw.optimizer != "adamw":
        from grading.user_code import load_reference

        try:
            optimizer = load_reference(adamw.optimizer)(dict(named), adamw)
        except (MemoryError, torch.OutOfMemoryError):  # no fault of the function
            raise
        except Exception as error:  # noqa: BLE001  the user's code may raise anything
            raise OwnCodeError(
                f"--optimizer {adamw.optimizer} fails: {type(error).__name__}: {error}; it gets parameters by name, of "
                f"which the first is {next(iter(named))!r}, and {adamw}."
            ) from error
        if not isinstance(optimizer, Optimizer) or not {*parameters_of(optimizer)} <= {*named.values()}:
            raise OwnCodeError(
                f"--optimizer {adamw.optimizer} made {optimizer!r:.200}; make a torch.optim.Optimizer of parameters "
                "that it was given, and of no other parameters: those of a loss are not saved (docs/hacks.md)."
            )
        for parameter in {*named.values()} - {*parameters_of(optimizer)}:
            parameter.requires_grad_(False)  # what the optimizer leaves out is frozen
        for group in optimizer.param_groups:
            group["relative_lr"] = adamw.learning_rate and group.get("lr", 0.0) / adamw.learning_rate
        return optimizer
    parameters = named.values()
    betas = (adamw.adam_beta1, adamw.adam_beta2)
    settings = {"lr": adamw.learning_rate, "betas": betas, "weight_decay": adamw.weight_decay}
    if memory.param_dtype == "float32" and memory.offload == "none":
        optimizer = torch.optim.AdamW(parameters, **settings, fused=True)
        for parameter in parameters_of(optimizer):
            moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": torch.zeros((), device=parameter.device)} | moments
        return optimizer
    ours = part("extras.models.adamw", "--param_dtype bfloat16 or --offload").ChunkedAdamW
    return ours(parameters, **settings, is_state_on_host=memory.offload == "optimizer")


def set_rate(optimizer: Optimizer, rate: float) -> None:
    """Sets the rate of each group. It is a function of the update's number: nothing to restore."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("relative_lr", 1.0)


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
