"""Bodies of the control routes: pause, weights, sleep and reset."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator

from fastdeploy.core.errors import InvalidField
from fastdeploy.core.served_weights import MAX_LORA_NAME_CHARS
from fastdeploy.core.weight_source import (
    MAX_VERSION_CHARS,
    DeltaBase,
    FolderSource,
    PartFormat,
    SharedMemorySource,
    Source,
    version_label,
)
from fastdeploy.http.body import Body, parse_json
from fastdeploy.http.openapi import described

PauseMode = Literal["abort", "wait", "keep"]
LoraName = Annotated[str, Field(min_length=1, max_length=MAX_LORA_NAME_CHARS)]
HoldId = Annotated[str, Field(min_length=1)]
WeightSessionId = Annotated[str, Field(min_length=1)]
Seconds = Annotated[float, Field(gt=0, le=86400)]


class ScopedBody(Body):
    """Fields of a call that concerns the whole engine or, with ``lora_name``, one adapter."""

    lora_name: LoraName | None = None


class PauseBody(ScopedBody):
    mode: PauseMode = "abort"
    clear_cache: bool | None = None
    admission: Literal["reject", "hold"] | None = None
    timeout_s: float = Field(60.0, ge=0, le=86400)
    on_timeout: Literal["keep", "abort", "cancel"] | None = None
    ttl_s: float | None = Field(None, gt=0)
    hold_id: HoldId | None = None


class ResumeBody(ScopedBody):
    hold_id: HoldId | None = None


class RenewBody(ScopedBody):
    hold_id: HoldId
    ttl_s: float | None = Field(None, gt=0)


class AbortBody(ScopedBody):
    abort_all: bool = False
    req_ids: list[str] | None = None


Label = int | Annotated[str, Field(min_length=1, max_length=MAX_VERSION_CHARS)]


def _from_query(value: Any) -> Any:
    """Parse a table of checksums or fingerprints that came in the query as JSON."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value.encode())
    except InvalidField as error:
        raise ValueError("expected a JSON object: {tensor: hex digits}") from error


def _tag_list(value: Any) -> Any:
    """Return the tags of a list, of a repeated query parameter, or of a text with commas."""
    parts = [value] if isinstance(value, str) else value
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        return parts
    return [tag for part in parts for tag in part.split(",") if tag]


Version = Annotated[str, PlainValidator(version_label), described(Label)]
Checksums = Annotated[dict[str, str], BeforeValidator(_from_query)]
Fingerprint = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
Fingerprints = Annotated[dict[str, Fingerprint], BeforeValidator(_from_query)]
FingerprintOverAll = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Tags = Annotated[list[Literal["weight", "kv_cache"]], BeforeValidator(_tag_list)]
Kv = Literal["keep", "recompute"]


class SourceBody(Body):
    """The fields that name the source of tensors: model_path or shared_memory. With neither, the HTTP body itself is
    the source."""

    model_path: str | None = Field(None, min_length=1)
    shared_memory: str | None = Field(None, min_length=1)
    nbytes: int = Field(0, ge=0, le=2**63 - 1)
    checksums: Checksums = {}
    verify_checksum: bool = False
    encoding: Literal["dense", "overwrite"] = "dense"
    compression: Literal["none", "zstd"] = "none"
    fingerprints: Fingerprints = {}
    layout: Literal["auto", "huggingface", "paddle", "paddleformers"] = "auto"

    @property
    def names_no_source(self) -> bool:
        return self.model_path is None and self.shared_memory is None

    @property
    def form(self) -> PartFormat:
        return PartFormat(self.encoding, self.compression, self.fingerprints, self.layout)

    def source(self, field: str, expected: str) -> Source:
        """Return the source that the body names. Raises InvalidField for ``field`` unless the body names one."""
        if self.model_path is not None and self.shared_memory is None:
            return FolderSource(self.model_path)
        if self.shared_memory is not None and self.model_path is None:
            return SharedMemorySource(self.shared_memory, self.nbytes)
        raise InvalidField(field, f"expected one of {expected}")

    def rest(self) -> dict[str, Any]:
        """Return the fields of the engine's call but the source."""
        return {**self.model_dump(exclude=SOURCE_FIELDS), "form": self.form}


class UpdateOptions(Body):
    version: Version | None = None
    expected_version: Version | None = None
    kv: Kv = "keep"
    partial: bool = False
    timeout_s: Seconds | None = None
    base_fingerprint: FingerprintOverAll | None = None
    base_epoch: int | None = Field(None, ge=0, le=2**63 - 1)
    base_version: Version | None = None
    fingerprint: FingerprintOverAll | None = None

    @property
    def base(self) -> DeltaBase | None:
        """The weights that the delta was made against. Raises InvalidField if they have no fingerprint."""
        if self.base_fingerprint is not None:
            return DeltaBase(self.base_fingerprint, self.base_epoch, self.base_version)
        if self.base_epoch is not None or self.base_version is not None:
            raise InvalidField("base_fingerprint", "expected beside base_epoch and base_version")
        return None

    def options(self) -> dict[str, Any]:
        """Return the fields of the engine's call."""
        return {**self.model_dump(exclude=BASE_FIELDS), "base": self.base}


SOURCE_FIELDS = {"model_path", "shared_memory", "nbytes", "encoding", "compression", "fingerprints", "layout"}
BASE_FIELDS = {"base_fingerprint", "base_epoch", "base_version"}


class UpdateWeightsBody(UpdateOptions, SourceBody):
    def rest(self) -> dict[str, Any]:
        both = {**super().rest(), **self.options()}
        return {name: value for name, value in both.items() if name not in SOURCE_FIELDS | BASE_FIELDS}


class BeginBody(UpdateOptions):
    lease_s: Seconds = 300.0
    idempotency_key: str | None = Field(None, min_length=1, max_length=MAX_VERSION_CHARS)


class PartBody(SourceBody):
    session_id: WeightSessionId


class CommitBody(Body):
    session_id: WeightSessionId
    version: Version | None = None
    kv: Kv | None = None
    fingerprint: FingerprintOverAll | None = None


class AbortUpdateBody(Body):
    session_id: WeightSessionId | None = None


class WeightInfoBody(Body):
    checksums: bool = False
    fingerprints: bool = False


class ExportBody(Body):
    tensors: list[str] = []


class SleepBody(Body):
    tags: Tags = []
    mode: PauseMode = "keep"
    discard: bool = False
    timeout_s: float = Field(60.0, ge=0, le=86400)


class WakeBody(Body):
    tags: Tags = []


class ResetBody(Body):
    version: Version | None = None
