"""The removal of keys from records, before these are written.

Removed are, whatever their names' case: the values of headers, query parameters and JSON fields whose names are those
of keys; user and password in URLs; and every other occurrence of a removed value of MIN_KEY_CHARS characters or more,
since servers repeat keys in errors and in reports of their settings. In a body of JSON, the fields are found at every
depth.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import quote, quote_plus, unquote_plus

from fastdeploy.traffic.file import Headers

REMOVED = "[removed]"
MIN_KEY_CHARS = 8  # shorter values ("EMPTY", "none") are words, which bodies have for other reasons
# Names with "-" replaced by "_". In a reply, "token" is the text of a token.
_KEY = r"\w*api_?keys?|(?:\w*[_.])?(?:access|secret|private|control|fleet|auth|encryption|subscription|signing)_?keys?"
_TOKEN = r"(?:\w*[_.])?(?:access|refresh|id|auth|api|bearer|csrf|session|security|hf|hub|github|gitlab|jwt)_?token"
_OTHER = r"token|\w*(?:secret|passw(?:or)?d|credential)s?|(?:\w*_)?authorization|(?:set_)?cookies?"
_NAME = re.compile(f"(?:{_KEY}|{_TOKEN}|{_OTHER})", re.IGNORECASE)
_QUERY_NAME = re.compile(f"(?:{_NAME.pattern}|key|sig|(?:x_amz_|x_goog_)?signature)", re.IGNORECASE)
_HEADER_NAME = re.compile(r"key$|token$|secret|auth(?!ent|ority)|cookie|credential|passw|signature", re.IGNORECASE)
# A cheap test of raw bytes, before a body is parsed: "\u" may hide a letter of a name.
_MAY_NAME_A_KEY = re.compile(rb"(?i)key|token\\?[\"']|secret|passw|credential|authorization|cookie|\\u00")
_USER_IN_URL = re.compile(rb"(?i)(\b[a-z][a-z0-9+.-]*:(?:\\?/){2})[^/\\\s\"'@<>?#]+@")
_QUERY_IN_TEXT = re.compile(rb"([?&]|\\u0026)([\w.%-]{1,80})=([^&#\s\"'<>\\]+)")
_FIELD_IN_TEXT = re.compile(rb"(\\?[\"'])([\w.-]{1,80})\1(\s*[:=]\s*)(\\?[\"'])((?:(?!\4)[^\\]|\\.)*?)\4", re.DOTALL)


class KeyRemover:
    """The keys that were found, which are removed wherever they occur from then on."""

    def __init__(self) -> None:
        self._keys: set[bytes] = set()
        self._pattern: re.Pattern[bytes] | None = None
        self._longest = 0
        self._bytes: frozenset[int] = frozenset()  # of all keys

    def headers(self, headers: Headers) -> Headers:
        """Return headers without keys."""
        named = [_HEADER_NAME.search(name) is not None for name, _ in headers]
        for is_key, (name, value) in zip(named, headers, strict=True):
            if is_key:
                self._learn(_keys_of_header(value.partition(";")[0] if name.lower() == "set-cookie" else value))
        return [
            (name, REMOVED if is_key else self.text(value.encode()).decode("utf-8", "replace"))
            for is_key, (name, value) in zip(named, headers, strict=True)
        ]

    def target(self, target: str) -> str:
        """Return the path and query of a request without keys."""
        path, mark, query = target.partition("?")
        return self.known(path.encode()).decode() + mark + self.form(query)

    def form(self, text: str) -> str:
        """Return a query, or a form in its encoding, without keys."""
        pairs = []
        for pair in text.split("&"):
            name, equals, value = pair.partition("=")
            if equals and _QUERY_NAME.fullmatch(_plain(unquote_plus(name))):
                self._learn([value, unquote_plus(value)])
                pair = f"{name}={REMOVED}"
            pairs.append(pair)
        return self.text("&".join(pairs).encode()).decode()

    def body(self, body: bytes, side_is_reply: bool) -> bytes:
        """Return a whole body without keys: JSON, a form, or other text. Without a key it is unchanged."""
        if _MAY_NAME_A_KEY.search(body):
            found: list[str] = []
            try:
                content = self._without_keys(json.loads(body), side_is_reply, found)
            except RecursionError:  # nested too deeply to be searched
                return REMOVED.encode()
            except ValueError:
                content = None
            self._learn(found)
            if found:
                body = json.dumps(content, ensure_ascii=False).encode("utf-8", "surrogatepass")
        return self.text(body)

    def text(self, text: bytes) -> bytes:
        """Return text without keys. Nothing is parsed, so a part of a body will do."""
        if b"=" in text:
            text = _QUERY_IN_TEXT.sub(self._query_in_text, text)
        if b"@" in text:
            text = _USER_IN_URL.sub(rb"\g<1>" + REMOVED.encode() + b"@", text)
        if _MAY_NAME_A_KEY.search(text):
            text = _FIELD_IN_TEXT.sub(self._field_in_text, text)
        return self.known(text)

    def open_end(self, text: bytes) -> bool:
        """Return whether a key that is known may begin at the end of ``text``, a piece of a stream. The rest of the key
        may stand in the next piece."""
        if not text or text[-1] not in self._bytes:  # as after each event of a stream, which ends with a line feed
            return False
        sizes = range(1, min(self._longest, len(text) + 1))
        return any(key.startswith(text[-size:]) for size in sizes for key in self._keys if len(key) > size)

    def known(self, data: bytes) -> bytes:
        """Return data without the keys that were found elsewhere."""
        return self._pattern.sub(REMOVED.encode(), data) if self._pattern else data

    def _learn(self, values: Iterable[str]) -> None:
        """Take values as keys from now on, in the forms in which JSON and URLs have them."""
        new = set[bytes]()
        for value in values:
            if len(value) >= MIN_KEY_CHARS and value != REMOVED:
                forms = (value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1],
                         quote(value, safe=""), quote(value), quote_plus(value))  # fmt: skip
                new |= {form.encode("utf-8", "surrogatepass") for form in forms}
        if not new <= self._keys:
            self._keys |= new
            longest_first = sorted(self._keys, key=len, reverse=True)
            self._pattern = re.compile(b"|".join(map(re.escape, longest_first)))
            self._longest = len(longest_first[0])
            self._bytes = frozenset(b"".join(longest_first))

    def _without_keys(self, value: Any, side_is_reply: bool, found: list[str]) -> Any:
        if isinstance(value, dict):
            return {
                name: self._removed(content, found)
                if _names_a_key(name, side_is_reply) and content not in (None, "", REMOVED)
                else self._without_keys(content, side_is_reply, found)
                for name, content in value.items()
            }
        if isinstance(value, list):
            return [self._without_keys(x, side_is_reply, found) if isinstance(x, dict | list) else x for x in value]
        return value

    def _removed(self, value: Any, found: list[str]) -> str:
        found += _texts(value)
        return REMOVED

    def _query_in_text(self, match: re.Match[bytes]) -> bytes:
        mark, name, value = match.groups()
        if not _QUERY_NAME.fullmatch(_plain(unquote_plus(name.decode("ascii", "replace")))):
            return match[0]
        text = value.decode("utf-8", "replace")
        self._learn([text, unquote_plus(text)])
        return mark + name + b"=" + REMOVED.encode()

    def _field_in_text(self, match: re.Match[bytes]) -> bytes:
        quote_1, name, colon, quote_2, value = match.groups()
        if not _names_a_key(name.decode("ascii", "replace"), True) or not value:
            return match[0]
        self._learn([value.decode("utf-8", "replace")])
        return quote_1 + name + quote_1 + colon + quote_2 + REMOVED.encode() + quote_2


def _plain(name: str) -> str:
    return name.replace("-", "_")


def _names_a_key(name: str, side_is_reply: bool) -> bool:
    return _NAME.fullmatch(_plain(name)) is not None and not (side_is_reply and name.lower() == "token")


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _texts(item)
    elif value is not None:
        yield str(value)
        yield from re.findall(r"(?i)^(?:bearer|basic|token)\s+(.+)", str(value))


def _keys_of_header(value: str) -> Iterator[str]:
    """Yield the value and its parts: behind the scheme, of each cookie, and what Basic has as base64."""
    yield value
    for word in re.split(r"[\s;,]+", value):
        yield word
        yield word.partition("=")[2].strip('"')
        try:
            decoded = base64.b64decode(word, validate=True).decode()
        except (binascii.Error, ValueError):
            continue
        yield from (decoded, *decoded.split(":", 1)) if ":" in decoded else ()
