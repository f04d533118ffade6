"""The public class: log probabilities of output tokens, equal to the bit to the server's, and their gradients.

Rounding and packing are those of a weight update: ``Ops.stage`` reads float32 bytes, rounds them to the serving dtype
and writes them to their place in the packed weights (worker/staged_values.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import paddle

from fastdeploy.core.errors import InvalidField
from fastdeploy.core.serving_dtype import dtype_of, widen
from fastdeploy.core.weight_source import FolderSource
from fastdeploy.model_executor.checkpoint_layout import describe
from fastdeploy.model_executor.models import build_model, load_config
from fastdeploy.model_executor.models.experts import experts_of_config
from fastdeploy.model_executor.models.interface import Model, ModelWeights
from fastdeploy.model_executor.ops import get_ops
from fastdeploy.model_executor.ops.interface import StageItem
from fastdeploy.model_executor.safetensors_source import open_source, refuse_tensor
from fastdeploy.rl.scoring.backward import Backward
from fastdeploy.rl.scoring.distribution import Distribution, SamplingMasks, checked_masks
from fastdeploy.rl.scoring.engine_forward import EngineForward
from fastdeploy.rl.scoring.samples import Ids, RoutedRows, Sample, checked_samples, with_routing
from fastdeploy.worker.part_reading import by_dtype, refusal
from fastdeploy.worker.staged_values import StagedValues
from fastdeploy.worker.standby import StandbyCopy

FORWARD_TOKENS = 8192  # of one batch
NEVER_STOPPED = np.zeros(1, np.int32)
DTYPES = {"float32": paddle.float32, "bfloat16": paddle.bfloat16}


def read_parameters(path: str, model: Model) -> dict[str, paddle.Tensor]:
    """Return the tensors of a checkpoint folder in float32, by name, with gradients. A tied tensor appears once.
    Raises WeightUpdateRefused, which names the tensor that is missing, unknown or damaged."""
    shapes = {name: shape for parameter in model.parameters for name, shape in parameter.shapes.items()}
    with open_source(FolderSource(path)) as reader:
        describe(reader, model)
        if missing := sorted(shapes.keys() - reader.entries.keys()):
            raise refuse_tensor(missing[0], f"is missing in {path}")
        return {name: paddle.to_tensor(widen(reader.read(name)), stop_gradient=False) for name in shapes}


class Snapshot(NamedTuple):
    """The parameters at one moment. rounded: in the serving dtype, by name. packed: the same values in the layout of
    the ops; valid until the next snapshot."""

    rounded: Mapping[str, paddle.Tensor]
    packed: ModelWeights


class Packer:
    """The maker of snapshots. Two sets of packed weights take turns, so that a snapshot allocates none. Only weights
    that blocks make of others (``PackedLinear.transposed_heads``) are new each time."""

    def __init__(self, model: Model):
        self._model = model
        self._standby = StandbyCopy(model.ops, model.parameters, policy="on")
        self._serving: ModelWeights | None = None

    def snapshot(self, parameters: Mapping[str, paddle.Tensor]) -> Snapshot:
        """Round and pack the parameters. Raises as :meth:`pack`; then the last snapshot stays valid."""
        sources = {name: np.ascontiguousarray(tensor.numpy()) for name, tensor in parameters.items()}
        packed = self.pack(sources)
        with paddle.no_grad():
            rounded = {
                name: paddle.to_tensor(source).astype(DTYPES[dtype_of(name, self._model.ops.dtype)])
                for name, source in sources.items()
            }
        return Snapshot(rounded, packed)

    def pack(self, sources: Mapping[str, np.ndarray]) -> ModelWeights:
        """Round and pack float32 arrays by checkpoint name. Raises WeightUpdateRefused for a value that is not finite,
        or not finite in the serving dtype; then the last packed weights stay valid."""
        ops, loan = self._model.ops, self._standby.lend()
        values = StagedValues(self._model, loan)
        items = {
            name: StageItem(values.region(name), "F32", 0, memory=source.reshape(-1).view(np.uint8))
            for name, source in sources.items()
        }
        for dtype, some in by_dtype(items, ops.dtype):
            for name, result in zip(some, ops.stage(list(some.values()), NEVER_STOPPED, dtype), strict=True):
                if result.problem is not None:
                    self._standby.give_back(loan)
                    raise refusal(name, "the parameters", result, dtype)
        packed = self._model.assemble(values.complete(sources, {}, NEVER_STOPPED))
        old = {} if self._serving is None else self._serving.values
        self._standby.commit(loan, old, packed.values, {})
        self._serving = packed
        return packed


class Scorer:
    """The scorer of samples, with the weights of a checkpoint folder, which a trainer changes.

    dtype: of the server, "float32" or "bfloat16". quantization: of the server, "int8" or None; gradients are those of
    weights without it. max_model_len: the longest sample, in tokens; None = that of the model. max_tokens: of one
    micro-batch of the backward pass, whose memory grows with it.

    parameters: float32 tensors by checkpoint name, a tied one once. An optimizer changes them; ``refresh`` must follow.

    Raises InvalidField for a setting or a config key, WeightUpdateRefused for a file or a tensor.
    """

    def __init__(
        self,
        model_path: str,
        dtype: str = "bfloat16",
        max_model_len: int | None = None,
        max_tokens: int = 1024,
        quantization: str | None = None,
    ):
        if dtype not in ("float32", "bfloat16"):
            raise InvalidField("dtype", f"expected float32 or bfloat16, got {dtype!r}")
        if max_tokens < 1:
            raise InvalidField("max_tokens", f"expected at least 1, got {max_tokens}")
        config = load_config(model_path)
        self._max_len = config.max_position_embeddings if max_model_len is None else max_model_len
        if not 2 <= self._max_len <= config.max_position_embeddings:
            expected = f"expected 2 to {config.max_position_embeddings} (the model's own)"
            raise InvalidField("max_model_len", f"{expected}, got {max_model_len}")
        self._model = build_model(config, get_ops(dtype), self._max_len, quantization)
        self.parameters: dict[str, paddle.Tensor] = read_parameters(model_path, self._model)
        self._packer = Packer(self._model)
        self._experts = experts_of_config(config)
        self._forward = EngineForward(self._model, FORWARD_TOKENS, self._experts)
        self.refresh()
        self._backward = Backward(self._model, max_tokens)

    def refresh(self) -> None:
        """Round and pack the parameters as they are now, for ``logprobs`` and ``state``. Call it after each step of an
        optimizer. Raises WeightUpdateRefused for a value that is not finite; then the last values stay in force."""
        self._snapshot = self._packer.snapshot(self.parameters)

    def state(self) -> dict[str, paddle.Tensor]:
        """Return what to publish, by checkpoint name: the values of the last ``refresh`` in the dtype of the server. A
        later ``refresh`` does not change them."""
        return dict(self._snapshot.rounded)

    def logprobs(
        self,
        sequences: Iterable[tuple[Ids, Ids]],
        temperature: float = 1.0,
        sampling_masks: SamplingMasks | None = None,
        routed_experts: Iterable[RoutedRows] | None = None,
    ) -> paddle.Tensor:
        """Return the log probability of each output token, float32 [total output tokens], in the order of
        ``sequences``. These are (prompt_ids, output_ids) pairs.

        The values equal, to the bit, those that a server with the same weights, dtype and quantization returns for the
        tokens it samples: with temperature 1.0 in logprobs_mode raw, with another one in mode temperature at this
        temperature. 0.0 counts as 1.0, as it does at the server. The result has gradients with respect to
        ``parameters``.

        sampling_masks: for each sequence, and for each of its output tokens, the ids that the token was drawn from, as
        the server returned them with ``return_sampling_mask``; none = any. The values are then normalised over these
        ids, and equal those of logprobs_mode processed at this temperature, without penalties.

        routed_experts: for each sequence the experts that compute its tokens, as the server returned them: the ids of
        the chosen experts of each token but the last, best first, integers [tokens - 1, experts layers, experts per
        token]; None = the model chooses, by the rounded weights. The choice has no gradient, the weights of the chosen
        experts have.

        Raises InvalidField for input that the model cannot score, NonFiniteLogits for weights that give NaN."""
        samples = self._checked(sequences, temperature)
        if routed_experts is not None:
            samples = with_routing(samples, routed_experts, self._experts)
        masks = checked_masks(sampling_masks, samples, self._model.config.vocab_size)
        over = Distribution(float(temperature), masks)
        differentiable = paddle.is_grad_enabled()
        call = _Call(
            self._forward, self._backward, self._snapshot, samples, over, list(self.parameters), differentiable
        )
        return _Logprobs.apply(call, *self.parameters.values())

    def top_logprobs(
        self, sequences: Iterable[tuple[Ids, Ids]], top: int, temperature: float = 1.0
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return what a teacher tells: the ids and the log probabilities of the ``top`` best tokens in the place of
        each output token, best first, int32 and float32 [total output tokens, top]. They equal those of a server's
        ``logprobs`` and ``prompt_logprobs`` to the bit, in the modes of :meth:`logprobs`. No gradients. Raises as
        :meth:`logprobs`."""
        samples = self._checked(sequences, temperature)
        if type(top) is not int or not 1 <= top <= self._model.config.vocab_size:
            raise InvalidField("top", f"expected an integer from 1 to {self._model.config.vocab_size}, got {top!r}")
        over = Distribution(float(temperature))
        return self._forward.top_logprobs(self._snapshot.packed, samples, over, top)

    def _checked(self, sequences: Iterable[tuple[Ids, Ids]], temperature: float) -> list[Sample]:
        if isinstance(temperature, bool) or not isinstance(temperature, int | float) or not 0 <= temperature < 1e6:
            raise InvalidField("temperature", f"expected a number from 0 to 1e6, got {temperature!r}")
        return checked_samples(sequences, self._model.config.vocab_size, self._max_len)


class _Call(NamedTuple):
    """One call of ``Scorer.logprobs``. names: of the parameters, in the order in which they are passed. differentiable:
    a backward pass may follow."""

    forward: EngineForward
    backward: Backward
    snapshot: Snapshot
    samples: Sequence[Sample]
    over: Distribution
    names: Sequence[str]
    differentiable: bool


class _Logprobs(paddle.autograd.PyLayer):
    """Forward through the engine's ops, backward through the plain decoder."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *parameters: paddle.Tensor) -> paddle.Tensor:
        """Return the log probabilities."""
        found, samples = call.forward.logprobs(call.snapshot.packed, call.samples, call.over, call.differentiable)
        ctx.call, ctx.frozen = call._replace(samples=samples), [one.stop_gradient for one in parameters]
        return paddle.to_tensor(found)

    @staticmethod
    def backward(ctx: Any, *upstreams: paddle.Tensor) -> Any:
        """Return the gradient of each parameter, None for a frozen one."""
        call, [upstream] = ctx.call, upstreams
        found = call.backward.gradients(call.snapshot.rounded, call.samples, call.over, upstream.numpy())
        return tuple(None if frozen else found[name] for name, frozen in zip(call.names, ctx.frozen, strict=True))
