"""Runs tests that are coroutines, and shortens the client's waits, since faults are scripted here."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest

from fastdeploy.rl import fan_out, hold_renewal, holds, publish, replica
from rl.coroutines import run


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(scope="session", autouse=True)
def short_waits() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replica, "BACKOFF_S", 0.002)
        patch.setattr(fan_out, "RETRY_S", 0.01)
        patch.setattr(holds, "RELEASE_S", 0.5)
        patch.setattr(hold_renewal, "PERIOD", 0.005)  # a ttl of 60 s is renewed every 0.3 s
        patch.setattr(publish, "CONFIRM_S", 0.5)
        yield
