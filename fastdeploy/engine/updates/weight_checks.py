"""Checks of calls about weights, before anything is staged."""

from __future__ import annotations

import re

from fastdeploy.core.delta_format import COMPRESSIONS, ENCODINGS
from fastdeploy.core.errors import BaseMismatch, InvalidField, VersionConflict, WeightUpdateRefused, WrongOrder
from fastdeploy.core.runner import Runner, Staged
from fastdeploy.core.weight_source import MAX_TENSORS, MAX_VERSION_CHARS, DeltaBase, PartFormat
from fastdeploy.engine.pauses.pause import PauseState
from fastdeploy.inter_communicator.messages import BeginUpdateArgs

MAX_SECONDS = 86400.0
MAX_EPOCH = 2**53 - 1  # every JSON reader has this number
OVER_ALL, OF_TENSOR = 64, 32  # hex digits of fingerprints
ASLEEP = (
    "the weights are asleep: call /v1/wakeup with tags=weight first, and publish then (after a sleep with discard the "
    "engine stays held until a full update is committed)"
)


class UpdateChecks:
    """The rules of one engine. pause: of the whole engine. stage_timeout_s: of a session without a timeout_s."""

    def __init__(self, runner: Runner, pause: PauseState, stage_timeout_s: float):
        self._runner, self._pause, self._scope = runner, pause, pause.scope
        self._stage_timeout_s = stage_timeout_s

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
            for field, given in (("partial", args.partial), ("in_place", args.in_place)):
                if given:
                    raise InvalidField(field, "expected false with base_fingerprint")
        return timeout_s

    def check_state(self, args: BeginUpdateArgs) -> None:
        """Raise VersionConflict, BaseMismatch or WrongOrder if the state of the engine does not let an update begin."""
        self.check_serving(args)
        if args.partial and not self._runner.has_weights:
            raise WrongOrder("a partial update needs complete weights to start from: send all tensors")
        if args.in_place and not self._pause.is_paused:
            raise WrongOrder("an update in place needs a paused engine: pause it first (mode keep or abort)")

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


def check_result_is_named(base: DeltaBase | None, fingerprint: str | None) -> None:
    """Raise InvalidField for a delta that may be committed without a check of its result."""
    if base is not None and fingerprint is None:
        raise InvalidField("fingerprint", "expected the fingerprint of the new weights, which a delta must name")


def check_form(form: PartFormat, base: DeltaBase | None) -> None:
    """Raise InvalidField for a part of a session with this base. Files are checked later, on the staging thread."""
    for field, value, known in (
        ("encoding", form.encoding, ENCODINGS),
        ("compression", form.compression, COMPRESSIONS),
    ):
        if value not in known:
            raise InvalidField(field, f"expected one of {', '.join(known)}, got {value!r}")
        if base is None and value != known[0]:
            raise InvalidField(field, f"expected {known[0]} in an update without base_fingerprint, got {value!r}")
    if len(form.fingerprints) > MAX_TENSORS:
        raise InvalidField("fingerprints", f"expected at most {MAX_TENSORS} tensors, got {len(form.fingerprints)}")
    for name, fingerprint in form.fingerprints.items():
        if not _is_hex(fingerprint, OF_TENSOR):
            why = f"expected {OF_TENSOR} hex digits in lower case for tensor {name!r}, got {fingerprint!r}"
            raise InvalidField("fingerprints", why)


def check_fingerprint(field: str, fingerprint: str | None) -> None:
    """Raise InvalidField unless ``fingerprint`` is None or a fingerprint over all tensors."""
    if fingerprint is not None and not _is_hex(fingerprint, OVER_ALL):
        raise InvalidField(field, f"expected {OVER_ALL} hex digits in lower case, got {fingerprint!r}")


def _is_hex(text: str, digits: int) -> bool:
    return re.fullmatch(f"[0-9a-f]{{{digits}}}", text) is not None


def check_label(field: str, version: str | None) -> None:
    """Raise InvalidField unless ``version`` is None or can be a label of weights. The label must fit into messages."""
    if version is None:
        return
    if not 1 <= len(version) <= MAX_VERSION_CHARS:
        raise InvalidField(field, f"expected 1 to {MAX_VERSION_CHARS} characters, got {len(version)}")
    if version != version.encode("utf-8", "replace").decode():
        raise InvalidField(field, "expected text that UTF-8 can encode, got half of a surrogate pair")


def check_epoch(weight_epoch: int | None, serves: int) -> None:
    """Raise an error unless ``weight_epoch`` is None, or above the one that serves."""
    if weight_epoch is not None and weight_epoch > MAX_EPOCH:
        raise InvalidField("weight_epoch", f"expected an integer up to 2**53 - 1, got {weight_epoch}")
    if weight_epoch is not None and weight_epoch <= serves:
        why = f"weight_epoch: expected a number above {serves}, which serves, got {weight_epoch}"
        raise VersionConflict(why, weight_epoch=serves)


def check_kv(kv: str | None) -> None:
    if kv not in (None, "keep", "recompute"):
        raise InvalidField("kv", f"expected keep or recompute, got {kv!r}")


def check_seconds(field: str, seconds: float) -> None:
    if not 0.0 < seconds <= MAX_SECONDS:
        raise InvalidField(field, f"expected seconds above 0 and at most {MAX_SECONDS:g}, got {seconds!r}")
