"""Policies of a single process: whole, and on the CPU."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import torch

from flags import Lora
from model.lora import add_adapter
from model.weights import fill
from policy import Policy, empty_policy


def load_policy(path: Path | str, dtype: torch.dtype = torch.float32, gradient_checkpointing: bool = False) -> Policy:
    """The policy with the weights at `path`."""
    policy = empty_policy(str(path), dtype, gradient_checkpointing)
    fill(policy, policy.model, str(path), torch.device("cpu"))
    return policy


def policy_of(args: Namespace, dtype: torch.dtype = torch.float32) -> Policy:
    """The policy of these flags: all weights are trained, or LoRA, whose adapter is not the zero that it starts as."""
    policy = load_policy(args.model, dtype, args.gradient_checkpointing)
    if args.lora_rank:
        add_adapter(policy.model, Lora.from_flags(args), args.seed, str(args.model))
        torch.manual_seed(2)
        for name, parameter in policy.named_parameters():
            if ".lora_B." in name:
                parameter.data.normal_(std=0.2)
    return policy
