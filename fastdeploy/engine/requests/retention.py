"""Results of requests with retain_s. The engine keeps them, and sends them when the same request comes again.

The engine keeps the results and not an API server, so any API server can ask for them, and any API server may die. A
request whose client is gone is *detached*: it runs on, and its outputs accumulate. API servers find stop strings, so a
detached request runs to its EOS or its length. An API server that attaches later finds the stop string in the replay.

The results die with the engine. A file names their requests for the next engine of this server, which knows then for
which requests a client may still come back. Such a client is told that the result is lost, and gets no other answer
under the same id. The file is a log of records of fixed size, and is written anew when it has grown.
"""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import logging
import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, BinaryIO, NamedTuple

import msgspec

from fastdeploy.core.errors import DuplicateRequest, InvalidField, QueueFull, ResultLost
from fastdeploy.core.outputs import Logprob, Span, merge_spans
from fastdeploy.core.request import Group
from fastdeploy.core.request_fields import AddRequest
from fastdeploy.core.request_table import RequestTable
from fastdeploy.inter_communicator.messages import Output

log = logging.getLogger("fastdeploy.engine")

DETACHED = ""  # the client of a detached request
RETRY_AFTER_S = 1
MIN_PRUNE = 256
# Bytes that CPython allocates (tracemalloc, Python 3.11): for a token id and its list slot, for a Logprob and its list
# slot without the bytes in its arrays, and for a choice without any token.
TOKEN_BYTES, LOGPROB_BYTES, CHOICE_BYTES = 40, 240, 1024
RECORD = struct.Struct("<16sdd")  # key, retain_s, until
MIN_RECORDS = 4096  # in a file that is written anew


