"""FastDeploy's model that a trainer fills: ``RolloutModel``. Its tensors have the names and the layout of FastDeploy's
models, so that a trainer's code writes them as before. ``checkpoint`` gives what a server takes."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import paddle
from paddle import nn

from fastdeploy.core.errors import InvalidField
from fastdeploy.core.serving_dtype import widen
from fastdeploy.core.weight_source import FolderSource
from fastdeploy.model_executor.checkpoint_layout import describe
from fastdeploy.model_executor.models import CONFIG, GENERATION, build_model, load_config
from fastdeploy.model_executor.models.interface import EMBEDDING, LM_HEAD
from fastdeploy.model_executor.ops import get_ops
from fastdeploy.model_executor.rollout_layout import (
    CHECKPOINT_DECODER,
    DECODERS,
    FusedTensor,
    by_checkpoint_name,
    fused_tensors,
)
from fastdeploy.model_executor.safetensors_source import open_source
from fastdeploy.rl.rollout_config import RolloutModelConfig
from fastdeploy.rl.state_encoding import host_tensors, write_folder

ANY_LENGTH = 2  # max_model_len: no tensor depends on it
OF_PADDLE = frozenset({"dtype", "source", "paddleformers_version"})  # keys that say: the weights are [in, out]
COMPUTED = ".inv_freq"  # buffers in old checkpoints, which no model reads
Weight = tuple[str, Any]


class RolloutModel(nn.Layer):
    """The tensors of FastDeploy's model for a checkpoint folder. They are kept for a trainer to write, and compute
    nothing.

    rollout_model: the layer that has the tensors. fd_config: the settings of an engine for the model.
    Raises InvalidField for a setting or a config key that is not supported."""

    def __init__(self, rollout_model_config: RolloutModelConfig):
        super().__init__()
        config = rollout_model_config
        self.fd_config = config.initialize()
        served = load_config(config.model)
        model = build_model(served, get_ops(config.dtype), ANY_LENGTH)
        self._fused = fused_tensors(model)
        self._decoder = DECODERS.get(served.architecture, CHECKPOINT_DECODER)
        self._tied = served.tie_word_embeddings
        self._head_dtype = "float32" if config.lm_head_fp32 else config.dtype
        self._mappings: dict[str, str | list[str]] = {}
        self.rollout_model = self._new_layer()
        if not config.dynamic_load_weight:
            with open_source(FolderSource(config.model)) as reader:
                describe(reader, model)
                self.load_weights((name, widen(reader.read(name))) for name in reader.entries)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, paddle.Tensor]:
        """Return the tensors by FastDeploy's names: fused, and linears as [in, out]. The trainer writes into them."""
        state: dict[str, paddle.Tensor] = self.rollout_model.state_dict(*args, **kwargs)
        return state

    def get_name_mappings_to_training(self, trainer_degree: Any = None) -> dict[str, str | list[str]]:
        """Return the trainer's name of each tensor; of stacked experts, that of each. trainer_degree: has no effect, as
        in FastDeploy."""
        if not self._mappings:
            renamed = [one for one in self._fused if one.trained != one.name]
            self._mappings = {one.name: one.trained for one in (*renamed, *self._fused)}
        return self._mappings

    def get_quantization_infer_keys(self) -> list[str]:
        """Return the tensors that the trainer has to quantize: none, since the server quantizes."""
        return []

    @paddle.no_grad()
    def load_weights(self, weights_iterator: Iterable[Weight]) -> None:
        """Take all tensors from pairs (name, tensor of Paddle or numpy), in any order. Names and layouts may be those
        of a Hugging Face checkpoint, of PaddleFormers' models ([in, out]), or of ``state_dict``. Raises InvalidField,
        which names the tensor that is unknown, missing or of a wrong shape; then the old tensors stay."""
        loader = _Loader(self._new_layer(), self._fused, self._decoder)
        for name, value in weights_iterator:
            if not name.endswith(COMPUTED):
                loader.add(name, value)
        if self._tied:
            loader.tie()
        self.rollout_model = loader.finish()

    @paddle.no_grad()
    def checkpoint(self) -> dict[str, paddle.Tensor]:
        """Return the tensors as a Hugging Face checkpoint has them, for ``RolloutClient.publish``. Raises InvalidField,
        which names a tensor that was not written. A tied output layer that nobody wrote is left out; one that was
        written must equal the embedding, or the server refuses the update."""
        state = self.state_dict()
        found: dict[str, paddle.Tensor] = {}
        for one in self._fused:
            value = state[one.name]
            if value._is_initialized():
                found |= one.to_checkpoint(value)
            elif not (self._tied and one.parts[0][0] == LM_HEAD):
                raise InvalidField(one.name, "was not written since the model was made")
        return found

    def save_checkpoint(self, folder: str | os.PathLike[str]) -> None:
        """Write ``checkpoint`` and its config.json to a folder, which ``LLM.update_weights`` and /v1/update_weights
        take. A folder that does not exist is made. Raises InvalidField as ``checkpoint`` does, and OSError."""
        old, new = Path(self.fd_config.model), Path(folder)
        new.mkdir(parents=True, exist_ok=True)
        config = json.loads((old / CONFIG).read_text())
        kept = {key: value for key, value in config.items() if key not in OF_PADDLE}
        (new / CONFIG).write_text(json.dumps(kept | {"torch_dtype": self.fd_config.dtype}, indent=1))
        if (old / GENERATION).exists():
            shutil.copyfile(old / GENERATION, new / GENERATION)
        write_folder(host_tensors(self.checkpoint()), new)

    def _new_layer(self) -> nn.Layer:
        """Return a layer with all tensors, which take no memory yet."""
        layer = nn.Layer()
        with paddle.LazyGuard():
            for one in self._fused:
                *path, last = one.name.split(".")
                inner = layer
                for name in path:
                    if name not in inner._sub_layers:
                        inner.add_sublayer(name, nn.Layer())
                    inner = inner._sub_layers[name]
                dtype: Any = self._head_dtype if one.parts[0][0] == LM_HEAD else self.fd_config.dtype
                dtype = "float32" if one.is_float32 else dtype
                parameter = inner.create_parameter(list(one.shape), dtype=dtype, is_bias=last == "bias")
                inner.add_parameter(last, parameter)
        layer.eval()
        return layer


