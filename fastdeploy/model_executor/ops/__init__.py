"""Ops for a place. Model code gets them from :func:`get_ops` and uses ``interface.Ops`` only."""

from __future__ import annotations

import logging

from fastdeploy.model_executor.ops.interface import Ops

logger = logging.getLogger(__name__)


def get_ops(dtype: str) -> Ops:
    """Return the C++ ops if their library loads, else the Paddle reference ops after one warning.

    dtype: the type of weights and KV cache, "float32" or "bfloat16".
    """
    from fastdeploy.model_executor.ops.cpu import CpuOps
    from fastdeploy.model_executor.ops.cpu_library import load_library

    try:
        return CpuOps(dtype, load_library())
    except OSError as error:
        from fastdeploy.model_executor.ops.reference import ReferenceOps

        logger.warning(
            "the C++ CPU ops are not available (%s): using the Paddle reference ops, in float32 and several times "
            "slower; with a C++ compiler, `python custom_ops/build.py` or another `pip install` builds the C++ ops",
            error,
        )
        return ReferenceOps(dtype)
