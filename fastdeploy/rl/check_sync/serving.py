"""The questions to an engine about the weights that serve, and the calls of its routes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

import httpx
import msgspec

from fastdeploy.core.errors import FastDeployError, shown_url
from fastdeploy.rl.check_sync.compare import Values
from fastdeploy.rl.check_sync.report import Difference, ServingState
from fastdeploy.rl.check_sync.weights import TrainerWeights
from fastdeploy.rl.connection import Connection, reply_error
from fastdeploy.rl.errors import Unreachable

T = TypeVar("T")
CONNECT_S, ANSWER_S = 10.0, 600.0  # an export of large weights is written before it is answered


class ChangedMeanwhile(Exception):
    """Other weights were committed while the engine was asked."""


class Engine(Protocol):
    """An engine that is asked for its weights.

    method: how the tensors are compared, for the report. zero: the digest of zeros of any shape, if there is one.
    has_fingerprints: it shows the fingerprint of each tensor that it has (core/fingerprint.py)."""

    method: str
    zero: str | None
    has_fingerprints: bool

    def state(self) -> ServingState:
        """Return what serves now."""

    def digests(self, trainer: TrainerWeights) -> Mapping[str, str]:
        """Return the digest of each tensor that serves, by the names of the trainer's tensors, without those that the
        engine does not show. Raises ChangedMeanwhile."""

    def digests_of(self, weights: TrainerWeights) -> dict[str, str]:
        """Return the digests that the engine would show if it served ``weights``, after a call of ``digests``."""

    @property
    def rows(self) -> Mapping[str, int]:
        """Of each tensor that the engine shows in part, the number of its first rows that ``digests`` has seen."""

    @property
    def values(self) -> Values | None:
        """The function that yields name and values of tensors that serve, in the serving dtype; None if the engine does
        not show values. Raises ChangedMeanwhile."""

    def damaged(self, trainer: TrainerWeights) -> list[str]:
        """Return the tensors of which the engine's memory has other values than the trainer, although the fingerprints
        are equal. [] if the engine cannot tell. Raises ChangedMeanwhile."""

    def changed(self) -> str | None:
        """Return a sentence if other weights serve than at the time of ``state``."""


class Calls:
    """Blocking calls of one address, with the keys of ``Connection``."""

    def __init__(self, connection: Connection):
        self._connection = connection
        timeout = httpx.Timeout(ANSWER_S, connect=CONNECT_S)
        self._http = httpx.Client(timeout=timeout, trust_env=False)

    @property
    def shown_url(self) -> str:
        """The URL for reports."""
        return shown_url(self._connection.url)

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def send(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Return the reply with the status 200. options: of httpx. Raises the error of the reply, or Unreachable."""
        url, headers = self._connection.target(path)
        try:
            reply = self._http.request(method, url, headers=headers, **options)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise Unreachable(f"{method} {path}: {type(error).__name__}: {error}") from error
        if reply.status_code != 200:
            raise reply_error(reply.status_code, reply.headers, reply.content)
        return reply

    def json(self, method: str, path: str, **options: Any) -> Any:
        """Return the JSON of a reply; of our own routes, the field ``result``."""
        reply = self.send(method, path, **options)
        try:
            found = msgspec.json.decode(reply.content)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Unreachable(f"{method} {path}: expected JSON, got {reply.content[:80]!r}") from error
        return found.get("result", found) if isinstance(found, dict) else found

    def find(self, path: str, **options: Any) -> dict[str, Any] | None:
        """Return the JSON object of a GET route; None if the server has no such route. Raises as ``send``."""
        try:
            found = self.json("GET", path, **options)
        except FastDeployError as error:
            if error.detail.get("status") in (404, 405, 501):
                return None
            raise
        return found if isinstance(found, dict) else None


def typed(found: Any, kind: type[T], what: str) -> T:
    """Return a part of a reply as ``kind``. Raises Unreachable for another form. what: the part, for the message."""
    try:
        return msgspec.convert(found, kind)
    except msgspec.ValidationError as error:
        raise Unreachable(f"{what} is not as expected: {error}") from error


class ReplicasDiffer(Exception):
    """The replicas of a fleet do not serve the same weights. served: what each of them serves, by name."""

    def __init__(self, message: str, served: Mapping[str, Mapping[str, Any]]):
        super().__init__(message)
        self.served = served

    def differences(self, fingerprints: Sequence[str]) -> list[Difference]:
        """Return a difference for each replica whose fingerprint over all tensors is none of ``fingerprints``."""
        return [
            Difference(
                "",
                "replica",
                f"the replica serves version {one['version']}, weight_epoch {one['weight_epoch']}, "
                f"with the fingerprint {one['fingerprint']}",
                replica=name,
            )
            for name, one in self.served.items()
            if one["fingerprint"] not in fingerprints
        ]
