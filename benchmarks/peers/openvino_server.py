"""OpenVINO GenAI's ContinuousBatchingPipeline behind POST /v1/completions, for comparisons. Run by openvino.sh.

The HTTP layer is ours and minimal: one thread, no framework, ids in and ids out, no text. Sockets are served between
steps: a step holds the interpreter lock, so a second thread would only wait.
Needs openvino-genai, numpy and uvloop; nothing of this repository.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
from typing import Any, cast

import numpy as np
import openvino
import openvino_genai
import uvloop

END_OF_TEXT = 257  # any id of the vocabulary: requests ignore it
SOCKET_TURNS = 4  # rounds of the event loop between two steps: accept, read, start, write


class Engine:
    """The pipeline and its requests. All calls are on the event loop's thread."""

    def __init__(self, args: argparse.Namespace) -> None:
        config = openvino_genai.SchedulerConfig()
        config.max_num_batched_tokens = args.max_num_batched_tokens
        config.max_num_seqs = args.max_num_seqs
        config.cache_size = args.kv_gb
        config.enable_prefix_caching = True
        config.dynamic_split_fuse = True
        properties = {
            "INFERENCE_PRECISION_HINT": args.precision,
            "KV_CACHE_PRECISION": args.kv_precision or args.precision,
            "INFERENCE_NUM_THREADS": args.threads,
        }
        self._pipe = openvino_genai.ContinuousBatchingPipeline(args.model, config, "CPU", properties)
        self._live: dict[Completion, Any] = {}
        self._count = 0
        self._work = asyncio.Event()

    def add(self, completion: Completion, body: dict[str, Any]) -> None:
        """Start a request. Raises KeyError, TypeError, ValueError or RuntimeError if the pipeline refuses the body."""
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = body["max_tokens"]
        config.ignore_eos = body.get("ignore_eos", False)
        config.eos_token_id = END_OF_TEXT
        temperature = body.get("temperature", 1.0)
        config.do_sample = temperature > 0
        if config.do_sample:
            config.temperature = float(temperature)
        config.num_return_sequences = body.get("n", 1)
        config.rng_seed = self._count  # otherwise requests with the same prompt get the same tokens
        prompt = openvino.Tensor(np.array([body["prompt"]], np.int64))
        self._live[completion] = self._pipe.add_request(self._count, prompt, config)
        self._count += 1
        self._work.set()

    def cancel(self, completion: Completion) -> None:
        if (handle := self._live.pop(completion, None)) is not None:
            handle.cancel()

    async def run(self) -> None:
        while True:
            if not self._pipe.has_non_finished_requests():
                self._work.clear()
                await self._work.wait()
            for _ in range(SOCKET_TURNS):
                await asyncio.sleep(0)
            self._pipe.step()
            for completion, handle in list(self._live.items()):
                while handle.can_read() and not completion.ended:
                    completion.add_outputs(handle.read())
                if completion.ended:
                    del self._live[completion]


class Completion(asyncio.Protocol):
    """One connection with one request."""

    def __init__(self, engine: Engine, model: str) -> None:
        self.ended = False
        self._engine, self._model = engine, model
        self._buffer = b""
        self._stream = False
        self._choices: dict[int, tuple[int, list[int]]] = {}  # by sequence id: (index, tokens)
        self._wanted = 0
        self._per_choice = 0
        self._prompt_tokens = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._engine.cancel(self)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, found, body = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines)
        if len(body) < int(headers.get("content-length", 0)):
            return
        method, path, _ = first.split(" ", 2)
        match (method, path):
            case "GET", "/health":
                self._reply(200, {})
            case "GET", "/v1/models":
                self._reply(200, {"object": "list", "data": [{"id": self._model, "object": "model"}]})
            case "POST", "/v1/completions":
                self._complete(json.loads(body))
            case _:
                self._reply(404, {"error": {"message": f"no route {method} {path}"}})

    def _complete(self, body: dict[str, Any]) -> None:
        try:
            self._stream = body.get("stream", False)
            self._wanted, self._per_choice = body.get("n", 1), body["max_tokens"]
            self._prompt_tokens = len(body["prompt"])
            self._engine.add(self, body)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            self._reply(400, {"error": {"message": f"{type(error).__name__}: {error}"}})
            return
        if self._stream:
            self._transport.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")

    def add_outputs(self, outputs: dict[int, Any]) -> None:
        """Send new tokens, by sequence id. The pipeline returns tokens after each step for a request of one choice, and
        at the end for a request of several."""
        chunks = []
        for sequence, output in outputs.items():
            index, tokens = self._choices.setdefault(sequence, (len(self._choices), []))
            tokens += output.generated_ids
            done = output.finish_reason != openvino_genai.GenerationFinishReason.NONE
            reason = ("length" if len(tokens) >= self._per_choice else "stop") if done else None
            choice = {"index": index, "text": "", "token_ids": output.generated_ids, "finish_reason": reason}
            chunks.append(choice)
            self._wanted -= done
        self.ended = self._wanted == 0
        if self._stream:
            self._transport.write(b"data: " + json.dumps({"choices": chunks}).encode() + b"\n\n")
            if self.ended:
                self._transport.write(b"data: [DONE]\n\n")
                self._transport.close()
        elif self.ended:
            reply = [
                {"index": index, "text": "", "token_ids": tokens, "finish_reason": "length"}
                for index, tokens in self._choices.values()
            ]
            made = sum(len(tokens) for _, tokens in self._choices.values())
            usage = {"prompt_tokens": self._prompt_tokens, "completion_tokens": made}
            self._reply(200, {"object": "text_completion", "choices": reply, "usage": usage})

    def _reply(self, status: int, content: dict[str, Any]) -> None:
        payload = json.dumps(content).encode()
        head = f"HTTP/1.1 {status} -\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}\r\n"
        self._transport.write(head.encode() + b"Connection: close\r\n\r\n" + payload)
        self._transport.close()


async def serve(args: argparse.Namespace) -> None:
    engine = Engine(args)
    server = await asyncio.get_running_loop().create_server(
        lambda: Completion(engine, args.served_model_name), "127.0.0.1", args.port
    )
    async with server:
        await engine.run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a folder with OpenVINO IR")
    parser.add_argument("--served-model-name", default="q05")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--max-num-batched-tokens", type=int, default=1024)
    parser.add_argument("--kv-gb", type=int, default=2)
    parser.add_argument("--precision", choices=("bf16", "f32"), default="bf16", help="f32 on a CPU without bf16")
    parser.add_argument("--kv-precision", help="default: --precision; the plug-in's own is u8")
    args = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(serve(args))


if __name__ == "__main__":
    main()
