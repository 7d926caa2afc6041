"""LoRA: instead of the whole policy, a low-rank addition to its linear layers is trained, and the rest stays as it was loaded.

    y = W x + s B A dropout(x)        s = --lora_alpha / --lora_rank; A [rank, in] starts random, B [out, rank] at zero

peft (arXiv 2106.09685) puts A and B into the model. W is frozen, in --dtype; A and B have fp32 masters like every trained parameter.
FSDP shards both in the same units: only a unit's trainable parameters must agree in dtype (torch 2.13, `_init_mp_dtypes`), and gathered
they all are in --dtype. Three things are made from the one model:

- the policy: with A and B;
- the reference: the same, with its adapter off (`adapter_off`), so no second model is loaded;
- the weights for the engine and for checkpoints: W + s B A, worked out in fp32 one parameter at a time (`merged_parameters`). W itself
  is never written to: adding to it and subtracting again would round it each time.

Dropout is on in the update alone. What is compared with the sampler, and what the ratio is taken against, are the log-probs of the
policy that sampled, which has none; so with dropout every update needs a pass for them, also the first of a step, and its ratios are
near 1, not exactly 1. Others draw the lines differently: ms-swift (3.x), with one update per rollout, takes the detached log-probs of the
update for old ones (ratio exactly 1, dropout in both), and TRL 1.16 makes old log-probs in a pass of its own with other dropout masks.
Which inputs are dropped is a function of seed, update and rank, and of how the update is packed (`dropout_on`): a resume draws them again.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from algorithm import check_effects
from fsdp_utils import World, full_tensor, full_tensors
from policy import Policy, model_from_config

NAME = "default"  # of the one adapter, for peft
MERGED_ROWS = 1024  # of a matrix at a time, in fp32


def add_lora_flags(parser: ArgumentParser) -> None:
    """Which part of the policy is trained."""
    add = parser.add_argument_group("LoRA").add_argument
    add("--lora_rank", type=int, default=0, help="train adapters of this rank on frozen weights; 0: train all weights")
    add("--lora_alpha", type=float, default=32.0, help="adapters are scaled by this / rank (ms-swift: 32 with rank 8)")
    add(
        "--lora_dropout",
        type=float,
        default=0.0,
        help="share of an adapter's inputs that is dropped in the update, and only there",
    )
    says = "names of the linear layers that get one (q_proj v_proj, say); default: all of the decoder but the head"
    add("--lora_targets", nargs="+", help=says)


def check_lora(args: Namespace, config: PretrainedConfig) -> None:
    """Raises ValueError for LoRA flags without LoRA, and for targets that the model of this configuration does not have."""
    check_effects(
        args,
        add_lora_flags,
        [(("lora_alpha", "lora_dropout", "lora_targets"), args.lora_rank > 0, "--lora_rank above 0")],
    )
    if args.lora_targets:
        with torch.device("meta"):  # names and shapes alone
            model = model_from_config(config)
        target_names(model, args.lora_targets)


def target_names(model: PreTrainedModel, targets: list[str] | None) -> list[str]:
    """Full names of the linear layers of the decoder whose own names are among `targets`; None: of all of them, which leaves out the head.

    Raises ValueError if one of the targets is the name of no such layer.
    """
    in_decoder = set(model.get_decoder().modules())
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module in in_decoder]
    own_names = sorted({name.rpartition(".")[2] for name in names})
    unknown = [target for target in targets or [] if target not in own_names]
    if unknown:
        raise ValueError(
            f"--lora_targets {' '.join(unknown)}: the linear layers of this model's decoder are {', '.join(own_names)}."
        )
    return [name for name in names if targets is None or name.rpartition(".")[2] in targets]


def add_adapter(policy: Policy, args: Namespace) -> None:
    """Freezes the policy and gives its linear layers adapters, the same on all ranks; they are fp32, whatever the dtype of the rest."""
    config = LoraConfig(
        r=args.lora_rank,
        lora_alpha=args.lora_alpha,
        lora_dropout=args.lora_dropout,
        target_modules=target_names(policy.model, args.lora_targets),
        base_model_name_or_path=args.model,
        task_type="CAUSAL_LM",
    )
    policy.requires_grad_(False)
    inject_adapter_in_model(config, policy.model, NAME)
    torch.manual_seed(args.seed)  # every rank keeps its part of the same A
    for layer in adapted_layers(policy):
        for part in (layer.lora_A, layer.lora_B):
            part.float().to_empty(device="cpu")  # peft puts them where W is, in its dtype; W may have no storage yet
        layer.reset_lora_parameters(NAME, init_lora_weights=True)
        layer.lora_dropout.eval()


def adapted_layers(model: nn.Module) -> list[LoraLayer]:
    """The linear layers that have an adapter; none without LoRA."""
    return [module for module in model.modules() if isinstance(module, LoraLayer)]


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """While it is open, the model is its base model; nothing changes for one without an adapter.

    peft also freezes what it turns off. FSDP decides at its first forward pass what there will be to reduce, and in which dtype; the
    first one may be this one, so the adapter stays trainable.
    """
    layers = adapted_layers(model)
    for layer in layers:
        layer.enable_adapters(False)
        for part in (layer.lora_A, layer.lora_B):
            part.requires_grad_(True)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


@contextmanager
def dropout_on(model: nn.Module, seed: tuple[int, ...], world: World) -> Iterator[None]:
    """While it is open, adapters drop inputs, drawn from `seed` and the rank; nothing changes without LoRA or without dropout."""
    dropouts = [
        module
        for layer in adapted_layers(model)
        for module in layer.lora_dropout.values()
        if isinstance(module, nn.Dropout)
    ]
    if dropouts:
        torch.manual_seed(int(np.random.SeedSequence([*seed, world.rank]).generate_state(1)[0]))
    for dropout in dropouts:
        dropout.train()
    try:
        yield
    finally:
        for dropout in dropouts:
            dropout.eval()


def merged_parameters(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """(name, full tensor) of each parameter of the model without adapter that computes the same: W + s B A in fp32, then in `dtype`.

    While the consumer uses one, the next one is gathered; all ranks must run through it together. Names are those of the base model.
    Without LoRA these are the parameters themselves. Tied parameters come once, under their first name.
    """
    layers = {
        f"{name}.base_layer.weight": module for name, module in model.named_modules() if isinstance(module, LoraLayer)
    }
    named = [(name, parameter) for name, parameter in model.named_parameters() if ".lora_" not in name]
    wanted = (
        (parameter, parameter.dtype if name in layers else dtype) for name, parameter in named
    )  # what is added to: as it is
    for (name, _), full in zip(named, full_tensors(wanted), strict=True):
        yield name.replace(".base_layer.", "."), _merged(layers[name], full, dtype) if name in layers else full


def _merged(layer: LoraLayer, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum in new memory, some rows at a time: the fp32 copy of a whole matrix would be larger than what is gathered."""
    a, b = (full_tensor(part[NAME].weight, torch.float32) for part in (layer.lora_A, layer.lora_B))
    merged = torch.empty_like(weight, dtype=dtype)
    for start in range(0, len(weight), MERGED_ROWS):
        rows = slice(start, start + MERGED_ROWS)
        merged[rows] = torch.addmm(weight[rows].float(), b[rows], a, alpha=layer.scaling[NAME])
    return merged


