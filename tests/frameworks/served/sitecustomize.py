"""Run by each Python that starts with this folder on its path: on Python 3.11, typing's TypedDict is the one of
typing_extensions, since pydantic asks for that."""

from __future__ import annotations

import sys
import typing

import typing_extensions

if sys.version_info < (3, 12):
    typing.TypedDict = typing_extensions.TypedDict
