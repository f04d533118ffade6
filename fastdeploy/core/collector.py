"""Settings of Python's garbage collector for processes that must answer within milliseconds."""

from __future__ import annotations

import gc

COLLECT_AFTER = 50_000  # new objects that can be part of a reference cycle


def collect_rarely() -> None:
    """Make garbage collections rare, and leave out the objects that exist now. Call when all modules are imported.

    A step makes thousands of objects and hardly any reference cycle. With Python's defaults the collector would search
    the objects several times a step, and sometimes all imported modules too. Such a collection took 75 to 156 ms."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER)
