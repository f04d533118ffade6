"""A framework's own tests, unmodified: once with the framework's own mock of an engine, and once with a server of ours
in the place of the mock. The result is a row of the table in docs/frameworks.md.

The suites are in tests/frameworks/own_suites. How a server takes the place of a mock is in tests/frameworks/served:
a pytest plugin for each framework, which is loaded in the framework's interpreter and leaves its files as they are.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

from fastdeploy.embedded import MODEL_DIR
from frameworks.conftest import OFFLINE, PYTHON

SERVED = Path(__file__).parent / "served"
LIMIT_S = 1500  # of a run of a suite


@dataclass(frozen=True)
class Suite:
    """Tests of a framework that talk to an engine, or to a mock of one.

    name: also the name of the folder of its checkout. tests: arguments of pytest, in the checkout. plugin: module in
    tests/frameworks/served that replaces the mock by our server; None = the tests start a server or read its address
    by themselves. not_applicable: pattern of a test's name (class::name) -> why our server cannot pass that test, or
    why nothing can pass it here. flags: of our server. path: folders of the checkout that are put on PYTHONPATH.
    environment: of the framework's tests."""

    name: str
    tests: tuple[str, ...]
    plugin: str | None
    not_applicable: Mapping[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    path: tuple[str, ...] = ("",)
    environment: Mapping[str, str] = field(default_factory=dict)
    own_mock: bool = (
        True  # without a server of ours the tests run with the framework's mock; False = they need an engine
    )

    def reason(self, name: str) -> str | None:
        """Return why the test ``name`` is not applicable; None if it has to pass."""
        return next((why for pattern, why in self.not_applicable.items() if fnmatchcase(name, pattern)), None)


class Outcome(NamedTuple):
    """What one run of a suite gave. Sets of the names of tests (class::name[parameters])."""

    passed: set[str]
    failed: dict[str, str]  # -> the first line of the error
    skipped: dict[str, str]  # -> the reason that the framework gives
    reached: set[str]  # tests that made requests to our server
    seconds: float

    @property
    def num_run(self) -> int:
        return len(self.passed) + len(self.failed)


def run(suite: Suite, checkout: Path, report: Path, url: str | None, python: str = PYTHON) -> Outcome:
    """Run a suite in the framework's interpreter, and return its outcome. report: file to write, in JUnit's format.
    url: of our server, which takes the place of the mock; None = the framework's own mock. Raises AssertionError with
    the end of the output if pytest could not run."""
    folders = [str(checkout / folder) for folder in suite.path] + [str(SERVED)]
    environment = {**os.environ, **OFFLINE, "PYTHONPATH": os.pathsep.join(folders), **suite.environment}
    environment |= {"FASTDEPLOY_PYTHON": sys.executable, "FASTDEPLOY_MODEL": str(MODEL_DIR)}
    plugins = []
    if url is not None:
        environment["FASTDEPLOY_URL"] = url
        plugins += ["-p", "between"] + (["-p", suite.plugin] if suite.plugin else [])
    command = [python, "-m", "pytest", "-q", *plugins, "-p", "no:cacheprovider", f"--junit-xml={report}", *suite.tests]
    start = time.monotonic()
    child = subprocess.run(
        command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert report.exists(), child.stdout[-4000:] + child.stderr[-4000:]
    report.with_suffix(".log").write_text(child.stdout + child.stderr)
    return outcome_of(report, time.monotonic() - start)


def outcome_of(report: Path, seconds: float) -> Outcome:
    """Read a report in JUnit's format."""
    outcome = Outcome(set(), {}, {}, set(), seconds)
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.attrib['classname'].rpartition('.')[2]}::{case.attrib['name']}"
        failure = next((e for tag in ("failure", "error") if (e := case.find(tag)) is not None), None)
        skip = case.find("skipped")
        if failure is not None:
            outcome.failed[name] = failure.attrib.get("message", "").partition("\n")[0][:200]
        elif skip is not None:
            outcome.skipped[name] = skip.attrib.get("message", "")
        else:
            outcome.passed.add(name)
        if any(e.attrib.get("name") == "requests" and e.attrib["value"] != "0" for e in case.iter("property")):
            outcome.reached.add(name)
    outcome.passed.difference_update(outcome.failed)  # an error of a teardown comes after a pass
    return outcome


def row(suite: Suite, commit: str, mock: Outcome | None, served: Outcome) -> str:
    """Return a row of the table in docs/frameworks.md. mock: None = the framework has no mock."""
    own = f"{len(mock.passed)} of {mock.num_run} in {mock.seconds:.0f} s" if mock else "none"
    missing = sum(1 for name in served.failed if suite.reason(name))
    cells: list[Any] = [suite.name, commit[:7], own, f"{len(served.passed)} of {served.num_run}", len(served.reached)]
    return "| " + " | ".join(map(str, [*cells, missing, f"{served.seconds:.0f}"])) + " |"


def unexpected(suite: Suite, served: Outcome) -> dict[str, str]:
    """Return the tests that failed although nothing says that they are not applicable, with their errors."""
    return {name: why for name, why in served.failed.items() if not suite.reason(name)}
