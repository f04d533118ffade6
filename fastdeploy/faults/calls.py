"""Faults in control calls: each is a function around the call that goes to the engine."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, NamedTuple, Protocol

from msgspec.structs import replace

from fastdeploy.core.config import ServeConfig
from fastdeploy.core.errors import EngineDead, EngineError, FastDeployError, PauseTimeout
from fastdeploy.core.weight_source import FileSource, FolderSource, Source
from fastdeploy.faults.book import FaultBook
from fastdeploy.faults.injection import Injection
from fastdeploy.faults.rules import Rule
from fastdeploy.faults.stream import SERVING, wait_released
from fastdeploy.faults.table import CALLS, TENSOR_CALLS, Place
from fastdeploy.faults.tensors import Tensors, changed, checksums_of, chosen, encode, names_of, parse, read_source
from fastdeploy.http.upload_files import UploadFiles
from fastdeploy.inter_communicator import messages as m

Report = dict[str, Any]
Next = Callable[[m.Args], Awaitable[Report]]
NAMES = {kind: name for name, kind in CALLS.items()}


class Actions(Protocol):
    """What calls need of their server. act(rule, request_id): kills a process. signal: tells the engines whether
    commits keep KV."""

    def act(self, rule: Rule, request_id: str) -> None: ...

    def signal(self, keep_kv: bool | None = None) -> None: ...


class Given(NamedTuple):
    """One fault of one call. number: of the call, as its rule counts. book: to wait until something is disarmed. files:
    for tensors that are changed. actions: see Actions."""

    rule: Rule
    number: int
    book: FaultBook
    files: UploadFiles
    actions: Actions

    def value(self, name: str) -> Any:
        return self.rule.parameters[name]


class CallFaults:
    """The faults of the control calls of one server."""

    def __init__(self, book: FaultBook, config: ServeConfig, actions: Actions):
        self._book, self._files, self._actions = book, UploadFiles(config), actions
        self._begun_version = ""  # of the last weight session

    async def call(self, injection: Injection, args: m.Args, real: Next) -> Report:
        """Make a control call with its faults. real: makes it without."""
        name = NAMES.get(type(args))
        if name is None or await _finds_no_session(args, real):
            return await real(args)
        if isinstance(args, m.BeginUpdateArgs):
            self._begun_version = args.version or ""

        async def version() -> str:
            brought = getattr(args, "version", None) or (self._begun_version if name in ("chunk", "commit") else "")
            return brought or (await real(m.WeightInfoArgs())).get("version", "")

        fits = functools.partial(_fits, args, functools.cache(lambda: _tensor_names(args)))
        ids = [injection.trace_id]
        faults = await self._book.decide(Place.CALL, injection.asked, injection.path, ids, name, version, fits)
        make = real
        for rule, happening in faults:
            injection.decided.append(happening)
            self._book.acted(happening)
            given = Given(rule, happening.number, self._book, self._files, self._actions)
            make = functools.partial(ACTIONS[rule.fault], given, make)
        return await make(args)


async def _finds_no_session(args: m.Args, real: Next) -> bool:
    """Return whether the call is a part for the open session, and none is open. Dialects try this first: a fault waits
    for the call that brings the tensors."""
    is_try = isinstance(args, m.UpdatePartArgs) and args.session_id is None
    return is_try and (await real(m.WeightInfoArgs())).get("session") is None


def _tensor_names(args: m.Args) -> list[str]:
    if not isinstance(args, m.UpdateWeightsArgs | m.UpdatePartArgs) or not args.form.is_plain:
        return []
    is_delta = isinstance(args, m.UpdateWeightsArgs) and args.base is not None
    return [] if is_delta else names_of(args.source)


def _fits(args: m.Args, names: Callable[[], list[str]], rule: Rule) -> bool:
    """Return whether the call has what the fault changes."""
    if isinstance(args, m.CommitUpdateArgs) and args.prepare:
        return False
    if rule.row.calls != TENSOR_CALLS or rule.fault == "chunk_doubled":
        return True
    return bool(chosen(names(), str(rule.parameters.get("tensors", "*"))))


# ---------------------------------------------------------------------- deaths and pauses


async def death_in_call(given: Given, call: Next, args: m.Args) -> Report:
    """See the table."""
    result = await call(args) if given.value("when") == "after" else None
    given.actions.act(given.rule, "")
    if result is None and given.value("of") not in SERVING:
        return await call(args)
    raise EngineDead("the engine process died")


async def pause_hangs(given: Given, call: Next, args: m.Args) -> Report:
    """See the table."""
    await wait_released(given.book, given.value("seconds"))
    return await call(args)


async def pause_times_out(given: Given, call: Next, args: m.Args) -> Report:
    """See the table. The error is the engine's own."""
    if seconds := given.value("seconds"):
        await wait_released(given.book, seconds)
    raise PauseTimeout("the drain did not end within timeout_s; the hold is released (on_timeout=cancel)")


