"""A pytest plugin: AReaL's tests that start an engine of SGLang or vLLM get our server at the address of that engine.

The tests need no GPU then. Their models are the folder that our server serves, whatever their name.
"""

from __future__ import annotations

import os
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import huggingface_hub

URL, MODEL = os.environ["FASTDEPLOY_URL"], os.environ["FASTDEPLOY_MODEL"]
RELAY = str(Path(__file__).with_name("relay.py"))
ENGINES = ("sglang", "vllm")
HOST = "127.0.0.1"

_version = metadata.version


def version(name: str) -> str:
    """Let the engines seem to be installed, in any version that AReaL asks for."""
    return "99" if name in ENGINES else _version(name)


def command(args: dict[str, Any]) -> list[str]:
    """Return a command in the place of an engine's command with the arguments ``args``."""
    return [sys.executable, RELAY, str(args["port"]), URL]


def pytest_configure() -> None:
    metadata.version = version
    huggingface_hub.snapshot_download = lambda *args, **kwargs: MODEL
    from areal.api import cli_args
    from areal.infra import remote_inf_engine
    from areal.utils import network, testing_utils

    for engine in (cli_args.SGLangConfig, cli_args.vLLMConfig):
        engine.build_cmd_from_args = staticmethod(command)
    testing_utils.get_model_path = lambda local, name: MODEL
    for module in (network, remote_inf_engine):
        module.gethostip = lambda *args, **kwargs: HOST
