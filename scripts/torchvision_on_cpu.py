"""Lets CPU torch import torchvision, whose image transforms Qwen2.5-VL's processor uses, here and in vLLM.

Nothing imports this file: `scripts/setup.sh` copies it into .venv of a CPU machine, where a .pth file runs it in every
process, also in vLLM's. Some package indexes have torchvision for the CUDA build of torch only. Its compiled part then
cannot be loaded, and the import of torchvision fails because two of its operators have no schema. This file declares
them during that import, if they are missing; nothing calls them.
"""

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


class InTorchvision(MetaPathFinder):
    """Finds no module, but declares the schemas before torchvision uses them; it has then tried its compiled part."""

    library = None  # kept: the declarations go with it

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name == "torchvision._meta_registrations" and InTorchvision.library is None:
            import torch

            if hasattr(torch.ops.torchvision, "nms"):
                return None
            InTorchvision.library = torch.library.Library("torchvision", "FRAGMENT")
            for schema in SCHEMAS:
                InTorchvision.library.define(schema)
        return None


sys.meta_path.insert(0, InTorchvision())
