"""Facts about the weights that serve: label, fingerprint and checksums."""

from __future__ import annotations

import hashlib
from typing import Any

from fastdeploy.core.errors import FastDeployError, WrongOrder
from fastdeploy.core.runner import Runner
from fastdeploy.core.scope import Scope
from fastdeploy.engine.delivery import Answer
from fastdeploy.engine.staging_thread import Job, StagingThread
from fastdeploy.inter_communicator.messages import WeightInfoArgs


class WeightInfo:
    """Answers GET /v1/weights. scope: the whole engine. thread: computes checksums. timeout_s: seconds for that."""

    def __init__(self, runner: Runner, scope: Scope, thread: StagingThread, timeout_s: float):
        self._runner, self._scope, self._thread, self._timeout_s = runner, scope, thread, timeout_s

    def facts(self) -> dict[str, Any]:
        """Return what the maker of a delta must know of the weights that serve."""
        return {"fingerprint": self._runner.fingerprint, "dtype": self._runner.info.dtype}

    def info(self, args: WeightInfoArgs, session: dict[str, Any] | None, answer: Answer) -> None:
        """Answer at once. With ``args.checksums``, answer when the staging thread has computed them. session: a
        description of the open one."""
        label = self._scope.weights_label()
        result = {**label, **self.facts(), "standby_nbytes": self._runner.standby_nbytes}
        result |= {"session": session, "asleep": sorted(self._runner.asleep)}
        if not args.checksums:
            answer(result, None)
            return
        if not self._runner.has_weights:
            raise WrongOrder("there are no checksums: the weights sleep, or are not complete")

        def done(checksums: dict[str, str] | None, error: FastDeployError | None, seconds: float) -> None:
            if error is None and self._scope.weights_label() != label:
                error = WrongOrder("other weights were committed while the checksums were computed: ask again")
            if error is not None or checksums is None:
                answer({}, error)
            else:
                answer({**result, "checksums": checksums, "checksum": _over_all(checksums)}, None)

        self._thread.submit(Job(None, self._runner.checksums, done, self._timeout_s, reads=False))


def _over_all(checksums: dict[str, str]) -> str:
    """Return the sha256, in hex, of the lines "name:checksum" of all tensors, sorted by name."""
    lines = "".join(f"{name}:{checksum}\n" for name, checksum in sorted(checksums.items()))
    return hashlib.sha256(lines.encode()).hexdigest()
