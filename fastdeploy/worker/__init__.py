"""A worker computes steps: it holds the weights and the KV cache, and knows nothing of requests or pauses."""

import fastdeploy.model_executor  # noqa: F401  (keeps Paddle quiet: must be the first import of Paddle)
