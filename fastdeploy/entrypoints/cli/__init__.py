"""The command line. Each command is a module of this package, and main.py has the list of them."""

from fastdeploy.entrypoints.cli.main import main

__all__ = ["main"]
