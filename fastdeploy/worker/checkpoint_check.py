"""Checks of a checkpoint without reading a weight."""

from __future__ import annotations

from typing import NamedTuple

from fastdeploy.core.weight_source import FolderSource
from fastdeploy.model_executor.checkpoint_layout import Layout, describe, find_layout
from fastdeploy.model_executor.models.interface import Model
from fastdeploy.model_executor.safetensors_source import open_source, refuse_tensor
from fastdeploy.worker.part_reading import check_config


class Checkpoint(NamedTuple):
    """What the headers tell. nbytes: of the tensors as they are stored."""

    nbytes: int
    layout: Layout


def check_checkpoint(model: Model, path: str) -> Checkpoint:
    """Check the headers of the folder ``path`` as an engine does that starts with it: layout, names, shapes and types,
    and that no tensor is missing. Raises WeightUpdateRefused, which names the tensor."""
    with open_source(FolderSource(path)) as reader:
        assert reader.folder is not None
        check_config(reader.folder, model.config, required=True)
        nbytes = sum(entry.nbytes for entry in reader.entries.values())
        describe(reader, model)
        for parameter in model.parameters:
            for name in parameter.tensors:
                if name not in reader.entries:
                    raise refuse_tensor(name, "is missing: it did not arrive")
        return Checkpoint(nbytes, find_layout(reader))
