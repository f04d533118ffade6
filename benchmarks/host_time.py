"""Measure a step's host time, without the model: ``python -m benchmarks.host_time [--running 256 --waiting 5000]``.

The real loop, scheduler, model runner and unix socket run with a model that returns at once. Another process receives
the outputs. A part's time excludes the parts that it calls, so the rows add up to the step.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.synchronize import Event
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np
import zmq

from benchmarks.lib.report import plain_table
from fastdeploy.core.config import EngineConfig
from fastdeploy.core.process import collect_rarely
from fastdeploy.core.request import Request
from fastdeploy.core.request_fields import AddRequest
from fastdeploy.core.roofline import Machine, StepRoofline
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.embedded import MODEL_DIR
from fastdeploy.engine.common_engine import CommonEngine
from fastdeploy.inter_communicator import messages as m
from fastdeploy.inter_communicator.zmq_transport import ZmqRouterTransport
from fastdeploy.model_executor import paddle
from fastdeploy.model_executor.models.interface import Model
from fastdeploy.model_executor.ops.interface import Ops
from fastdeploy.model_executor.ops.vocabulary import Cutoff, LogprobBatch, SampleBatch, TokenLogprobs, TokenMasks
from fastdeploy.scheduler.ngram_drafter import NgramDrafter
from fastdeploy.worker.model_runner import ModelRunner
from fastdeploy.worker.sampler import Sampler

SPAWN = multiprocessing.get_context("spawn")
CLIENT = "client"
MODEL = "model and ops (instant)"
WARMUP = 20
SLACK = 256  # greatest number of tokens that one sequence of the batch is ahead of another


class InstantModel:
    """A model that takes no time and gives every sequence the same token."""

    def __init__(self, vocab_size: int):
        self._logits = paddle.zeros([1, vocab_size])

    def forward(self, *_: Any) -> paddle.Tensor:
        return self._logits

    logits = forward


class InstantOps:
    def sample(
        self, logits: paddle.Tensor, batch: SampleBatch, cutoff: Cutoff | None = None, masks: TokenMasks | None = None
    ) -> np.ndarray:
        return np.full(len(batch.temperature), 7, np.int32)

    def logprobs(self, logits: paddle.Tensor, batch: LogprobBatch) -> TokenLogprobs:
        rows, top = len(batch.token_ids), batch.top
        values, ids = np.zeros((rows, top), np.float32), np.zeros((rows, top), np.int32)
        return TokenLogprobs(values.sum(1), values, ids, np.ones(rows, np.int32), np.empty(0, np.float32))


class UnusedDrafts:
    """A drafter that takes its full time, and whose drafts are not used: each step has one token of each sequence."""

    def __init__(self) -> None:
        self._drafter = NgramDrafter(lambda rows, sampled, keys: 1.0)
        self.ended = self._drafter.ended

    def draft(self, requests: Sequence[Request], other_rows: int, most: int) -> Mapping[Request, list[int]]:
        self._drafter.draft(requests, other_rows, most)
        return {}


class Stopwatch:
    """Seconds per part since the last ``lap``. If parts are nested, time counts for the inner one."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._inner = [0.0]

    def watch(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                whole = time.perf_counter() - started
                self._seconds[part] += whole - self._inner.pop()
                self._inner[-1] += whole

        return watched

    def watch_method(self, part: str, owner: Any, name: str) -> None:
        setattr(owner, name, self.watch(part, getattr(owner, name)))

    def lap(self) -> dict[str, float]:
        seconds, self._seconds = self._seconds, defaultdict(float)
        return seconds


class Row(NamedTuple):
    """Time of one part, in milliseconds per step."""

    part: str
    median: float
    p99: float


def take_outputs(endpoint: str, connected: Event) -> None:
    """Receive the outputs of the engine and drop them. The main of a process."""
    socket = zmq.Context().socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, CLIENT.encode())
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.connect(endpoint)
    socket.send(msgspec.msgpack.encode(m.Hello(os.getpid())))
    connected.set()
    while True:
        socket.recv()


def make_runner(num_blocks: int) -> ModelRunner:
    runner = ModelRunner(str(MODEL_DIR), num_blocks=num_blocks)
    runner.model = cast(Model, InstantModel(runner.info.vocab_size))
    runner.ops = cast(Ops, InstantOps())
    runner._sampler = Sampler(runner.ops)
    return runner


