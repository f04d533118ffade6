"""Calls of a running server by the commands ``chat``, ``complete`` and ``bench serve``."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import httpx

from fastdeploy.core.errors import InvalidField
from fastdeploy.entrypoints.cli.settings import SettingsParser
from fastdeploy.http.guards.keys import API_KEY

DEFAULT_URL = "http://127.0.0.1:8180/v1"
CONNECT_S = 10.0


def add_server_flags(parser: SettingsParser) -> None:
    """Add the flags that say which server is called."""
    parser.add_argument("--url", default=DEFAULT_URL, help="of the server, with or without /v1 (%(default)s)")
    parser.add_argument("--model-name", metavar="NAME", help="the model (the first one that the server lists)")
    text = f"key of the server (or OPENAI_API_KEY, or {API_KEY})"
    parser.add_argument("--api-key", metavar="KEY", help=text)


class ServerCalls:
    """A server of OpenAI's routes. Raises OSError with one line for what the server refuses or does not answer."""

    def __init__(self, url: str, api_key: str | None, model: str | None):
        if not url.startswith(("http://", "https://")):
            raise InvalidField("url", f"expected http://HOST:PORT, got {url!r}")
        base = url.rstrip("/").removesuffix("/v1") + "/v1"
        timeout = httpx.Timeout(None, connect=CONNECT_S)
        self._http = httpx.Client(base_url=base, headers=key_header(api_key), timeout=timeout)
        self._url = base
        self.model = model or self._first_model()

    def texts(self, path: str, body: dict[str, Any]) -> Iterator[str]:
        """Stream an answer of ``path``. Yield its pieces of text."""
        try:
            with self._http.stream("POST", path, json={"model": self.model, "stream": True, **body}) as reply:
                if reply.status_code != 200:
                    reply.read()
                    raise OSError(refusal(reply))
                for line in reply.iter_lines():
                    if line.startswith("data:") and (data := line[5:].strip()) != "[DONE]":
                        yield from _texts(json.loads(data))
        except httpx.HTTPError as error:
            raise OSError(f"{self._url}: {error}") from None

    def _first_model(self) -> str:
        try:
            reply = self._http.get("/models")
        except httpx.HTTPError as error:
            raise OSError(f"{self._url}: {error}") from None
        if reply.status_code != 200:
            raise OSError(refusal(reply))
        name: str = reply.json()["data"][0]["id"]
        return name


def key_header(api_key: str | None) -> dict[str, str]:
    """Return the header with the key of a flag, or of the environment."""
    given = api_key or os.environ.get("OPENAI_API_KEY") or os.environ.get(API_KEY, "")
    first = next(iter(given.split()), "")
    return {"Authorization": f"Bearer {first}"} if first else {}


def refusal(reply: httpx.Response) -> str:
    """Return one line about a reply that is no 200."""
    try:
        error = reply.json()["error"]
        text = error["message"] if isinstance(error, dict) else str(error)
    except (ValueError, KeyError, TypeError):
        text = reply.text[:300] or reply.reason_phrase
    return f"{reply.request.url}: HTTP {reply.status_code}: {text}"


def _texts(chunk: dict[str, Any]) -> Iterator[str]:
    if "error" in chunk:
        raise OSError(str(chunk["error"]))
    for choice in chunk.get("choices", ()):
        delta = choice.get("delta") or {}
        yield choice.get("text") or delta.get("content") or ""
