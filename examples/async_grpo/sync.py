"""The ways in which new weights come to the server; ``--sync`` names one.

- synchronous: nothing is generated while the trainer trains, and nothing is trained while the server generates. The
  producer sees to that (rollouts.Producer.batch). So nothing is in flight here, and no pause is needed.
- wait: all started answers end, then the weights change.
- abort: all answers end early, then the weights change. RolloutClient asks for the rest of each answer by itself.
- keep: all answers freeze, then the weights change, and the answers go on.
- live: the server changes the weights between two steps, without a pause.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, Literal

from examples.async_grpo.config import Settings, SyncWay
from fastdeploy.rl.client import RolloutClient

PAUSES: dict[SyncWay, Literal["wait", "abort", "keep"]] = {"wait": "wait", "abort": "abort", "keep": "keep"}


async def publish(
    client: RolloutClient, settings: Settings, state: Mapping[str, Any], version: int, now: Callable[[], float]
) -> dict[str, Any]:
    """Publish weights in the way of the settings. Returns what happened when, by ``now``, in seconds.

    paused: when the pause was complete; resumed: when it had ended; both None without a pause. staged_s: time in which
    the server read, checked and packed the weights. bytes: sent.
    """
    mode = PAUSES.get(settings.sync)
    times: dict[str, float | None] = {"began": now(), "paused": None}
    async with client.paused(mode=mode) if mode else nullcontext():
        if mode:
            times["paused"] = now()
        publication = await client.publish(state, version=version, kv=settings.kv)
        times["committed"] = now()
    times["resumed"] = now() if mode else None
    timings = publication.report.get("timings_ms", {})
    return times | {"staged_s": timings.get("stage", 0.0) / 1000, "bytes": publication.nbytes}
