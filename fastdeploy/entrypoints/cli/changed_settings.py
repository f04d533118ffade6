"""The settings of a fleet that runs, read again for a rolling change: command line, environment and YAML file as at the
start, and the flags of ``fastdeploy roll`` above them.

Only settings of which two replicas of one fleet may have different values can change. The others are refused by name:
those that change tokens or names, since a request may go on at any replica; the addresses, since the parent keeps its
sockets; and keys, folders and all that says who may do what, since the caller may be on another host.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import msgspec

from fastdeploy.core.config import EngineConfig, ServeConfig, flags_of
from fastdeploy.core.errors import InvalidField
from fastdeploy.entrypoints.roll import Reread, Settings

HEADINGS = ("engine", "requests", "connections, request bodies and uploads")
MUST_MATCH = ("dtype", "quantization", "max_model_len", "enable_return_routed_experts")
FOR_THE_OWNER = ("trace", "chat_template", "trust_request_chat_template")
OTHERS = (
    "adapter_memory_mb", "failover_s", "fence_after_s", "keepalive_s", "max_lora_rank", "stage_timeout_s", "stall_s",
    "standby_weights",
)  # fmt: skip
_FLAGS = {
    field.name for kind in (EngineConfig, ServeConfig) for field, flag in flags_of(kind) if flag.heading in HEADINGS
}
CHANGEABLE = (_FLAGS - {*MUST_MATCH, *FOR_THE_OWNER}) | {*OTHERS}
MADE_AT_THE_START = ("fleet_id",)


def reread_of(args: argparse.Namespace, first: Settings, settings_of: Any) -> Reread:
    """Return the function that reads the settings of a fleet again. args: of its start. first: the settings that they
    gave. settings_of(args): makes them."""

    def reread(given: Mapping[str, str]) -> Settings:
        for name in given:
            check_changeable(name)
        try:
            again = args.parser.parse_args(args.argv)
        except SystemExit:  # argparse has written why to stderr
            raise InvalidField("config", "the settings cannot be read any more: see the log of the fleet") from None
        args.parser.change(again, given)
        now = settings_of(again)
        return Settings(*(_changed(before, after) for before, after in zip(first, now, strict=True)))

    return reread


def check_changeable(name: str) -> None:
    """Raise InvalidField for a setting that a rolling change cannot change."""
    if name in MUST_MATCH:
        raise InvalidField(name, "all replicas must have the same: a request may go on at any of them")
    if name not in CHANGEABLE:
        raise InvalidField(name, "a rolling change cannot change it: stop the fleet, and start it with this setting")


def _changed(before: msgspec.Struct, after: msgspec.Struct) -> Any:
    """Return ``after``, with what is made anew at each start as in ``before``."""
    kept = {name: getattr(before, name) for name in MADE_AT_THE_START if hasattr(before, name)}
    after = msgspec.structs.replace(after, **kept)
    for name in before.__struct_fields__:
        if getattr(before, name) != getattr(after, name):
            check_changeable(name)
    return after
