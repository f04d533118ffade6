"""A pytest plugin: TRL's tests that start `trl vllm-serve` on a second GPU get a client of our server.

The package trl is that of the interpreter, since the routes of a server are chosen by its client. The tests' models and
tokenizers are the folder that our server serves, whatever their name.
"""

from __future__ import annotations

import os
import types
from collections.abc import Sequence
from typing import Any

import pytest
import trl.generation.vllm_client as client
from trl import import_utils
from trl.generation import vllm_generation
from trl.scripts import vllm_serve

URL, MODEL = os.environ["FASTDEPLOY_URL"], os.environ["FASTDEPLOY_MODEL"]
client.is_vllm_available = lambda: True  # read before the first request, and not used later


def of_other_tests(name: str) -> Any:
    """Stand for a function that the modules of the tests import, for other tests, and that this trl lacks."""
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda: False


for module in (import_utils, vllm_generation, vllm_serve):
    module.__getattr__ = of_other_tests


class Client(client.VLLMClient):
    """TRL's client, without a group of NCCL."""

    def __init__(self, **settings: Any):
        super().__init__(URL)

    def init_communicator(self, device: Any = 0) -> None: ...

    def close_communicator(self) -> None: ...


def stand_in(kind: Any) -> Any:
    """Return a class of transformers that loads our model in the place of each other."""
    return types.SimpleNamespace(from_pretrained=lambda name, **settings: kind.from_pretrained(MODEL, **settings))


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    for module in {item.module for item in items if isinstance(item, pytest.Function)}:
        if hasattr(module, "VLLMClient"):
            module.VLLMClient = Client
            module.subprocess = types.SimpleNamespace(Popen=lambda *a, **k: types.SimpleNamespace(pid=0), PIPE=None)
            module.kill_process = lambda process: None
            for name in ("AutoTokenizer", "AutoModelForCausalLM"):
                setattr(module, name, stand_in(getattr(module, name)))
    for item in items:
        for node in item.listchain():  # two GPUs and vllm, which our server needs no more than its client does
            node.own_markers = [mark for mark in node.own_markers if mark.name != "skipif"]
