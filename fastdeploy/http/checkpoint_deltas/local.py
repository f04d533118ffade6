"""The local folder of pulls: it holds one version of a checkpoint, or it is marked as unfinished.

- The folder lies beneath --pull-root, and no link leads into it.
- A file that no pull has made is never changed. No file gets wider permissions than it had, but for writing by its
  owner, this server.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from fastdeploy.core.errors import InvalidField, WeightUpdateRefused
from fastdeploy.core.files import make_beneath, open_regular, read_whole
from fastdeploy.core.pulled_folder import LOCK, STATE, SYNC
from fastdeploy.http.checkpoint_deltas.patch import ALGORITHMS, ENCODINGS, patch_bytes
from fastdeploy.http.checkpoint_deltas.published import (
    MAX_JSON_BYTES,
    Delta,
    Payload,
    Published,
    is_checkpoint_file,
    read_header,
    read_payload,
    refused,
)

OWN, PART = "files.json", "part"  # in .weight_sync, besides the lock and the state
BOOT_ID = "/proc/sys/kernel/random/boot_id"
SLICE_BYTES = 64 << 20  # bytes copied between two checks whether the pull was given up
CORES, MAX_THREADS = os.cpu_count() or 1, 8  # threads that patch tensors
FIELD = "local_checkpoint_dir"


class State(msgspec.Struct):
    """The content of state.json. version: six digits, as in SGLang. source: Published.identity of that version. model:
    that of version 0. boot_id: of the system that wrote the folder."""

    version: str
    source: str = ""
    model: str = ""
    boot_id: str = ""


class PatchRefused(WeightUpdateRefused):
    """A delta does not fit the bytes of the local folder, which is unfinished now."""


class Place(NamedTuple):
    """The bytes of one tensor in a local file."""

    fd: int
    offset: int
    nbytes: int


class LocalFolder:
    """An open local folder, which no other pull and no reader uses meanwhile. target, sync: descriptors of the folder
    and of its .weight_sync. check: called between slices of the work; raises if the pull was given up."""

    def __init__(self, target: int, sync: int, check: Callable[[], None]):
        self._target, self._sync, self._check = target, sync, check
        with open(BOOT_ID) as file:
            self._boot_id = file.read().strip()

    def state(self) -> State | None:
        """Return the state, or None if the folder holds no whole version, or none that can be trusted."""
        try:
            fd = open_regular(STATE, self._sync)
            try:
                state = msgspec.json.decode(read_whole(fd, MAX_JSON_BYTES), type=State)
            finally:
                os.close(fd)
        except (OSError, msgspec.DecodeError):
            return None
        return state if state.boot_id == self._boot_id and state.version.isdecimal() else None

    def finish(self, version: int, source: str, model: str) -> None:
        """Mark the folder as whole. source, model: Published.identity of this version and of version 0."""
        self._write(STATE, State(f"{version:06d}", source, model, self._boot_id))

    def copy(self, published: Published) -> None:
        """Replace the content by a whole version. The list of files is written first, so that the next pull recognises
        the files of a killed pull. Raises InvalidField, with nothing changed, if the folder has other files."""
        self._check()
        names, own = published.files, self._own_files()
        foreign = sorted(set(os.listdir(self._target)) - own - {SYNC})
        if foreign:
            raise InvalidField(FIELD, f"has files that no pull has put there: {foreign[0]!r}")
        self._unfinished()
        self._write(OWN, sorted(own.union(names)))
        for name in names:
            fd = published.folder.open(name)
            try:
                mode = stat.S_IMODE(os.fstat(fd).st_mode) & 0o644 | stat.S_IWUSR
                with self._replacing(name, self._target, mode) as copy:
                    copy_bytes(fd, copy, self._check)
            finally:
                os.close(fd)
        for name in own.difference(names):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self._target)
        self._write(OWN, sorted(names))

    def patch(self, published: Published, delta: Delta) -> None:
        """Apply a delta to the files in place. Raises WeightUpdateRefused with nothing changed for a tensor that is not
        there, and PatchRefused for bytes that do not fit."""
        with contextlib.ExitStack() as files:
            places = self._places(files)
            for payload in delta.payloads:
                place = places.get(payload.tensor)
                if place is None:
                    raise _bad(published, payload, "is not in the local checkpoint")
                if payload.nbytes > 6 * place.nbytes + 1024:
                    raise _bad(published, payload, f"has a payload too large for its {place.nbytes} bytes")
            self._unfinished()
            errors: list[BaseException] = []

            def check() -> None:
                self._check()
                if errors:
                    raise WeightUpdateRefused("another tensor was refused")

            def work(payload: Payload) -> None:
                _patch_tensor(published, delta.encoding, payload, places[payload.tensor], check)

            _on_threads(work, delta.payloads, errors)
            if errors:
                raise min(errors, key=lambda error: not isinstance(error, PatchRefused))

    def _places(self, files: contextlib.ExitStack) -> dict[str, Place]:
        """Open the local safetensors files for writing, and return the places of their tensors."""
        places: dict[str, Place] = {}
        for name in sorted(self._own_files()):
            if not name.endswith(".safetensors"):
                continue
            fd = _open_own(name, self._target)
            files.callback(os.close, fd)
            try:
                header = read_header(fd)
            except ValueError as error:
                raise WeightUpdateRefused(f"{FIELD}: {name}: {error}", file=name) from error
            for tensor, info in header.tensors.items():
                if tensor in places:
                    raise WeightUpdateRefused(f"{FIELD}: tensor {tensor} is in two files", tensor=tensor)
                places[tensor] = Place(fd, header.start + info.data_offsets[0], info.nbytes)
        return places

    def _unfinished(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(STATE, dir_fd=self._sync)

    def _own_files(self) -> set[str]:
        try:
            fd = open_regular(OWN, self._sync)
        except FileNotFoundError:
            return set()
        try:
            names = msgspec.json.decode(read_whole(fd, MAX_JSON_BYTES), type=list[str])
        except (msgspec.DecodeError, ValueError) as error:
            raise OSError(errno.EINVAL, f"{SYNC}/{OWN} is no list of names") from error
        finally:
            os.close(fd)
        return {name for name in names if is_checkpoint_file(name) and "/" not in name}

    @contextlib.contextmanager
    def _replacing(self, name: str, folder: int, mode: int) -> Iterator[int]:
        """Yield a new file, which becomes ``name`` in ``folder`` when the block ends. A reader of the old file keeps
        the old content. mode: permissions, less those that the umask removes."""
        with contextlib.suppress(FileNotFoundError):  # left by a killed pull
            os.unlink(PART, dir_fd=self._sync)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(PART, flags, mode, dir_fd=self._sync)
        try:
            yield fd
        finally:
            os.close(fd)
        os.rename(PART, name, src_dir_fd=self._sync, dst_dir_fd=folder)

    def _write(self, name: str, value: object) -> None:
        with self._replacing(name, self._sync, 0o644) as fd, open(fd, "wb", closefd=False) as file:
            file.write(msgspec.json.encode(value))


@contextlib.contextmanager
def local_folder(root: str, path: str, check: Callable[[], None]) -> Iterator[LocalFolder]:
    """Open the folder ``path``, which is made if it does not exist. Other pulls into it wait until the block ends.
    Raises InvalidField for a path that is not beneath ``root``, or a folder with files of others. Raises OSError."""
    with contextlib.ExitStack() as stack:

        def opened(fd: int) -> int:
            stack.callback(os.close, fd)
            return fd

        try:
            target = opened(make_beneath(root, path))
        except OSError as error:
            raise InvalidField(FIELD, f"{path!r} cannot be made below --pull-root: {error.strerror}") from error
        if os.listdir(target) and SYNC not in os.listdir(target):
            raise InvalidField(FIELD, f"{path!r} has files that no pull has put there")
        with contextlib.suppress(FileExistsError):
            os.mkdir(SYNC, 0o755, dir_fd=target)
        sync = opened(os.open(SYNC, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=target))
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        lock = opened(os.open(LOCK, flags, 0o600, dir_fd=sync))
        if not stat.S_ISREG(os.fstat(lock).st_mode):
            raise OSError(errno.EINVAL, f"{SYNC}/{LOCK} is not a regular file")
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield LocalFolder(target, sync, check)


def copy_bytes(source: int, target: int, check: Callable[[], None]) -> None:
    """Copy all bytes of one open file to another. check: called after each slice, and may raise."""
    done = 0
    while count := os.sendfile(target, source, done, SLICE_BYTES):
        done += count
        check()


def _on_threads(work: Callable[[Payload], None], payloads: Sequence[Payload], errors: list[BaseException]) -> None:
    """Call ``work`` for each payload, and add what it raises to ``errors``. No payload is begun after an error. The
    threads are daemons, since they may hang in a read of a dead mount, and the process must be able to end."""
    rest = deque(payloads)

    def loop() -> None:
        while not errors:
            try:
                payload = rest.popleft()
            except IndexError:  # another thread has taken the last one
                return
            try:
                work(payload)
            except BaseException as error:
                errors.append(error)

    threads = [threading.Thread(target=loop, name="patch", daemon=True) for _ in range(min(MAX_THREADS, CORES))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _open_own(name: str, folder: int) -> int:
    """Open a file that a pull has made for reading and writing. A second name (hard link) may be the file of another
    program. Raises OSError."""
    fd = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1 or found.st_uid != os.geteuid():
        os.close(fd)
        raise OSError(errno.EINVAL, f"{name} is not the file that a pull has put there")
    return fd


def _patch_tensor(
    published: Published, encoding: str, payload: Payload, place: Place, check: Callable[[], None]
) -> None:
    check()
    try:
        frame = read_payload(published.folder, payload)
        patch = ENCODINGS[encoding](frame, place.nbytes)
        found = patch_bytes(place.fd, place.offset, place.nbytes, patch, ALGORITHMS[payload.algorithm](), check)
    except ValueError as error:
        raise PatchRefused(_bad(published, payload, f"cannot be patched: {error}").message) from error
    if found != payload.checksum.lower():
        why = f"has the {payload.algorithm} {found} once it is patched, expected {payload.checksum}"
        raise PatchRefused(_bad(published, payload, why).message, tensor=payload.tensor)


def _bad(published: Published, payload: Payload, why: str) -> WeightUpdateRefused:
    error = refused(published.version, payload.file, f"tensor {payload.tensor} {why}")
    error.detail["tensor"] = payload.tensor
    return error
