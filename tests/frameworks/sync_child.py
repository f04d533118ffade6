"""One sync of weights by a framework's own code, as its trainer sees it. Run by test_silent_syncs.py; prints one line
of JSON.

usage: sync_child.py slime|nemo_rl CHECKOUT URL FOLDER VERSION      (FOLDER: the new weights of the served model)

Replaced, since they need CUDA or Ray's processes: what slime_child.py replaces; the package __init__ files of NeMo-RL,
its policy, which sends tensors of CUDA, and ``ray.get``.
"""

from __future__ import annotations

import base64
import json
import sys
import types
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit


def by_slime(checkout: str, url: str, folder: str, version: str) -> dict[str, Any]:
    """slime's SGLangEngine loads the folder. Return what slime asks the engine afterwards."""
    from slime_child import stub_what_is_missing

    stub_what_is_missing(checkout)
    from slime.backends.sglang_utils.sglang_engine import SGLangEngine

    engine = SGLangEngine(args=None, rank=0)
    where = urlsplit(url)
    engine.node_rank, engine.server_host, engine.server_port = 0, where.hostname, where.port
    reply = engine.update_weights_from_disk(folder, weight_version=version)
    checked = engine.check_weights("checksum")
    return {"success": reply["success"], "version": engine.get_weight_version(), "checked": checked["success"]}


class Policy:
    """NeMo-RL's policy: it sends the tensors of a folder by NeMo-RL's own worker of SGLang."""

    def __init__(self, worker: Any, folder: str, version: str):
        self._worker, self._folder, self._version = worker, folder, version

    def offload_before_refit(self) -> None: ...

    def offload_after_refit(self) -> None: ...

    def stream_weights_via_http(self, rollout_engine_urls: list[str], buffer_size_bytes: int) -> list[Any]:
        data = base64.b64encode(Path(self._folder, "model.safetensors").read_bytes()).decode()
        reply = self._worker.update_weights_from_tensor([data], weight_version=self._version)
        assert reply["success"], reply
        return [reply]


class Generation:
    """NeMo-RL's generation, of one server that is awake."""

    def __init__(self, url: str):
        self._url = url

    def prepare_for_generation(self, tags: list[str]) -> None: ...

    def get_rollout_engine_urls(self) -> list[str]:
        return [self._url]


def by_nemo_rl(checkout: str, url: str, folder: str, version: str) -> dict[str, Any]:
    """NeMo-RL's HTTPWeightSynchronizer brings the weights. Return how it ended, and what NeMo-RL asks afterwards."""
    sys.path.insert(0, checkout)
    for name in (
        "nemo_rl.weight_sync",
        "nemo_rl.models",
        "nemo_rl.models.generation",
        "nemo_rl.models.generation.sglang",
    ):
        module = types.ModuleType(name)
        module.__path__ = [f"{checkout}/{name.replace('.', '/')}"]
        sys.modules[name] = module
    from nemo_rl.models.generation.sglang.sglang_worker import SGLangGenerationWorker
    from nemo_rl.weight_sync import http_weight_synchronizer

    http_weight_synchronizer.ray = types.SimpleNamespace(get=lambda results: results)
    kind = SGLangGenerationWorker.__ray_metadata__.modified_class
    worker = kind.__new__(kind)
    worker.node_rank, worker.server_base_url = 0, url
    worker.invalidate_kv_cache()
    synchronizer = http_weight_synchronizer.HTTPWeightSynchronizer(
        Policy(worker, folder, version), Generation(url), refit_buffer_size_gb=1
    )
    try:
        synchronizer.sync_weights()
        error = ""
    except Exception as raised:
        error = repr(raised)
    return {"error": error, "is_stale": synchronizer.is_stale, "healthy": worker.health_generate()}


if __name__ == "__main__":
    by, *arguments = sys.argv[1:]
    print("RESULT " + json.dumps({"slime": by_slime, "nemo_rl": by_nemo_rl}[by](*arguments)), flush=True)
