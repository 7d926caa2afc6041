"""Decoder layers under torch.compile: --compile"""

import torch
import torch._dynamo
from torch import nn


def compile_layers(layers: list[nn.Module]) -> None:
    """Puts these decoder layers under torch.compile, in place. One compilation serves all of them and all lengths.

    Only their `forward`: FSDP's hooks and recomputation stay around it; no parameter is renamed.
    """
    for layer in layers:
        # A graph for each state: gradients, adapter on or off, kind of layer, range of lengths.
        compiled = torch.compile(layer.forward, dynamic=True, recompile_limit=64)
        # On CPUs `Engine` disables compilation in the whole process, for vLLM, and attention cuts a layer. Nested: into
        # one graph before it and one after it; without, the layer's part and its attention's module have two each.
        layer.forward = torch._dynamo.config.patch(disable=False, nested_graph_breaks=True)(compiled)
