"""All errors that callers of this package can meet. Each class gives its code, its HTTP status and its meaning.

``STATUS`` is the one map from ``code`` to HTTP status. Messages between processes carry ``code`` (messages.Failure).
"""

from __future__ import annotations

import re
import reprlib
from typing import Any

MAX_MESSAGE_CHARS = 800
MAX_NAME_CHARS = 200
BY_CODE: dict[str, type[FastDeployError]] = {}


def shortened(text: str, limit: int) -> str:
    """Return ``text`` in at most ``limit`` characters that UTF-8 can encode, with the middle left out. Error messages
    repeat the input of clients, which may have megabytes, or half of a surrogate pair."""
    if len(text) > limit:
        mark = f"...({len(text)} characters)..."
        head = limit * 2 // 3
        text = text[:head] + mark + text[len(text) - (limit - head - len(mark)) :]
    return text.encode("utf-8", "replace").decode()


def shown(value: Any) -> str:
    """Return a value from a client or a file for a message. Of a long or deeply nested one, parts are left out."""
    short = reprlib.Repr()
    short.maxstring = 200
    return short.repr(value)


def shown_url(url: str) -> str:
    """Return a URL for a message or a report: without user and password."""
    return re.sub(r"^([\w+.-]+://)?.*@", r"\1", url, flags=re.DOTALL)


class FastDeployError(Exception):
    """Base of all errors. detail: further fields of the HTTP reply, under ``error``. A message is cut to
    MAX_MESSAGE_CHARS characters, a string in ``detail`` to MAX_NAME_CHARS."""

    code: str = "internal_error"
    status: int = 500

    def __init_subclass__(cls, code: str = "", status: int = 0):
        if code:  # classes of other modules set both themselves, and are never sent by the engine
            cls.code, cls.status = code, status
            BY_CODE[code] = cls

    def __init__(self, message: str, **detail: Any):
        self.message = shortened(message, MAX_MESSAGE_CHARS)
        super().__init__(self.message)
        short = {k: shortened(v, MAX_NAME_CHARS) for k, v in detail.items() if isinstance(v, str)}
        self.detail: dict[str, Any] = detail | short

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), self.message, self.__dict__)  # constructors differ, and Ray pickles errors


def _restore(cls: type[FastDeployError], message: str, fields: dict[str, Any]) -> FastDeployError:
    """Make an error without its constructor."""
    error = cls.__new__(cls)
    FastDeployError.__init__(error, message)
    error.__dict__.update(fields)
    return error


class RequestError(FastDeployError, code="invalid_request_error", status=400):
    """A request that the server refuses or cannot answer."""


class InvalidField(RequestError, ValueError, code="invalid_field", status=400):
    """A field is missing, malformed or not supported. field: its dotted path. The message says what was expected. It is
    a ValueError too, which callers of the offline ``LLM`` expect for a wrong argument."""

    def __init__(self, field: str, message: str):
        super().__init__(f"{field}: {message}", param=field)
        self.field: str = self.detail["param"]


class ContextLengthExceeded(InvalidField, code="context_length_exceeded", status=400):
    """A request does not fit the model's context. Clients find this error by its code, or by the first words of the
    message: keep both. asked: the size that was asked for."""

    def __init__(self, field: str, max_model_len: int, asked: str):
        message = (
            f"This model's maximum context length is {max_model_len} tokens. However, you requested {asked} ({field})."
        )
        RequestError.__init__(self, message, param=field)
        self.field = self.detail["param"]


class InvalidKey(RequestError, code="invalid_api_key", status=401):
    """The request carries no key, or a wrong one."""


class Forbidden(RequestError, code="forbidden", status=403):
    """The caller may not use the route."""


class RouteNotFound(RequestError, code="not_found", status=404):
    """There is no such route."""


class ModelNotFound(RequestError, code="model_not_found", status=404):
    """The model that the request names is not served here."""


class UnknownSession(RequestError, code="unknown_session", status=404):
    """There is no session of this name that this key may see."""


class AdapterFolderNotFound(ModelNotFound, code="adapter_folder_not_found", status=404):
    """The folder that a load names is not there, or has no adapter in it yet. prime-rl tries again after a 404."""


class AdapterLoaded(RequestError, code="adapter_loaded", status=400):
    """An adapter of this name is loaded, and the call does not replace it."""


class DuplicateRequest(RequestError, code="duplicate_request_id", status=409):
    """A request with this id is still running."""


class AttachedElsewhere(RequestError, code="attached_elsewhere", status=409):
    """A later request with this id took over (retain_s)."""


class ResultLost(RequestError, code="result_lost", status=410):
    """The engine that kept this result has died (retain_s)."""


class RequestTooLarge(RequestError, code="request_too_large", status=413):
    """The body is larger than --max-body-mb, or an upload larger than --max-upload-mb."""


class UnsupportedBody(RequestError, code="unsupported_media_type", status=415):
    """The Content-Type of the body is not supported."""


