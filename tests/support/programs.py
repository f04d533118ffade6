"""Programs of this repository, run in processes that are forked from one which has imported what takes them seconds."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from pathlib import Path

from support.markdown import ROOT

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([__name__, "fastdeploy.worker.model_runner", "fastdeploy.http.app", "transformers"])


def run(arguments: list[str], errors: Path) -> None:
    """Run a program of this repository as ``python`` does with ``arguments``."""
    os.chdir(ROOT)
    is_module = arguments[0] == "-m"
    sys.argv = arguments[is_module:]
    sys.path.insert(0, str(ROOT if is_module else Path(arguments[0]).resolve().parent))
    start = runpy.run_module if is_module else runpy.run_path
    with open(errors, "w") as sys.stderr:
        start(sys.argv[0], run_name="__main__")
