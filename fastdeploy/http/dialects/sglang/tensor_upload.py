"""Bodies with safetensors bytes in base64, for weights and for adapters. A pickle is refused by its first bytes."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from fastdeploy.core.errors import InvalidField
from fastdeploy.http.body import LaxBody, parse_body
from fastdeploy.http.control.protocol import Version

# SGLang's loaders of an upload. All of these mean whole tensors under their own names.
TENSOR_FORMATS = (None, "auto", "direct", "flattened_bucket", "safetensors")


class VersionedBody(LaxBody):
    weight_version: Version | None = None
    abort_all_requests: bool = False


class TensorUpload(msgspec.Struct, kw_only=True):
    """A body with tensors. Base64 strings become bytes while the body is parsed. No code in them is ever run."""

    load_format: str | None = None


Upload = TypeVar("Upload", bound=TensorUpload)


class TensorBody(TensorUpload, kw_only=True):
    """The body of an update."""

    serialized_named_tensors: list[bytes]
    flush_cache: bool | None = True
    abort_all_requests: bool | None = False
    weight_version: str | int | None = None
    selector: str | None = None

    @property
    def version(self) -> str | None:
        """The label of the new weights. Raises InvalidField for a value that is no label."""
        return parse_body({"weight_version": self.weight_version}, VersionedBody, {}).weight_version

    def distinct_tensors(self) -> list[bytes]:
        """Return each entry once. SGLang's clients send one entry per tensor-parallel rank. Equal entries
        have whole tensors, of which each rank takes its own part."""
        return list(dict.fromkeys(self.serialized_named_tensors))


def require_format(given: str | None, known: tuple[str | None, ...]) -> None:
    if given not in known:
        raise InvalidField("load_format", f"expected one of {', '.join(filter(None, known))}, got {given!r}")


def require_target(selector: str | None) -> None:
    if selector not in (None, "all", "target"):
        raise InvalidField("selector", f"there is no draft model here; expected all or target, got {selector!r}")


def decode_tensors(raw: bytes, kind: type[Upload]) -> Upload:
    """Parse a body with base64 strings. Raises InvalidField. Runs on a thread, since the body may have gigabytes."""
    try:
        body = msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidField("body", f"expected base64 strings in serialized_named_tensors: {error}") from error
    require_format(body.load_format, TENSOR_FORMATS)
    return body


def parse_tensors(raw: bytes) -> TensorBody:
    """Parse and check the body of an update, as :func:`decode_tensors`."""
    body = decode_tensors(raw, TensorBody)
    require_target(body.selector)
    if not body.serialized_named_tensors:
        raise InvalidField("serialized_named_tensors", "expected at least one entry")
    for i, data in enumerate(body.serialized_named_tensors):
        require_safetensors(data, f"serialized_named_tensors[{i}]")
    return body


def require_safetensors(data: bytes, field: str) -> None:
    """Raise InvalidField unless ``data`` begins like a safetensors file. Only the first bytes are read: a pickle is
    code, and is never loaded."""
    size = int.from_bytes(data[:8], "little")
    if 2 <= size <= len(data) - 8 and data[8:9] == b"{":
        return
    if data[:1] == b"\x80" or data[:4] == b"PK\x03\x04":
        raise InvalidField(field, "this is a pickle, which is code and never loaded here; send safetensors bytes")
    raise InvalidField(field, "expected the bytes of a safetensors file")