class RequestTimeout(RequestError, code="request_timeout", status=408):
    """The headers or the body did not come in time."""


class HeadersTooLarge(RequestError, code="headers_too_large", status=431):
    """The headers are larger than 256 KiB."""


class ServerBusy(RequestError, code="server_busy", status=429):
    """Too many connections, bodies or uploads at once."""


class QueueFull(RequestError, code="queue_full", status=429):
    """The queue of waiting requests is full (--max-waiting)."""


class RequestsRejected(RequestError, code="rejecting_new_requests", status=503):
    """A pause with admission=reject is in force."""


class ControlError(FastDeployError, code="control_error", status=400):
    """A control call that could not be carried out."""


class PauseInterrupted(ControlError, code="pause_interrupted", status=409):
    """A resume released the hold while the engine was draining."""


class PauseBlocked(ControlError, code="pause_blocked", status=409):
    """A pause of one adapter waits for requests that holds of the whole engine freeze: detail["held_by"]."""


class PauseTimeout(ControlError, code="pause_timeout", status=504):
    """A pause with on_timeout=cancel did not drain in time. Its hold is released."""


class WeightUpdateRefused(ControlError, code="weight_update_refused", status=400):
    """The new weights are not usable: the old weights go on serving."""


class BaseMismatch(ControlError, code="base_mismatch", status=409):
    """A delta was made against other weights than those that serve, which the error names."""


class StagingTimeout(ControlError, code="staging_timeout", status=504):
    """Reading new weights took longer than allowed: the old weights go on serving."""


class ResumeRefused(ControlError, code="resume_refused", status=409):
    """The engine sleeps, or has no complete weights to run with."""


class HoldNotFound(ControlError, code="hold_not_found", status=404):
    """No such hold stands: it was released, its ttl ended, or the engine restarted."""


class OutOfSpace(ControlError, code="out_of_space", status=507):
    """No room for an upload or for sleeping weights. Nothing changed."""


class UpdateInProgress(ControlError, code="update_in_progress", status=409):
    """Another weight session is open."""


class SessionNotFound(ControlError, code="session_not_found", status=404):
    """There is no such weight session."""


class SessionExpired(ControlError, code="session_expired", status=409):
    """The lease of the weight session ended: the old weights go on serving."""


class VersionConflict(ControlError, code="version_conflict", status=409):
    """The version that serves is not the expected one."""


class WrongOrder(ControlError, code="wrong_order", status=409):
    """The engine is in the wrong state: asleep, not asleep, or not paused."""


class NotLeader(ControlError, code="not_leader", status=409):
    """The engine belongs to a fleet, and takes this call from the fleet's gateway only."""


class ReplicaNotFound(ControlError, code="replica_not_found", status=404):
    """The fleet has no replica of this name."""


class ReplicaMisfit(ControlError, code="replica_misfit", status=409):
    """A replica cannot belong to the fleet: it has another model, or a version of this package that does not know what
    the gateway sends."""


class FleetMixed(ControlError, code="fleet_mixed", status=409):
    """A member of the fleet runs a version of this package that does not know the call, or a field that it gives.
    Nothing was changed. detail["cannot"]: what each of these members does not know."""


class FleetCallFailed(ControlError, code="fleet_call_failed", status=502):
    """A control call failed on some replicas of the fleet and was undone on the others. detail["replicas"]: a report of
    each replica."""


class SessionStoreFailed(FastDeployError, code="session_store_failed", status=503):
    """The file with the turns of sessions cannot be read or written, for example because its disk is full."""


class EngineError(FastDeployError, code="engine_error", status=500):
    """The engine process is at fault."""


class NonFiniteLogits(EngineError, code="non_finite_logits", status=500):
    """Logits that are not finite: no token can be drawn. The code is also the ``stop_reason`` of a choice that ended
    with this error."""


class NoTokenAllowed(RequestError, code="no_token_allowed", status=400):
    """The grammar, allowed_token_ids and bad_words of a request leave no token, or its resumed tokens do not follow
    its grammar. The code is also the ``stop_reason`` of a choice that ended with this error."""


class EngineDead(EngineError, code="engine_dead", status=503):
    """The engine died. All open requests and calls have been answered."""


class EngineStalled(EngineError, code="engine_stalled", status=504):
    """The engine sends no heartbeats, and is being replaced."""


BY_CODE[FastDeployError.code] = FastDeployError
STATUS: dict[str, int] = {code: cls.status for code, cls in BY_CODE.items()}


def from_wire(code: str, message: str, detail: dict[str, Any]) -> FastDeployError:
    """Rebuild the exception that the engine sent as (code, message, detail)."""
    error = _restore(BY_CODE.get(code, FastDeployError), message, {"detail": detail})  # detail may have any keys
    if isinstance(error, InvalidField):
        error.field = detail.get("param", "")
    return error
