"""FastDeploy: an LLM serving engine for RL rollouts. Heavy parts are imported when they are first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fastdeploy.core.process import VERSION as __version__

__all__ = ["LLM", "SamplingParams", "__version__", "grammars"]

if TYPE_CHECKING:
    from fastdeploy.client import grammars
    from fastdeploy.core.sampling_params import SamplingParams
    from fastdeploy.entrypoints.llm import LLM


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from fastdeploy.entrypoints.llm import LLM

        return LLM
    if name == "grammars":
        return importlib.import_module("fastdeploy.client.grammars")
    if name == "SamplingParams":
        from fastdeploy.core.sampling_params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
