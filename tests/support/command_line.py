"""The parser of the command line. Making it takes 50 ms, and hundreds of tests use it."""

from __future__ import annotations

from functools import cache

from fastdeploy.entrypoints.cli.main import make_parser

parser = cache(make_parser)
