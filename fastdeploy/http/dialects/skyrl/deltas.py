"""SkyRL's checkpoint deltas (generator.inference_engine.weight_sync_backend: delta).

SkyRL's trainer first calls /init_weight_transfer_engine with the folder of the model and a local folder. For each
version it publishes the folder ``delta-00000007`` below ``sync_dir``, calls /fetch_weights, pauses the engine, and has
the local folder loaded by an ordinary weight update whose ``update_info`` names the version.

The calls may reach any API server of this host. What the first call says is therefore kept in a file below --pull-root,
by the port of the server. The local checkpoint is the folder ``weights`` in SkyRL's local folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Sequence
from typing import Any, cast

import msgspec
from pydantic import Field

from fastdeploy.core.config import ServeConfig
from fastdeploy.core.errors import InvalidField, OutOfSpace, WrongOrder
from fastdeploy.core.files import ANYWHERE, make_beneath, open_regular, read_whole
from fastdeploy.core.pulled_folder import SYNC, pulled_version
from fastdeploy.core.weight_source import FolderSource
from fastdeploy.http.body import LaxBody, parse_body
from fastdeploy.http.checkpoint_deltas.formats import SkyRLVersions, check_path
from fastdeploy.http.checkpoint_deltas.published import MAX_JSON_BYTES
from fastdeploy.http.checkpoint_deltas.pulls import MAX_VERSION, NO_ROOT, Pulls

WEIGHTS = "weights"
# Each marks the init_info or the update_info of a delta among those of vLLM's other transports.
INIT_FIELD, UPDATE_FIELD = "local_checkpoint_dir", "target_version"


class InitInfo(LaxBody):
    """The setup of a run. SkyRL also sends how its own workers download and load; those fields are dropped."""

    base_model_path: str
    local_checkpoint_dir: str


class FetchBody(LaxBody):
    """The version to fetch. uri: its folder of the target version, if it is not below sync_dir."""

    target_version: int = Field(ge=0, le=MAX_VERSION)
    sync_dir: str | None = None
    uri: str | None = None


class ReloadInfo(LaxBody):
    target_version: int = Field(ge=0)


class Setup(msgspec.Struct):
    """The content of the file that /init_weight_transfer_engine leaves."""

    base_model_path: str
    local_checkpoint_dir: str


class CheckpointDeltas:
    """SkyRL's deltas, as one API server receives them."""

    def __init__(self, config: ServeConfig):
        self._config = config
        self._pulls = Pulls(config)

    async def init(self, info: dict[str, Any]) -> None:
        """Keep what /init_weight_transfer_engine says for the calls that follow. Raises InvalidField or OutOfSpace."""
        body = parse_body(info, InitInfo, {})
        check_path(INIT_FIELD, body.local_checkpoint_dir)
        if not self._config.pull_root:
            raise InvalidField(INIT_FIELD, NO_ROOT)
        setup = Setup(body.base_model_path, body.local_checkpoint_dir)
        await asyncio.to_thread(self._keep, setup)

    async def fetch(self, body: FetchBody) -> dict[str, Any]:
        """Bring the local checkpoint to a version. Raises WrongOrder before :meth:`init`, and the errors of a pull."""
        setup = await asyncio.to_thread(self._setup)
        versions = self._versions(setup, body)
        start = time.perf_counter()
        await self._pulls.pull(_weights(setup), versions, body.target_version)
        stats = {"total_s": time.perf_counter() - start}
        return {"status": "ok", "target_version": body.target_version, "stats": stats}

    async def prepared(self, info: dict[str, Any]) -> tuple[FolderSource, str]:
        """Return the local checkpoint and its version, for an update to the version that ``info`` names. Raises
        WrongOrder if the local checkpoint is of another version."""
        target = parse_body(info, ReloadInfo, {}).target_version
        setup = await asyncio.to_thread(self._setup)
        local = _weights(setup)
        found = await asyncio.to_thread(pulled_version, local)
        if found != target:
            got = "no whole version" if found is None else f"version {found}"
            raise WrongOrder(f"target_version: the local checkpoint has {got}; call /fetch_weights for {target} first")
        return FolderSource(local), str(target)

    def _versions(self, setup: Setup, body: FetchBody) -> SkyRLVersions:
        """Return the versions that ``body`` names. SkyRL may name the folder of version 0 as this server's model, or as
        a folder of this host. Raises InvalidField."""
        config, path = self._config, setup.base_model_path
        model, roots = config.model, cast(Sequence[str], ANYWHERE)
        if path not in (model, config.served_model_name) and os.path.realpath(path) != os.path.realpath(model):
            if not os.path.isabs(path):
                expected = f"{model!r}, {config.served_model_name!r} or a folder below --model-root"
                raise InvalidField("base_model_path", f"expected {expected}, got {path!r}")
            model, roots = path, config.model_roots
        return SkyRLVersions(model, roots, body.target_version, body.sync_dir, body.uri, config.model_roots)

    @property
    def _file(self) -> str:
        return f"skyrl-{self._config.port}.json"

    def _keep(self, setup: Setup) -> None:
        self._versions(setup, FetchBody(target_version=0)).open(0).folder.close()
        root, part = self._config.pull_root, f"{self._file}.{os.getpid()}"
        try:
            os.close(make_beneath(root, setup.local_checkpoint_dir))
        except OSError as error:
            why = f"{setup.local_checkpoint_dir!r} cannot be made below --pull-root: {error.strerror}"
            raise InvalidField(INIT_FIELD, why) from error
        try:
            folder = make_beneath(root, os.path.join(root, SYNC))
            try:
                with contextlib.suppress(FileNotFoundError):  # left by a killed API server
                    os.unlink(part, dir_fd=folder)
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                with open(os.open(part, flags, 0o600, dir_fd=folder), "wb") as file:
                    file.write(msgspec.json.encode(setup))
                os.rename(part, self._file, src_dir_fd=folder, dst_dir_fd=folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise OutOfSpace(f"--pull-root: {self._file} cannot be written: {error.strerror}") from error

    def _setup(self) -> Setup:
        if not self._config.pull_root:
            raise InvalidField(INIT_FIELD, NO_ROOT)
        try:
            fd = open_regular(os.path.join(self._config.pull_root, SYNC, self._file))
            try:
                return msgspec.json.decode(read_whole(fd, MAX_JSON_BYTES), type=Setup)
            finally:
                os.close(fd)
        except (OSError, msgspec.DecodeError) as error:
            raise WrongOrder("call /init_weight_transfer_engine with a local_checkpoint_dir first") from error


def _weights(setup: Setup) -> str:
    return os.path.join(setup.local_checkpoint_dir, WEIGHTS)
