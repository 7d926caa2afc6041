"""Lets CPU torch import torchvision, whose image transforms Qwen2.5-VL's processor uses, here and in vLLM. Nothing imports this file:
`scripts/setup.sh` copies it into .venv of a CPU machine, where a .pth file runs it in every process, vLLM's too.

The wheel of torchvision on the index is made for the CUDA build of torch: its compiled part cannot be loaded, and then its import fails
because two of its operators have no schema. They are declared here, just before the first import; nothing calls them.
"""

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


class BeforeTorchvision(MetaPathFinder):
    """Finds no module; declares the schemas when torchvision is looked for."""

    library = None  # kept: the declarations go with it

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name == "torchvision" and BeforeTorchvision.library is None:
            import torch

            BeforeTorchvision.library = torch.library.Library("torchvision", "DEF")
            for schema in SCHEMAS:
                BeforeTorchvision.library.define(schema)
        return None


sys.meta_path.insert(0, BeforeTorchvision())
