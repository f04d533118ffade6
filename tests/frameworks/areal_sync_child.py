"""One sync of weights by AReaL's remote inference engine with its vLLM backend, to several servers, as its trainer sees
it. Run by test_silent_syncs.py; prints one line of JSON.

usage: areal_sync_child.py CHECKOUT FOLDER URL...      (FOLDER: the new weights of the served model)
"""

from __future__ import annotations

import json
import sys
import tempfile
from datetime import datetime
from typing import Any
from urllib.parse import urlsplit


def main(folder: str, urls: list[str]) -> dict[str, Any]:
    from areal.api import WeightUpdateMeta
    from areal.api.cli_args import InferenceEngineConfig, NameResolveConfig
    from areal.engine.vllm_remote import VLLMBackend
    from areal.infra import RemoteInfEngine
    from areal.utils import name_resolve, names

    with tempfile.TemporaryDirectory() as records:
        # The key by which AReaL's trainer announces a saved checkpoint to its rollout side.
        name_resolve.reconfigure(NameResolveConfig(nfs_record_root=records))
        name_resolve.add(names.update_weights_from_disk("e", "t", 0), str(datetime.now().timestamp()))
        config = InferenceEngineConfig(experiment_name="e", trial_name="t", request_retries=1, setup_timeout=60)
        engine = RemoteInfEngine(config, VLLMBackend())
        engine.initialize(engine_id="t", addr=[urlsplit(url).netloc for url in urls], train_data_parallel_size=1)
        meta = WeightUpdateMeta(type="disk", path=folder, version=1, clear_checkpoint_after_load=False)
        try:
            engine.update_weights_from_disk(meta).result()
            engine.set_version(1)
            error = ""
        except Exception as raised:
            error = repr(raised)
        version = engine.get_version()
        engine.destroy()
    return {"error": error, "version": version}


if __name__ == "__main__":
    checkout, new, *servers = sys.argv[1:]
    sys.path.insert(0, checkout)
    print("RESULT " + json.dumps(main(new, servers)), flush=True)
