"""A pytest plugin: the actors of miles' tests that mock an engine of SGLang call our server.

Each call is recorded as the mock records it, since the tests read the records, and a fault that a test has set is
raised. Then miles' own SGLangEngine makes the call, as an external engine at our server's address.
"""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import urlsplit

import ray
from miles.utils.test_utils import mock_sglang_engine

URL = os.environ["FASTDEPLOY_URL"]
Mock = mock_sglang_engine.MockSGLangEngine.__ray_actor_class__
CALLS = (
    "health_generate", "release_memory_occupation", "resume_memory_occupation", "flush_cache", "pause_generation",
    "continue_generation", "get_server_info", "get_weight_version", "update_weight_version",
)  # fmt: skip


class ServedEngine(Mock):
    """The mock, whose calls reach our server."""

    def _served(self) -> Any:
        from miles.backends.sglang_utils.sglang_engine import SGLangEngine

        engine = SGLangEngine(self.args, self.rank)
        where = urlsplit(URL)
        engine.server_host, engine.server_port, engine.node_rank = where.hostname, where.port, 0
        return engine

    def init(self, **kwargs: Any) -> Any:
        result = super().init(**kwargs)
        self._served().health_generate()
        return result


def _calling(name: str) -> Any:
    recorded = getattr(Mock, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = recorded(self, *args, **kwargs)
        getattr(self._served(), name)(*args, **kwargs)
        return result

    method.__name__ = name
    return method


for _name in CALLS:
    setattr(ServedEngine, _name, _calling(_name))
mock_sglang_engine.MockSGLangEngine = ray.remote(ServedEngine)
