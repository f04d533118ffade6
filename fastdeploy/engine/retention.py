"""Requests with retain_s outlive their client: what they produced is kept, and the same request sent again gets it.

Kept by the engine and not by an API server, so that it makes no difference which of them is asked, or dies. A request
whose client has gone is *detached*: it runs on like any other, and its outputs only accumulate. Stop strings are found
at the API server, so a detached request runs to its EOS or its length; whoever attaches finds the stop in the replay.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from fastdeploy.engine.request import Group
from fastdeploy.errors import DuplicateRequest
from fastdeploy.inter_communicator.messages import AddRequest, Output

DETACHED = ""  # the client of a request that nobody is attached to
MAX_RETAIN_S = 86400.0


@dataclass
class Record:
    """All outputs of one request so far, merged by choice. expires_at: once every choice has ended."""

    group: Group
    outputs: dict[int, Output] = field(default_factory=dict)
    expires_at: float | None = None

    def add(self, output: Output) -> None:
        before = self.outputs.get(output.choice)
        self.outputs[output.choice] = output if before is None else _joined(before, output)

    @property
    def ended(self) -> bool:
        finals = sum(output.finish_reason is not None for output in self.outputs.values())
        return finals == self.group.add.n


class Retention:
    """``max_ended``: results kept after their end; the oldest go first. Live requests are never dropped."""

    def __init__(self, max_ended: int):
        self._max_ended = max_ended
        self._records: dict[str, Record] = {}
        self._ended: dict[str, Record] = {}  # by request id, in the order of their end

    def __len__(self) -> int:
        return len(self._records)

    def track(self, group: Group) -> None:
        if group.add.retain_s > 0:
            self._records[group.add.request_id] = Record(group)

    def find(self, add: AddRequest) -> Record | None:
        """The record that ``add`` asks for by its id and its fingerprint. Raises DuplicateRequest where the id is that
        of another body."""
        record = self._records.get(add.request_id)
        if record is None:
            return None
        if add.retain_s <= 0 or add.fingerprint != record.group.add.fingerprint:
            raise DuplicateRequest(
                f"request_id {add.request_id!r} is that of a retained request with another body", param="request_id"
            )
        return record

    def observe(self, output: Output, now: float) -> None:
        """Every output of a retained request, whether it is sent to somebody or not."""
        record = self._records.get(output.request_id)
        if record is None:
            return
        record.add(output)
        if record.ended and record.expires_at is None:
            record.expires_at = now + record.group.add.retain_s
            self._ended[output.request_id] = record
            if len(self._ended) > self._max_ended:
                self._drop(next(iter(self._ended)))

    def expire(self, now: float) -> None:
        for request_id in [i for i, r in self._ended.items() if r.expires_at is not None and r.expires_at <= now]:
            self._drop(request_id)

    def _drop(self, request_id: str) -> None:
        del self._ended[request_id]
        del self._records[request_id]


def _joined(a: Output, b: Output) -> Output:
    return msgspec.structs.replace(
        b,
        token_ids=a.token_ids + b.token_ids,
        logprobs=a.logprobs + b.logprobs,
        spans=a.spans + b.spans,
        prompt_logprobs=a.prompt_logprobs + b.prompt_logprobs,
        cached_tokens=a.cached_tokens or b.cached_tokens,
    )
