"""The reply of our server with the words of a mock's script.

A test that compares a reply with the words of its mock cannot pass on the words of a real model. So the request of the
test goes to our server, which has to accept it, and the reply must have each field of the mock's reply, of the same
type. Then the values of the script take the place of the values of ours.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from typing import Any

URL = os.environ["FASTDEPLOY_URL"]
LIMIT_S = 60
NUM_TOKENS = 272  # the vocabulary of the model that serves


def post(path: str, body: dict[str, Any]) -> Any:
    """Make a request of our server, and return its reply. Raises AssertionError if the server refuses it."""
    request = urllib.request.Request(URL + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=LIMIT_S) as reply:
            return json.load(reply)
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{path}: HTTP {error.code}: {error.read().decode()}") from error


def folded(token_ids: list[int]) -> list[int]:
    """Return token ids of another vocabulary as ids of the vocabulary that serves."""
    return [token % NUM_TOKENS for token in token_ids]


def with_script(reply: Any, script: Any, where: str = "reply") -> Any:
    """Return ``reply`` with the values of ``script``. Lists are those of the script; their first entries are compared.
    Raises AssertionError if ``reply`` lacks a field, or has another type there."""
    if script is None:
        return None
    if isinstance(script, dict):
        assert isinstance(reply, dict), f"{where}: expected an object, got {reply!r}"
        missing = [name for name, value in script.items() if value is not None and name not in reply]
        assert not missing, f"{where}: the fields {missing} are missing in {sorted(reply)}"
        taken = {name: with_script(reply.get(name), value, f"{where}.{name}") for name, value in script.items()}
        return {**reply, **taken}
    if isinstance(script, list):
        assert isinstance(reply, list), f"{where}: expected a list, got {reply!r}"
        return [
            with_script(reply[0], entry, f"{where}[]") if reply and entry is not None else entry for entry in script
        ]
    number = (int, float)
    same = isinstance(reply, number) if isinstance(script, number) else isinstance(reply, type(script))
    assert same, f"{where}: expected a value as {script!r}, got {reply!r}"
    return script
