"""Pauses and new weights beside rollouts. The new weights have the old values, so every rollout must come out as it
would have without them."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from itertools import cycle
from typing import Any, Literal

from examples.embedded_model import checkpoint
from fastdeploy.embedded import MODEL_DIR
from fastdeploy.rl.client import RolloutClient

PERIOD_S = 2.0
Disturbance = Literal["abort", "keep", "wait", "live", "live, recompute", "paused"]
ALL: tuple[Disturbance, ...] = ("abort", "live", "keep", "live, recompute", "wait", "paused")


async def disturb(client: RolloutClient, finished: asyncio.Event) -> Counter[str]:
    """Pause in each mode and publish weights in each way, again and again until ``finished``. Return how often."""
    weights = checkpoint.load(MODEL_DIR).weights
    counts: Counter[str] = Counter()
    for what in cycle(ALL):
        await _once(client, what, weights)
        counts[what] += 1
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(finished.wait(), PERIOD_S)
        if finished.is_set():
            break
    return counts


async def _once(client: RolloutClient, what: Disturbance, weights: dict[str, Any]) -> None:
    match what:
        case "abort" | "keep" | "wait":
            # The cache is kept, since the weights stay. A new version begins with an empty cache in any case.
            async with client.paused(what, clear_cache=False):
                pass
        case "live" | "live, recompute":
            kv: Literal["keep", "recompute"] = "recompute" if what == "live, recompute" else "keep"
            await client.publish(weights, kv=kv, delta="never")
        case "paused":
            async with client.paused("abort"):
                await client.publish(weights, delta="never")
