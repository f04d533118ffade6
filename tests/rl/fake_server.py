"""A scripted server for faults that are rare on a real one: aborts at any token, broken connections, refusals,
restarts. Runs in the event loop of the test, with as much of the HTTP contract as RolloutClient needs.

A token is a pure function of (seed, choice, absolute position), as the real sampler's random numbers are.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

from fastdeploy.core.errors import FastDeployError, HoldNotFound, ModelNotFound, UpdateInProgress
from fastdeploy.rl.client import RolloutClient
from rl.fake_weights import FakeStaging, FakeWeights, read_source

EOS = 7
VOCAB = 64
CHECKPOINT = "/w"  # a folder that the server can read
REFUSALS = {"reject": (503, "rejecting_new_requests"), "full": (429, "queue_full")}  # by kind of fault
FINISH_REASONS = {"abort": "abort", "deadline": "abort", "unloaded": "abort", "stop": "stop", "length": "length"}


class Fault(NamedTuple):
    """The end of one generation request after ``tokens`` tokens of each choice: "abort" (by a final chunk), "drop"
    (the connection breaks), "engine_dead" (an error event), "deadline" and "unloaded" (aborts that the caller asked
    for), "reject" (503 at once), "full" (429), "hang" (comments only), "non_finite" (of choice 0 alone).
    prefilled: tokens of the prompt that have logprobs at an end without a token. None: the list is null."""

    kind: str
    tokens: int = 0
    prefilled: int | None = None


def token_at(seed: int, choice: int, position: int) -> int:
    return random.Random(f"{seed}/{choice}/{position}").randrange(VOCAB)


def text_of(tokens: list[int]) -> str:
    return "".join(chr(97 + token % 26) for token in tokens)


def logprob_of(token: int, position: int) -> float:
    return -((token * 31 + position * 17) % 101) / 10


def rows_of(positions: range) -> dict[str, Any]:
    """Return the routing of the tokens at these positions, in the server's own form: two of three layers have four
    experts, and choose one of them."""
    data = bytes(expert % 4 for p in positions for expert in (p, p * p // 3))
    described = {"layers": [0, 2], "num_layers": 3, "num_experts": 4, "start": positions.start, "dtype": "uint8"}
    return {"data": base64.b64encode(data).decode(), "shape": [len(positions), 2, 1], **described}


class FakeServer:
    """A scripted server. faults: one per generation request, in order; then none. refuse: (status, code) answers of
    control calls by path, used in order; the code "drop" breaks the connection before the call, "drop_reply" after it.
    requests: bodies of the generations; their number is the count of cached tokens of the last one. calls: (path, body)
    of the control calls."""

    def __init__(self, *faults: Fault | None):
        self.faults: deque[Fault | None] = deque(faults)
        self.refuse: dict[str, deque[tuple[int, str]]] = {}
        self.requests: list[dict[str, Any]] = []
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.uploads: list[bytes] = []
        self.boot_id, self.weight_epoch, self.version = "boot-1", 0, "0"
        self.holds: dict[str, str] = {}  # mode by hold id; the holds of an adapter are "NAME/ID"
        self.adapters: dict[str, dict[str, Any]] = {}  # by name: the body of the last load, and its adapter_epoch
        self.past_adapter_epoch = 0  # the highest adapter_epoch of an adapter that was unloaded
        self.weights = FakeWeights()
        self.session: dict[str, Any] | None = None  # the body of begin, and "staging"
        self.before_token: Callable[[int], None] = lambda position: None
        self.down = False
        self.streams = 0
        self.ids: set[str] = set()  # ids of accepted requests
        self.tenants: set[str | None] = set()  # X-Tenant of every request
        self.keys: list[tuple[str, str]] = []  # (path, authorization) of every request

    async def __aenter__(self) -> FakeServer:
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self._writers: set[asyncio.StreamWriter] = set()
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        self.drop_all()

    def drop_all(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    def restart(self) -> None:
        """Start another engine, with the start-up weights."""
        self.boot_id, self.weight_epoch, self.version = f"boot-{random.getrandbits(32)}", 0, "0"
        self.weights, self.session = FakeWeights(self.weights.dtype, self.weights.tied), None
        self.adapters.clear()
        self.past_adapter_epoch = 0
        self.drop_all()

    def paths(self) -> list[str]:
        return [path for path, _ in self.calls]

    def bodies(self, path: str) -> list[dict[str, Any]]:
        return [body for called, body in self.calls if called == path]

    # ------------------------------------------------------------------ HTTP

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while head := await reader.readline():
                method, target, _ = head.decode().split()
                headers = {}
                while line := (await reader.readline()).strip():
                    name, _, value = line.decode().partition(":")
                    headers[name.lower()] = value.strip()
                content = await reader.readexactly(int(headers.get("content-length", 0)))
                if self.down:
                    writer.transport.abort()
                    return
                url = urlsplit(target)
                self.tenants.add(headers.get("x-tenant"))
                self.keys.append((url.path, headers.get("authorization", "").removeprefix("Bearer ")))
                body = dict(parse_qsl(url.query))
                if headers.get("content-type") == "application/octet-stream":
                    self.uploads.append(content)
                elif content:
                    body |= json.loads(content)
                if url.path == "/v1/completions":
                    await self._generate(writer, body)
                    return
                await self._control(writer, url.path, body)
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _reply(self, writer: asyncio.StreamWriter, status: int, body: Any, retry_after: float | None = None):
        content = json.dumps(body).encode()
        extra = "" if retry_after is None else f"Retry-After: {retry_after}\r\n"
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(content)}\r\n{extra}\r\n".encode() + content)
        await writer.drain()

    async def _error(self, writer: asyncio.StreamWriter, status: int, code: str, retry_after: float | None = None):
        await self._reply(writer, status, {"error": {"message": code, "code": code, "type": "x"}}, retry_after)

    # ------------------------------------------------------------------ generation

    async def _generate(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        self.requests.append(body)
        fault = self.faults.popleft() if self.faults else None
        if fault is not None and fault.kind in REFUSALS:
            return await self._error(writer, *REFUSALS[fault.kind], retry_after=0.01)
        if refusals := self.refuse.get("/v1/completions"):
            return await self._error(writer, *refusals.popleft())
        if body["prompt"][0] >= 1000:
            return await self._error(writer, 400, "invalid_field")
        if body.get("model") not in (None, *self.adapters):
            return await self._error(writer, 404, "model_not_found")
        if (request_id := body.get("request_id")) in self.ids:
            return await self._error(writer, 409, "duplicate_request_id")
        self.ids |= {request_id} - {None}
        writer.write(b"HTTP/1.1 200 X\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        self.streams += 1
        try:
            for k in range(body.get("n", 1)):
                if not await self._choice(writer, body, k, fault):
                    return None
            if body["stream_options"]["include_usage"]:
                usage = {"prompt_tokens_details": {"cached_tokens": len(self.requests)}}
                await self._write(writer, {"system_fingerprint": self.boot_id, "choices": [], "usage": usage})
            await self._write(writer, b"data: [DONE]\n\n")
        finally:
            self.streams -= 1

    async def _choice(self, writer: asyncio.StreamWriter, body: dict, k: int, fault: Fault | None) -> bool:
        """Stream one choice; return False if the stream ends with it."""
        fault = None if k and fault is not None and fault.kind == "non_finite" else fault
        prompt, resumed = body["prompt"], body.get("resumed_tokens", 0)
        index, seed, budget = body.get("first_choice", 0) + k, body["seed"], body.get("max_tokens", 10_000)
        ids: list[int] = []
        text = text_of(prompt[len(prompt) - resumed :])
        end = None
        while end is None:
            start, stop = len(ids), len(ids) + 1 + (len(prompt) + len(ids)) % 3
            while end is None and len(ids) < stop:
                if fault is not None and len(ids) >= fault.tokens:
                    end = fault.kind
                    break
                self.before_token(resumed + len(ids))
                ids.append(token_at(seed, index, len(prompt) + len(ids)))
                stops = [*body.get("stop_token_ids", ()), *([] if body.get("ignore_eos") else [EOS])]
                if ids[-1] in stops and len(ids) >= body.get("min_tokens", 0):
                    end = "stop"
                elif len(ids) == budget:
                    end = "length"
            if len(ids) > start or end in FINISH_REASONS:
                known = fault.prefilled if fault is not None and not ids else len(prompt)
                await self._write_output(writer, body, k, start, ids, text + text_of(ids[start:]), end, known)
                text = ""
        if end == "non_finite":
            return await self._end_with_error(writer, k, last=body.get("n", 1) == 1)
        if end == "drop":
            writer.transport.abort()
        elif end == "engine_dead":
            await self._write(writer, {"error": {"message": "died", "code": "engine_dead"}})
        while end == "hang":
            await self._write(writer, b": keep-alive\n\n")
            await asyncio.sleep(0.02)
        return end in FINISH_REASONS

    async def _end_with_error(self, writer: asyncio.StreamWriter, k: int, last: bool) -> bool:
        """End a choice with an error as the real server does: with the choice, and again if no choice is left."""
        error = {"error": {"message": "not finite", "code": "non_finite_logits"}}
        choice = {"index": k, "finish_reason": "error", "stop_reason": "non_finite_logits", **error}
        await self._write(writer, {"choices": [choice], "system_fingerprint": self.boot_id}, *([error] if last else []))
        return not last

    async def _write_output(
        self, writer, body, k: int, start: int, ids: list[int], text: str, end: str | None, known: int | None
    ) -> None:
        """Write an event with the tokens of choice ``k`` from ``start`` on. known: prompt tokens that have logprobs."""
        new = ids[start:]
        values = [logprob_of(t, p) for p, t in enumerate(new, len(body["prompt"]) + start)]
        span = {"version": self.version, "weight_epoch": self.weight_epoch, "start": start, "end": len(ids)}
        if (adapter := self.adapters.get(body.get("model", ""))) is not None:
            of_adapter = {name: adapter[name] for name in ("version", "lora_name", "adapter_epoch")}
            span |= of_adapter
        choice: dict[str, Any] = {
            "index": k,
            "text": text,
            "token_ids": new,
            "finish_reason": FINISH_REASONS.get(end),
            "weight_versions": [span] if new else [],
        }
        if body.get("logprobs") is not None:
            top = [{f"token:{t}": v, "token_id:63": -9.0} for t, v in zip(new, values, strict=True)]
            choice["logprobs"] = {"token_logprobs": values, "top_logprobs": top, "tokens": [str(t) for t in new]}
        if end in FINISH_REASONS:
            choice["stop_reason"] = {"deadline": "deadline", "unloaded": "adapter_unloaded"}.get(end)
            choice["num_preempted"] = 1
        if start == 0 and k == 0 and body.get("prompt_logprobs") is not None:
            entries = [None, *({str(t): {"logprob": -0.5}} for t in body["prompt"][1:])]
            choice["prompt_logprobs"] = None if known is None else entries[:known]
        if new and body.get("routed_experts"):
            known_rows = len(body["prompt"]) + start - 1 if start else body.get("routed_experts_start", 0)
            choice["routed_experts"] = rows_of(range(known_rows, len(body["prompt"]) + len(ids) - 1))
        await self._write(writer, {"id": "x", "system_fingerprint": self.boot_id, "choices": [choice]})

    async def _write(self, writer: asyncio.StreamWriter, *events: dict[str, Any] | bytes) -> None:
        for event in events:
            writer.write(event if isinstance(event, bytes) else b"data: " + json.dumps(event).encode() + b"\n\n")
        await writer.drain()

    # ------------------------------------------------------------------ control

    async def _control(self, writer: asyncio.StreamWriter, path: str, body: dict[str, Any]) -> None:
        self.calls.append((path, body))
        route = getattr(self, "_" + path.strip("/").replace("/", "_"), lambda body: {})
        if refusals := self.refuse.get(path):
            status, code = refusals.popleft()
            if code in ("drop", "drop_reply"):
                if code == "drop_reply":
                    route(body)
                writer.transport.abort()
                return
            await self._error(writer, status, code)
            return
        try:
            result = route(body)
        except FastDeployError as error:
            await self._error(writer, error.status, error.code)
            return
        await self._reply(writer, 200, result if path in ("/health", "/ready") else {"result": result})

    def _health(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"status": "ok", "boot_id": self.boot_id}

    def _label(self) -> dict[str, Any]:
        return {"version": self.version, "weight_epoch": self.weight_epoch, "boot_id": self.boot_id}

    def _v1_weights(self, body: dict[str, Any]) -> dict[str, Any]:
        return self._weight_info()

    def _weight_info(self) -> dict[str, Any]:
        return self._label() | {"fingerprint": self.weights.fingerprint, "dtype": self.weights.dtype}

    def _v1_update_weights(self, body: dict[str, Any]) -> dict[str, Any]:
        self.version = body["version"]
        return self._label()

    def _hold(self, body: dict[str, Any]) -> str:
        """Return the key of a hold. Raises ModelNotFound for an adapter that is not known and has no hold."""
        name = body.get("lora_name")
        if name is None:
            return body.get("hold_id", "")
        if name not in self.adapters and not any(hold.startswith(f"{name}/") for hold in self.holds):
            raise ModelNotFound(name)
        return f"{name}/{body.get('hold_id', '')}"

    def _v1_pause(self, body: dict[str, Any]) -> dict[str, Any]:
        self.holds[self._hold(body)] = body["mode"]
        return {"status": "paused", "is_paused": True}

    def _v1_resume(self, body: dict[str, Any]) -> dict[str, Any]:
        known = self.holds.pop(self._hold(body), None)
        return {"status": "running", "released": [body["hold_id"]] if known else []}

    def _v1_renew(self, body: dict[str, Any]) -> dict[str, Any]:
        if self._hold(body) not in self.holds:
            raise HoldNotFound(body["hold_id"])
        return {"hold": {"id": body["hold_id"]}}

    def _v1_is_paused(self, body: dict[str, Any]) -> dict[str, Any]:
        scope = self._hold(body)
        return {"is_paused": any(("/" in hold) == ("/" in scope) and hold.startswith(scope) for hold in self.holds)}

    def _v1_adapters_load(self, body: dict[str, Any]) -> dict[str, Any]:
        name = body["lora_name"]
        adapter_epoch = self.adapters.get(name, {}).get("adapter_epoch", self.past_adapter_epoch) + 1
        self.adapters[name] = {"version": str(adapter_epoch)} | body | {"adapter_epoch": adapter_epoch}
        of_adapter = {key: self.adapters[name][key] for key in ("lora_name", "adapter_epoch", "version")}
        return self._label() | of_adapter | {"status": "loaded"}

    def _v1_adapters_unload(self, body: dict[str, Any]) -> dict[str, Any]:
        if (adapter := self.adapters.pop(body["lora_name"], None)) is None:
            raise ModelNotFound(body["lora_name"])
        self.past_adapter_epoch = max(self.past_adapter_epoch, adapter["adapter_epoch"])
        return {"lora_name": body["lora_name"], "adapter_epoch": adapter["adapter_epoch"]}

    def _v1_reset(self, body: dict[str, Any]) -> dict[str, Any]:
        for lora_name in list(self.adapters):
            self._v1_adapters_unload({"lora_name": lora_name})
        return self._label()

    def _v1_weights_begin(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.session is None:
            self.session = body | {"staging": FakeStaging(self.weights, body)}
        elif self.session["idempotency_key"] != body["idempotency_key"]:
            raise UpdateInProgress("a session is open")
        names = {"ignored_tensors": ["mtp."], "stacks_experts": False}
        return {"session_id": "s-1", **names, **self._weight_info()}

    def _v1_weights_chunk(self, body: dict[str, Any]) -> dict[str, Any]:
        assert self.session is not None and body["session_id"] == "s-1"
        if body.get("model_path") == CHECKPOINT:
            return {"tensors": 1, "nbytes": 10}
        content = read_source(body) if "shared_memory" in body or "model_path" in body else self.uploads[-1]
        return self.session["staging"].add(content, body)

    def _v1_weights_abort(self, body: dict[str, Any]) -> dict[str, Any]:
        assert body["session_id"] == "s-1"
        self.session = None
        return {"aborted": ["s-1"]}

    def _v1_weights_commit(self, body: dict[str, Any]) -> dict[str, Any]:
        assert self.session is not None
        session, self.session = self.session, None
        session["staging"].commit(body.get("fingerprint"))
        self.weight_epoch += 1
        self.version = str(session.get("version", self.weight_epoch))
        return self._weight_info() | {"status": "committed"}


@asynccontextmanager
async def fake_site(*faults: Fault | None, **options: Any) -> AsyncIterator[tuple[FakeServer, RolloutClient]]:
    """Start a scripted server, and a client of it with ``options``."""
    async with FakeServer(*faults) as server, RolloutClient(server.url, **options) as client:
        yield server, client
