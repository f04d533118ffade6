"""A pytest plugin: TRL's tests of its VLLMClient talk to our server where they start ``trl vllm-serve`` on GPUs.

The client is that of the installed package: the one of the repository's snapshot speaks to TRL's own server, not to
vLLM's routes. Marks that skip a test without GPUs or without the package vllm are removed. The process that a test
class starts is one that waits, its model is that of our server, and the client connects without a group of NCCL.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import trl.generation.vllm_client as client_module  # before the checkout is on the path

URL, MODEL = os.environ["FASTDEPLOY_URL"], os.environ["FASTDEPLOY_MODEL"]
WAITS = [sys.executable, "-c", "import time; time.sleep(3600)"]
NEEDS = ("accelerator", "test requires vllm", "at least 3")


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    client_module.is_vllm_available = lambda: True
    for module in {item.module for item in items if isinstance(item, pytest.Function)}:
        if hasattr(module, "VLLMClient"):
            module.VLLMClient = client_of_our_server(module.VLLMClient)
            module.subprocess = Processes
    for node in {parent for item in items for parent in item.listchain()}:
        node.own_markers = [mark for mark in node.own_markers if not needs_a_gpu(mark)]
        if getattr(getattr(node, "cls", None), "model_id", None):
            node.cls.model_id = MODEL


def needs_a_gpu(mark: pytest.Mark) -> bool:
    reason = str(mark.kwargs.get("reason", ""))
    return mark.name == "skipif" and any(words in reason for words in NEEDS)


class Processes:
    """The module ``subprocess``, as far as the tests use it."""

    PIPE = subprocess.PIPE

    @staticmethod
    def Popen(command: Any, **settings: Any) -> subprocess.Popen[bytes]:  # noqa: N802
        return subprocess.Popen(WAITS)


def client_of_our_server(client: Any) -> Any:
    class Client(client):
        def __init__(self, *_: Any, **settings: Any):
            super().__init__(base_url=URL, connection_timeout=settings.get("connection_timeout", 60))

        def init_communicator(self, *_: Any, **__: Any) -> None:
            pass

    return Client