def make_engine(running: int, waiting: int, context: int, steps: int, endpoint: str) -> CommonEngine:
    num_blocks = running * -(-(context + steps + SLACK) // 16) + 4096 // 16
    config = EngineConfig(
        model="",
        max_num_seqs=running,
        max_waiting=running + waiting,
        max_num_batched_tokens=running * context,
        max_step_ms=1e6,
    )
    engine = CommonEngine(config, make_runner(num_blocks), ZmqRouterTransport(endpoint), drafter=UnusedDrafts())
    engine.scheduler.pacer.decode_steps.roofline = StepRoofline(Machine(4e10, 1e12), 10**6, 2 * 10**6, 1024)
    return engine


def watch_runner(clock: Stopwatch, runner: ModelRunner) -> None:
    clock.watch_method("make batch", runner._sequences, "batch")
    for owner, name in (
        (runner.model, "forward"),
        (runner.model, "logits"),
        (runner.ops, "sample"),
        (runner.ops, "logprobs"),
    ):
        clock.watch_method(MODEL, owner, name)
    clock.watch_method("sampling", runner._sampler, "sample")


def watch(engine: CommonEngine) -> Stopwatch:
    clock = Stopwatch()
    runner = cast(ModelRunner, engine._runner)
    clock.watch_method("messages in", engine._transport, "recv")
    clock.watch_method("plan", engine.scheduler, "plan")
    clock.watch_method("drafts", engine.scheduler.speculation, "drafts")
    clock.watch_method("model runner", runner, "execute")
    watch_runner(clock, runner)
    clock.watch_method("apply", engine.scheduler, "apply")
    clock.watch_method("metrics", engine.metrics, "observe_tokens")
    clock.watch_method("outputs", engine.delivery, "send_outputs")
    clock.watch_method("encode and send", engine._transport, "send")
    clock.watch_method("the rest of the loop", engine, "run_once")
    return clock


def measure(args: argparse.Namespace, waiting: int) -> list[Row]:
    """Measure ``steps`` steps of an engine with ``running`` sequences in the batch and ``waiting`` in the queue."""
    with tempfile.TemporaryDirectory() as folder:
        endpoint = f"ipc://{folder}/engine"
        engine = make_engine(args.running, waiting, args.context, args.steps, endpoint)
        connected = SPAWN.Event()
        other = SPAWN.Process(target=take_outputs, args=(endpoint, connected), daemon=True)
        other.start()
        connected.wait()
        try:
            while not engine.delivery.clients:
                engine.run_once(block=True)
            submit(engine, args, args.running + waiting)
            running = engine.scheduler.running
            while len(running) < args.running or any(not r.num_output_tokens for r in running):
                engine.run_once(block=False)
            collect_rarely()
            clock = watch(engine)
            laps = []
            for step in range(args.steps + WARMUP):
                engine.run_once(block=False)
                lap = clock.lap()
                if step >= WARMUP:
                    laps.append(lap)
            assert len(running) == args.running and len(engine.scheduler.waiting) == waiting
        finally:
            other.kill()
            other.join()
            engine._transport.close()
            engine._runner.close()
    return rows_of(laps)


def submit(engine: CommonEngine, args: argparse.Namespace, count: int) -> None:
    draw = np.random.default_rng(0)
    sampling = SamplingParams(max_tokens=args.steps + SLACK, ignore_eos=True, temperature=1.0)
    for i in range(count):
        # With prompts of one length, all sequences would need a new KV block in the same step.
        prompt = draw.integers(0, engine.info.vocab_size, args.context - i % 16).tolist()
        engine._handle(CLIENT, AddRequest(f"request-{i}", prompt, sampling))


def rows_of(laps: list[dict[str, float]]) -> list[Row]:
    def row(part: str, seconds: list[float]) -> Row:
        return Row(part, float(np.median(seconds)) * 1e3, float(np.percentile(seconds, 99)) * 1e3)

    parts = list(dict.fromkeys(part for lap in laps for part in lap))
    rows = [row(part, [lap.get(part, 0.0) for lap in laps]) for part in parts]
    whole = row("host time of a step", [sum(s for part, s in lap.items() if part != MODEL) for lap in laps])
    return [*sorted((r for r in rows if r.part != MODEL), key=lambda r: -r.median), whole]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--running", type=int, default=256, help="sequences in the batch (%(default)s)")
    parser.add_argument("--waiting", type=int, default=5000, help="of the second column (%(default)s)")
    parser.add_argument("--context", type=int, default=512, help="tokens of each prompt (%(default)s)")
    parser.add_argument("--steps", type=int, default=500, help="that are measured (%(default)s)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    tables = {str(waiting): measure(args, waiting) for waiting in dict.fromkeys((0, args.waiting))}
    if args.json:
        print(json.dumps({name: [row._asdict() for row in rows] for name, rows in tables.items()}))
        return
    print(f"{args.running} running sequences, ms a step: median (99th percentile)")
    header = ["", *(f"{name} waiting" for name in tables)]
    cells = [{row.part: f"{row.median:.3f} ({row.p99:.3f})" for row in rows} for rows in tables.values()]
    print(plain_table(header, [[part, *(each[part] for each in cells)] for part in cells[0]]))


if __name__ == "__main__":
    main()
