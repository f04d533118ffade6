"""TRL's AsyncGRPOTrainer with this server: a ``weight_transfer`` that needs no NCCL, and no change of TRL.

    trainer = AsyncGRPOTrainer(..., weight_transfer=FastDeployWeightTransfer("http://127.0.0.1:8180"))

TRL 1.16 calls, around each step: pause, send_weights, resume (trl/experimental/async_grpo, WeightTransferProtocol).
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from fastdeploy.rl.pause import beside
from fastdeploy.rl.publish import Publication
from fastdeploy.rl.sync_client import SyncRolloutClient


class FastDeployWeightTransfer:
    """Publishes the trainer's full weights to one server or many, all of them or none.

    label: the version of the n-th sync is label + str(n), from 0 (the weights that training begins with). kv: what
    becomes of the KV of requests in flight ("recompute": as if they had been computed by the new weights, which TRL
    assumes). paused False: nothing is paused at all; the new weights are committed between two steps. via, chunk_mb:
    see RolloutClient.publish. client: further options of RolloutClient, such as api_key, control_key, control_urls and
    hold_ttl_s (a trainer that died between pause and resume does not hold the servers for longer). publications: what
    was committed so far.

    A sync that fails raises, and the servers go on with the weights they had.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        label: str = "trl-",
        kv: Literal["keep", "recompute"] = "recompute",
        paused: bool = True,
        via: Literal["auto", "upload", "shared_memory"] = "auto",
        chunk_mb: int = 256,
        deadline_s: float = 1800.0,
        **client: Any,
    ):
        self._urls = urls
        self._client_options = client
        self._label = label
        self._kv: Literal["keep", "recompute"] = kv
        self._paused = paused
        self._publish_options: dict[str, Any] = {"via": via, "chunk_mb": chunk_mb, "deadline_s": deadline_s}
        self._hold: str | None = None
        self._client: SyncRolloutClient | None = None
        self.publications: list[Publication] = []

    def init_weight_transfer(self) -> None:
        """Connect. Called once, before the first sync."""
        self._client = SyncRolloutClient(self._urls, **self._client_options)

    def pause(self) -> None:
        """Freeze what is in flight on all servers, or on none: FleetError has a report per server."""
        if self._paused:
            self._hold = f"trl-{uuid.uuid4().hex}"
            self._connected().pause("keep", hold_id=self._hold)

    def send_weights(self, iterator: Iterable[tuple[str, Any]]) -> None:
        """Publish all ``(name, tensor)`` pairs as one commit. Tied weights come under their first name only, which is
        what the servers expect. On failure the pause is over before this raises."""
        try:
            version = f"{self._label}{len(self.publications)}"
            state = dict(iterator)
            self.publications.append(
                self._connected().publish(state, version, kv=self._kv, **self._publish_options),
            )
        except BaseException as error:
            with beside(error):
                self.resume()
            raise

    def resume(self) -> None:
        """Release the hold of :meth:`pause` and no other. A second call does nothing. Raises HoldLost if a server ran
        before."""
        hold, self._hold = self._hold, None
        if hold is not None:
            self._connected().resume(hold)

    def destroy(self) -> None:
        """Leave the servers running, and close the connections."""
        if self._client is not None:
            self.resume()
            self._client.close()
            self._client = None

    def _connected(self) -> SyncRolloutClient:
        if self._client is None:
            self.init_weight_transfer()
        assert self._client is not None
        return self._client
