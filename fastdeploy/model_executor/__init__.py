"""Models and the operators that they use. Paddle is imported here first, with settings that keep its import quiet."""

import os
import warnings

os.environ.setdefault("GLOG_minloglevel", "2")
os.environ.setdefault("GLOG_v", "0")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Paddle warns on import about build tools that only its own extensions need
    import paddle  # noqa: F401
