"""Every error a caller of this package can meet, and the HTTP status it maps to.

    FastDeployError
    ├── RequestError            the caller's fault: nothing was accepted, nothing changed
    │   ├── InvalidField        400  a field is missing, malformed, or not supported
    │   ├── InvalidKey          401  the request carries no key, or a wrong one
    │   ├── Forbidden           403  this caller may not use this route
    │   ├── RouteNotFound       404  there is no such route
    │   ├── ModelNotFound       404  the model named is not served here
    │   ├── DuplicateRequest    409  the request id is alive
    │   ├── AttachedElsewhere   409  a later request with this id took over (retain_s)
    │   ├── RequestTimeout      408  the headers or the body did not come in time
    │   ├── RequestTooLarge     413  the body is larger than --max-body-mb
    │   ├── UnsupportedBody     415  the Content-Type of the body is not taken
    │   ├── HeadersTooLarge     431  the headers are larger than --max-header-kb
    │   ├── QueueFull           429  the waiting queue is at its bound
    │   ├── ServerBusy          429  too many connections, bodies or uploads at once
    │   └── RequestsRejected    503  a pause with admission=reject stands
    ├── ControlError            a control call that did not do what it asked for
    │   ├── PauseInterrupted    409  a resume released the hold while it was draining
    │   ├── PauseTimeout        504  on_timeout=cancel: the engine runs again
    │   ├── ResumeRefused       409  there are no whole weights to run with
    │   ├── HoldNotFound        404  no such hold stands: it was released, its ttl ended, or the engine restarted
    │   ├── WeightUpdateRefused 400  the old weights serve on
    │   ├── StagingTimeout      504  reading new weights took longer than allowed: the old weights serve on
    │   ├── OutOfSpace          507  no room to take an upload or sleeping weights in; nothing changed
    │   ├── UpdateInProgress    409  another weight session is open
    │   ├── SessionNotFound     404  no such weight session
    │   ├── SessionExpired      409  its lease ended: the old weights serve on
    │   ├── VersionConflict     409  the version that serves is not the expected one
    │   └── WrongOrder          409  not in this state: asleep, not asleep, not paused
    └── EngineError             the engine process is at fault
        ├── NonFiniteLogits     500  the weights give logits that are not finite: no token can be drawn
        ├── EngineDead          503  it died; what was in flight has been answered
        └── EngineStalled       504  it stopped beating; it is being replaced

``STATUS`` is the one map from ``code`` to HTTP status; the wire carries ``code`` (see messages.Failure).
"""

from __future__ import annotations

from typing import Any

MAX_MESSAGE_CHARS = 800
MAX_NAME_CHARS = 200


def shortened(text: str, limit: int) -> str:
    """``text`` in at most ``limit`` characters, its end included, and such that UTF-8 can carry it. What a client sends
    is repeated in messages and may have megabytes, or half of a surrogate pair."""
    if len(text) > limit:
        mark = f"...({len(text)} characters)..."
        head = limit * 2 // 3
        text = text[:head] + mark + text[len(text) - (limit - head - len(mark)) :]
    return text.encode("utf-8", "replace").decode()


class FastDeployError(Exception):
    """Base of the tree. ``detail`` is machine-readable and travels to the HTTP body under ``error``. A message is cut
    to MAX_MESSAGE_CHARS characters, a string in ``detail`` to MAX_NAME_CHARS."""

    code: str = "internal_error"
    status: int = 500

    def __init__(self, message: str, **detail: Any):
        self.message = shortened(message, MAX_MESSAGE_CHARS)
        super().__init__(self.message)
        self.detail: dict[str, Any] = {
            k: shortened(v, MAX_NAME_CHARS) if isinstance(v, str) else v for k, v in detail.items()
        }

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), self.args, self.__dict__)  # constructors differ; trainers send errors on (Ray)


def _restore(cls: type[FastDeployError], args: tuple[Any, ...], state: dict[str, Any]) -> FastDeployError:
    error = cls.__new__(cls)
    Exception.__init__(error, *args)
    error.__dict__.update(state)
    return error


class RequestError(FastDeployError):
    code, status = "invalid_request_error", 400


class InvalidField(RequestError):
    """``field`` is the dotted path of the offending field; the message says what was expected."""

    code, status = "invalid_field", 400

    def __init__(self, field: str, message: str):
        super().__init__(f"{field}: {message}", param=field)
        self.field: str = self.detail["param"]


class InvalidKey(RequestError):
    code, status = "invalid_api_key", 401


class Forbidden(RequestError):
    code, status = "forbidden", 403


class RouteNotFound(RequestError):
    code, status = "not_found", 404


class ModelNotFound(RequestError):
    code, status = "model_not_found", 404


class DuplicateRequest(RequestError):
    code, status = "duplicate_request_id", 409


class AttachedElsewhere(RequestError):
    code, status = "attached_elsewhere", 409


class RequestTooLarge(RequestError):
    code, status = "request_too_large", 413


class UnsupportedBody(RequestError):
    code, status = "unsupported_media_type", 415


class RequestTimeout(RequestError):
    code, status = "request_timeout", 408


class HeadersTooLarge(RequestError):
    code, status = "headers_too_large", 431


class ServerBusy(RequestError):
    code, status = "server_busy", 429


class QueueFull(RequestError):
    code, status = "queue_full", 429


class RequestsRejected(RequestError):
    code, status = "rejecting_new_requests", 503


class ControlError(FastDeployError):
    code, status = "control_error", 400


class PauseInterrupted(ControlError):
    code, status = "pause_interrupted", 409


class PauseTimeout(ControlError):
    code, status = "pause_timeout", 504


class WeightUpdateRefused(ControlError):
    code, status = "weight_update_refused", 400


class StagingTimeout(ControlError):
    code, status = "staging_timeout", 504


class ResumeRefused(ControlError):
    code, status = "resume_refused", 409


class HoldNotFound(ControlError):
    code, status = "hold_not_found", 404


class OutOfSpace(ControlError):
    code, status = "out_of_space", 507


class UpdateInProgress(ControlError):
    code, status = "update_in_progress", 409


class SessionNotFound(ControlError):
    code, status = "session_not_found", 404


class SessionExpired(ControlError):
    code, status = "session_expired", 409


class VersionConflict(ControlError):
    code, status = "version_conflict", 409


class WrongOrder(ControlError):
    code, status = "wrong_order", 409


class EngineError(FastDeployError):
    code, status = "engine_error", 500


class NonFiniteLogits(EngineError):
    """The code is also the ``stop_reason`` of a choice that ended so."""

    code, status = "non_finite_logits", 500


class EngineDead(EngineError):
    code, status = "engine_dead", 503


class EngineStalled(EngineError):
    code, status = "engine_stalled", 504


def _walk(cls: type[FastDeployError]):
    yield cls
    for sub in cls.__subclasses__():
        yield from _walk(sub)


BY_CODE: dict[str, type[FastDeployError]] = {cls.code: cls for cls in _walk(FastDeployError)}
STATUS: dict[str, int] = {code: cls.status for code, cls in BY_CODE.items()}


def from_wire(code: str, message: str, detail: dict[str, Any]) -> FastDeployError:
    """Rebuild the exception that the engine put on the wire as (code, message, detail)."""
    cls = BY_CODE.get(code, FastDeployError)
    error = cls.__new__(cls)
    FastDeployError.__init__(error, message)
    error.detail = detail  # may have any keys
    if isinstance(error, InvalidField):
        error.field = detail.get("param", "")
    return error
