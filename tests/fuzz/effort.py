"""Number of fuzz examples. The suite runs the same few in every run; ``make fuzz`` runs many random ones."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "0"))


def effort(few: int, share: float = 1.0) -> settings:
    """Return settings with ``few`` examples; with ``share`` of FUZZ_EXAMPLES if that variable is set."""
    return settings(
        max_examples=max(int(EXAMPLES * share), few),
        derandomize=not EXAMPLES,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