class _Loader:
    """The writer of a new layer. A weight with as many rows as columns does not tell its layout; it waits until another
    one tells that of all. layer: of new tensors."""

    def __init__(self, layer: nn.Layer, fused: Sequence[FusedTensor], decoder: str):
        self._layer, self._state = layer, layer.state_dict()
        self._known = {one.name: one for one in fused}
        self._parts = by_checkpoint_name(fused, decoder)
        self._decoder = decoder
        self._missing = {name: None for one in fused for name, _ in one.parts}
        self._square: list[tuple[str, FusedTensor, Any]] = []
        self._in_out: bool | None = None  # the layout of linears: [in, out], [out, in], or unknown

    def add(self, name: str, value: Any) -> None:
        """Write one tensor."""
        value = value if isinstance(value, paddle.Tensor) else paddle.to_tensor(value)
        shape = tuple(value.shape)
        if (one := self._parts.get(name)) is not None:
            self._add_part(name, one, value, shape)
        elif (one := self._known.get(name)) is not None:
            if shape != one.shape:
                raise InvalidField(name, f"expected the shape {list(one.shape)}, got {list(shape)}")
            self._state[one.name].set_value(value.astype(self._state[one.name].dtype).contiguous())
            for part, _ in one.parts:
                self._missing.pop(part, None)
        else:
            raise InvalidField(name, "is no tensor of this model")

    def tie(self) -> None:
        """Take the embedding for a tied output layer that did not come."""
        if LM_HEAD in self._missing and EMBEDDING not in self._missing:
            embedding = self._state[self._parts[EMBEDDING].name]
            self._write(LM_HEAD, self._parts[LM_HEAD], embedding.T)

    def finish(self) -> nn.Layer:
        """Return the layer. Raises InvalidField for a tensor that did not come."""
        for name, one, value in self._square:
            self._write(name, one, value if self._in_out else value.T)
        if self._missing:
            raise InvalidField(next(iter(self._missing)), "is missing: it did not come")
        return self._layer

    def _add_part(self, name: str, one: FusedTensor, value: Any, shape: tuple[int, ...]) -> None:
        place = one.places()[self._checkpoint_name(name, one)][-1]
        expected = (*one.shape[1 if one.experts else 0 : -1], place.stop - place.start)
        # An output layer may be [vocab, hidden], and a router [experts, hidden], in both layouts.
        if not one.transposed or one.parts[0][0] == LM_HEAD or one.is_float32:
            if one.transposed and shape == expected[::-1] and shape != expected:
                value, shape = value.T, expected
            self._require(name, shape == expected, expected, shape)
            self._write(name, one, value)
            return
        if expected[0] == expected[1]:
            self._require(name, shape == expected, expected, shape)
            self._square.append((name, one, value))
            return
        in_out = shape == expected
        self._require(name, in_out or shape == expected[::-1], expected, shape)
        if self._in_out not in (None, in_out):
            raise InvalidField(name, f"has the shape {list(shape)}, which is not the layout of the tensors before it")
        self._in_out = in_out
        self._write(name, one, value if in_out else value.T)

    def _write(self, name: str, one: FusedTensor, value: Any) -> None:
        """Write a part, [in, out], to its place."""
        target, part = self._state[one.name], self._checkpoint_name(name, one)
        value = value.astype(target.dtype).contiguous()  # a transposed view would stay one in the target
        if one.is_whole:
            target.set_value(value)
        else:
            if not target._is_initialized():
                target.initialize()
            target[one.places()[part]] = value
        self._missing.pop(part, None)

    def _checkpoint_name(self, name: str, one: FusedTensor) -> str:
        """Return the checkpoint's name of a part, whichever name its decoder has."""
        prefix = f"{self._decoder}."
        names = one.places()
        return name if name in names else f"{CHECKPOINT_DECODER}.{name.removeprefix(prefix)}"

    @staticmethod
    def _require(name: str, ok: bool, expected: tuple[int, ...], shape: tuple[int, ...]) -> None:
        if not ok:
            raise InvalidField(name, f"expected the shape {list(expected)}, or its transpose, got {list(shape)}")
