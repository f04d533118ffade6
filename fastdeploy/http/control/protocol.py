"""Bodies of the control routes: pause, weights, sleep and reset."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator

from fastdeploy.core.errors import InvalidField
from fastdeploy.core.scope import MAX_LORA_NAME_CHARS
from fastdeploy.core.weight_source import (
    MAX_VERSION_CHARS,
    FolderSource,
    SharedMemorySource,
    WholeSource,
    version_label,
)
from fastdeploy.http.body import Body, parse_json
from fastdeploy.http.openapi import described

# Refused by calls that have no such field: they would act on the whole engine, and not on the adapter.
CONTROL_UNSUPPORTED: dict[str, tuple[Any, ...]] = {"lora_name": (None,)}
PauseMode = Literal["abort", "wait", "keep"]
LoraName = Annotated[str, Field(min_length=1, max_length=MAX_LORA_NAME_CHARS)]
HoldId = Annotated[str, Field(min_length=1)]
SessionId = Annotated[str, Field(min_length=1)]
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
    """Parse a table of checksums that came in the query as JSON."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value.encode())
    except InvalidField as error:
        raise ValueError("expected a JSON object: {tensor: sha256 hex}") from error


def _tag_list(value: Any) -> Any:
    """Return the tags of a list, of a repeated query parameter, or of a text with commas."""
    parts = [value] if isinstance(value, str) else value
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        return parts
    return [tag for part in parts for tag in part.split(",") if tag]


Version = Annotated[str, PlainValidator(version_label), described(Label)]
Checksums = Annotated[dict[str, str], BeforeValidator(_from_query)]
Tags = Annotated[list[Literal["weight", "kv_cache"]], BeforeValidator(_tag_list)]
Kv = Literal["keep", "recompute"]


class SourceBody(Body):
    """Names the source of tensors: model_path or shared_memory. With neither, the HTTP body itself is the source."""

    model_path: str | None = Field(None, min_length=1)
    shared_memory: str | None = Field(None, min_length=1)
    nbytes: int = Field(0, ge=0, le=2**63 - 1)
    checksums: Checksums = {}
    verify_checksum: bool = False

    @property
    def names_no_source(self) -> bool:
        return self.model_path is None and self.shared_memory is None

    def source(self, field: str, expected: str) -> WholeSource:
        """Return the source that the body names. Raises InvalidField for ``field`` unless the body names one."""
        if self.model_path is not None and self.shared_memory is None:
            return FolderSource(self.model_path)
        if self.shared_memory is not None and self.model_path is None:
            return SharedMemorySource(self.shared_memory, self.nbytes)
        raise InvalidField(field, f"expected one of {expected}")

    def rest(self) -> dict[str, Any]:
        """All fields but those of the source."""
        return self.model_dump(exclude={"model_path", "shared_memory", "nbytes"})


class UpdateOptions(Body):
    version: Version | None = None
    expected_version: Version | None = None
    kv: Kv = "keep"
    partial: bool = False
    in_place: bool = False
    timeout_s: Seconds | None = None


class UpdateWeightsBody(UpdateOptions, SourceBody): ...


class BeginBody(UpdateOptions):
    lease_s: Seconds = 300.0


class ChunkBody(SourceBody):
    session_id: SessionId


class CommitBody(Body):
    session_id: SessionId
    version: Version | None = None
    kv: Kv | None = None


class AbortUpdateBody(Body):
    session_id: SessionId | None = None


class WeightInfoBody(Body):
    checksums: bool = False


class SleepBody(Body):
    tags: Tags = []
    mode: PauseMode = "keep"
    discard: bool = False
    timeout_s: float = Field(60.0, ge=0, le=86400)


class WakeBody(Body):
    tags: Tags = []


class ResetBody(Body):
    version: Version | None = None
