"""The number of fuzz examples: the same few in every run of the suite, and many random ones in ``make fuzz``."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "0"))


def effort(few: int, share: float = 1.0) -> settings:
    """Return settings with ``few`` examples, or with ``share`` times FUZZ_EXAMPLES if that is more."""
    return settings(
        max_examples=max(int(EXAMPLES * share), few),
        derandomize=not EXAMPLES,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
