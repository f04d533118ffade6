"""Messages between clients (API servers, the offline LLM) and the engine: frozen structs, msgpack on the wire.

A client sends ``ToEngine`` messages and receives ``ToClient`` messages. Both directions keep the order per client, so a
FenceAck proves that the client has received everything that was sent before the Fence.
"""

# ruff: noqa: F401  the calls of weight_calls and peer_calls are names of this module too

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from fastdeploy.core.outputs import Logprob, Span
from fastdeploy.core.request_fields import AddRequest
from fastdeploy.core.served_weights import WHOLE_ENGINE
from fastdeploy.inter_communicator.control_call import Args, Failure
from fastdeploy.inter_communicator.peer_calls import Copy, FollowArgs, PlaceArgs, ReplicaArgs, SentCallArgs, SourcedArgs
from fastdeploy.inter_communicator.weight_calls import (
    AbortUpdateArgs,
    AdaptersArgs,
    BeginUpdateArgs,
    CheckUpdateArgs,
    CommitUpdateArgs,
    EndLoadArgs,
    ExportAdapterArgs,
    LoadAdapterArgs,
    LookUpAdapterArgs,
    UnloadAdapterArgs,
    UpdatePartArgs,
    UpdateWeightsArgs,
)

# --------------------------------------------------------------------------- client -> engine


class Hello(msgspec.Struct, frozen=True, tag=True):
    """First message of each connection of a client. The engine answers Welcome. host: id of the client's machine; "" =
    that of the engine. The engine cannot see whether a process of another machine lives. gateway: the client is a
    gateway of a fleet, and other gateways reach it at this address; "" = it is none, or the only one."""

    pid: int
    host: str = ""
    gateway: str = ""


class CancelRequest(msgspec.Struct, frozen=True, tag=True):
    """Message to end choices, for which no Output follows. choice: None = all. reason: "stop" (the API server found a
    stop string) or "abort" (the client disconnected). An unknown id is ignored."""

    request_id: str
    choice: int | None = None
    reason: str = "abort"


