"""FastDeploy: an LLM serving engine for RL rollouts. Heavy parts are imported when they are first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fastdeploy.core.process import VERSION as __version__

__all__ = ["LLM", "GuidedDecodingParams", "SamplingParams", "__version__", "version"]

if TYPE_CHECKING:
    from fastdeploy.core.offline_params import GuidedDecodingParams, SamplingParams
    from fastdeploy.entrypoints.llm import LLM

LAZY = {
    "LLM": "fastdeploy.entrypoints.llm",
    "GuidedDecodingParams": "fastdeploy.core.offline_params",
    "SamplingParams": "fastdeploy.core.offline_params",
}


def version() -> str:
    """Return the version of this package, as FastDeploy's function of this name does."""
    return __version__


def __getattr__(name: str) -> Any:
    if name in LAZY:
        return getattr(importlib.import_module(LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
