"""What crosses between API servers and the engine: frozen structs, msgpack on the wire, named by who receives them.

A client (an API server, or the offline LLM) sends the ``ToEngine`` union and receives the ``ToClient`` union.
Both directions are FIFO per client, which is what makes ``Fence`` a proof of delivery.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from fastdeploy.core.outputs import Logprob, Span
from fastdeploy.core.request_fields import AddRequest
from fastdeploy.core.scope import WHOLE_ENGINE
from fastdeploy.core.weight_source import Source

# --------------------------------------------------------------------------- client -> engine


class Hello(msgspec.Struct, frozen=True, tag=True):
    """First message of a client; the engine answers Welcome. Sent again whenever the connection was lost."""

    pid: int


class CancelRequest(msgspec.Struct, frozen=True, tag=True):
    """The client has no more use for these choices: ``choice`` None = all. ``reason`` "stop" (a stop string was
    found at the API server) or "abort" (disconnect). No Output follows; an unknown id is ignored."""

    request_id: str
    choice: int | None = None
    reason: str = "abort"


class Call(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """A control call; answered by exactly one Reply with the same call_id. ``args`` is one of the *Args structs."""

    call_id: int
    args: Args


class PauseArgs(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """mode: abort|wait|keep. clear_cache None = the mode's default. admission: reject|hold (None: the mode's native
    default). on_timeout: keep|abort|cancel. ttl_s: the hold releases itself. hold_id None = anonymous. scope: id of the
    scope whose requests are paused; here and below."""

    mode: str = "abort"
    clear_cache: bool | None = None
    admission: str | None = None
    timeout_s: float = 60.0
    on_timeout: str | None = None
    ttl_s: float | None = None
    hold_id: str | None = None
    placed_by: str = "native"
    scope: str = WHOLE_ENGINE


class ResumeArgs(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Release a hold of the scope. hold_id None: every anonymous one."""

    hold_id: str | None = None
    scope: str = WHOLE_ENGINE


