"""--kl_over vocabulary: the reference as a teacher, followed over its whole distribution. It runs beside the update."""

from collections.abc import Callable

import torch

from batch import Batch
from extras.teacher.head import Teacher
from fsdp_utils import release_gathered


@torch.no_grad()
def run(reference, divergence: Callable, temperature: float, batch: Batch) -> Teacher:
    """The distributions of the reference, a `Policy`, at the trained tokens. `divergence`: its KL."""
    with reference.adapter_off():
        hidden_KD, weight_VD = reference.hidden_states(batch.reference_batch())
    if reference.adapter is None:  # with LoRA the policy computes with these weights next
        release_gathered(reference)
    return Teacher(hidden_KD, weight_VD, divergence, temperature * reference.logits_divisor)
