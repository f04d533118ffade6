"""A strict reader of Chrome traces, written from the published "Trace Event Format" of the Chromium project."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

TraceEvent = dict[str, Any]


def read(path: str | Path, killed: bool = False) -> list[TraceEvent]:
    """Return the events of a file in JSON array form. killed: the array has no end, and the last line may be cut."""
    text = Path(path).read_text()
    if killed:
        whole = text.rstrip().removesuffix(",")
        while not whole.endswith("}") or not _parses(whole + "]"):
            whole = whole[: whole.rindex("\n")].rstrip().removesuffix(",")
        text = whole + "]"
    events = json.loads(text)
    assert isinstance(events, list)
    return events


def _parses(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def check(events: list[TraceEvent], killed: bool = False) -> None:
    """Assert that the events obey the format. killed: slices may have no end."""
    last: dict[tuple[int, int], int] = {}
    stacks: dict[tuple[int, int], list[float]] = defaultdict(list)  # ends of X slices, and infinity for B
    spans: dict[tuple[str, str], list[str]] = defaultdict(list)
    flows: dict[tuple[str, int], str] = {}
    for event in events:
        ph, at, thread = event["ph"], event["ts"], (event["pid"], event["tid"])
        assert isinstance(event["name"], str) and all(isinstance(x, int) for x in (at, *thread)), event
        assert isinstance(event.get("args", {}), dict), event
        if ph == "M":
            assert event["name"] in ("process_name", "process_labels", "thread_name", "thread_sort_index"), event
            continue
        if ph in "BEXisf":
            assert at >= last.get(thread, 0), f"time goes back: {event}"
            last[thread] = at
            while stacks[thread] and stacks[thread][-1] <= at:  # slices that have ended
                stacks[thread].pop()
        if ph == "B":
            stacks[thread].append(float("inf"))
        elif ph == "E":
            assert stacks[thread] and stacks[thread].pop() == float("inf"), f"an end without a begin: {event}"
        elif ph == "X":
            assert event["dur"] >= 0 and all(at + event["dur"] <= end for end in stacks[thread]), f"overlaps: {event}"
            stacks[thread].append(at + event["dur"])
        elif ph in "ben":
            names = spans[event["cat"], event["id"]]
            if ph == "b":
                names.append(event["name"])
            elif ph == "e":
                assert names and names.pop() == event["name"], f"an end without a begin: {event}"
            else:
                assert names, event
        elif ph in "sf":
            assert stacks[thread], f"a flow outside of all slices: {event}"
            state = flows.get((event["cat"], event["id"]))
            assert state == (None if ph == "s" else "s"), event
            flows[event["cat"], event["id"]] = ph
        elif ph == "C":
            assert event["args"] and all(isinstance(x, int | float) for x in event["args"].values()), event
        else:
            assert ph == "i" and event["s"] in "gpt", f"unknown phase: {event}"
    if not killed:
        assert not any(end == float("inf") for stack in stacks.values() for end in stack), "slices without an end"
        assert not any(spans.values()), "async slices without an end"


def tokens_by_version(events: list[TraceEvent]) -> dict[str, dict[str, int]]:
    """Return the number of tokens of each request by weight version, as the lanes show them."""
    open_slices: dict[int, list[str]] = defaultdict(list)
    found: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for event in events:
        names = open_slices[event["tid"]]
        if event["ph"] == "B":
            names.append(event["name"])
        elif event["ph"] == "E" and (name := names.pop()).startswith("version "):
            found[names[0]][name.removeprefix("version ")] += event["args"]["tokens"]
    return {name: dict(counts) for name, counts in found.items()}
