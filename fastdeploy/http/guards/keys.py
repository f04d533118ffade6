"""The keys of a server. The supervisor reads them once, and API servers inherit them in their environment.

Keys are never part of a config, since configs are on command lines and in replies of /server_info. No error message of
this module repeats its input, because a user may give a key in place of a path.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

from fastdeploy.core.config import ServeConfig, is_loopback
from fastdeploy.core.errors import InvalidField

API_KEY = "FASTDEPLOY_API_KEY"
CONTROL_KEY = "FASTDEPLOY_CONTROL_KEY"
FASTDEPLOY_API_KEY = "FD_API_KEY"  # of PaddlePaddle/FastDeploy: keys with commas between them
MAX_BYTES = 64 << 10  # the kernel takes 128 KiB in one variable


@dataclasses.dataclass(frozen=True)
class Keys:
    """The keys for data routes and the keys for control routes. Any one of them is enough. () = no key is needed."""

    data: tuple[bytes, ...] = dataclasses.field(default=(), repr=False)
    control: tuple[bytes, ...] = dataclasses.field(default=(), repr=False)

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """Return a copy of ``base`` with these keys instead of its own."""
        named = {API_KEY: self.data, CONTROL_KEY: self.control, FASTDEPLOY_API_KEY: ()}
        rest = {name: value for name, value in base.items() if name not in named}
        return rest | {name: b"\n".join(keys).decode() for name, keys in named.items() if keys}


NO_KEYS = Keys()


def read_keys(api_key: Sequence[str] | None, control_key: str | None, environment: Mapping[str, str]) -> Keys:
    """Read each kind of key from its file, or from its environment variable if no file is given. api_key: each is a
    file, or a key if there is no such file and it does not look like a path. FD_API_KEY, FastDeploy's variable, is
    weaker than ours.

    Raises InvalidField if a file cannot be read, or if a file or variable holds no valid key."""
    if api_key:
        data = tuple(key for given in api_key for key in _file_or_key(given))
    elif API_KEY not in environment and environment.get(FASTDEPLOY_API_KEY):
        text = environment[FASTDEPLOY_API_KEY].replace(",", "\n")
        data = _parse("api_key", text.encode(), f"in {FASTDEPLOY_API_KEY}")
    else:
        data = _read("api_key", None, environment, API_KEY)
    return Keys(data, _read("control_key", control_key, environment, CONTROL_KEY))


def pop_keys(environment: MutableMapping[str, str]) -> Keys:
    """Move the keys out of ``environment``, so that no child process inherits them."""
    keys = read_keys(None, None, environment)
    for name in (API_KEY, CONTROL_KEY, FASTDEPLOY_API_KEY):
        environment.pop(name, None)
    return keys


def is_exposed(config: ServeConfig, keys: Keys) -> bool:
    """Return whether other machines can reach this server and its control routes need no control key."""
    return not is_loopback(config.host) and not keys.control


def _file_or_key(given: str) -> tuple[bytes, ...]:
    if given.startswith(("/", ".", "~")) or os.path.isfile(given):
        return _read("api_key", os.path.expanduser(given), {}, API_KEY)
    return _parse("api_key", given.encode(), "or a file of keys")


def _read(field: str, path: str | None, environment: Mapping[str, str], variable: str) -> tuple[bytes, ...]:
    if path is None:
        return _parse(field, environment[variable].encode(), f"in {variable}") if variable in environment else ()
    try:
        with Path(path).open("rb") as file:
            return _parse(field, file.read(MAX_BYTES + 1), "in the file")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "not a path"
        raise InvalidField(field, f"expected the path of a file that holds the key: {why}") from None


def _parse(field: str, text: bytes, where: str) -> tuple[bytes, ...]:
    keys = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not keys:
        raise InvalidField(field, f"expected a key {where}, one on each line, found none")
    if len(text) > MAX_BYTES or not all(0x21 <= byte <= 0x7E for key in keys for byte in key):
        raise InvalidField(field, f"expected printable ASCII without spaces {where}, at most {MAX_BYTES} bytes in all")
    return keys
