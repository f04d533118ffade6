"""Checks of a weight source that need no access to files.

The loop's thread must not open a file, since a dead mount would block the thread. The staging thread checks, when it
opens a folder, that the folder lies beneath a root after all links are followed (``files``).
"""

from __future__ import annotations

import os

from fastdeploy.core.config import UPLOAD_PREFIX, upload_folders
from fastdeploy.core.errors import InvalidField
from fastdeploy.core.files import SHARED_MEMORY, path_problem
from fastdeploy.core.weight_source import FileSource, FolderSource, SharedMemorySource, Source, StreamSource

MAX_NBYTES = 2**63 - 1


class SourcePolicy:
    """Rules for weight sources. roots: folders that weights may be read from; none = no folder and no shared memory.
    upload_dir: setting of the folder of uploads. Uploads are always allowed, since the HTTP route has checked them."""

    def __init__(self, roots: tuple[str, ...], upload_dir: str):
        self._folders_allowed = bool(roots)
        reals = [os.path.realpath(root) for root in roots]
        self._segments_allowed = any(os.path.commonpath([SHARED_MEMORY, root]) == root for root in reals)
        self._uploads = [os.path.normpath(folder) for folder in upload_folders(upload_dir)]

    @property
    def upload_folders(self) -> tuple[str, ...]:
        """The folders for uploads, the preferred one first."""
        return tuple(self._uploads)

    def check(self, source: Source, folder_field: str = "model_path") -> None:
        """Raise InvalidField, naming the field of the route, if the source is not allowed. folder_field: the field that
        names a folder."""
        match source:
            case FolderSource(path=path):
                self._check_folder(path, folder_field)
            case SharedMemorySource(name=name, nbytes=nbytes):
                self._check_segment(name, nbytes)
            case FileSource(path=path):
                self._check_upload(path)
            case StreamSource(path=path) if source.state != "broken":
                if path or source.nbytes:  # an upload that the session only waits for has no file
                    self._check_upload(path)
                if min(source.offset, source.nbytes, source.start) < 0:
                    raise InvalidField("body", f"expected a piece of an upload, got {source!r}")

    def _check_folder(self, path: str, field: str) -> None:
        if (problem := path_problem(path)) is not None:
            raise InvalidField(field, problem)
        if not self._folders_allowed:
            raise InvalidField(field, f"{path!r} is refused: no folder is allowed without --model-root")

    def _check_segment(self, name: str, nbytes: int) -> None:
        plain = name.removeprefix("/")
        if "/" in plain or plain in (".", "..") or path_problem(plain) is not None:
            raise InvalidField("shared_memory", f"expected the name of a POSIX segment, without slashes, got {name!r}")
        if not 0 <= nbytes <= MAX_NBYTES:
            raise InvalidField("nbytes", f"expected an integer from 0 to 2**63 - 1, got {nbytes}")
        if not self._segments_allowed:
            raise InvalidField("shared_memory", f"{SHARED_MEMORY} is not under an allowed root (--model-root)")

    def _check_upload(self, path: str) -> None:
        folder, name = os.path.split(path)
        if path_problem(path) is not None or folder not in self._uploads or not name.startswith(UPLOAD_PREFIX):
            raise InvalidField("body", "expected the path of an upload to an API server of this engine")