def save_adapter(policy: Policy, folder: Path, world: World) -> None:
    """Writes A and B in fp32 and their configuration, for `PeftModel.from_pretrained(base model, folder)`. Without LoRA: nothing."""
    if not adapted_layers(policy):
        return
    state = {}
    for name, parameter in policy.model.named_parameters():
        if ".lora_" in name:
            tensor = full_tensor(parameter, torch.float32)
            if world.is_main:
                state[f"base_model.model.{name.replace(f'.{NAME}.', '.')}"] = tensor.cpu().contiguous()
    if world.is_main:
        config = policy.model.peft_config[NAME]
        config.target_modules = sorted(config.target_modules)  # a set otherwise, in another order each time
        config.save_pretrained(folder)
        save_file(state, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def describe_parameters(policy: Policy, args: Namespace) -> str:
    """How many parameters the policy has and how many of them are trained: for the first lines of the log."""
    trained = sum(parameter.numel() for parameter in policy.parameters() if parameter.requires_grad)
    everything = sum(parameter.numel() for parameter in policy.parameters())
    if not args.lora_rank:
        frozen = f" of {everything:,}, without those of the vision tower" if trained < everything else ""
        return f"trainable: all {trained:,} parameters{frozen}"
    layers = adapted_layers(policy)
    names = sorted(
        {name.rpartition(".")[2] for name, module in policy.named_modules() if isinstance(module, LoraLayer)}
    )
    scale = f"rank {args.lora_rank}, alpha {args.lora_alpha:g}, so s = {args.lora_alpha / args.lora_rank:g}; dropout {args.lora_dropout:g}"
    return f"trainable: {trained:,} of {everything:,} parameters: LoRA ({scale}) on {len(layers)} linear layers: {', '.join(names)}"
