"""Checks of the fields that several control calls have, and their errors. They know nothing of the engine's state."""

from __future__ import annotations

import re

from fastdeploy.core.delta_format import COMPRESSIONS, ENCODINGS
from fastdeploy.core.errors import InvalidField, ModelNotFound, VersionConflict
from fastdeploy.core.weight_source import (
    AUTO,
    HUGGINGFACE,
    LAYOUTS,
    MAX_TENSORS,
    MAX_VERSION_CHARS,
    DeltaBase,
    PartFormat,
)

MAX_SECONDS = 86400.0
MAX_EPOCH = 2**53 - 1  # every JSON reader has this number
OVER_ALL, OF_TENSOR = 64, 32  # hex digits of fingerprints


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
    if form.layout not in LAYOUTS:
        raise InvalidField("layout", f"expected one of {', '.join(LAYOUTS)}, got {form.layout!r}")
    if not form.is_plain and form.layout not in (AUTO, HUGGINGFACE):
        raise InvalidField(
            "layout", f"expected {HUGGINGFACE}, in which the payloads of a delta are, got {form.layout!r}"
        )
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


def adapter_not_found(name: str, field: str = "model", more: str = "") -> ModelNotFound:
    """Return the error for an unknown name, in the field of this name. more: to say about it."""
    return ModelNotFound(f"{field}: there is no adapter {name!r}{more}", param=field)
