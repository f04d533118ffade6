"""Log probabilities of output tokens for a trainer, equal to the bit to those of the server, with gradients.

scorer      Scorer, the public class: parameters of a checkpoint, and log probabilities by the engine's model and ops
samples     the checked input
distribution  temperature and sampling masks
decoder     the same model in plain Paddle, with gradients
backward    gradients of the parameters, by way of the decoder

This layer imports Paddle; the rest of ``fastdeploy.rl`` does not.
"""

from fastdeploy.rl.scoring.scorer import Scorer

__all__ = ["Scorer"]
