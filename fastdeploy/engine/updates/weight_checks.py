"""Checks of an update against the weights that serve."""

from __future__ import annotations

from fastdeploy.core.errors import BaseMismatch, InvalidField, VersionConflict, WeightUpdateRefused, WrongOrder
from fastdeploy.core.request import Scope
from fastdeploy.core.runner import Runner, Staged
from fastdeploy.core.weight_source import DeltaBase
from fastdeploy.engine.field_checks import check_epoch, check_fingerprint, check_kv, check_label, check_seconds
from fastdeploy.inter_communicator.messages import BeginUpdateArgs

ASLEEP = (
    "the weights are asleep: call /v1/wakeup with tags=weight first, and publish then (after a sleep with discard the "
    "engine stays held until a full update is committed)"
)


class UpdateChecks:
    """The rules of one engine. scope: the whole engine. stage_timeout_s: of a session without a timeout_s."""

    def __init__(self, runner: Runner, scope: Scope, stage_timeout_s: float):
        self._runner, self._scope, self._stage_timeout_s = runner, scope, stage_timeout_s

    def check_fields(self, args: BeginUpdateArgs) -> float:
        """Check the fields of a begin. Return the session's ``timeout_s``. Raises InvalidField."""
        check_label("version", args.version)
        check_label("idempotency_key", args.idempotency_key)
        check_kv(args.kv)
        check_seconds("lease_s", args.lease_s)
        timeout_s = self._stage_timeout_s if args.timeout_s is None else args.timeout_s
        check_seconds("timeout_s", timeout_s)
        check_fingerprint("fingerprint", args.fingerprint)
        if args.base is not None:
            check_fingerprint("base_fingerprint", args.base.fingerprint)
            check_label("base_version", args.base.version)
            if args.partial:
                raise InvalidField("partial", "expected false with base_fingerprint")
        return timeout_s

    def check_state(self, args: BeginUpdateArgs) -> None:
        """Raise VersionConflict, BaseMismatch or WrongOrder if the state of the engine does not let an update begin."""
        self.check_serving(args)
        if args.partial and not self._runner.has_weights:
            raise WrongOrder("a partial update needs complete weights to start from: send all tensors")

    def check_serving(self, args: BeginUpdateArgs) -> None:
        """Raise an error unless the weights that serve are those that the update was made for."""
        self.check_expected(args.expected_version)
        if "weight" in self._runner.asleep:
            raise WrongOrder(ASLEEP)
        if args.base is not None:
            self._check_base(args.base)

    def check_epoch(self, weight_epoch: int | None) -> None:
        """Raise VersionConflict unless ``weight_epoch`` is None, or above that of the weights that serve."""
        check_epoch(weight_epoch, self._scope.model.served.weight_epoch)

    def check_expected(self, version: str | None) -> None:
        serves = self._scope.model.served.version
        if version is not None and version != serves:
            raise VersionConflict(f"expected_version: expected {version!r}, but {serves!r} serves", version=serves)

    def _check_base(self, base: DeltaBase) -> None:
        serves, fingerprint = self._scope.model.served, self._runner.fingerprint
        given = (base.fingerprint, base.weight_epoch, base.version)
        found = (fingerprint or "no complete set of weights", serves.weight_epoch, serves.version)
        for field, expected, got in zip(("fingerprint", "epoch", "version"), given, found, strict=True):
            if expected is not None and expected != got:
                why = f"base_{field}: the delta was made against {expected!r}, but {got!r} serves"
                raise BaseMismatch(why, **self._scope.weights_label(), fingerprint=fingerprint)


def check_result(expected: str | None, staged: Staged) -> None:
    """Raise WeightUpdateRefused unless the new weights have the fingerprint that the trainer named."""
    if expected is not None and staged.fingerprint != expected:
        why = f"fingerprint: expected {expected} over all new tensors, got {staged.fingerprint}"
        raise WeightUpdateRefused(why, param="fingerprint", expected=expected, got=staged.fingerprint)
