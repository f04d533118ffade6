"""Models and the operators they are written against. Paddle is imported here first, so that it is quiet everywhere."""

import os
import warnings

os.environ.setdefault("GLOG_minloglevel", "2")
os.environ.setdefault("GLOG_v", "0")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Paddle warns on import about build tools that only its own extensions need
    import paddle  # noqa: F401
