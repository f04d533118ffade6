"""Encodes a message of the engine as bytes. Error messages repeat text of clients, which UTF-8 may not be able to
hold."""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from fastdeploy.core.errors import FastDeployError
from fastdeploy.inter_communicator.messages import Failure, Rejected, Reply, ToClient

logger = logging.getLogger(__name__)
_encoder = msgspec.msgpack.Encoder()


def encode(message: ToClient) -> bytes:
    """Encode ``message`` with msgpack. Lone surrogates are replaced by "?". A Reply or Rejected that still cannot be
    encoded, such as one with an integer of more than 64 bits, becomes an internal error to the same caller. For any
    other message the error of msgspec is raised, since the engine itself made the mistake."""
    try:
        try:
            return _encoder.encode(message)
        except UnicodeEncodeError:
            logger.warning("a %s has text that UTF-8 cannot hold: replaced", type(message).__name__)
            return _encoder.encode(_without_surrogates(msgspec.to_builtins(message, builtin_types=(bytes,))))
    except Exception as error:
        return _encoder.encode(_internal_error(message, error))


def _internal_error(message: ToClient, error: Exception) -> Reply | Rejected:
    text = f"the engine's answer cannot be sent: {type(error).__name__}: {error}"
    failure = Failure(FastDeployError.code, _without_surrogates(text))
    match message:
        case Reply(call_id=call_id):
            logger.error("the reply to call %d cannot be encoded", call_id, exc_info=error)
            return Reply(call_id, {}, failure)
        case Rejected(request_id=request_id):
            logger.error("the refusal of a request cannot be encoded", exc_info=error)
            return Rejected(request_id, failure)
    raise error


def _without_surrogates(value: Any) -> Any:
    match value:
        case str():
            return value.encode("utf-8", "replace").decode()
        case dict():
            return {_without_surrogates(key): _without_surrogates(item) for key, item in value.items()}
        case list() | tuple():
            return [_without_surrogates(item) for item in value]
    return value
