"""A model as loader, staging and worker see it. An architecture of this package is a ``Model`` with builders of its
blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import paddle

from fastdeploy.model_executor.model_config import ModelConfig
from fastdeploy.model_executor.ops.blocks import Block, DecoderLayer, PackedLinear
from fastdeploy.model_executor.ops.interface import (
    AdapterRows,
    AttentionBatch,
    KVCache,
    Ops,
    PackedAdapter,
    PackedLora,
    Routing,
)
from fastdeploy.model_executor.parameters import Parameter, Use, Value, as_linear, as_vector, linear, vector

EMBEDDING, NORM, LM_HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


def norm_weight(config: ModelConfig, value: Value) -> paddle.Tensor:
    """Return what an RMSNorm multiplies with: its packed weight, or 1 + weight if ``norms_add_one``. A new tensor then:
    the packed weight keeps the values of the checkpoint, for checksums, exports and updates."""
    weight = as_vector(value)
    return weight + 1.0 if config.norms_add_one else weight


def new_kv_cache(ops: Ops, config: ModelConfig, num_blocks: int, block_size: int) -> KVCache:
    """Allocate the KV cache of a model. Raises MemoryError."""
    layers, heads, dim = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
    return ops.new_kv_cache(layers, num_blocks, block_size, heads, dim, config.keys_only)


@dataclass(frozen=True)
class ModelWeights:
    """One complete set of weights. Immutable: an update makes a second set, and serving switches to it by reference.

    norm: see ``norm_weight``. lm_head: the same object as ``embedding`` if the two are tied. values: all parameters, by
    key.
    """

    embedding: PackedLinear
    layers: tuple[DecoderLayer, ...]
    norm: paddle.Tensor
    lm_head: PackedLinear
    values: Mapping[str, Value]

    @property
    def nbytes(self) -> int:
        """Memory of all linears."""
        return sum(value.nbytes for value in self.values.values() if not isinstance(value, paddle.Tensor))


def _is_adaptable(parameter: Parameter) -> bool:
    return not parameter.is_vector and parameter.use is Use.ADAPTED


class BlockBuilder(Protocol):
    """The builder of one block of every layer."""

    def parameters(self, layer: int) -> list[Parameter]:
        """Return the parameters of the block in this layer. Those that adapters may change are in the order of
        ``linears`` of the block."""

    def build(self, values: Mapping[str, Value], layer: int) -> Block:
        """Make the block of this layer. values: the packed value of each parameter, by key."""


class Model:
    """The computation of a decoder-only model, without weights: an embedding, layers of blocks, an RMSNorm and an
    output head. builders: one for each block of a layer.

    parameters: all parameters of the model. adaptable: the linears that an adapter may change. The last one is the
    output layer; if that is tied to the embedding, it is no parameter. aliases: further tensors that a checkpoint may
    have, each with the name of the tensor that it must equal (lm_head.weight if embeddings are tied: transformers
    ignores it, but a trainer that sends other values for it would expect them to serve). ignored: how the names of
    further tensors begin, which a checkpoint may have and no result depends on (a layer that predicts several tokens).
    quantization: see ``build_model``. embedding_scale: the embedding is multiplied by it.
    """

    quantization: str | None = None

    def __init__(
        self,
        config: ModelConfig,
        ops: Ops,
        builders: Sequence[BlockBuilder],
        embedding_scale: float = 1.0,
        ignored: tuple[str, ...] = (),
    ):
        self.config, self.ops, self.embedding_scale, self.ignored = config, ops, embedding_scale, ignored
        self._builders = tuple(builders)
        self.aliases: Mapping[str, str] = {LM_HEAD: EMBEDDING} if config.tie_word_embeddings else {}
        embedding, head = (
            linear(key, {name.removesuffix(".weight"): config.vocab_size}, config.hidden_size)
            for key, name in (("embedding", EMBEDDING), ("lm_head", LM_HEAD))
        )
        self._head = "embedding" if config.tie_word_embeddings else "lm_head"  # the key of the output layer's values
        blocks = [[one.parameters(layer) for one in self._builders] for layer in range(config.num_hidden_layers)]
        self._adaptable_keys = [[[p.key for p in block if _is_adaptable(p)] for block in layer] for layer in blocks]
        of_layers = [parameter for layer in blocks for block in layer for parameter in block]
        ends = [vector("norm", NORM, config.hidden_size)] + ([] if config.tie_word_embeddings else [head])
        self.parameters: tuple[Parameter, ...] = (embedding, *of_layers, *ends)
        self.adaptable: tuple[Parameter, ...] = (*filter(_is_adaptable, of_layers), head)

    def quantize(self, values: Mapping[str, Value], stop: np.ndarray) -> None:
        """Make the int8 values of those linears that steps multiply with, after their values were written. values: by
        key. stop: see ``Ops.quantize``. Does nothing without quantization. Raises MemoryError."""
        if self.quantization is None:
            return
        linears = [one for one in self.parameters if not one.is_vector and one.use is not Use.EXACT]
        multiplied = {one.key for one in linears} - {"embedding"} | {self._head}
        self.ops.quantize([as_linear(value) for key, value in values.items() if key in multiplied], stop)

    def assemble(self, values: Mapping[str, Value]) -> ModelWeights:
        """Make weights from the packed value of each parameter, by key."""
        layers = tuple(
            DecoderLayer(tuple(builder.build(values, layer) for builder in self._builders))
            for layer in range(self.config.num_hidden_layers)
        )
        embedding, norm = as_linear(values["embedding"]), norm_weight(self.config, values["norm"])
        return ModelWeights(embedding, layers, norm, as_linear(values[self._head]), values)

    def assemble_adapter(self, loras: Mapping[str, PackedLora]) -> PackedAdapter:
        """Make an adapter from the packed adapter of each linear that has one, by the linear's key (its Parameter)."""
        layers = tuple(tuple(tuple(map(loras.get, block)) for block in layer) for layer in self._adaptable_keys)
        adapter = PackedAdapter(layers, loras.get("lm_head"), sum(lora.nbytes for lora in loras.values()))
        self.ops.gather_adapter(adapter)
        return adapter

    def forward(
        self,
        weights: ModelWeights,
        token_ids: np.ndarray,
        cache: KVCache,
        batch: AttentionBatch,
        rows: np.ndarray,
        between_layers: Callable[[], None] | None = None,
        adapters: AdapterRows | None = None,
        routing: Routing | None = None,
    ) -> paddle.Tensor:
        """Compute token_ids, int32 [T]. Returns the hidden states of the token rows ``rows`` (int64, ascending),
        float32 [len(rows), hidden_size], for ``logits``. The keys and values of all T tokens are in the cache
        afterwards. between_layers, adapters, routing: see ``Ops.decoder_layers``."""
        hidden = self.ops.embedding(token_ids, weights.embedding)
        if self.embedding_scale != 1.0:
            hidden.scale_(self.embedding_scale)
        return self.ops.decoder_layers(hidden, weights.layers, cache, batch, rows, between_layers, adapters, routing)

    def logits(
        self, weights: ModelWeights, hidden: paddle.Tensor, adapters: AdapterRows | None = None
    ) -> paddle.Tensor:
        """Return logits: hidden [N, hidden_size] -> float32 [N, vocab_size]. The next call may overwrite the result.
        adapters: of the N rows."""
        return self.ops.logits(hidden, weights.norm, self.config.rms_norm_eps, weights.lm_head, adapters)


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
