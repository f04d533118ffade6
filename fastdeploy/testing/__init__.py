"""Servers for the tests of a trainer: start one, reset it between tests, and leave nothing behind.

Modules are imported when they are first used, since pytest imports this package in every run, for the plugin."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["Server", "ServerFailed", "ServerProcess", "serve"]

if TYPE_CHECKING:
    from fastdeploy.testing.process import ServerFailed, ServerProcess
    from fastdeploy.testing.server import Server, serve

LAZY = {"Server": "server", "ServerFailed": "process", "ServerProcess": "process", "serve": "server"}


def __getattr__(name: str) -> Any:
    if name in LAZY:
        return getattr(importlib.import_module(f"{__name__}.{LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
