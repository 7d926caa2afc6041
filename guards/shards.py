"""Reads the shards of a checkpoint, which somebody else may have written: nothing but plain records is unpickled.

`torch.distributed.checkpoint` (`dcp`) keeps a list of its shards, which is a pickle, and in them pickled values.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem


class MetadataUnpickler(pickle.Unpickler):
    """Makes nothing but the records that belong in `dcp`'s list. Python's own unpickler calls what the file names."""

    ALLOWED = {
        "torch": {"Size"} | {name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)},
        "torch.serialization": {"_get_layout"},
        "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
        "torch.distributed.checkpoint.metadata": {
            "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
            "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
        },
        "pathlib": {"PosixPath"},
        "pathlib._local": {"PosixPath"},  # Python 3.13
    }  # fmt: skip

    def find_class(self, module: str, name: str) -> object:
        if name in self.ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of a checkpoint")


class ShardReader(dcp.FileSystemReader):
    """`dcp` reads tensors with `weights_only`; this does the same for its list of them."""

    def read_metadata(self, *_: object, **__: object) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            return MetadataUnpickler(file).load()


class ShardPlanner(dcp.DefaultLoadPlanner):
    """The same for values that are no tensors, such as Adam's betas: `dcp` unpickles anything here."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        checked = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), checked)
        checked.seek(0)
        super().load_bytes(read_item, checked)
