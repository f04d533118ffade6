"""A server that pauses as it should, or with one chosen defect: what the acceptance script is tested against.

Speaks the native and the vLLM control routes over raw asyncio. Tokens depend on the prompt and the position only.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

BLOCKS = 1000
STEP_S = 0.002
REFUSAL = {"error": {"message": "paused", "type": "rejecting_new_requests", "code": 503}}


@dataclass
class Request:
    prompt: list[int]
    max_tokens: int
    made: int = 0
    chunks: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)

    def token(self, at: int) -> int:
        return (sum(self.prompt) * 31 + at * at * 7) % 251

    def put(self, ids: list[int], reason: str | None) -> None:
        choice = {"index": 0, "text": "", "token_ids": ids, "finish_reason": reason}
        self.chunks.put_nowait(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")

    def end(self, reason: str, *, twice: bool = False) -> None:
        for _ in range(2 if twice else 1):
            self.put([], reason)
        self.chunks.put_nowait(b"data: [DONE]\n\n")
        self.chunks.put_nowait(None)


class FakeServer:
    """defect: None, or leaky_gap, escape, double_final, double_end, early_finish, accepts, lost_blocks, lost_token."""

    def __init__(self, max_num_seqs: int = 3, defect: str | None = None) -> None:
        self.max_num_seqs, self.defect = max_num_seqs, defect
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.mode: str | None = None
        self.is_paused = self.rejecting = False
        self.url = ""
        self._drained = asyncio.Event()
        self._pauses = 0

    async def __aenter__(self) -> FakeServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=2048)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self._loop = asyncio.create_task(self._steps())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._loop.cancel()
        self._server.close()

    # ------------------------------------------------------------------ engine

    async def _steps(self) -> None:
        while True:
            await asyncio.sleep(STEP_S)
            while self.mode is None and self.waiting and len(self.running) < self.max_num_seqs:
                self.running.append(self.waiting.pop(0))
            if self.mode == "keep":
                if self.defect == "leaky_gap":
                    self._step(self.running[:1])
                continue
            self._step(self.running)
            if self.mode == "wait" and not self.running:
                self._drained.set()

    def _step(self, requests: list[Request]) -> None:
        for request in list(requests):
            request.put([request.token(request.made)], None)
            request.made += 1
            early = self.defect == "early_finish" and request.made == 5
            if request.made >= request.max_tokens or early:
                self.running.remove(request)
                request.end("length", twice=self.defect == "double_end")

    async def pause(self, mode: str, admission: str | None) -> None:
        self._pauses += 1
        self.mode = mode
        self.rejecting = (admission or ("reject" if mode == "abort" else "hold")) == "reject"
        if mode == "abort":
            if self.defect == "escape" and self.waiting:
                self.waiting[0].put([1], None)
            for i, request in enumerate([*self.running, *self.waiting]):
                request.end("abort", twice=self.defect == "double_final" and i == 0)
            self.running, self.waiting = [], []
        elif mode == "wait":
            self._drained.clear()
            await self._drained.wait()
        self.is_paused = True

    def resume(self) -> None:
        if self.mode == "keep" and self.defect == "lost_token":
            self.running[0].made += 1
        self.mode, self.is_paused, self.rejecting = None, False, False

    # ------------------------------------------------------------------ HTTP

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            method, target, _ = (await reader.readline()).decode().split(" ")
            length = 0
            while (line := (await reader.readline()).strip()) != b"":
                name, _, value = line.decode().partition(":")
                length = int(value) if name.lower() == "content-length" else length
            body = json.loads(await reader.readexactly(length)) if length else {}
            await self._route(f"{method} {urlsplit(target).path}", parse_qs(urlsplit(target).query), body, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _route(self, route: str, query: dict, body: dict, writer: asyncio.StreamWriter) -> None:
        native = route.split()[1].startswith("/v1/")
        result: dict[str, Any] = {}
        match route:
            case "POST /v1/completions":
                await self._completion(body, writer)
                return
            case "GET /metrics":
                self._reply(writer, self._metrics())
                return
            case "GET /v1/models":
                self._reply(writer, json.dumps({"data": [{"id": "fake", "max_model_len": 4096}]}))
                return
            case "GET /server_info":
                self._reply(writer, json.dumps({"max_num_seqs": self.max_num_seqs}))
                return
            case "POST /v1/pause" | "POST /pause":
                mode = body.get("mode") or query["mode"][0]
                await self.pause(mode, body.get("admission") if native else "hold")
            case "POST /v1/resume" | "POST /resume":
                self.resume()
            case "GET /v1/is_paused" | "GET /is_paused":
                result = {"is_paused": self.is_paused, "rejecting_new_requests": self.rejecting}
            case _:
                raise AssertionError(f"the acceptance script called {route}")
        self._reply(writer, json.dumps({"status": "success", "result": result} if native else result))

    def _reply(self, writer: asyncio.StreamWriter, text: str, status: str = "200 OK", headers: str = "") -> None:
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(text)}\r\n{headers}\r\n{text}".encode())

    def _metrics(self) -> str:
        blocks = BLOCKS - len(self.running) - (self._pauses if self.defect == "lost_blocks" else 0)
        lines = ["# TYPE fastdeploy:num_requests_running gauge"]
        for prefix in ("fastdeploy", "vllm"):
            lines.append(f'{prefix}:num_requests_running{{engine="0"}} {len(self.running)}.0')
            lines.append(f"{prefix}:num_requests_waiting {len(self.waiting)}")
        lines.append(f"fastdeploy:available_gpu_block_num {blocks}")
        return "\n".join(lines) + "\n"

    async def _completion(self, body: dict, writer: asyncio.StreamWriter) -> None:
        if self.rejecting and self.defect != "accepts":
            self._reply(writer, json.dumps(REFUSAL), "503 Service Unavailable", "Retry-After: 1\r\n")
            return
        request = Request(body["prompt"], body["max_tokens"])
        self.waiting.append(request)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while (chunk := await request.chunks.get()) is not None:
            writer.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
            await writer.drain()
        writer.write(b"0\r\n\r\n")
