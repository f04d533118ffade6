"""A model as loader, staging and worker see it. Every architecture of this package implements ``Model``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import paddle

from fastdeploy.model_executor.model_config import ModelConfig
from fastdeploy.model_executor.ops.interface import (
    AdapterRows,
    AttentionBatch,
    DecoderLayer,
    KVCache,
    Ops,
    PackedAdapter,
    PackedLinear,
    PackedLora,
)
from fastdeploy.model_executor.parameters import Parameter, Value


@dataclass(frozen=True)
class ModelWeights:
    """One complete set of weights. Immutable: an update makes a second set, and serving switches to it by reference.

    lm_head: the same object as ``embedding`` if the two are tied. values: all parameters, by key.
    """

    embedding: PackedLinear
    layers: tuple[DecoderLayer, ...]
    norm: paddle.Tensor
    lm_head: PackedLinear
    values: Mapping[str, Value]


class Model(Protocol):
    """The computation of a model, without weights.

    parameters: all parameters of the model. adaptable: the linears that an adapter may change. The last one is the
    output layer; if that is tied to the embedding, it is no parameter. aliases: further tensors that a checkpoint may
    have, each with the name of the tensor that it must equal (lm_head.weight if embeddings are tied: transformers
    ignores it, but a trainer that sends other values for it would expect them to serve).
    """

    config: ModelConfig
    ops: Ops
    parameters: tuple[Parameter, ...]
    adaptable: tuple[Parameter, ...]
    aliases: Mapping[str, str]

    def assemble(self, values: Mapping[str, Value]) -> ModelWeights:
        """Make weights from the packed value of each parameter, by key."""

    def assemble_adapter(self, loras: Mapping[str, PackedLora]) -> PackedAdapter:
        """Make an adapter from the packed adapter of each linear that has one, by the linear's key (its Parameter)."""

    def forward(
        self,
        weights: ModelWeights,
        token_ids: np.ndarray,
        cache: KVCache,
        batch: AttentionBatch,
        rows: np.ndarray,
        between_layers: Callable[[], None] | None = None,
        adapters: AdapterRows | None = None,
    ) -> paddle.Tensor:
        """Compute token_ids, int32 [T]. Returns the hidden states of the token rows ``rows`` (int64, ascending),
        float32 [len(rows), hidden_size], for ``logits``. The keys and values of all T tokens are in the cache
        afterwards. between_layers, adapters: see ``Ops.decoder_layers``."""

    def logits(
        self, weights: ModelWeights, hidden: paddle.Tensor, adapters: AdapterRows | None = None
    ) -> paddle.Tensor:
        """Return logits: hidden [N, hidden_size] -> float32 [N, vocab_size]. The next call may overwrite the result.
        adapters: of the N rows."""


Config = TypeVar("Config", bound=ModelConfig)


@dataclass(frozen=True)
class Architecture(Generic[Config]):
    """An entry of the registry of architectures.

    read_config: makes the config from config.json and generation_config.json, both parsed. Raises InvalidField, which
    names the key that is missing, malformed or not supported.
    build: makes the model for a config, ops and the longest sequence (max_model_len).
    """

    read_config: Callable[[dict[str, Any], dict[str, Any]], Config]
    build: Callable[[Config, Ops, int], Model]
