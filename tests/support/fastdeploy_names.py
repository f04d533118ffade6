"""Writes fastdeploy_names.json: the flags, variables and routes in checkouts of PaddlePaddle/FastDeploy.

    python tests/support/fastdeploy_names.py release/2.6=COMMIT=PATH develop=COMMIT=PATH

Names only are kept, each with the file that has it.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

NAMES = Path(__file__).with_suffix(".json")
ENTRYPOINTS = "fastdeploy/entrypoints"
FLAG_FILES = ("fastdeploy/engine/args_utils.py", f"{ENTRYPOINTS}/openai/utils.py", f"{ENTRYPOINTS}/cli/serve.py")
PARAMETERS, VARIABLES = "docs/parameters.md", "fastdeploy/envs.py"
FLAG = re.compile(r'"--([\w-]+)"')
PARAMETER = re.compile(r"^\|\s*`+(\w+)`+\s*\|", re.MULTILINE)
VARIABLE = re.compile(r'^    "(\w+)"(?=: lambda)', re.MULTILINE)
DOCUMENTED_VARIABLE = re.compile(r"\bFD_[A-Z][A-Z0-9_]+\b")
ROUTE = re.compile(r'^@\w+\.(get|post|put|delete|api_route)\("(/[^"]*)"', re.MULTILINE)


def names_of(checkout: Path) -> dict[str, dict[str, list[str]]]:
    """Return the names of one checkout: kind -> file -> names. Flags have ``_`` between their words."""
    flags = {file: {name.replace("-", "_") for name in FLAG.findall(read(checkout, file))} for file in FLAG_FILES}
    flags[PARAMETERS] = set(PARAMETER.findall(read(checkout, PARAMETERS)))
    variables = {VARIABLES: set(VARIABLE.findall(read(checkout, VARIABLES)))}
    routes = {}
    for page in pages(checkout):
        variables[page] = set(DOCUMENTED_VARIABLE.findall(read(checkout, page))) - variables[VARIABLES]
    for path in sorted((checkout / ENTRYPOINTS).rglob("*.py")):
        file = str(path.relative_to(checkout))
        routes[file] = {route for _, route in ROUTE.findall(path.read_text())}
    kinds = {"flags": flags, "variables": variables, "routes": routes}
    return {kind: {f: sorted(found) for f, found in files.items() if found} for kind, files in kinds.items()}


def read(checkout: Path, file: str) -> str:
    """Return the text of a file of the checkout."""
    return (checkout / file).read_text()


def pages(checkout: Path) -> Iterator[str]:
    """Yield the pages of the English documentation."""
    for path in sorted((checkout / "docs").rglob("*.md")):
        file = path.relative_to(checkout)
        if "zh" not in file.parts:
            yield str(file)


def stored(kind: str) -> dict[str, str]:
    """Return all stored names of a kind, each with a branch and the file that has it."""
    branches = json.loads(NAMES.read_text())
    return {
        name: f"{branch}: {file}"
        for branch, found in branches.items()
        for file, names in found[kind].items()
        for name in names
    }


def main(arguments: list[str]) -> None:
    """Write the names of all checkouts."""
    branches = {}
    for argument in arguments:
        branch, commit, path = argument.split("=")
        branches[branch] = {"commit": commit, **names_of(Path(path))}
    NAMES.write_text(json.dumps(branches, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
