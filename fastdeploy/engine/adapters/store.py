"""The engine's own copies of adapters, as PEFT folders.

A trainer deletes its folder right after the reply, but an adapter that had to leave the memory is read again later. All
code here runs on staging threads, except ``close``.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from fastdeploy.core.errors import (
    AdapterFolderNotFound,
    FastDeployError,
    ModelNotFound,
    OutOfSpace,
    WeightUpdateRefused,
)
from fastdeploy.core.files import Folder, new_file, open_regular, write_all
from fastdeploy.core.weight_source import (
    ADAPTER_CONFIG,
    ADAPTER_TENSORS,
    FolderSource,
    Source,
)

PICKLED = "adapter_model.bin"
PREFIX = "fastdeploy-adapters-"
MAX_CONFIG_BYTES = 1 << 20
BYTES_PER_CALL = 1 << 26


class AdapterStore:
    """A folder with one folder for each load, named by the number of the load. folder: where the store is made; "" =
    the temporary folder. max_bytes: limit of one file of tensors. check: called with the content of each
    adapter_config.json before its tensors are copied, so that a refusal costs no copy.

    A replica that joins a fleet gets an adapter from the stores of other engines of this user, see ``is_copy``.

    The store is made when the first adapter is copied. The store holds a lock on its folder, which ends with the
    process. Folders of dead engines are removed then.
    """

    def __init__(self, folder: str, max_bytes: int, check: Callable[[bytes], object]):
        self._parent = folder or tempfile.gettempdir()
        self._max_bytes = max_bytes
        self._check = check
        self._root: str | None = None
        self._remove_root: Callable[[], object] = lambda: None
        self._making = threading.Lock()
        self._closed = False

    def path(self, number: int) -> str:
        """Return the folder of a load whose copy is complete."""
        assert self._root is not None
        return os.path.join(self._root, str(number))

    def is_copy(self, path: str) -> bool:
        """Whether ``path`` is, by its name, a copy in the store of any engine that shares the folder of stores."""
        root, number = os.path.split(path)
        parent, name = os.path.split(root)
        return parent == os.path.abspath(self._parent) and name.startswith(PREFIX) and number.isdecimal()

    def copy(
        self,
        number: int,
        source: Source,
        config: dict[str, Any] | None,
        roots: Sequence[str],
        takes_copies: bool = False,
    ) -> None:
        """Copy an adapter. config: content of adapter_config.json, for a source that is not a folder. roots: a folder
        must lie below one of these. takes_copies: it may also be the copy that another engine of this user keeps.
        Raises AdapterFolderNotFound, WeightUpdateRefused or OutOfSpace, and leaves nothing then."""
        try:
            self._make_root()
            path = self.path(number)
            os.mkdir(path)
        except OSError as error:
            raise _no_room(self._parent, error) from error
        try:
            if takes_copies and isinstance(source, FolderSource) and self.is_copy(source.path):
                roots = (_own(os.path.dirname(source.path)),)
            self._fill(path, source, config, roots)
        except BaseException:
            self.remove(number)
            raise

    def look(self, path: str, roots: Sequence[str]) -> None:
        """Raise the error of :meth:`copy` for a folder that cannot be opened."""
        with contextlib.closing(_opened(path, roots)):
            return

    def remove(self, number: int) -> None:
        """Remove the copy of a load, if there is one."""
        if self._root is not None:
            shutil.rmtree(self.path(number), ignore_errors=True)

    def close(self) -> None:
        """Remove the whole store, at the end of the engine."""
        with self._making:
            self._closed = True
            self._remove_root()

    def _make_root(self) -> None:
        with self._making:
            if self._closed:
                raise OSError(errno.ENOENT, "the engine ends")
            if self._root is None:
                _remove_dead(self._parent)
                self._root, fd = _make_locked(self._parent)
                self._remove_root = weakref.finalize(self, _remove_locked, self._root, fd)

    def _fill(self, path: str, source: Source, config: dict[str, Any] | None, roots: Sequence[str]) -> None:
        if isinstance(source, FolderSource):
            with _opened(source.path, roots) as folder:
                self._write_config(path, _read_config(folder))
                with _naming(ADAPTER_TENSORS):
                    if folder.has(PICKLED) and not folder.has(ADAPTER_TENSORS):
                        raise _refused(ADAPTER_TENSORS, "is missing (pickled tensors are never read)")
                    _require(folder, ADAPTER_TENSORS)
                    fd = folder.open(ADAPTER_TENSORS)
                self._copy_tensors(path, fd, 0)
            return
        data = msgspec.json.encode(config)
        if len(data) > MAX_CONFIG_BYTES:
            raise _refused(ADAPTER_CONFIG, f"has {len(data)} bytes, expected at most {MAX_CONFIG_BYTES}")
        self._write_config(path, data)
        with _naming(os.path.basename(source.file)):
            fd = open_regular(source.file)
        self._copy_tensors(path, fd, source.nbytes)

    def _write_config(self, path: str, data: bytes) -> None:
        self._check(data)
        try:
            with new_file(os.path.join(path, ADAPTER_CONFIG), 0o600) as file:
                write_all(file, data)
        except OSError as error:
            raise _no_room(self._parent, error) from error

    def _copy_tensors(self, path: str, source: int, nbytes: int) -> None:
        """Copy the open file ``source``, and close it. nbytes: number of bytes to copy; 0 = all."""
        try:
            size = os.fstat(source).st_size
            if nbytes > size:
                raise _refused(ADAPTER_TENSORS, f"is cut short: it has {size} bytes, expected {nbytes}")
            size = nbytes or size
            if size > self._max_bytes:
                limit = f"more than the {self._max_bytes} bytes of --adapter-memory-mb"
                raise _refused(ADAPTER_TENSORS, f"has {size} bytes, {limit}")
            with new_file(os.path.join(path, ADAPTER_TENSORS), 0o600) as target:
                copied = 0
                while copied < size:
                    sent = os.sendfile(target.fileno(), source, copied, min(size - copied, BYTES_PER_CALL))
                    if sent == 0:
                        raise _refused(ADAPTER_TENSORS, f"is cut short: it ended after {copied} of {size} bytes")
                    copied += sent
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise _no_room(self._parent, error) from error
            raise _refused(ADAPTER_TENSORS, f"cannot be copied: {error.strerror}") from error
        finally:
            os.close(source)


@contextlib.contextmanager
def _naming(file: str) -> Iterator[None]:
    """Turn an OSError into a refusal that names ``file``."""
    try:
        yield
    except OSError as error:
        raise _refused(file, f"cannot be read: {error.strerror}") from error


def _own(root: str) -> str:
    """Return the store ``root`` of another engine. Raises ModelNotFound unless it is there and belongs to this user."""
    with contextlib.suppress(OSError):
        if os.stat(root, follow_symlinks=False).st_uid == os.geteuid():
            return root
    raise ModelNotFound(f"lora_path: there is no store {root!r} of this user", param="lora_path")


def _opened(path: str, roots: Sequence[str]) -> Folder:
    try:
        return Folder(path, roots)
    except FileNotFoundError as error:
        raise AdapterFolderNotFound(f"lora_path: there is no folder {path!r}", param="lora_path") from error
    except OSError as error:
        why = f"lora_path: {path!r} cannot be opened as a folder: {error.strerror}"
        raise WeightUpdateRefused(why, file=path, param="lora_path") from error


def _read_config(folder: Folder) -> bytes:
    with _naming(ADAPTER_CONFIG):
        _require(folder, ADAPTER_CONFIG)
        return folder.read(ADAPTER_CONFIG, MAX_CONFIG_BYTES)


def _require(folder: Folder, file: str) -> None:
    """Raise AdapterFolderNotFound unless ``folder`` has the file."""
    if not folder.has(file):
        raise AdapterFolderNotFound(f"lora_path: {folder.path!r} has no {file}", param="lora_path")


def _refused(file: str, why: str) -> WeightUpdateRefused:
    return WeightUpdateRefused(f"{file}: {why}", file=file)


def _no_room(folder: str, error: OSError) -> FastDeployError:
    return OutOfSpace(f"the adapter cannot be copied to {folder!r} (--adapter-store): {error.strerror}")


def _make_locked(parent: str) -> tuple[str, int]:
    """Make a store, and return its path and the descriptor that holds its lock."""
    while True:
        path = tempfile.mkdtemp(prefix=PREFIX, dir=parent)  # only this user may enter
        # Before the lock is taken, another engine may take the store for that of a dead engine.
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(fd, fcntl.LOCK_EX)
            if os.path.isdir(path):
                return path, fd
            os.close(fd)


def _remove_locked(path: str, fd: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    os.close(fd)


def _remove_dead(parent: str) -> None:
    """Remove the stores of engines of this user that were killed: nobody holds their locks."""
    for entry in os.scandir(parent):
        if not entry.name.startswith(PREFIX):
            continue
        with contextlib.suppress(OSError):
            fd = os.open(entry.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(fd).st_uid == os.geteuid():
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(entry.path, ignore_errors=True)
            finally:
                os.close(fd)
