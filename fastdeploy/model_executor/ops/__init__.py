"""Ops for a place. Model code asks :func:`get_ops` once and is written against ``interface.Ops``."""

from __future__ import annotations

import logging

from fastdeploy.core.errors import InvalidField
from fastdeploy.model_executor.ops.interface import Ops

logger = logging.getLogger(__name__)


def get_ops(dtype: str, place: str = "cpu") -> Ops:
    """The C++ ops where they are built and load, else the Paddle reference ops with one warning.

    dtype: "float32" or "bfloat16", that of weights and KV cache. Raises InvalidField for a place without ops.
    """
    if place != "cpu":
        raise InvalidField("place", f"there are no ops for {place!r} yet, only for cpu")
    from fastdeploy.model_executor.ops.cpu import CpuOps
    from fastdeploy.model_executor.ops.cpu_library import load_library

    try:
        return CpuOps(dtype, load_library())
    except OSError as error:
        from fastdeploy.model_executor.ops.reference import ReferenceOps

        logger.warning(
            "the C++ CPU ops are not available (%s): running the Paddle reference ops, in float32 and several times "
            "slower; where there is a C++ compiler `python custom_ops/build.py` builds them, or `pip install` anew",
            error,
        )
        return ReferenceOps(dtype)