class Call(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """A control call. The answer is exactly one Reply with the same call_id. change: numbers the changes that the
    gateway of a fleet sends to all members, from 1; 0 = no such change. The engine tells the last one that it has got,
    so that a later gateway can tell an engine that missed changes."""

    call_id: int
    args: AnyArgs
    change: int = 0


class PauseArgs(Args, frozen=True):
    """The call that pauses a scope. mode: abort|wait|keep. clear_cache, admission (reject|hold): None = the mode's
    default. on_timeout: keep|abort|cancel. ttl_s: seconds after which the hold ends by itself. hold_id: None =
    anonymous. scope: id of the scope, as in the messages below. anonymous: with a hold_id, a hold of this name that
    counts as anonymous; a gateway names the anonymous holds of its fleet, so that they have one name on all engines."""

    mode: str = "abort"
    clear_cache: bool | None = None
    admission: str | None = None
    timeout_s: float = 60.0
    on_timeout: str | None = None
    ttl_s: float | None = None
    hold_id: str | None = None
    placed_by: str = "native"
    scope: str = WHOLE_ENGINE
    anonymous: bool = False


class ResumeArgs(Args, frozen=True):
    """The call that releases a hold of the scope. hold_id: None = all anonymous holds."""

    hold_id: str | None = None
    scope: str = WHOLE_ENGINE


class RenewArgs(Args, frozen=True):
    """The call that sets the end of a hold to ``ttl_s`` seconds from now. None: the hold does not end by itself. Fails
    with HoldNotFound if there is no such hold."""

    hold_id: str
    ttl_s: float | None = None
    scope: str = WHOLE_ENGINE


class PauseStatusArgs(Args, frozen=True):
    """The question for the pause status of a scope."""

    reads = True
    scope: str = WHOLE_ENGINE


class AbortArgs(Args, frozen=True):
    """The call that ends requests, with reason "abort" and the tokens that they have. One of the four fields must be
    given. session: all requests of this session. lora_name: all requests of this adapter. A name that nobody knows has
    none, and is reported like an unknown id: a trainer may abort before it loads the name for the first time. While a
    gateway leads, another connection ends only its own requests, by their ids; those of others count as not found.

    Reply: {"aborted": [{"request_id", "output_token_count"}], "not_found": [ids, or the name of the adapter]}."""

    request_ids: list[str] | None = None
    abort_all: bool = False
    lora_name: str | None = None
    session: str | None = None

    def needs_leader(self) -> bool:
        """Anyone may end requests of the same connection, by their ids."""
        return self.request_ids is None or self.abort_all or self.lora_name is not None


class SetVersionArgs(Args, frozen=True):
    """The call that gives the weights that serve another label, which later tokens carry. Nothing else changes.

    Two fields are for an engine that joins a fleet and has the fleet's tensors. weight_epoch: a number that is not
    below the present one; with another number, new requests find no prefix that was cached before. eos_token_ids: the
    EOS ids from then on."""

    version: str
    weight_epoch: int | None = None
    eos_token_ids: tuple[int, ...] | None = None


class ResetArgs(Args, frozen=True):
    """The call of a trainer that starts again: it aborts all requests, releases anonymous holds, ends the open weight
    session and all loads of adapters, unloads all adapters and clears the KV. version: new label of the weights."""

    version: str | None = None


class ResetCacheArgs(Args, frozen=True):
    """The call that forgets all cached prefixes. running: requests in flight lose their KV too, and are recomputed.
    Reply: {"success": true, "requests_to_recompute": n}. Works in every state."""

    running: bool = False


class SleepArgs(Args, frozen=True):
    """The call that gives memory back to the system, behind a pause with the system hold "sleep". The reply comes
    afterwards.

    tags: of "weight" and "kv_cache"; none = all that are awake. WrongOrder for a tag that sleeps.
    mode: of the pause. discard: the weights are not kept. After the wake-up the system hold "republish" is in force
    until new weights are committed.
    timeout_s: after that the call fails with PauseTimeout, also while the weights are being written. Then nothing has
    changed, and its hold is released.

    Another sleep waits for this one. A weight session that begins before the weights sleep makes the call fail."""

    tags: tuple[str, ...] = ()
    mode: str = "keep"
    discard: bool = False
    timeout_s: float = 60.0


class WakeArgs(Args, frozen=True):
    """The call that takes memory again. The hold "sleep" is released when no tag sleeps any more. tags: none = all that
    sleep. The reply comes when the weights are read back. StagingTimeout if that takes longer than --stage-timeout-s:
    the weights sleep on, and the call may be repeated.

    WrongOrder for a tag that does not sleep, or not yet; for kv_cache while the weights sleep; and during another
    wake-up."""

    tags: tuple[str, ...] = ()


class WeightInfoArgs(Args, frozen=True):
    """The question for the weights that serve. Reply: {version, weight_epoch, boot_id, "fingerprint": over all tensors
    that serve or null, "eos_token_ids", "dtype": of the weights, "quantization": if there is one, "standby_nbytes":
    memory of the standby copy, "session": {...} or null, "asleep": [tags]}. checksums: reply also {"checksums":
    {tensor: sha256 hex of the values that serve}, "checksum": one over all of them}. fingerprints: reply also
    {"fingerprints": {tensor: its fingerprint in hex, from the update that brought it}}, in the order of the model."""

    reads = True

    checksums: bool = False
    fingerprints: bool = False


class ModelInfoArgs(Args, frozen=True):
    """The question for the model and the limits of the engine."""

    reads = True
    shows_replicas = False


class LeadArgs(Args, frozen=True):
    """The call of a fleet's gateway that makes its connection the only one that may change the engine's state. It is
    repeated at least once in ``lease_s`` seconds. Calls of other connections that change state are refused with
    NotLeader, which names the leader; calls that only read are not. The end of the lease lets another controller lead,
    and changes nothing else.

    fleet: id of the fleet. controller: id of the gateway's process. term: counts the gateways of the fleet. Refused
    with NotLeader, which shows the term that is in force, if a higher term has led, if this term is another
    controller's, or if the lease of another controller still runs on a live connection. past_adapter_epoch: as in
    FleetStateArgs, of the whole fleet; the engine takes it if it is higher than its own. gateway: as in Hello.
    patience_s: how long the engine waits for another gateway to acknowledge a Fence, before it drops that one. Reply:
    that of FleetStateArgs."""

    leader_only = False

    fleet: str
    controller: str
    term: int
    lease_s: float
    past_adapter_epoch: int = 0
    gateway: str = ""
    patience_s: float = 0.0


class FleetStateArgs(Args, frozen=True):
    """The question for the engine's state. Reply: all that a gateway needs to build the state of its fleet anew:
    {"fleet", "controller", "term", "leader": address of the gateway that leads ("" if it is not connected, or has
    none), "gateways": addresses of all that are connected, "boot_id", the fields of CommittedState
    (core/served_weights.py), "phase", "is_paused", "rejecting_new_requests", "holds": [as in PauseStatusArgs, of all
    scopes], "adapters": [as in AdaptersArgs], "past_adapter_epoch": no adapter_epoch up to this number is given to a
    name that is not loaded, "prepared_loads": [names], "asleep": [tags], "session": as in WeightInfoArgs, "running",
    "waiting": numbers of choices, "available_gpu_block_num", "max_num_seqs", "last_change": [term, number] of the last
    change that came (see Call.change)}. "fleet" is "" and "term" 0 as long as no gateway has led."""

    reads = True


class ExportWeightsArgs(Args, frozen=True):
    """The call that writes the weights that serve to a new file in the upload folder, as safetensors with the names and
    types of a checkpoint, beside the steps. tensors: names; none = all. Reply: {"path", "nbytes", and the fields of
    CommittedState}. The caller deletes the file. UpdateInProgress if a commit changed the weights meanwhile."""

    leader_only = False

    timeout_s: float | None = None
    tensors: tuple[str, ...] = ()


class RetainedArgs(Args, frozen=True):
    """The question whether this engine knows a request with retain_s. Reply: {"known": whether a request with this id
    runs here or has a retained result, "kept_s": seconds since a client has asked last for its tokens, if all of them
    are here, else null}. The rest of a request whose engine was lost is known, and not kept."""

    reads = True

    request_id: str


class MetricsArgs(Args, frozen=True):
    """The question for the metrics. Reply: {"text": Prometheus exposition}."""

    reads = True
    shows_replicas = False


class EventsArgs(Args, frozen=True):
    """The question for the state and for what has happened since the last call, for viewers of /ui. An API server calls
    only while it has viewers. after: "next" of the last reply; 0 at first. requests: reply the live requests too.

    Reply: {"now": on the clock of the events, "next", "events": [Event] after ``after``, "lost": number of events that
    came too fast to be kept, "state": {...}, "requests": [...] if asked for or if events were lost}. After a restart of
    the engine "next" counts from 0 again; "boot_id" of the state tells the restart."""

    reads = True
    one_member = True
    shows_replicas = False

    after: int = 0
    requests: bool = False


if TYPE_CHECKING:
    AnyArgs = Args
else:
    AnyArgs = reduce(or_, Args.__subclasses__())


class FenceAck(msgspec.Struct, frozen=True, tag=True):
    """The acknowledgement of a Fence."""

    fence_id: int


class Malformed(NamedTuple):
    """A message that does not fit its type, as the transport has found it. Never on the wire. call_id, request_id: one
    is set if the sender waits for an answer."""

    why: str
    call_id: int | None = None
    request_id: str | None = None


ToEngine = Hello | AddRequest | CancelRequest | Call | FenceAck

# --------------------------------------------------------------------------- engine -> client


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The answer to Hello. boot_id changes with every start of an engine process. software: version of this package at
    the engine. knows: the messages that the engine knows, see known_messages.py."""

    boot_id: str
    pid: int
    max_model_len: int
    software: str = ""
    knows: dict[str, dict[str, bool]] = {}


class Output(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """New tokens of one choice. The last Output of a choice, and no other, has a ``finish_reason``.

    logprobs: empty unless asked for, else one per token. spans: labels of token_ids; positions count from the choice's
    first output token. finish_reason: stop|length|abort|error. The last token of an output that ends with "stop" is the
    EOS or stop id; one without a token ends a choice in which the client found a stop string.
    stop_reason: the stop token id that ended the choice, "deadline", "queue_timeout", "adapter_unloaded" (in a fleet),
    or "non_finite_logits" or "no_token_allowed" for an error of this choice alone; else None.
    prompt_logprobs: of the next prompt tokens, from the second on, if asked for (choice 0 only).
    cached_tokens: tokens of the prompt's prefix hit, sent with the first output.
    routed: if asked for, the rows (core/experts.py) of all tokens before the last one of this output that were not sent
    yet. So after each output with tokens, and from SamplingParams.routed_experts_start on, the client has the rows of
    all tokens that it knows but the last one. A row is sent once: it is that of the computation from which the next
    token was sampled, even if the token is computed again later.
    message: cause of an abort or error. For an abort before the first token it starts with "Abort before prefill".
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
    routed: bytes = b""


class Load(msgspec.Struct, frozen=True, array_like=True):
    """What an engine has to do for other clients than the one that reads this. choices: that have not ended.
    prompt_tokens: to compute before the first tokens of these. context: the sum of the choices' prompts, in tokens."""

    choices: int = 0
    prompt_tokens: int = 0
    context: int = 0


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """All outputs of one step for one client, in one message. load: None = as it was told last."""

    outputs: list[Output]
    load: Load | None = None


class Rejected(msgspec.Struct, frozen=True, tag=True):
    """The AddRequest was not accepted; no Output follows."""

    request_id: str
    failure: Failure


class Reply(msgspec.Struct, frozen=True, tag=True):
    """Answer to a Call. failure: None = success. A failed pause still has its report in ``result``."""

    call_id: int
    result: dict[str, Any]
    failure: Failure | None = None


class Fence(msgspec.Struct, frozen=True, tag=True):
    """Request for a FenceAck. The client sends it once every earlier message has been handed to the waiting
    requests."""

    fence_id: int


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Sign that the engine's loop is not stuck. load: None = as it was told last."""

    load: Load | None = None


class Goodbye(msgspec.Struct, frozen=True, tag=True):
    """The engine has dropped this client, which missed a fence or sent no Hello. The client starts again with Hello."""


ToClient = Welcome | Outputs | Rejected | Reply | Fence | Heartbeat | Goodbye
