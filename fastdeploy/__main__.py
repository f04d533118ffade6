"""``python -m fastdeploy``: the command line."""

import sys

from fastdeploy.entrypoints.cli import main

sys.exit(main())
