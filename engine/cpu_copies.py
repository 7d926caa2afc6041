"""CPU: copies that vLLM's kernels multiply by, in a layout of their own, which a reload of weights does not renew."""

from __future__ import annotations

from torch import nn
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead


def renew_copies(model: nn.Module) -> None:
    """Renews the copy of a tied head, which the reload leaves as it was, and packs experts, which it writes plain."""
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
        elif isinstance(module, RoutedExperts):
            module.quant_method.moe_kernel.fused_experts.process_weights_after_loading(module)
