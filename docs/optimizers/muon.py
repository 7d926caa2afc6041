"""Muon for the matrices of the layers, AdamW for the rest: --optimizer docs/optimizers/muon.py:make

Sources: https://kellerjordan.github.io/posts/muon and "Muon is Scalable for LLM Training" (arXiv
2502.16982), whose scale of 0.2 sqrt(larger side) lets it take the rates and decays of AdamW.
"""

import torch


class Muon(torch.optim.Optimizer):
    """Two of torch's optimizers as one: they share the groups, and so their rates, and the state."""

    def __init__(self, *parts):
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = parts

    def step(self, closure=None):
        for part, group in zip(self.parts, self.param_groups, strict=True):  # which a resume has replaced
            part.param_groups, part.state = [group], self.state
            part.step()


def make(named, adamw):
    matrices = {name: p for name, p in named.items() if p.ndim == 2 and "layers." in name}
    rest = [p for name, p in named.items() if name not in matrices]
    betas, common = (
        (adamw.adam_beta1, adamw.adam_beta2),
        {"lr": adamw.learning_rate, "weight_decay": adamw.weight_decay},
    )
    parts = [torch.optim.Muon(matrices.values(), **common, adjust_lr_fn="match_rms_adamw")]
    if rest:  # LoRA trains matrices alone
        parts.append(torch.optim.AdamW(rest, betas=betas, **common))
    return Muon(*parts)
