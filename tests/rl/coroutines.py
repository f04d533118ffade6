"""Running a test's coroutine."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run ``coroutine`` in an event loop of its own. A test that hangs fails after two minutes."""
    return asyncio.run(asyncio.wait_for(coroutine, 120))