@dataclass
class ChoiceRecord:
    """All outputs of one choice so far, joined. ``final``: the final output, if the choice has ended."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    prompt_logprobs: list[Logprob] = field(default_factory=list)
    cached_tokens: int = 0
    routed: bytearray = field(default_factory=bytearray)
    final: Output | None = None

    def add(self, output: Output) -> None:
        assert self.final is None, "an output after the final one"
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        self.prompt_logprobs += output.prompt_logprobs
        self.cached_tokens = self.cached_tokens or output.cached_tokens
        self.routed += output.routed
        merge_spans(self.spans, output.spans)
        if output.finish_reason is not None:
            self.final = output

    def replay(self, request_id: str, choice: int) -> list[Output]:
        """Return one output with all tokens. A final output without a token stays a separate output: a client reads the
        last token of a final output as the EOS or stop id."""
        whole = Output(
            request_id=request_id,
            choice=choice,
            token_ids=list(self.token_ids),
            logprobs=list(self.logprobs),
            spans=list(self.spans),
            prompt_logprobs=list(self.prompt_logprobs),
            cached_tokens=self.cached_tokens,
            routed=bytes(self.routed),
        )
        final = self.final
        if final is None:
            return [whole]
        end: dict[str, Any] = {
            name: getattr(final, name) for name in ("finish_reason", "stop_reason", "message", "num_preempted")
        }
        if final.token_ids or not self.token_ids:
            return [msgspec.structs.replace(whole, **end)]
        return [whole, Output(request_id=request_id, choice=choice, **end)]


class Record:
    """All outputs of one request so far. attached_at: time.time() at which a client has asked for it last."""

    def __init__(self, group: Group):
        self.group = group
        self.choices: dict[int, ChoiceRecord] = {}
        self.nbytes = group.add.n * CHOICE_BYTES + len(group.add.prompt_token_ids) * TOKEN_BYTES  # of memory, about
        self._num_ended = 0
        self.attached_at = time.time()

    def add(self, output: Output) -> None:
        self.nbytes += _nbytes(output)
        choice = self.choices.setdefault(output.choice, ChoiceRecord())
        choice.add(output)
        self._num_ended += choice.final is not None

    @property
    def ended(self) -> bool:
        return self._num_ended == self.group.add.n

    def replay(self) -> list[Output]:
        """Return all outputs from the first token on, for a client that attaches."""
        request_id = self.group.add.request_id
        return [output for i, choice in self.choices.items() for output in choice.replay(request_id, i)]


class Entry(NamedTuple):
    """One request with retain_s, as the log names it. retain_s: 0 = its result was dropped. until: time.time() up to
    which its result is kept; 0 = the request runs."""

    retain_s: float
    until: float


class RetainedLog:
    """The retained requests of this engine, and those of dead engines whose results are lost. A result is lost for as
    long as it would have been kept. A request that ran counts as if it had ended when this engine started.

    path: of the file; "" = none, for an engine that has no successor. clock: time.time, or that of a test.
    """

    def __init__(self, path: str = "", clock: Callable[[], float] = time.time):
        self._path, self._clock = path, clock
        self._entries: dict[bytes, Entry] = {}
        self._lost: dict[bytes, Entry] = {}
        self._file: BinaryIO | None = None
        self._num_records = 0
        if path:
            now = clock()
            found = {key: Entry(e.retain_s, e.until or now + e.retain_s) for key, e in _read(path).items()}
            self._lost = {key: entry for key, entry in found.items() if entry.until > now}
            self._write_anew()

    def check(self, add: AddRequest) -> None:
        """Raise ResultLost if ``add`` asks for the result of an engine that has died."""
        asks = add.retain_s > 0 and not add.recomputes_lost
        entry = self._lost.get(_key(add)) if asks and self._lost else None
        if entry is not None and entry.until > self._clock():
            why = "the engine that had this result has died; send the request with another request_id"
            raise ResultLost(f"request_id {(add.group or add.request_id)!r}: {why}", param="request_id")

    def began(self, add: AddRequest) -> None:
        """Record a request that this engine has accepted."""
        self._record(add, Entry(add.retain_s, 0.0))

    def ended(self, add: AddRequest) -> None:
        """Record that the result is complete."""
        self._record(add, Entry(add.retain_s, self._clock() + add.retain_s))

    def dropped(self, add: AddRequest) -> None:
        """Record that the result is not kept any more."""
        self._record(add, Entry(0.0, 0.0))

    def forget_lost(self) -> None:
        """Forget the lost results: their ids may be used again."""
        self._lost.clear()
        self._write_anew()

    def _record(self, add: AddRequest, entry: Entry) -> None:
        if not self._path:
            return
        key = _key(add)
        if entry.retain_s:
            self._entries[key] = entry
        else:
            self._entries.pop(key, None)
        if self._num_records > 4 * max(len(self._entries), MIN_RECORDS):
            self._write_anew()
            return
        try:
            self._append([(key, entry)])
        except OSError as error:
            self._give_up(error)

    def _write_anew(self) -> None:
        """Replace the file by one with the entries of now."""
        if not self._path:
            return
        now = self._clock()
        self._lost = {key: entry for key, entry in self._lost.items() if entry.until > now}
        try:
            if self._file is not None:
                self._file.close()
            self._file = open(self._path + ".new", "wb", buffering=0)  # noqa: SIM115  stays open
            self._num_records = 0
            self._append([*self._lost.items(), *self._entries.items()])
            os.replace(self._path + ".new", self._path)
        except OSError as error:
            self._give_up(error)

    def _append(self, entries: list[tuple[bytes, Entry]]) -> None:
        assert self._file is not None
        self._file.write(b"".join(RECORD.pack(key, *entry) for key, entry in entries))
        self._num_records += len(entries)

    def _give_up(self, error: OSError) -> None:
        log.error("retained requests cannot be recorded, so a restarted engine will not know them: %s", error)
        self._path = ""
        if self._file is not None:
            self._file.close()


class Retention:
    """All retained results. max_ended: limit of the number of results of ended requests. max_bytes: limit of the memory
    of all results, also of live requests. Beyond a limit, the results of requests that ended first are dropped. Results
    of live requests are never dropped: ``check_room`` refuses further requests instead.

    retained_log: names the results for the next engine. nbytes: memory, about. num_dropped: results that were dropped
    before their retain_s was over.
    """

    def __init__(self, max_ended: int, max_bytes: int, retained_log: RetainedLog):
        self._log = retained_log
        self._max_ended = max_ended
        self._max_bytes = max_bytes
        self.nbytes = 0
        self.num_dropped = 0
        self._ended_nbytes = 0
        self._records: dict[str, Record] = {}
        self._members: dict[str, set[str]] = {}  # request ids by the id that the client knows
        self._ended: dict[str, Record] = {}  # by request id, in the order of their end
        self._expiries: list[tuple[float, int, Record]] = []  # a heap; may hold records that were dropped before
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._records)

    def track(self, group: Group) -> None:
        if group.add.retain_s > 0:
            record = self._records[group.add.request_id] = Record(group)
            self._log.began(group.add)
            self.nbytes += record.nbytes
            self._members.setdefault(group.client_id, set()).add(group.add.request_id)

    def check_room(self, add: AddRequest) -> None:
        """Raise QueueFull for a request with retain_s if the results of live requests alone take max_bytes."""
        if add.retain_s > 0 and self.nbytes - self._ended_nbytes >= self._max_bytes:
            mib = self._max_bytes / 2**20
            message = f"retain_s: the results of requests that run take all {mib:g} MiB of --max-retained-mb"
            raise QueueFull(message, retry_after=RETRY_AFTER_S)

    def find(self, add: AddRequest) -> Record | None:
        """Return the record of this request, if it was sent before. Raises DuplicateRequest if a retained request has
        the same id, or the same id for clients, but another body; and ResultLost if the request was sent to an engine
        that has died."""
        self._log.check(add)
        record = self._records.get(add.request_id)
        sibling = self._records.get(next(iter(self._members.get(add.group or add.request_id, ())), ""))
        for known in (record, sibling):
            if known and (add.retain_s <= 0 or add.fingerprint != known.group.add.fingerprint):
                name = known.group.client_id
                message = f"request_id {name!r} belongs to a retained request with another body"
                raise DuplicateRequest(message, param="request_id")
        return record

    def knows(self, request_id: str) -> bool:
        """Return whether there is a result of this id, or of this id for clients."""
        return request_id in self._records or request_id in self._members

    def attached_at(self, request_id: str) -> float:
        """Return when a client has asked last for the result of this id; 0 = there is none."""
        record = self._records.get(request_id)
        return 0.0 if record is None else record.attached_at

    def observe(self, output: Output, now: float) -> None:
        """Record an output of a retained request."""
        record = self._records[output.request_id]
        before = record.nbytes
        record.add(output)
        self.nbytes += record.nbytes - before
        if record.ended:
            self._log.ended(record.group.add)
            self._ended_nbytes += record.nbytes
            self._ended[output.request_id] = record
            if len(self._expiries) > 2 * max(len(self._ended), MIN_PRUNE):
                self._expiries = [entry for entry in self._expiries if self._is_kept(entry[2])]
                heapq.heapify(self._expiries)
            heapq.heappush(self._expiries, (now + record.group.add.retain_s, next(self._numbers), record))
        while self._ended and (len(self._ended) > self._max_ended or self.nbytes > self._max_bytes):
            self._drop(next(iter(self._ended.values())))
            self.num_dropped += 1

    def expire(self, now: float) -> None:
        while self._expiries and self._expiries[0][0] <= now:
            record = heapq.heappop(self._expiries)[2]
            if self._is_kept(record):
                self._drop(record)

    def forget(self, request_id: str) -> None:
        """Drop the result of a request that has ended, if there is one."""
        if (record := self._ended.get(request_id)) is not None:
            self._drop(record)

    def forget_ended(self) -> None:
        """Drop the results of all requests that have ended, also those that dead engines had."""
        for record in list(self._ended.values()):
            self._drop(record)
        self._log.forget_lost()

    def _is_kept(self, record: Record) -> bool:
        return self._ended.get(record.group.add.request_id) is record

    def _drop(self, record: Record) -> None:
        request_id, name = record.group.add.request_id, record.group.client_id
        self._log.dropped(record.group.add)
        self.nbytes -= record.nbytes
        self._ended_nbytes -= record.nbytes
        del self._ended[request_id]
        del self._records[request_id]
        self._members[name].discard(request_id)
        if not self._members[name]:
            del self._members[name]

    def check_integrity(self, requests: RequestTable) -> None:
        """Check that the record of each live request has the tokens that were delivered, and all counts."""
        assert len(self._ended) <= self._max_ended
        assert self.nbytes == sum(record.nbytes for record in self._records.values())
        assert self._ended_nbytes == sum(record.nbytes for record in self._ended.values())
        assert sum(map(len, self._members.values())) == len(self._records)
        for request_id, record in self._records.items():
            live = [r for r in requests.get(request_id) if r.group is record.group]
            assert record.ended == (request_id in self._ended) == (not live), request_id
            for request in live:
                kept = record.choices[request.choice].token_ids if request.choice in record.choices else []
                begin = request.num_prompt_tokens
                assert kept == request.token_ids[begin : begin + request.num_delivered], request
        for request in requests:
            assert request.group.add.retain_s <= 0 or request.group.add.request_id in self._records, request


def _nbytes(output: Output) -> int:
    logprobs = [*output.logprobs, *output.prompt_logprobs]
    of_tokens = len(output.token_ids) * TOKEN_BYTES + len(output.routed)
    return of_tokens + sum(LOGPROB_BYTES + x.nbytes for x in logprobs)


def check_retainable(add: AddRequest) -> None:
    """Raise InvalidField for a request with retain_s that has no fingerprint."""
    if add.retain_s > 0 and not add.fingerprint:
        raise InvalidField("fingerprint", "expected one with retain_s, so that no other body attaches to the result")


def _key(add: AddRequest) -> bytes:
    return hashlib.sha256(f"{add.request_id}\0{add.fingerprint}".encode("utf-8", "surrogatepass")).digest()[:16]


def _read(path: str) -> dict[bytes, Entry]:
    """Return the last entry of each request in the file. A record that was cut off by the engine's death is ignored."""
    raw = b""
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        raw = file.read()
    entries = {key: Entry(*rest) for key, *rest in RECORD.iter_unpack(raw[: len(raw) // RECORD.size * RECORD.size])}
    return {key: entry for key, entry in entries.items() if entry.retain_s}
