"""SGLang's /pull_weights: copy a published version of the weights into a folder of this host.

slime uses the route in its disk mode. Version 7 is the Hugging Face folder ``weight_v000007`` below ``source_dir``.
Version 0 is the model that the server started with. A second call of the trainer loads the local folder.

The server may read and write files that the caller may not. Therefore:

- A source lies beneath --model-root, and has no links out of ``source_dir``.
- A target lies beneath --pull-root, and has no links at all.
- Only checkpoint files are copied. No file gets wider permissions than it had.
- A file that another program made is never changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import stat
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import msgspec

from fastdeploy.core.config import ServeConfig
from fastdeploy.core.errors import InvalidField, OutOfSpace, StagingTimeout, UpdateInProgress, WeightUpdateRefused
from fastdeploy.core.safe_files import ANYWHERE, Folder, make_beneath, open_regular, path_problem, read_whole

INDEX = "model.safetensors.index.json"
# Copied besides *.safetensors. No other file of a published folder is copied.
CHECKPOINT_FILES = frozenset({
    INDEX, "added_tokens.json", "chat_template.jinja", "chat_template.json", "checksums.json", "config.json",
    "generation_config.json", "merges.txt", "special_tokens_map.json", "tokenizer.json", "tokenizer.model",
    "tokenizer_config.json", "vocab.json",
})  # fmt: skip
NO_ROOT = "the server has no folder to write to: start it with --pull-root PATH"
SYNC = ".weight_sync"  # folder for the state of pulls, of the same name as in SGLang
LOCK, OWN, STATE, PART = "lock", "files.json", "state.json", "part"
MAX_JSON_BYTES = 4 << 20
MAX_VERSION = 10**9
MAX_PULLS = 4
SLICE_BYTES = 64 << 20  # bytes copied between two checks whether the pull was given up


class Pulls:
    """The pulls of one API server, each on a thread of its own. A pull that takes longer than --stage-timeout-s is
    given up, but its thread may hang in a read of a dead mount. No pull starts while MAX_PULLS threads run or hang."""

    def __init__(self, config: ServeConfig):
        self._config = config
        self._free_threads = threading.BoundedSemaphore(MAX_PULLS)

    async def pull(self, local_dir: str, source_dir: str, version: int) -> None:
        """See :func:`pull_weights`. Also raises StagingTimeout or UpdateInProgress."""
        if not self._free_threads.acquire(blocking=False):
            raise UpdateInProgress(f"{MAX_PULLS} pulls are under way or hang: try again when one has ended")
        done: Future[None] = Future()
        done.set_running_or_notify_cancel()  # so that a time-out does not cancel the future
        given_up = threading.Event()

        def work() -> None:
            error = None
            try:
                pull_weights(self._config, local_dir, source_dir, version, given_up)
            except BaseException as raised:
                error = raised
            self._free_threads.release()
            done.set_result(None) if error is None else done.set_exception(error)

        threading.Thread(target=work, name="pull-weights", daemon=True).start()
        limit = self._config.stage_timeout_s
        try:
            async with asyncio.timeout(limit):
                await asyncio.wrap_future(done)
        except TimeoutError as error:
            raise StagingTimeout(f"version {version} was not copied in {limit:g} s (--stage-timeout-s)") from error
        finally:
            given_up.set()


def pull_weights(config: ServeConfig, local_dir: str, source_dir: str, version: int, given_up: threading.Event) -> None:
    """Make ``local_dir`` a copy of ``version``. A folder with files that no pull has made is not changed. Nothing more
    is written once ``given_up`` is set. Raises InvalidField, WeightUpdateRefused or OutOfSpace."""
    if not 0 <= version <= MAX_VERSION:
        raise InvalidField("target_version", f"expected an integer from 0 to {MAX_VERSION}, got {version}")
    for field, path in (("local_checkpoint_dir", local_dir), ("source_dir", source_dir)):
        problem = path_problem(path) or (None if os.path.isabs(path) else f"expected an absolute path, got {path!r}")
        if problem is not None:
            raise InvalidField(field, problem)
    if not config.pull_root:
        raise InvalidField("local_checkpoint_dir", NO_ROOT)
    with _published(config, source_dir, version) as source:
        names = [name for name in source.names() if is_checkpoint_file(name)]
        _check_whole(source, names, version)
        try:
            with _target(config.pull_root, local_dir) as (target, sync):
                _copy(source, names, target, sync, version, given_up)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise OutOfSpace(f"local_checkpoint_dir: no room for version {version}: {error.strerror}") from error
            raise WeightUpdateRefused(f"version {version} cannot be copied: {error.strerror}") from error


def is_checkpoint_file(name: str) -> bool:
    return name in CHECKPOINT_FILES or (name.endswith(".safetensors") and not name.startswith("."))


def _published(config: ServeConfig, source_dir: str, version: int) -> Folder:
    """Open the folder of ``version``. Links are allowed in the server's own model, as in a Hugging Face cache."""
    try:
        if version == 0:
            return Folder(config.model, ANYWHERE)
        with Folder(source_dir, config.model_roots) as base:
            root = base.path
    except OSError as error:
        raise InvalidField("source_dir", f"{source_dir!r} cannot be opened as a folder: {error.strerror}") from error
    try:
        return Folder(os.path.join(root, f"weight_v{version:06d}"), [root])
    except OSError as error:
        raise WeightUpdateRefused(f"source_dir: version {version} cannot be opened: {error.strerror}") from error


