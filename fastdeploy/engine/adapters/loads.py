"""An adapter that requests can name, and a load that is in progress or prepared."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from fastdeploy.core.errors import WeightUpdateRefused
from fastdeploy.core.request import ServedModel
from fastdeploy.core.runner import AdapterInfo
from fastdeploy.engine.adapters.reads import Packed
from fastdeploy.engine.requests.delivery import Answer
from fastdeploy.inter_communicator.messages import LoadAdapterArgs

PREPARED_S = 60.0  # the end of a prepared load must be called in this time and twice the load's time-out


@dataclass
class Adapter:
    """An adapter that requests can name. int_id: counts names, from 1; a load in place keeps it. path: the origin.
    fingerprint: see AdapterInfo."""

    model: ServedModel
    int_id: int
    path: str = ""
    rank: int = 0
    fingerprint: str = ""

    @property
    def name(self) -> str:
        return self.model.served.adapter_name

    def describe(self, in_memory: bool) -> dict[str, Any]:
        """Return the adapter's entry of the reply to AdaptersArgs."""
        model = self.model
        return {
            "lora_name": self.name,
            "lora_int_id": self.int_id,
            "adapter_epoch": model.served.adapter_epoch,
            "version": model.served.version,
            "fingerprint": self.fingerprint,
            "path": self.path,
            "rank": self.rank,
            "nbytes": model.nbytes,
            "in_memory": in_memory,
            "requests": len(model.requests),
        }


@dataclass(eq=False)
class Load:
    """A load in progress. number: of the load, and of its folder in the store. timeout_s: seconds that the whole load
    may take, with the time that its jobs wait. answer: answers the call; None = no call waits for an answer. own: no
    call asked for the load; a request named the adapter, and the engine looks it up in the adapter root. given_up:
    nobody wants the result.

    packed: the result of a prepared load, which is forgotten at ``expires_at``, on the loop's clock."""

    args: LoadAdapterArgs
    number: int
    timeout_s: float
    answer: Answer | None
    started_at: float
    own: bool
    copy_s: float = 0.0
    read_s: float = 0.0
    given_up: bool = False
    packed: Packed | None = None
    expires_at: float = math.inf

    @property
    def deadline(self) -> float:
        """Time at which the load is given up, on the loop's clock."""
        return self.started_at + self.timeout_s

    @property
    def fingerprint(self) -> str | None:
        """The fingerprint of the prepared adapter; None = it is not prepared yet."""
        return None if self.packed is None else self.packed[0].fingerprint

    def prepared(self, packed: Packed, now: float) -> None:
        """Keep the result for the end of the load, and answer the call. Before a gateway ends the load, other replicas
        may need the whole time-out for theirs."""
        self.packed, self.expires_at = packed, now + self.timeout_s + PREPARED_S
        answer, self.answer = self.answer, None
        assert answer is not None
        answer({"lora_name": self.args.lora_name, "status": "prepared", "fingerprint": self.fingerprint}, None)

    def timings_ms(self, began: float, now: float) -> dict[str, float]:
        """Return how long the parts of the load took, up to ``now``. began: when its commit began."""
        seconds = {"copy": self.copy_s, "read": self.read_s, "commit": now - began, "total": now - self.started_at}
        return {name: round(value * 1000, 3) for name, value in seconds.items()}


def problem_of(args: LoadAdapterArgs, info: AdapterInfo, waiting: int, budget: int) -> WeightUpdateRefused | None:
    """Return why an adapter that was read must not be taken, or None. waiting: bytes of other prepared loads. budget:
    bytes of all adapters in memory."""
    if args.fingerprint is not None and info.fingerprint != args.fingerprint:
        why = f"fingerprint: expected {args.fingerprint}, the adapter has {info.fingerprint}"
        return WeightUpdateRefused(why, key="fingerprint")
    if info.nbytes > budget or (args.prepare and info.nbytes + waiting > budget):
        prepared = f" with the {waiting} bytes of other prepared loads" if waiting else ""
        limit = f"more than the {budget} bytes of --adapter-memory-mb"
        return WeightUpdateRefused(f"lora_name: {info.nbytes} bytes in memory{prepared} are {limit}", param="lora_name")
    return None
