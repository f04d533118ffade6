"""Pulls: bring a local folder to one published version, on threads that may hang in a read of a dead mount."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable
from concurrent.futures import Future

from fastdeploy.core.config import ServeConfig
from fastdeploy.core.errors import InvalidField, OutOfSpace, StagingTimeout, UpdateInProgress, WeightUpdateRefused
from fastdeploy.http.checkpoint_deltas.formats import PublishedVersions, check_path
from fastdeploy.http.checkpoint_deltas.local import FIELD, LocalFolder, PatchRefused, local_folder

NO_ROOT = "the server has no folder to write to: start it with --pull-root PATH"
MAX_VERSION = 10**8 - 1  # the eight digits of SkyRL's folders
MAX_PULLS = 4


class Pulls:
    """The pulls of one API server, each on a thread of its own. A pull that takes longer than --stage-timeout-s is
    given up, but its thread may hang. No pull starts while MAX_PULLS threads run or hang."""

    def __init__(self, config: ServeConfig):
        self._config = config
        self._free_threads = threading.BoundedSemaphore(MAX_PULLS)

    async def pull(self, local_dir: str, versions: PublishedVersions, version: int) -> None:
        """See :func:`pull_version`. Also raises StagingTimeout or UpdateInProgress."""
        if not self._free_threads.acquire(blocking=False):
            raise UpdateInProgress(f"{MAX_PULLS} pulls are under way or hang: try again when one has ended")
        done: Future[None] = Future()
        done.set_running_or_notify_cancel()  # so that a time-out does not cancel the future
        given_up = threading.Event()

        def work() -> None:
            error = None
            try:
                pull_version(self._config.pull_root, local_dir, versions, version, given_up)
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
            raise StagingTimeout(f"version {version} was not pulled in {limit:g} s (--stage-timeout-s)") from error
        finally:
            given_up.set()


def pull_version(
    root: str, local_dir: str, versions: PublishedVersions, version: int, given_up: threading.Event
) -> None:
    """Bring ``local_dir``, beneath the folder ``root``, to ``version``. A folder with files that no pull has made is
    not changed. Nothing more is written once ``given_up`` is set. Raises InvalidField, WeightUpdateRefused or
    OutOfSpace."""
    if not 0 <= version <= MAX_VERSION:
        raise InvalidField("target_version", f"expected an integer from 0 to {MAX_VERSION}, got {version}")
    check_path(FIELD, local_dir)
    if not root:
        raise InvalidField(FIELD, NO_ROOT)
    with versions.open(version):  # refuses most calls before anything is made below the root
        pass
    try:
        with local_folder(root, local_dir, _check(given_up)) as local:
            _bring_to(local, versions, version)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OutOfSpace(f"{FIELD}: no room for version {version}: {error.strerror}") from error
        raise WeightUpdateRefused(f"version {version} cannot be copied: {error.strerror}") from error


def _bring_to(local: LocalFolder, versions: PublishedVersions, target: int) -> None:
    with versions.open(0) as first:
        model = first.identity()
    applied = _usable(local, versions, target, model)
    try:
        _follow(local, versions, applied, target, model)
    except PatchRefused:
        if applied is None:
            raise
        _follow(local, versions, None, target, model)


def _usable(local: LocalFolder, versions: PublishedVersions, target: int, model: str) -> int | None:
    """Return the version of the local folder if ``target`` can be made from it."""
    state = local.state()
    if state is None or state.model != model or int(state.version) > target:
        return None
    applied = int(state.version)
    try:
        with versions.open(applied) as published:
            same = published.identity() == state.source
    except (InvalidField, WeightUpdateRefused):
        # Trainers may remove versions that all have pulled. The checksums of the next version tell the rest.
        return applied if applied < target else None
    return applied if same else None


def _follow(local: LocalFolder, versions: PublishedVersions, applied: int | None, target: int, model: str) -> None:
    """Apply the versions behind ``applied``, up to ``target``, from the newest whole version on. All versions are
    opened before the first is applied, so that a missing or malformed one changes nothing."""
    start = target
    while start != applied:
        with versions.open(start) as published:
            if published.delta is None:
                break
        start -= 1
    for version in range(start, target + 1):
        if version == applied:
            continue
        with versions.open(version) as published:
            source = published.identity()  # before the files are read, which may be replaced at any time
            if published.delta is None:
                local.copy(published)
            else:
                local.patch(published, published.delta)
            local.finish(version, source, model)


def _check(given_up: threading.Event) -> Callable[[], None]:
    def check() -> None:
        if given_up.is_set():
            raise WeightUpdateRefused("this pull was given up")

    return check