async def pause_acknowledged_early(given: Given, call: Next, args: m.Args) -> Report:
    """See the table. The report has the fields of a true one (engine/pauses/pause.py)."""
    assert isinstance(args, m.PauseArgs)
    if given.value("how") == "draining":
        pausing = asyncio.ensure_future(call(args))
        pausing.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.sleep(0)  # the pause is sent first
    status = await call(m.PauseStatusArgs(args.scope))
    holds = status.get("holds") or [{"id": args.hold_id or "anonymous-0", "mode": args.mode}]
    rejects = args.admission or ("reject" if args.mode == "abort" else "hold")
    report = {name: value for name, value in status.items() if name != "holds"}
    report |= {"status": "paused", "state": "paused", "mode": args.mode, "scope": args.scope, "is_paused": True}
    report |= {"rejecting_new_requests": True, "admission": rejects, "hold": holds[-1], "escalated_by": None}
    report |= {"counts": {"aborted": 0, "drained": 0, "kept": 0, "queued": 0}, "tokens_returned": 0, "elapsed_ms": 0.1}
    return report | {"aborted_ids": [], "forced_ids": [], "slow_api_servers": [], "dropped_api_servers": 0}


# ---------------------------------------------------------------------- weights


@contextlib.contextmanager
def _written(given: Given, tensors: Tensors) -> Iterator[Source]:
    """Keep tensors in a file, as an upload, while the block runs."""
    data = encode(tensors)
    with given.files.file(len(data), keep=False) as file:
        file.resize(len(data))
        file.write(0, data)
        yield FileSource(file.path)


async def _served(call: Next) -> Tensors:
    """Return the tensors that serve."""
    path = (await call(m.ExportWeightsArgs()))["path"]
    try:
        with open(path, "rb") as file:
            return parse(file.read())
    finally:
        os.unlink(path)


async def wrong_tensors(given: Given, call: Next, args: m.Args) -> Report:
    """Make the call with other tensors. A folder becomes a file, which keeps its checksums."""
    assert isinstance(args, m.UpdateWeightsArgs | m.UpdatePartArgs)
    tensors = await asyncio.to_thread(read_source, args.source)
    served = await _served(call) if given.rule.fault in ("tensors_stale", "chunk_dropped") else {}
    if args.verify_checksum and isinstance(args.source, FolderSource):
        args = replace(args, checksums={**checksums_of(args.source), **args.checksums}, verify_checksum=False)
    wrong = await asyncio.to_thread(changed, tensors, given.rule, given.number, served)
    with _written(given, wrong) as source:
        return await call(replace(args, source=source))


async def sync_fails_half_way(given: Given, call: Next, args: m.Args) -> Report:
    """See the table. The first half of the tensors is committed, in the order of the source."""
    assert isinstance(args, m.UpdateWeightsArgs | m.UpdatePartArgs)
    tensors = await asyncio.to_thread(read_source, args.source)
    half = dict(list(tensors.items())[: (len(tensors) + 1) // 2])
    before = (await call(m.WeightInfoArgs())).get("version", "")
    if isinstance(args, m.UpdatePartArgs):
        await call(m.AbortUpdateArgs(args.session_id))
    with _written(given, half) as source, contextlib.suppress(FastDeployError):
        await call(m.UpdateWeightsArgs(source, version=before, partial=True))
    raise EngineError("the update failed half-way: an injected fault (sync_fails_half_way)")


async def chunk_doubled(given: Given, call: Next, args: m.Args) -> Report:
    """See the table."""
    await call(args)
    return await call(args)


async def kv_kept(given: Given, call: Next, args: m.Args) -> Report:
    """See the table. A clear of the cache is answered, and not made."""
    if isinstance(args, m.ResetCacheArgs):
        return {"success": True, "requests_to_recompute": 0}
    given.actions.signal(keep_kv=True)
    try:
        return await call(args)
    finally:
        given.actions.signal(keep_kv=False)


ACTIONS: dict[str, Callable[[Given, Next, m.Args], Awaitable[Report]]] = {
    **{action.__name__: action for action in (death_in_call, pause_hangs, pause_times_out, pause_acknowledged_early)},
    **{action.__name__: action for action in (sync_fails_half_way, chunk_doubled, kv_kept)},
    **dict.fromkeys(
        ("chunk_dropped", "bits_flipped", "tensors_stale", "tensors_transposed", "tensors_scaled"), wrong_tensors
    ),
}