def _check_whole(source: Folder, names: list[str], version: int) -> None:
    if not names:
        raise WeightUpdateRefused(f"version {version} has no checkpoint files (*.safetensors, config.json, ...)")
    if INDEX not in names:
        return
    try:
        metadata = msgspec.json.decode(source.read(INDEX, MAX_JSON_BYTES), type=dict[str, dict]).get("metadata", {})
    except (OSError, ValueError, RecursionError) as error:
        raise WeightUpdateRefused(f"{INDEX} of version {version} cannot be read: {error}", file=INDEX) from error
    if "delta_encoding" in metadata:
        raise WeightUpdateRefused(f"version {version} is a delta; this server takes whole checkpoints")


@contextlib.contextmanager
def _target(root: str, path: str) -> Iterator[tuple[int, int]]:
    """Open the folder and its .weight_sync, and yield their descriptors. Other pulls into the folder wait until the
    block ends."""
    with contextlib.ExitStack() as stack:

        def opened(fd: int) -> int:
            stack.callback(os.close, fd)
            return fd

        try:
            target = opened(make_beneath(root, path))
        except OSError as error:
            why = f"{path!r} cannot be made below --pull-root: {error.strerror}"
            raise InvalidField("local_checkpoint_dir", why) from error
        if os.listdir(target) and SYNC not in os.listdir(target):
            raise InvalidField("local_checkpoint_dir", f"{path!r} has files that no pull has put there")
        with contextlib.suppress(FileExistsError):
            os.mkdir(SYNC, 0o755, dir_fd=target)
        sync = opened(os.open(SYNC, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=target))
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        lock = opened(os.open(LOCK, flags, 0o600, dir_fd=sync))
        if not stat.S_ISREG(os.fstat(lock).st_mode):
            raise OSError(errno.EINVAL, f"{SYNC}/{LOCK} is not a regular file")
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield target, sync


def _copy(source: Folder, names: list[str], target: int, sync: int, version: int, given_up: threading.Event) -> None:
    """Copy the files. The list of files is written first, so that the next pull recognises the files of a killed pull.
    The state file is absent while the folder may hold files of two versions."""
    _check_wanted(given_up)
    own = _own_files(sync)
    foreign = sorted(set(os.listdir(target)) - own - {SYNC})
    if foreign:
        raise InvalidField("local_checkpoint_dir", f"has files that no pull has put there: {foreign[0]!r}")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(STATE, dir_fd=sync)
    _write(sync, OWN, sorted(own.union(names)))
    for name in names:
        fd = source.open(name)
        try:
            with _replacing(name, sync, target, stat.S_IMODE(os.fstat(fd).st_mode) & 0o644) as copy:
                _copy_bytes(fd, copy, given_up)
        finally:
            os.close(fd)
    for name in own.difference(names):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=target)
    _write(sync, OWN, names)
    _write(sync, STATE, {"version": f"{version:06d}"})


def _own_files(sync: int) -> set[str]:
    try:
        fd = open_regular(OWN, sync)
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
def _replacing(name: str, sync: int, folder: int, mode: int) -> Iterator[int]:
    """Yield a new file, which becomes ``name`` in ``folder`` when the block ends. A reader of the old file keeps the
    old content. mode: permissions, less those that the umask removes."""
    with contextlib.suppress(FileNotFoundError):  # left by a killed pull
        os.unlink(PART, dir_fd=sync)
    fd = os.open(PART, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=sync)
    try:
        yield fd
    finally:
        os.close(fd)
    os.rename(PART, name, src_dir_fd=sync, dst_dir_fd=folder)


def _copy_bytes(source: int, target: int, given_up: threading.Event) -> None:
    done = 0
    while count := os.sendfile(target, source, done, SLICE_BYTES):
        done += count
        _check_wanted(given_up)


def _check_wanted(given_up: threading.Event) -> None:
    if given_up.is_set():
        raise WeightUpdateRefused("this pull was given up")


def _write(sync: int, name: str, value: object) -> None:
    with _replacing(name, sync, sync, 0o644) as fd, open(fd, "wb", closefd=False) as file:
        file.write(msgspec.json.encode(value))
