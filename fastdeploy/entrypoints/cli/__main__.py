"""``python -m fastdeploy.entrypoints.cli``: the command line."""

import sys

from fastdeploy.entrypoints.cli import main

if __name__ == "__main__":
    sys.exit(main())
