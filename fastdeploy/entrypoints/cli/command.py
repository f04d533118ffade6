"""The interface of a command of ``fastdeploy``: a module with ``add_parser`` and ``run``, and its name in the list of
main.py."""

from __future__ import annotations

import argparse
from typing import NamedTuple, Protocol, TypeAlias

from fastdeploy.entrypoints.cli.settings import SettingsParser

# What add_subparsers returns; argparse has no public name for it.
Commands: TypeAlias = "argparse._SubParsersAction[SettingsParser]"


class Context(NamedTuple):
    """What a command gets beside its arguments. engine_module: see Supervisor."""

    engine_module: str


class Command(Protocol):
    """A module of this package."""

    def add_parser(self, commands: Commands) -> SettingsParser:
        """Add the command's parser to ``commands`` and return it."""

    def run(self, args: argparse.Namespace, context: Context) -> int:
        """Run the command and return its exit status. Raises InvalidField, which names a flag of the command; OSError
        for what the system refuses, such as a port in use."""
