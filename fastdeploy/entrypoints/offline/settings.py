"""The settings of the offline ``LLM``: ours, by our names and by FastDeploy's. The verdicts on FastDeploy's names are
those of the command line (entrypoints/cli/fastdeploy_flags.py)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from fastdeploy.core.config import EngineConfig, ServeConfig
from fastdeploy.core.errors import InvalidField
from fastdeploy.entrypoints.cli.fastdeploy_flags import FLAGS, REFUSED_VALUES, VALUES
from fastdeploy.entrypoints.cli.foreign import Foreign, Form

OF_ENGINE, OF_REQUESTS = (frozenset(kind.__struct_fields__) for kind in (EngineConfig, ServeConfig))
FOREIGN: Mapping[str, Foreign] = {flag.name: flag for flag in FLAGS}
MAX_WAITING = 1 << 20  # choices: one call may bring any number of prompts
NONE = "None"  # of FastDeploy's tests, in place of None


class Settings(NamedTuple):
    """The settings of both sides of an ``LLM``."""

    engine: EngineConfig
    requests: ServeConfig


def settings_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of ours for names of ours and of FastDeploy. Raises InvalidField for a name that is unknown, or
    that asks for what is not here."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        if value is None or value == NONE:
            if name not in OF_ENGINE | OF_REQUESTS | FOREIGN.keys():
                raise InvalidField(name, "unknown setting")
        elif name in OF_ENGINE | OF_REQUESTS:
            found[name] = _our_value(name, value)
        else:
            found |= _of_foreign(name, value)
    return found


def checked_settings(model: str, given: Mapping[str, Any]) -> Settings:
    """Return the settings for the model of a folder. The limits that guard a server from its clients are off, since the
    caller is in the same process. Raises InvalidField."""
    found = {"model_roots": ("/",), "max_waiting": MAX_WAITING} | settings_of(given) | {"model": model}
    engine, serve = ({k: v for k, v in found.items() if k in names} for names in (OF_ENGINE, OF_REQUESTS))
    unguarded = {"trust_request_chat_template": True, "max_reply_logprobs": 1 << 62}
    return Settings(_config(EngineConfig, engine).check(), _config(ServeConfig, serve | unguarded).check())


def _our_value(name: str, value: Any) -> Any:
    """Return the value of a setting of ours. FastDeploy has other words for some."""
    if not isinstance(value, str):
        return value
    if (why := REFUSED_VALUES.get(name, {}).get(value)) is not None:
        raise InvalidField(name, f"{value!r} is not supported: {why}")
    return VALUES.get(name, {}).get(value, value)


def _of_foreign(name: str, value: Any) -> Mapping[str, Any]:
    """Return what a value of FastDeploy's setting means."""
    flag = FOREIGN.get(name)
    if flag is None:
        raise InvalidField(name, "unknown setting")
    if flag.form is Form.OURS:
        raise InvalidField(name, "a setting of the command line alone")
    found: dict[str, Any] = {}
    try:
        for one in value if isinstance(value, list | tuple) else [value]:
            found |= flag.meaning(_text(one), {"workers": 1})
    except ValueError as error:
        raise InvalidField(name, str(error)) from error
    return found


def _text(value: Any) -> str:
    """Return a value as the command line has it."""
    return value if isinstance(value, str) else json.dumps(value)


def _config(kind: Any, values: Mapping[str, Any]) -> Any:
    """Make a config, with the types of its fields checked."""
    try:
        return msgspec.convert(dict(values), kind)
    except msgspec.ValidationError as error:
        message, _, path = str(error).rpartition(" - at `$.")
        raise InvalidField(path.rstrip("`") or "settings", message.replace("`", "")) from error
