"""The public class: log probabilities of output tokens, equal to the bit to the server's, and their gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import paddle

from fastdeploy.core.errors import InvalidField
from fastdeploy.model_executor.models import build_model, load_config
from fastdeploy.model_executor.ops import get_ops
from fastdeploy.rl.scoring.backward import Backward
from fastdeploy.rl.scoring.decoder import Decoder
from fastdeploy.rl.scoring.forward import EngineForward
from fastdeploy.rl.scoring.samples import Ids, Sample, checked_samples
from fastdeploy.rl.scoring.weights import Packer, Snapshot, read_parameters

FORWARD_TOKENS = 8192


class Scorer:
    """Scores samples with the weights of a checkpoint folder, which a trainer changes.

    dtype: of the server, "float32" or "bfloat16". max_model_len: the longest sample, in tokens; None = that of the
    model. max_tokens: of one micro-batch of the backward pass, whose memory grows with it.

    parameters: float32 tensors by checkpoint name, a tied one once. An optimizer changes them; ``refresh`` must follow.

    Raises InvalidField for a setting or a config key, WeightUpdateRefused for a file or a tensor.
    """

    def __init__(
        self, model_path: str, dtype: str = "bfloat16", max_model_len: int | None = None, max_tokens: int = 1024
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
        self._model = build_model(config, get_ops(dtype), self._max_len)
        self.parameters: dict[str, paddle.Tensor] = read_parameters(model_path, self._model)
        self._packer = Packer(self._model)
        self._forward = EngineForward(self._model, FORWARD_TOKENS)
        self.refresh()
        self._backward = Backward(self._model, Decoder(self._model, self._snapshot.packed), max_tokens)

    def refresh(self) -> None:
        """Round and pack the parameters as they are now, for ``logprobs`` and ``state``. Call it after each step of an
        optimizer. Raises WeightUpdateRefused for a value that is not finite; then the last values stay in force."""
        self._snapshot = self._packer.snapshot(self.parameters)

    def state(self) -> dict[str, paddle.Tensor]:
        """Return what to publish, by checkpoint name: the values of the last ``refresh`` in the dtype of the server. A
        later ``refresh`` does not change them."""
        return dict(self._snapshot.rounded)

    def logprobs(self, sequences: Iterable[tuple[Ids, Ids]], temperature: float = 1.0) -> paddle.Tensor:
        """Return the log probability of each output token, float32 [total output tokens], in the order of
        ``sequences``. These are (prompt_ids, output_ids) pairs.

        The values equal, to the bit, those that a server with the same weights and dtype returns for the tokens it
        samples: with temperature 1.0 in logprobs_mode raw, with another one in mode temperature at this temperature.
        0.0 counts as 1.0, as it does at the server. The result has gradients with respect to ``parameters``.

        Raises InvalidField for input that the model cannot score, NonFiniteLogits for weights that give NaN."""
        if isinstance(temperature, bool) or not isinstance(temperature, int | float) or not 0 <= temperature < 1e6:
            raise InvalidField("temperature", f"expected a number from 0 to 1e6, got {temperature!r}")
        samples = checked_samples(sequences, self._model.config.vocab_size, self._max_len)
        call = _Call(self._forward, self._backward, self._snapshot, samples, float(temperature), list(self.parameters))
        return _Logprobs.apply(call, *self.parameters.values())


class _Call(NamedTuple):
    """One call of ``Scorer.logprobs``. names: of the parameters, in the order in which they are passed."""

    forward: EngineForward
    backward: Backward
    snapshot: Snapshot
    samples: Sequence[Sample]
    temperature: float
    names: Sequence[str]


class _Logprobs(paddle.autograd.PyLayer):
    """Forward through the engine's ops, backward through the plain decoder."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *parameters: paddle.Tensor) -> paddle.Tensor:
        """Return the log probabilities."""
        ctx.call, ctx.frozen = call, [parameter.stop_gradient for parameter in parameters]
        return paddle.to_tensor(call.forward.logprobs(call.snapshot.packed, call.samples, call.temperature))

    @staticmethod
    def backward(ctx: Any, *upstreams: paddle.Tensor) -> Any:
        """Return the gradient of each parameter, None for a frozen one."""
        call, [upstream] = ctx.call, upstreams
        found = call.backward.gradients(call.snapshot.rounded, call.samples, call.temperature, upstream.numpy())
        return tuple(None if frozen else found[name] for name, frozen in zip(call.names, ctx.frozen, strict=True))
