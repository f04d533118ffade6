"""Log probabilities of output tokens for a trainer, equal to the bit to those of the server, with gradients.

scorer      Scorer, the public class
samples     the checked input
weights     float32 parameters of a checkpoint, and their rounded and packed values
forward     log probabilities by the engine's own model and ops
decoder     the same model in plain Paddle, with gradients
backward    gradients of the parameters, by way of the decoder

This layer imports Paddle; the rest of ``fastdeploy.rl`` does not.
"""

from fastdeploy.rl.scoring.scorer import Scorer

__all__ = ["Scorer"]
