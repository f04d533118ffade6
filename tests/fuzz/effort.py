"""How much is tried. The suite tries the same few examples in every run; ``make fuzz`` tries many random ones."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "0"))


def effort(few: int, share: float = 1.0) -> settings:
    """``few`` examples in the suite; ``share`` of FUZZ_EXAMPLES where that is set."""
    return settings(
        max_examples=max(int(EXAMPLES * share), few),
        derandomize=not EXAMPLES,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
