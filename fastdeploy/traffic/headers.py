"""Headers of HTTP: what a proxy may not pass on, and what a body is by its headers."""

from __future__ import annotations

from fastdeploy.traffic.file import Headers

# RFC 9110, 7.6.1: of one connection only.
HOP_BY_HOP = frozenset(
    ("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
     "transfer-encoding", "upgrade")
)  # fmt: skip
OPAQUE = (
    "application/octet-stream",
    "multipart/",
    "image/",
    "audio/",
    "video/",
    "application/zip",
    "application/x-tar",
)


def value_of(headers: Headers, name: str) -> str:
    """Return the last value of a header; "" without one. name: in lower case."""
    return next((value for key, value in reversed(headers) if key.lower() == name), "")


def end_to_end(headers: Headers) -> Headers:
    """Return the headers that a proxy passes on."""
    named = {name.strip().lower() for name in value_of(headers, "connection").split(",")}
    return [(name, value) for name, value in headers if name.lower() not in HOP_BY_HOP | named]


def content_length(headers: Headers) -> int | None:
    value = value_of(headers, "content-length")
    return int(value) if value.isascii() and value.isdigit() else None


def encoding_of(headers: Headers) -> str:
    """Return the compression of the body; "" without one."""
    encoding = value_of(headers, "content-encoding").strip().lower()
    return "" if encoding == "identity" else encoding


def is_opaque(headers: Headers) -> bool:
    """Return whether a body is data, such as tensors, and no text."""
    return value_of(headers, "content-type").lower().startswith(OPAQUE)


def is_json(headers: Headers) -> bool:
    return "json" in value_of(headers, "content-type").lower()
