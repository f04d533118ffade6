"""The frameworks' own tests pass with a server of ours in the place of their mocks.

They are read from checkouts: ``make test-own-tests CHECKOUTS=/path``, a folder with one checkout for each framework,
named as the modules of tests/frameworks/own_suites. A framework whose dependencies exclude those of another gets an
interpreter of its own: OWN_TESTS_PYTHON_slime=/path/to/python.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from fastdeploy.testing import serve
from frameworks.conftest import PYTHON
from frameworks.own_suites import SUITES
from frameworks.own_tests import row, run, unexpected

CHECKOUTS = os.environ.get("OWN_TESTS_CHECKOUTS", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHECKOUTS, reason="make test-own-tests CHECKOUTS=/path/to/their/repositories"),
]


@pytest.mark.parametrize("name", SUITES)
def test_every_test_passes_that_is_applicable(name, tmp_path, capsys):
    suite, checkout = SUITES[name], Path(CHECKOUTS) / name
    if not checkout.is_dir():
        pytest.skip(f"{checkout} is missing")
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=checkout, capture_output=True, text=True, check=True)
    python = os.environ.get(f"OWN_TESTS_PYTHON_{name}", PYTHON)
    mock = run(suite, checkout, tmp_path / "mock.xml", None, python) if suite.own_mock else None
    with serve(None, "--max-num-seqs", "4", "--num-gpu-blocks-override", "2048", *suite.flags) as server:
        served = run(suite, checkout, tmp_path / "served.xml", server.url, python)
    with capsys.disabled():
        print("\n" + row(suite, head.stdout.strip(), mock, served))
        for test, why in sorted(served.failed.items()):
            print(f"  {test}: {suite.reason(test) or 'UNEXPECTED ' + why}")
    assert unexpected(suite, served) == {}
    assert served.reached, "no test talked to the server"
