"""Where new weights may come from. Everything that a path can be is looked at before anything is opened."""

from __future__ import annotations

import os

from fastdeploy.config import UPLOAD_PREFIX, upload_folders
from fastdeploy.errors import InvalidField
from fastdeploy.inter_communicator.messages import FileSource, FolderSource, SharedMemorySource, Source

SHARED_MEMORY = "/dev/shm"


class SourcePolicy:
    """roots: folders that weights may be read from; none = no folder and no shared memory. upload_dir: as in the
    configs, where the API servers put uploads; those are always allowed, since the HTTP route admitted them."""

    def __init__(self, roots: tuple[str, ...], upload_dir: str):
        self._roots = [os.path.realpath(root) for root in roots]
        self._uploads = {os.path.realpath(folder) for folder in upload_folders(upload_dir)}

    def check(self, source: Source) -> None:
        """Raise InvalidField naming the field of the route."""
        match source:
            case FolderSource(path=path):
                self._check_folder(path)
            case SharedMemorySource(name=name, nbytes=nbytes):
                self._check_segment(name, nbytes)
            case FileSource(path=path):
                self._check_upload(path)

    def _check_folder(self, path: str) -> None:
        if "\0" in path:
            raise InvalidField("model_path", "expected a path, got a string with a zero byte")
        real = os.path.realpath(path)
        if not self._allowed(real):
            raise InvalidField("model_path", f"{path!r} is not under an allowed root (--model-root)")
        if not os.path.isdir(real):
            raise InvalidField("model_path", f"{path!r} is not a folder")

    def _check_segment(self, name: str, nbytes: int) -> None:
        plain = name.removeprefix("/")
        if not plain or "/" in plain or "\0" in plain or plain in (".", "..") or len(plain) > 255:
            raise InvalidField("shared_memory", f"expected the name of a POSIX segment, without slashes, got {name!r}")
        if nbytes < 0:
            raise InvalidField("nbytes", f"expected an integer >= 0, got {nbytes}")
        if not self._allowed(os.path.realpath(os.path.join(SHARED_MEMORY, plain))):
            raise InvalidField("shared_memory", f"{SHARED_MEMORY} is not under an allowed root (--model-root)")

    def _check_upload(self, path: str) -> None:
        folder, name = os.path.split(path)
        if os.path.realpath(folder) not in self._uploads or not name.startswith(UPLOAD_PREFIX) or os.path.islink(path):
            raise InvalidField("body", "expected an upload that an API server of this engine has spooled")

    def _allowed(self, real: str) -> bool:
        return any(os.path.commonpath([real, root]) == root for root in self._roots)
