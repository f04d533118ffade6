"""The trainer's weights as a server of a dtype would have them: its names, its layout, its rounding.

A folder is read as a server reads a folder. A state dict is written, part by part, to a file in memory, and read as a
server reads an upload. So the rules for names, layouts and rounding are those of the server, and no others.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from fastdeploy.core.errors import InvalidField
from fastdeploy.core.files import ANYWHERE, Folder, write_all
from fastdeploy.core.fingerprint import Fingerprint, fingerprint
from fastdeploy.core.serving_dtype import dtype_of, fits, in_dtype, widen
from fastdeploy.core.weight_source import AUTO, FolderSource
from fastdeploy.model_executor.checkpoint_layout import describe
from fastdeploy.model_executor.models import CONFIG, build_model, load_config, read_json
from fastdeploy.model_executor.models.interface import Model
from fastdeploy.model_executor.ops import get_ops
from fastdeploy.model_executor.safetensors_source import SafetensorsReader, open_source, refuse_tensor
from fastdeploy.rl.state_encoding import HostTensor, host_tensors, pieces, split

ANY_LENGTH = 2  # max_model_len: no tensor depends on it
PART_BYTES = 256 << 20  # of a state dict that are copied at once
STATE = "the state dict"  # in messages, in place of the name of a file


class TrainerWeights:
    """The weights of a trainer, as a server of ``dtype`` would have them.

    weights: a folder, or a state dict of Paddle, torch or numpy tensors, in any layout that a server takes.
    model_folder: has config.json; None = the folder of the weights. dtype: "float32" or "bfloat16". layout: as in
    /v1/update_weights. label: how messages name these weights.

    model: the computation, without weights. shapes: of all tensors by name, in the order of the model. present: the
    names of those that ``weights`` has. A tied tensor (``Model.aliases``) is not among them.

    Raises InvalidField for a setting or a config key, WeightUpdateRefused for a file or a tensor that a server would
    refuse. Use it as a context manager, which closes the files."""

    def __init__(
        self,
        weights: Mapping[str, Any] | str | os.PathLike[str],
        model_folder: str | os.PathLike[str] | None = None,
        dtype: str = "bfloat16",
        layout: str = AUTO,
        label: str = "the trainer's weights",
    ):
        if isinstance(weights, Mapping) and model_folder is None:
            raise InvalidField("model", "expected a folder with config.json, as the weights are a state dict")
        self.dtype, self.label = dtype, label
        folder = model_folder if model_folder is not None else weights
        assert not isinstance(folder, Mapping)
        self.model_folder = Path(folder)
        self.model: Model = build_model(load_config(self.model_folder), get_ops(dtype), ANY_LENGTH)
        self.shapes = {name: shape for parameter in self.model.parameters for name, shape in parameter.shapes.items()}
        self._source = (
            _State(weights, self.model, layout)
            if isinstance(weights, Mapping)
            else _Folder(weights, self.model, layout)
        )
        self._fingerprints: dict[str, Fingerprint] | None = None
        self.present = tuple(name for name in self.shapes if name in self._source.names)

    def __enter__(self) -> TrainerWeights:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        self._source.close()

    def read(self, name: str) -> np.ndarray:
        """Return a tensor as a server has it, in its serving dtype: float32, or bfloat16 as uint16 bits."""
        return self._rounded(name, self._source.read(name))

    def read_wide(self, name: str) -> np.ndarray:
        """Return a tensor before it is rounded to the serving dtype, as float32."""
        return widen(self._source.read(name))

    def arrays(self, names: Iterable[str]) -> Iterator[tuple[str, np.ndarray]]:
        """Yield name and values, as ``read`` returns them, in the order in which they are read fastest."""
        for name in self._source.in_order(names):
            yield name, self.read(name)

    def fingerprints(self) -> dict[str, Fingerprint]:
        """Return the fingerprint of every tensor that is there, as a server of this dtype has it. Raises
        WeightUpdateRefused for an alias that differs from its tensor."""
        if self._fingerprints is not None:
            return self._fingerprints
        found = {name: fingerprint(np.ascontiguousarray(values)) for name, values in self.arrays(self.present)}
        for alias, name in self.model.aliases.items():
            if alias in self._source.names and name in found and fingerprint(self.read(alias)) != found[name]:
                raise refuse_tensor(alias, f"differs from {name}, but tie_word_embeddings is true")
        self._fingerprints = {name: found[name] for name in self.present}
        return self._fingerprints

    def _rounded(self, name: str, values: np.ndarray) -> np.ndarray:
        dtype = dtype_of(name, self.dtype)
        if not fits(values, dtype):
            raise refuse_tensor(name, f"of {self.label} has values that are not finite in {dtype}")
        return in_dtype(values, dtype)


def checkpoint_dtype(folder: str | os.PathLike[str]) -> str:
    """Return the dtype that config.json of a folder names, "bfloat16" if it names none. Raises InvalidField."""
    try:
        with Folder(folder, ANYWHERE) as opened:
            raw = read_json(opened, CONFIG)
    except OSError as error:
        raise InvalidField("model", f"the folder {os.fspath(folder)!r} cannot be read: {error.strerror}") from error
    return str(raw.get("torch_dtype") or raw.get("dtype") or "bfloat16")


class _Folder:
    """A checkpoint folder, open. names: of its tensors, as a server has them."""

    def __init__(self, path: str | os.PathLike[str], model: Model, layout: str):
        self._reader = open_source(FolderSource(os.fspath(path)))
        try:
            describe(self._reader, model, layout)
        except BaseException:
            self._reader.close()
            raise
        self.names = self._reader.entries.keys()

    def read(self, name: str) -> np.ndarray:
        return self._reader.read(name)

    def in_order(self, names: Iterable[str]) -> Iterable[str]:
        return names

    def close(self) -> None:
        self._reader.close()


class _State:
    """A state dict. One part of it at a time is in a file in memory. names: of its tensors, as a server has them."""

    def __init__(self, state: Mapping[str, Any], model: Model, layout: str):
        self._model, self._layout = model, layout
        self._parts = list(split(host_tensors(state), PART_BYTES))
        self._open: tuple[int, SafetensorsReader] | None = None
        self._part_of: dict[str, int] = {}
        for index in range(len(self._parts)):
            for name in self._reader_of(index).entries:
                if name in self._part_of:
                    raise refuse_tensor(name, f"is twice in {STATE}")
                self._part_of[name] = index
        self.names = self._part_of.keys()

    def read(self, name: str) -> np.ndarray:
        return self._reader_of(self._part_of[name]).read(name)

    def in_order(self, names: Iterable[str]) -> Iterable[str]:
        return sorted(names, key=self._part_of.__getitem__)

    def close(self) -> None:
        if self._open is not None:
            self._open[1].close()
        self._open = None

    def _reader_of(self, index: int) -> SafetensorsReader:
        if self._open is None or self._open[0] != index:
            self.close()
            self._open = index, _in_memory(self._parts[index], self._model, self._layout)
        return self._open[1]


def _in_memory(tensors: Mapping[str, HostTensor], model: Model, layout: str) -> SafetensorsReader:
    """Return a reader of these tensors, which are copied to a file in memory."""
    reader = SafetensorsReader()
    with ExitStack() as stack:
        stack.callback(reader.close)
        with os.fdopen(os.memfd_create("fastdeploy-check-sync"), "wb", buffering=0) as file:
            for piece in pieces(tensors):
                write_all(file, piece)
            reader.add_file(STATE, os.dup(file.fileno()))
        describe(reader, model, layout)
        stack.pop_all()
    return reader
