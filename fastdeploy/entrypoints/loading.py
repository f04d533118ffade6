"""Loading of a model, into this process or into a separate one."""

from __future__ import annotations

import os
import select
import signal

import msgspec

from fastdeploy.core import envs
from fastdeploy.core.config import EngineConfig
from fastdeploy.core.runner import Runner
from fastdeploy.entrypoints.child import Child
from fastdeploy.inter_communicator import ipc_dir
from fastdeploy.inter_communicator.remote_runner import RemoteRunner

CLOSE_S = 10.0  # time for a runner's process to end; then it is killed


def load_runner(config: EngineConfig, folder: str | None = None) -> Runner:
    """Load the model of ``config``, into a separate process if ``runner_process`` is set. folder: for the sockets of
    that process; None = a temporary folder. Raises FastDeployError or OSError if the model cannot be served."""
    return _start_runner(config, folder) if config.runner_process else load_model(config)


def load_model(config: EngineConfig) -> Runner:
    """Load the model into this process. Raises as ``load_runner``."""
    from fastdeploy.worker.model_runner import ModelRunner

    return ModelRunner(
        config.model,
        dtype=config.dtype,
        block_size=config.block_size,
        num_blocks=config.num_gpu_blocks_override,
        kv_cache_bytes=None if config.kv_cache_gb is None else int(config.kv_cache_gb * 2**30),
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        place=envs.place(),
        spill_dir=config.spill_dir,
        model_roots=config.model_roots,
        max_lora_rank=config.max_lora_rank,
        standby_weights=config.standby_weights,
        engines_on_host=config.engines_on_host,
    )


def _start_runner(config: EngineConfig, given_folder: str | None) -> RemoteRunner:
    """Start the runner's process. The system kills it when the calling thread ends."""
    folder = given_folder or ipc_dir.create()
    args = ["--config", msgspec.json.encode(config).decode(), "--socket-dir", folder]
    main = "fastdeploy.entrypoints.runner_main"
    child = Child("runner", main, args, death_signal=signal.SIGKILL, environment=os.environ)

    def end() -> None:
        if not select.select([child.pidfd], [], [], CLOSE_S)[0]:
            child.signal(signal.SIGKILL)
        child.reap()
        if given_folder is None:
            ipc_dir.remove(folder)

    try:
        return RemoteRunner(folder, child.pidfd, end)
    except BaseException:
        child.signal(signal.SIGKILL)
        end()
        raise
