"""Servers for the tests of a trainer: start one, reset it between tests, and leave nothing behind."""

from __future__ import annotations

from fastdeploy.testing.process import ServerFailed, ServerProcess
from fastdeploy.testing.server import Server, serve, serve_fleet

__all__ = ["Server", "ServerFailed", "ServerProcess", "serve", "serve_fleet"]
