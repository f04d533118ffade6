"""Python's garbage collector, in processes whose every millisecond somebody waits for."""

from __future__ import annotations

import gc

COLLECT_AFTER = 50_000  # new objects that can be part of a cycle


def collect_rarely() -> None:
    """Call once all is imported and loaded. A step, and the answers to it, are thousands of objects and hardly a cycle:
    by default they would be looked through several times a step, and now and then with everything that was ever
    imported (measured with 2,000 open streams: 75 to 156 ms, in the middle of an abort)."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER)
