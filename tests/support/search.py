"""Settings of hypothesis: the same few examples in every run of the suite, many random ones in ``make search``."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.conjecture.providers import Constants

# A random search tries FACTOR times the examples of the suite. 0: no search.
FACTOR = int(os.environ.get("SEARCH_FACTOR", "0"))
TIMES = FACTOR or 1


def configure() -> None:
    """Set the defaults of all tests, also where hypothesis has chosen those for CI. Nothing depends on speed."""
    profile = settings(
        settings.get_profile("default"),
        derandomize=not FACTOR,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=bool(FACTOR),
    )
    settings.register_profile("suite", profile, max_examples=profile.max_examples * TIMES)
    settings.load_profile("suite")
    if not FACTOR:
        leave_out_constants()


def leave_out_constants() -> None:
    """Draw no constants out of the code that is imported. What is imported depends on the tests that ran before."""
    providers._get_local_constants = Constants


def examples(few: int) -> settings:
    """Return settings with ``few`` examples in the suite, and with FACTOR times as many in a search."""
    return settings(max_examples=few * TIMES)
