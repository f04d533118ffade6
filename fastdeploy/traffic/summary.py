"""A recording as text: what was called how often, and the control calls on a line of time."""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from fastdeploy.traffic.file import Exchange, Outcome, Recording
from fastdeploy.traffic.order import is_control

VERSION_FIELDS = ("version", "weight_version", "new_version", "target_version", "model_path", "mode", "lora_name")
MAX_VALUE_CHARS = 60


def summary(recording: Recording) -> str:
    """Return the summary of a recording."""
    opening = recording.opening
    began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(opening.began))
    ending = "" if recording.closed else ", not closed: the recorder was killed, or still runs"
    lines = [
        f"{opening.upstream}, recorded {began} by fastdeploy {opening.version}",
        f"{len(recording.exchanges)} requests in {recording.seconds:.3f} s{ending}",
        "",
        "requests  statuses            bytes in   bytes out  route",
    ]
    return "\n".join([*lines, *_routes(recording.exchanges), "", "Time line:", *_time_line(recording.exchanges)])


def _routes(exchanges: Sequence[Exchange]) -> Iterator[str]:
    of_route = defaultdict(list)
    for one in exchanges:
        of_route[one.method, one.path].append(one)
    for (method, path), found in of_route.items():
        statuses = Counter(_status(one) for one in found)
        shown = " ".join(f"{status}x{times}" for status, times in sorted(statuses.items()))
        size_in = sum(one.request_size for one in found)
        size_out = sum(sum(len(data) for _, data in one.pieces) for one in found)
        yield f"{len(found):8}  {shown:16} {size_in:11} {size_out:11}  {method} {path}"


def _time_line(exchanges: Sequence[Exchange]) -> Iterator[str]:
    """Yield a line for each control call, for each request that failed, and for the requests between those."""
    others = 0
    for one in exchanges:
        if not is_control(one.method, one.path) and _is_good(one):
            others += 1
            continue
        if others:
            yield f"{'':12}{others} other requests began"
            others = 0
        seconds = f", {one.ended - one.began:.3f} s" if one.ended is not None else ""
        yield f"{one.began:9.3f} s {one.name}: {_status(one)}{seconds}{_told(one)}"
    if others:
        yield f"{'':12}{others} other requests began"


def _is_good(one: Exchange) -> bool:
    return one.outcome is Outcome.COMPLETE and one.status is not None and one.status < 400


def _status(one: Exchange) -> str:
    if one.outcome is Outcome.COMPLETE:
        return str(one.status)
    return "no_end" if one.outcome is None else one.outcome.value


def _told(one: Exchange) -> str:
    """Return the fields of the body that say what a control call is about, and the error of one that failed."""
    found = [one.error] if one.error else []
    try:
        body = json.loads(one.request or b"null")
    except ValueError:
        body = None
    if isinstance(body, dict):
        found += [f"{name}={str(body[name])[:MAX_VALUE_CHARS]}" for name in VERSION_FIELDS if name in body]
    if one.query:
        found.append(one.query[:MAX_VALUE_CHARS])
    return "".join(f", {text}" for text in found)
