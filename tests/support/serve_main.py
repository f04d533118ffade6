"""``fastdeploy`` over fake_engine_main: ``python serve_main.py serve FLAGS``."""

from __future__ import annotations

import sys

from fastdeploy.entrypoints.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], engine_module="support.fake_engine_main"))
