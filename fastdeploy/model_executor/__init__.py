"""Models and the operators that they use. Paddle is imported here first, with settings that keep its import quiet."""

import os
import sys
import warnings

os.environ.setdefault("GLOG_minloglevel", "2")
os.environ.setdefault("GLOG_v", "0")
# Paddle imports httpx, whose command line takes 0.1 s and is optional: httpx does without a module that is None.
sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Paddle warns on import about build tools that only its own extensions need
    import paddle  # noqa: F401
