"""An adapter that requests can name, and a load that is in progress or prepared."""

from __future__ import annotations

from dataclasses import dataclass

from fastdeploy.core.scope import ServedModel
from fastdeploy.engine.adapter_reads import Packed
from fastdeploy.engine.delivery import Answer
from fastdeploy.inter_communicator.messages import LoadAdapterArgs

PREPARED_S = 60.0  # the end of a prepared load must be called in this time and twice the load's time-out


@dataclass
class Adapter:
    """An adapter that requests can name. int_id: counts names, from 1; a load in place keeps it. path: the origin."""

    model: ServedModel
    int_id: int
    path: str = ""
    rank: int = 0

    @property
    def name(self) -> str:
        return self.model.served.adapter_name


@dataclass(eq=False)
class Load:
    """A load in progress. number: of the load, and of its folder in the store. answer: of the call, as long as it
    waits. lookup: nobody has called; the name is looked up in the adapter root. given_up: its result is not wanted.

    packed: the result of a prepared load, which is forgotten at ``expires_at``, on the loop's clock."""

    args: LoadAdapterArgs
    number: int
    timeout_s: float
    answer: Answer | None
    started_at: float
    lookup: bool
    copy_s: float = 0.0
    read_s: float = 0.0
    given_up: bool = False
    packed: Packed | None = None
    expires_at: float = 0.0

    def prepared(self, packed: Packed, now: float) -> None:
        """Keep the result for the end of the load, and answer the call. Other replicas may still read and pack the
        adapter, each within the time-out, before a gateway ends the load."""
        self.packed, self.expires_at = packed, now + 2 * self.timeout_s + PREPARED_S
        answer, self.answer = self.answer, None
        assert answer is not None
        answer({"lora_name": self.args.lora_name, "status": "prepared"}, None)
