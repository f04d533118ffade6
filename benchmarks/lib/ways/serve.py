"""``fastdeploy serve`` over the engine of ``engine_main``: ``python -m benchmarks.lib.ways.serve serve FLAGS``."""

from __future__ import annotations

import sys

from fastdeploy.entrypoints.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], engine_module="benchmarks.lib.ways.engine_main"))
