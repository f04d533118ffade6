"""Facts about the weights that serve: label, fingerprint and checksums."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import uuid
from collections.abc import Callable, Sequence

from fastdeploy.core.config import UPLOAD_PREFIX
from fastdeploy.core.errors import FastDeployError, InvalidField, OutOfSpace, UpdateInProgress, WrongOrder
from fastdeploy.core.request import Scope
from fastdeploy.core.runner import Runner
from fastdeploy.core.served_weights import CommittedState
from fastdeploy.engine.handlers import handles
from fastdeploy.engine.requests.delivery import Answer
from fastdeploy.engine.staging_thread import Job
from fastdeploy.engine.updates.weights import WeightSessions
from fastdeploy.inter_communicator.messages import ExportWeightsArgs, WeightInfoArgs


class WeightInfo:
    """The answers to GET /v1/weights, and the export of the weights. scope: the whole engine. committed: returns what
    the last commit has set. sessions: their thread computes checksums and writes exports. timeout_s: seconds for that.
    folders: for exports, the preferred one first."""

    def __init__(
        self,
        runner: Runner,
        scope: Scope,
        committed: Callable[[], CommittedState],
        sessions: WeightSessions,
        timeout_s: float,
        folders: Sequence[str] = (),
    ):
        self._runner, self._scope, self._committed = runner, scope, committed
        self._sessions, self._timeout_s, self._folders = sessions, timeout_s, folders

    @handles(WeightInfoArgs)
    def info(self, args: WeightInfoArgs, answer: Answer) -> None:
        """Answer at once. With ``args.checksums``, answer when the staging thread has computed them. Raises WrongOrder
        for tensors of weights that are not complete."""
        for asked, what in ((args.checksums, "checksums"), (args.fingerprints, "fingerprints")):
            if asked and not self._runner.has_weights:
                raise WrongOrder(f"there are no {what}: the weights sleep, or are not complete")
        label = self._scope.weights_label()
        result = {**label, "dtype": self._runner.info.dtype, **self._committed()._asdict()}
        result["standby_nbytes"] = self._runner.standby_nbytes
        result |= {"session": self._sessions.describe_session(), "asleep": sorted(self._runner.asleep)}
        if args.fingerprints:
            result["fingerprints"] = self._runner.fingerprints
        if not args.checksums:
            answer(result, None)
            return

        def on_computed(checksums: dict[str, str] | None, error: FastDeployError | None, seconds: float) -> None:
            if error is None and self._scope.weights_label() != label:
                error = WrongOrder("other weights were committed while the checksums were computed: ask again")
            if error is not None or checksums is None:
                answer({}, error)
            else:
                answer({**result, "checksums": checksums, "checksum": _over_all(checksums)}, None)

        self._sessions.thread.submit(Job(None, self._runner.checksums, on_computed, self._timeout_s, reads=False))

    @handles(ExportWeightsArgs)
    def export(self, args: ExportWeightsArgs, answer: Answer) -> None:
        """Write the weights that serve to a new file, beside steps, and answer with its path. Raises WrongOrder without
        complete weights. The answer is UpdateInProgress if other weights were committed meanwhile."""
        if not self._runner.has_weights:
            raise WrongOrder("there is nothing to export: the weights sleep, or are not complete")
        if args.timeout_s is not None and not 0 < args.timeout_s < math.inf:
            raise InvalidField("timeout_s", f"expected seconds above 0, got {args.timeout_s}")
        committed = self._committed()
        paths = [os.path.join(folder, f"{UPLOAD_PREFIX}{uuid.uuid4().hex}.safetensors") for folder in self._folders]

        def work() -> tuple[str, int]:
            for path in paths[:-1]:
                with contextlib.suppress(OutOfSpace):
                    return path, self._runner.export(path, args.tensors)
            return paths[-1], self._runner.export(paths[-1], args.tensors)

        def on_written(written: tuple[str, int] | None, error: FastDeployError | None, seconds: float) -> None:
            if written is not None and error is None and self._committed() != committed:
                _remove(written)
                error = UpdateInProgress("other weights were committed during the export: ask again")
            if error is not None or written is None:
                answer({}, error)
            else:
                report = {**self._scope.weights_label(), **committed._asdict()}
                answer({**report, "path": written[0], "nbytes": written[1]}, None)

        timeout_s = self._timeout_s if args.timeout_s is None else args.timeout_s
        self._sessions.thread.submit(Job(None, work, on_written, timeout_s, reads=False, discard=_remove))


def _remove(written: tuple[str, int]) -> None:
    """Remove an exported file that nobody will read."""
    with contextlib.suppress(OSError):
        os.unlink(written[0])


def _over_all(checksums: dict[str, str]) -> str:
    """Return the sha256, in hex, of the lines "name:checksum" of all tensors, sorted by name."""
    lines = "".join(f"{name}:{checksum}\n" for name, checksum in sorted(checksums.items()))
    return hashlib.sha256(lines.encode()).hexdigest()
