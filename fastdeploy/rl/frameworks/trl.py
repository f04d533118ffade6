"""TRL integration: a ``weight_transfer`` of AsyncGRPOTrainer that needs neither NCCL nor a change of TRL.

    trainer = AsyncGRPOTrainer(..., weight_transfer=FastDeployWeightTransfer("http://127.0.0.1:8180"))

TRL 1.16 calls pause, send_weights, resume around each step (trl/experimental/async_grpo, WeightTransferProtocol).
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any, Literal

from fastdeploy.rl.holds import note_cleanup_failure
from fastdeploy.rl.publish import Publication
from fastdeploy.rl.sync_client import SyncRolloutClient
from fastdeploy.rl.uploads import MemoryVia


class FastDeployWeightTransfer:
    """The ``weight_transfer`` that publishes the trainer's weights to a server or a fleet, which is sent what changed
    since the last sync if it serves that one.

    label: the version of the n-th sync is label + str(n), from 0 (the weights at the start of training). kv: the KV of
    requests in flight is kept, or recomputed by the new weights, as TRL assumes. paused False: do not pause, and commit
    between two steps. delta, via, chunk_mb, deadline_s: see RolloutClient.publish. client: further options of
    RolloutClient (api_key, control_key, control_url, hold_ttl_s). publications: the publications so far.

    A failed sync raises, and the server keeps its weights.
    """

    def __init__(
        self,
        url: str,
        *,
        label: str = "trl-",
        kv: Literal["keep", "recompute"] = "recompute",
        paused: bool = True,
        delta: Literal["auto", "never"] = "auto",
        via: MemoryVia = "auto",
        chunk_mb: int = 256,
        deadline_s: float = 1800.0,
        **client: Any,
    ):
        self._url = url
        self._client_options = client
        self._label = label
        self._kv: Literal["keep", "recompute"] = kv
        self._paused = paused
        self._publish_options: dict[str, Any] = {
            "delta": delta,
            "via": via,
            "chunk_mb": chunk_mb,
            "deadline_s": deadline_s,
        }
        self._hold: str | None = None
        self._client: SyncRolloutClient | None = None
        self.publications: list[Publication] = []

    def init_weight_transfer(self) -> None:
        """Connect. Called once, before the first sync."""
        self._client = SyncRolloutClient(self._url, **self._client_options)

    def pause(self) -> None:
        """Freeze the requests in flight."""
        if self._paused:
            self._hold = f"trl-{uuid.uuid4().hex}"
            self._connected().pause("keep", hold_id=self._hold)

    def send_weights(self, iterator: Iterable[tuple[str, Any]]) -> None:
        """Publish all ``(name, tensor)`` pairs as one commit. Of tied weights, ``iterator`` has the first name only, as
        the servers expect. After a failure, the server is resumed before the error is raised."""
        try:
            version = f"{self._label}{len(self.publications)}"
            publish = self._connected().publish
            self.publications.append(publish(dict(iterator), version, kv=self._kv, **self._publish_options))
        except BaseException as error:
            with note_cleanup_failure(error):
                self.resume()
            raise

    def resume(self) -> None:
        """Release only the hold of :meth:`pause`. A second call does nothing. Raises HoldLost if the hold had ended
        early."""
        hold, self._hold = self._hold, None
        if hold is not None:
            self._connected().resume(hold)

    def destroy(self) -> None:
        """Resume the server and close the connections."""
        if self._client is not None:
            self.resume()
            self._client.close()
            self._client = None

    def _connected(self) -> SyncRolloutClient:
        if self._client is None:
            self.init_weight_transfer()
        assert self._client is not None
        return self._client
