"""What crosses between API servers and the engine: frozen structs, msgpack on the wire, named by who receives them.

A client (an API server, or the offline LLM) sends the ``ToEngine`` union and receives the ``ToClient`` union.
Both directions are FIFO per client, which is what makes ``Fence`` a proof of delivery.
"""

from __future__ import annotations

from typing import Any

import msgspec

from fastdeploy.engine.sampling_params import SamplingParams


class Span(msgspec.Struct, frozen=True):
    """Output tokens [start, end) were sampled by weights (version, epoch).

    recomputed: the request began under an earlier epoch, whose KV was lost since (to a preemption, a cleared cache or
    an update with kv=recompute) and rebuilt under the weights of a later one.
    """

    version: str
    epoch: int
    start: int
    end: int
    recomputed: bool = False


class Logprob(msgspec.Struct, frozen=True, array_like=True):
    """Log softmax of the raw logits. ``top``: (token id, logprob), best first, as many as asked for."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


# --------------------------------------------------------------------------- client -> engine


class Hello(msgspec.Struct, frozen=True, tag=True):
    """First message of a client; the engine answers Welcome. Sent again whenever the connection was lost."""

    pid: int


class AddRequest(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """All n choices of one request: they share the prompt and are admitted, paused and aborted together.

    request_id: the id that the client knows; the engine never renames it. arrival: time.time() at the HTTP door.
    seed_base: position of the first output token is len(prompt_token_ids), absolute in the sequence.
    group: the id that the client knows, where one HTTP request with several prompts became several of these ("" = the
    request_id itself); aborting a group aborts all of its members.
    Answered by one Output per choice that has ``finish_reason``, or by one Rejected for all.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    n: int = 1
    priority: int = 0
    cache_salt: str = ""
    arrival: float = 0.0
    group: str = ""


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
    default). on_timeout: keep|abort|cancel. ttl_s: the hold releases itself. hold_id None = anonymous."""

    mode: str = "abort"
    clear_cache: bool | None = None
    admission: str | None = None
    timeout_s: float = 60.0
    on_timeout: str | None = None
    ttl_s: float | None = None
    hold_id: str | None = None
    placed_by: str = "native"


class ResumeArgs(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """hold_id None releases every anonymous hold."""

    hold_id: str | None = None


class PauseStatusArgs(msgspec.Struct, frozen=True, tag=True):
    pass


class AbortArgs(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Finish these requests with reason "abort" and every token computed. One of the two must be given."""

    request_ids: list[str] | None = None
    abort_all: bool = False


class UpdateWeightsArgs(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Replace all weights from a Hugging Face folder of safetensors. kv: keep|recompute for requests in flight."""

    model_path: str
    version: str | None = None
    kv: str = "keep"


class ModelInfoArgs(msgspec.Struct, frozen=True, tag=True):
    pass


class MetricsArgs(msgspec.Struct, frozen=True, tag=True):
    """Reply.result = {"text": Prometheus exposition}."""


Args = PauseArgs | ResumeArgs | PauseStatusArgs | AbortArgs | UpdateWeightsArgs | ModelInfoArgs | MetricsArgs


class FenceAck(msgspec.Struct, frozen=True, tag=True):
    fence_id: int


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
    first output token. stop_reason: the stop token id that ended it, None for EOS and all else.
    cached_tokens: prompt tokens served from the prefix cache, told with the first output.
    message: why, for abort and error. An abort before the first token starts with "Abort before prefill".
    """

    request_id: str
    choice: int
    token_ids: list[int] = []
    logprobs: list[Logprob] = []
    spans: list[Span] = []
    finish_reason: str | None = None
    stop_reason: int | None = None
    cached_tokens: int = 0
    num_preempted: int = 0
    message: str = ""


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """All outputs of one step for one client, in one message."""

    outputs: list[Output]


class Failure(msgspec.Struct, frozen=True):
    """An exception of fastdeploy.errors on the wire."""

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
