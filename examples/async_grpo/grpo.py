"""The formulas of the algorithm: advantages of a group, loss of its tokens, mismatch of logprobs. No I/O here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import paddle

from examples.async_grpo.config import Settings

EPSILON = 1e-4


def advantages(rewards: Sequence[float]) -> np.ndarray:
    """Return how much better each answer of a group is than the group: (reward - mean) / deviation, float32 [group].

    All zero for a group whose rewards are equal: nothing can be learned from it. GRPO, https://arxiv.org/abs/2402.03300.
    """
    found = np.asarray(rewards, np.float32)
    return (found - found.mean()) / (found.std() + EPSILON)


class Losses(NamedTuple):
    """Scalars. loss: to be minimized. kl: to the reference, per token. clipped: share of tokens whose ratio the bounds
    change for the worse: they have no gradient."""

    loss: paddle.Tensor
    kl: paddle.Tensor
    clipped: paddle.Tensor


def token_loss(
    current: paddle.Tensor,
    behaviour: paddle.Tensor,
    reference: paddle.Tensor | None,
    advantage: paddle.Tensor,
    settings: Settings,
) -> Losses:
    """Return the mean loss over all tokens of a batch, each float32 [tokens].

    current: logprobs by the weights that are trained. behaviour: logprobs that the server returned when it sampled the
    tokens, perhaps by older weights. Their ratio is the importance weight of a token. reference: logprobs by the
    weights at the start; None if kl_weight is 0.

    - The ratio is clipped to [1 - clip_low, 1 + clip_high] where that lowers the objective (PPO, with the wider upper
      bound of DAPO, https://arxiv.org/abs/2503.14476).
    - A ratio above max_ratio counts as max_ratio. This bounds the loss of a token with a negative advantage (dual clip,
      https://arxiv.org/abs/1912.09729).
    - Every token has the same weight, whatever the length of its answer (DAPO).
    - KL to the reference by exp(d) - d - 1 with d = reference - current (http://joschu.net/blog/kl-approx.html). As in
      GRPO, the ratio does not weight this term.
    """
    ratio = paddle.exp(paddle.clip(current - behaviour, max=float(np.log(settings.max_ratio))))
    bounded = paddle.clip(ratio, 1 - settings.clip_low, 1 + settings.clip_high)
    gain = paddle.minimum(ratio * advantage, bounded * advantage)
    clipped = (ratio * advantage > bounded * advantage).astype("float32").mean()
    if reference is None:
        return Losses(-gain.mean(), paddle.zeros([]), clipped)
    apart = reference - current
    kl = (paddle.exp(apart) - apart - 1).mean()
    return Losses(settings.kl_weight * kl - gain.mean(), kl, clipped)


def mismatch(trainer: np.ndarray, server: np.ndarray) -> dict[str, float] | None:
    """Compare two logprobs of each token, float32 [tokens]. None without tokens.

    kl: mean of exp(d) - d - 1, where d = trainer - server. ratio_max: greatest exp(abs(d)). Without any difference,
    max_abs and kl are 0, and ratio_max is 1.
    """
    if not trainer.size:
        return None
    apart = trainer.astype(np.float64) - server.astype(np.float64)
    largest = float(np.abs(apart).max())
    kl = float((np.exp(apart) - apart - 1).mean())
    return {"tokens": apart.size, "max_abs": largest, "kl": kl, "ratio_max": float(np.exp(largest))}
