"""Bringing a folder on this host up to a version that a trainer has published (slime's disk mode).

Versions are Hugging Face folders ``weight_v000007`` below ``source_dir``; version 0 is the model that the server
started with. The trainer has the local folder loaded by a second call.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fastdeploy.config import ServeConfig
from fastdeploy.errors import InvalidField, OutOfSpace, WeightUpdateRefused

# SGLang's own marker of a folder that it may overwrite.
MARKER = Path(".weight_sync") / "state.json"
LOCK = Path(".weight_sync") / "lock"
INDEX = "model.safetensors.index.json"


def pull_weights(config: ServeConfig, local_dir: str, source_dir: str, version: int) -> None:
    """Make ``local_dir`` a copy of ``version``. Raises InvalidField, WeightUpdateRefused or OutOfSpace.

    A folder with files that no pull has put there is never touched."""
    if version < 0:
        raise InvalidField("target_version", f"expected an integer >= 0, got {version}")
    target = _allowed(config, "local_checkpoint_dir", local_dir)
    source = Path(config.model) if version == 0 else _published(config, source_dir, version)
    try:
        with _locked(target):
            _copy(source, target, version)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OutOfSpace(f"local_checkpoint_dir: no room for version {version}: {error}") from error
        raise WeightUpdateRefused(f"version {version} cannot be copied: {error}") from error


def _allowed(config: ServeConfig, field: str, path: str) -> Path:
    real = os.path.realpath(path) if path and "\0" not in path else ""
    roots = [os.path.realpath(root) for root in config.model_roots]
    if not os.path.isabs(path) or not any(os.path.commonpath([real, root]) == root for root in roots):
        raise InvalidField(field, f"{path!r} is not under an allowed root (--model-root)")
    return Path(real)


def _published(config: ServeConfig, source_dir: str, version: int) -> Path:
    folder = _allowed(config, "source_dir", os.path.join(source_dir, f"weight_v{version:06d}"))
    if not folder.is_dir():
        raise WeightUpdateRefused(f"source_dir: version {version} is not there: no folder {str(folder)!r}")
    index = folder / INDEX
    if index.exists() and "delta_encoding" in json.loads(index.read_bytes()).get("metadata", {}):
        raise WeightUpdateRefused(f"version {version} is a delta; this server takes whole checkpoints")
    return folder


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    """The folder is ours: new, empty, or made by a pull; and no other pull is at work in it."""
    if target.is_dir() and any(target.iterdir()) and not (target / LOCK).exists() and not (target / MARKER).exists():
        raise InvalidField("local_checkpoint_dir", f"{str(target)!r} has files that no pull has put there")
    (target / LOCK).parent.mkdir(parents=True, exist_ok=True)
    with (target / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _copy(source: Path, target: Path, version: int) -> None:
    """The marker is absent while the folder is half one version and half another."""
    (target / MARKER).unlink(missing_ok=True)
    names = {entry.name for entry in source.iterdir() if entry.is_file()}
    for name in sorted(names):
        shutil.copyfile(source / name, target / name)
    for entry in target.iterdir():
        if entry.is_file() and entry.name not in names:
            entry.unlink()
    (target / MARKER).write_text(json.dumps({"version": f"{version:06d}"}))
