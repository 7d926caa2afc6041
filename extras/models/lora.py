"""--lora_rank: LoRA (arXiv 2106.09685), the `Adapter` of a policy (`Policy.adapter`).

A low-rank addition to the linear layers is trained, and the rest stays as it was loaded.

    y = W x + s B A dropout(x)        s = --lora_alpha / --lora_rank; A [rank, in] starts random, B [out, rank] at zero

peft puts A and B into the model. W is frozen, in --dtype; A and B have fp32 masters. FSDP shards
both in the same units: only a unit's trainable parameters must agree in dtype. With its adapter off
the model is the reference (`adapter_off`). Engine and checkpoints get W + s B A (`merged`); W
itself is never written to, or each sync would round it. Dropout is on in the update alone, because
the sampler has none: see docs/algorithm.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from flags import Lora
from fsdp_utils import World, full_tensor
from model.sizes import MERGED_ROWS

NAME = "default"  # peft's name for the one adapter


def target_names(model: PreTrainedModel, targets: Sequence[str] | None) -> list[str]:
    """Full names of the decoder's linear layers (not the head) whose own names are among `targets`; None: of all.

    Raises ValueError if a target is the name of no such layer.
    """
    linear = {module for module in model.get_decoder().modules() if isinstance(module, nn.Linear)}
    own_names = {name: name.rpartition(".")[2] for name, module in model.named_modules() if module in linear}
    if targets is None:
        return list(own_names)
    known = sorted(set(own_names.values()))
    unknown = [target for target in targets if target not in known]
    if unknown:
        raise ValueError(
            f"--lora_targets {' '.join(unknown)}: the linear layers of this model's decoder are {', '.join(known)}; "
            "name some, with spaces between them, or leave the flag out for all of them."
        )
    return [name for name, own_name in own_names.items() if own_name in targets]


def add_adapter(model: PreTrainedModel, lora: Lora, seed: int, path: str) -> Adapter:
    """Freezes the model and gives its linear layers fp32 adapters, the same on all ranks. `path`: the base model's."""
    config = LoraConfig(
        r=lora.lora_rank, lora_alpha=lora.lora_alpha, lora_dropout=lora.lora_dropout, task_type="CAUSAL_LM",
        target_modules=target_names(model, lora.lora_targets), base_model_name_or_path=path,
    )  # fmt: skip
    model.requires_grad_(False)
    inject_adapter_in_model(config, model, NAME)
    torch.manual_seed(seed)  # every rank keeps its part of the same A
    adapter = Adapter(model)
    for layer in adapter.layers.values():
        for part in (layer.lora_A, layer.lora_B):
            part.float().to_empty(device="cpu")  # peft puts them where W is, in its dtype; W may have no storage yet
        layer.reset_lora_parameters(NAME, init_lora_weights=True)
        layer.lora_dropout.eval()
    return adapter


class Adapter:
    """The adapters of all linear layers of a model; a policy has one in `Policy.adapter`."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.config = model, model.peft_config[NAME]
        self.has_dropout = self.config.lora_dropout > 0
        modules = model.named_modules()
        self.layers = {f"{name}.base_layer.weight": each for name, each in modules if isinstance(each, LoraLayer)}

    @contextmanager
    def off(self) -> Iterator[None]:
        """Turns the adapter off in the block: the model is as it was loaded.

        peft also freezes what it turns off. Here it stays trainable: FSDP decides in its first
        forward pass, which may be this one, which gradients it reduces, and in which dtype.
        """
        layers = self.layers.values()
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
    def dropout_on(self, seed: tuple[int, ...], world: World) -> Iterator[None]:
        """Has the adapter drop inputs in the block, drawn from the seed and the rank."""
        layers = self.layers.values()
        if self.has_dropout:
            torch.manual_seed(int(np.random.SeedSequence([*seed, world.trainer_rank]).generate_state(1)[0]))
        for layer in layers:
            layer.lora_dropout.train()
        try:
            yield
        finally:
            for layer in layers:
                layer.lora_dropout.eval()

    def save(self, folder: Path, world: World) -> None:
        """Writes A and B in fp32 for `PeftModel.from_pretrained(base model, folder)`. All ranks call it."""
        state = {}
        for name, parameter in self.model.named_parameters():
            if ".lora_" in name:
                tensor = full_tensor(parameter, torch.float32)  # on all ranks, for they gather it together
                if world.is_main:
                    state[f"base_model.model.{name.replace(f'.{NAME}.', '.')}"] = tensor.cpu().contiguous()
        if world.is_main:
            self.config.target_modules = sorted(self.config.target_modules)  # a set has another order each time
            self.config.save_pretrained(folder)
            save_file(state, folder / "adapter_model.safetensors", metadata={"format": "pt"})

    def describe(self) -> str:
        """A line such as: LoRA (rank 8, alpha 32, dropout 0) on 14 linear layers: q_proj."""
        config = self.config
        names = ", ".join(sorted({name.split(".")[-3] for name in self.layers}))  # before .base_layer.weight
        settings = f"rank {config.r}, alpha {config.lora_alpha:g}, dropout {config.lora_dropout:g}"
        return f"LoRA ({settings}) on {len(self.layers)} linear layers: {names}"

    def merged(self, layer: LoraLayer, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """W + s B A in fp32, then in `dtype`, for a layer's whole `weight`; fp32 copies are of some rows at a time."""
        a = full_tensor(layer.lora_A[NAME].weight, torch.float32)
        b = full_tensor(layer.lora_B[NAME].weight, torch.float32)
        total = torch.empty_like(weight, dtype=dtype)
        for start in range(0, len(weight), MERGED_ROWS):
            rows = slice(start, start + MERGED_ROWS)
            total[rows] = torch.addmm(weight[rows].float(), b[rows], a, alpha=layer.scaling[NAME])
        return total