class RenewArgs(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Let a standing hold end ``ttl_s`` seconds from now (None: not by itself). Nothing else changes. Fails with
    HoldNotFound if no such hold stands."""

    hold_id: str
    ttl_s: float | None = None
    scope: str = WHOLE_ENGINE


class PauseStatusArgs(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    scope: str = WHOLE_ENGINE


class AbortArgs(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Finish these requests with reason "abort" and every token computed. One of the two must be given."""

    request_ids: list[str] | None = None
    abort_all: bool = False


class UpdateWeightsArgs(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """One call: begin, one chunk, commit. kv: keep|recompute for requests in flight. See BeginUpdateArgs.

    verify_checksum: the folder must hold a checksums.json ({tensor: sha256 hex}), and every tensor must match it.
    timeout_s: seconds that reading and checking may take (None = --stage-timeout-s); StagingTimeout after that.
    """

    source: Source
    version: str | None = None
    expected_version: str | None = None
    kv: str = "keep"
    partial: bool = False
    in_place: bool = False
    checksums: dict[str, str] = {}
    verify_checksum: bool = False
    timeout_s: float | None = None


class BeginUpdateArgs(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Open a weight session. Reply: {"session_id", "lease_s", version, weight_epoch, boot_id}.

    lease_s: seconds without a chunk, commit or begin after which the session is dropped. expected_version: refused
    unless it is the version that serves, now and at the commit. partial: tensors that do not arrive keep their value;
    otherwise all must arrive. in_place: no second copy; needs a paused engine and places the system hold "in_place".
    timeout_s: seconds that each chunk, and the check of the commit, may take; after that the session has ended.
    placed_by: who opened the session. Callers that keep no session id name the session by this.
    """

    version: str | None = None
    expected_version: str | None = None
    kv: str = "keep"
    partial: bool = False
    in_place: bool = False
    lease_s: float = 300.0
    timeout_s: float | None = None
    placed_by: str = "native"


class UpdateChunkArgs(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Some tensors of the new weights, checked and packed before the reply: {"session_id", "tensors", "nbytes",
    "tensors_received", "lease_s"}. checksums: {tensor: sha256 hex of its bytes}, for any of them. A chunk that is
    refused ends the session. version: label of the commit, over what begin said.

    session_id None: the session that ``placed_by`` has open. If there is none, the chunk is not read, and the reply is
    {"session_id": null}."""

    session_id: str | None
    source: Source
    version: str | None = None
    checksums: dict[str, str] = {}
    verify_checksum: bool = False
    placed_by: str = ""


class CheckUpdateArgs(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Ask before the bytes of an upload are received whether the engine would refuse them: as a chunk of the session
    (found as for UpdateChunkArgs), or without a session as an update that starts with ``begin``. Reply: {}. Fails as
    the chunk or the begin would. Changes nothing."""

    session_id: str | None = None
    begin: BeginUpdateArgs = BeginUpdateArgs()
    placed_by: str = ""


class CommitUpdateArgs(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Swap what the session holds in, between two steps. version, kv: over what begin said. Reply: a report.

    session_id None: the session that ``placed_by`` has open. WrongOrder if there is none."""

    session_id: str | None
    version: str | None = None
    kv: str | None = None
    placed_by: str = ""


class AbortUpdateArgs(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Drop a session; the old weights serve on. None: whichever is open. Reply: {"aborted": [session ids]}."""

    session_id: str | None = None


class SetVersionArgs(msgspec.Struct, frozen=True, tag=True):
    """Relabel the weights that serve: later tokens carry ``version``. No epoch, no KV and no request changes."""

    version: str


class ResetArgs(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """A trainer starts over: abort all requests, drop anonymous holds and the open session, clear KV. version:
    relabel."""

    version: str | None = None


class ResetCacheArgs(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Forget all cached prefixes. running: requests in flight give their KV back too and are recomputed.
    Reply: {"success": true, "requests_to_recompute": n}. Works in every state."""

    running: bool = False


class SleepArgs(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Give memory back to the system; answered when it is. tags: of "weight" and "kv_cache" (none = what is awake).
    Implies a pause of this ``mode`` by the system hold "sleep". discard: the weights are not kept for the wake-up:
    after it the system hold "republish" stands until weights are committed. WrongOrder for a tag that sleeps.
    PauseTimeout if that is not done in timeout_s: then nothing sleeps, and the hold is released."""

    tags: tuple[str, ...] = ()
    mode: str = "keep"
    discard: bool = False
    timeout_s: float = 60.0


class WakeArgs(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Take memory again; when no tag sleeps any more the hold "sleep" is released, and no other. none = all that
    sleep. WrongOrder for a tag that does not sleep, and for kv_cache while the weights do."""

    tags: tuple[str, ...] = ()


class WeightInfoArgs(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Reply: {version, weight_epoch, boot_id, "session": {...} or null, "asleep": [tags]}, and with checksums
    {"checksums": {tensor: sha256 hex of the values that serve}, "checksum": one over all of them}."""

    checksums: bool = False


class ModelInfoArgs(msgspec.Struct, frozen=True, tag=True):
    pass


class MetricsArgs(msgspec.Struct, frozen=True, tag=True):
    """Reply.result = {"text": Prometheus exposition}."""


Args = (
    PauseArgs
    | ResumeArgs
    | RenewArgs
    | PauseStatusArgs
    | AbortArgs
    | UpdateWeightsArgs
    | BeginUpdateArgs
    | UpdateChunkArgs
    | CheckUpdateArgs
    | CommitUpdateArgs
    | AbortUpdateArgs
    | SetVersionArgs
    | ResetArgs
    | ResetCacheArgs
    | SleepArgs
    | WakeArgs
    | WeightInfoArgs
    | ModelInfoArgs
    | MetricsArgs
)


class FenceAck(msgspec.Struct, frozen=True, tag=True):
    fence_id: int


class Malformed(NamedTuple):
    """A message that does not fit its type, as the transport reports it; never on the wire. ``call_id`` or
    ``request_id`` is set if the sender waits for an answer."""

    why: str
    call_id: int | None = None
    request_id: str | None = None


ToEngine = Hello | AddRequest | CancelRequest | Call | FenceAck

# --------------------------------------------------------------------------- engine -> client


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """boot_id changes with every start of an engine process."""

    boot_id: str
    pid: int
    max_model_len: int


class Output(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """New tokens of one choice. ``finish_reason`` (stop|length|abort|error) is set exactly once per choice, last.

    logprobs is empty unless asked for, else aligned with token_ids. spans label token_ids, counted from the choice's
    first output token. stop_reason: the stop token id that ended it, "deadline", "queue_timeout", or with an error that
    is this choice's own "non_finite_logits"; else None.
    prompt_logprobs: of the next prompt tokens, from the second on, where asked for (choice 0 only).
    cached_tokens: prompt tokens served from the prefix cache, sent with the first output.
    message: why, for abort and error. An abort before the first token starts with "Abort before prefill".
    """

    request_id: str
    choice: int
    token_ids: list[int] = []
    logprobs: list[Logprob] = []
    spans: list[Span] = []
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: list[Logprob] = []
    cached_tokens: int = 0
    num_preempted: int = 0
    message: str = ""


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """All outputs of one step for one client, in one message."""

    outputs: list[Output]


class Failure(msgspec.Struct, frozen=True):
    """An exception of fastdeploy.core.errors on the wire."""

    code: str
    message: str
    detail: dict[str, Any] = {}


class Rejected(msgspec.Struct, frozen=True, tag=True):
    """The AddRequest was not accepted; no Output follows."""

    request_id: str
    failure: Failure


class Reply(msgspec.Struct, frozen=True, tag=True):
    """Answer to a Call: ``failure`` None = success. A failed pause still carries its report in ``result``."""

    call_id: int
    result: dict[str, Any]
    failure: Failure | None = None


class Fence(msgspec.Struct, frozen=True, tag=True):
    """Acknowledge once everything received before has been handed to the waiting requests."""

    fence_id: int


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """The loop turned: the engine is not stuck, whatever else it does or waits for."""


class Goodbye(msgspec.Struct, frozen=True, tag=True):
    """The engine counts this client as gone (it missed a fence, or never said Hello): start over with Hello."""


ToClient = Welcome | Outputs | Rejected | Reply | Fence | Heartbeat | Goodbye
