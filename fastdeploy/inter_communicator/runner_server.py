"""Serves a runner to an engine in another process."""

from __future__ import annotations

import functools
import os
import queue
import threading
import time
from collections.abc import Callable
from itertools import count
from typing import Any

import msgspec
import zmq

from fastdeploy.core.errors import WrongOrder
from fastdeploy.core.runner import Runner, Staging, WeightMove
from fastdeploy.inter_communicator import runner_messages as m
from fastdeploy.inter_communicator.zmq_transport import new_socket

TICK_S = 0.01  # a tick and its answer take some 0.1 ms
LINGER_MS = 1000


class RunnerServer:
    """Runs the calls of one engine on the runner. ``serve`` runs on the thread that made the server.

    folder: has the sockets. tick_s: seconds between two ticks of a long call; 0 = as often as the runner allows.
    """

    def __init__(self, folder: str, tick_s: float = TICK_S):
        steps, beside = m.endpoints(folder)
        self._context = zmq.Context()
        self._steps = new_socket(self._context, zmq.DEALER, LINGER_MS)
        self._steps.bind(steps)
        self._beside = new_socket(self._context, zmq.ROUTER, LINGER_MS)
        self._beside.bind(beside)
        self._results: queue.SimpleQueue[tuple[bytes, bytes] | None] = queue.SimpleQueue()  # None: the end
        self._results_fd = os.eventfd(0, os.EFD_CLOEXEC)  # readable when there is a result
        self._encoder = msgspec.msgpack.Encoder()
        self._calls = msgspec.msgpack.Decoder(m.StepCall)
        self._answers = msgspec.msgpack.Decoder(m.Answer)
        self._tick = self._encoder.encode(m.Tick())
        self._tick_s, self._next_tick = tick_s, 0.0
        self._numbers = count(1)
        self._stagings: dict[int, Staging] = {}
        self._staged: dict[int, Any] = {}
        self._moves: dict[int, WeightMove] = {}
        self._adapters: dict[int, Any] = {}  # read, and neither committed nor discarded

    def serve(self, load: Callable[[], Runner]) -> None:
        """Load the runner, and serve it until the engine closes it. An error of ``load`` answers the first call."""
        try:
            runner = load()
        except Exception as error:
            self._steps.recv()
            self._steps.send(self._failed(error))
            self._context.destroy(linger=LINGER_MS)
            return
        beside = threading.Thread(target=self._serve_beside, args=(runner,), name="runner-beside", daemon=True)
        beside.start()
        while not isinstance(call := self._calls.decode(self._steps.recv()), m.Close):
            self._next_tick = time.monotonic() + self._tick_s
            self._steps.send(self._answer(functools.partial(self._step_call, runner, call)))
        runner.close()
        self._put(None)
        beside.join()
        self._steps.send(self._answer(lambda: None))
        self._steps.close()
        self._context.term()

    def _step_call(self, runner: Runner, call: m.StepCall) -> Any:
        match call:
            case m.Execute(plan):
                return runner.execute(plan, self._is_given_up)
            case m.Info():
                return runner.info
            case m.HasWeights():
                return runner.has_weights
            case m.WeightFacts():
                return runner.fingerprint, runner.standby_nbytes
            case m.BeginUpdate(partial, in_place, delta):
                number = next(self._numbers)
                self._stagings[number] = runner.begin_update(partial, in_place, delta)
                return number
            case m.Commit(number):
                runner.commit(self._staged.pop(number))
                del self._stagings[number]
            case m.CommitAdapter(adapter, number):
                runner.commit_adapter(adapter, self._adapters.pop(number))
            case m.DiscardAdapter(number):
                runner.discard_adapter(self._adapters.pop(number))
            case m.DropAdapters(adapters):
                runner.drop_adapters(adapters)
            case m.BeginSleep(tags, discard):
                return self._number(runner.begin_sleep(tags, discard))
            case m.Sleep(tags, number):
                return runner.sleep(tags, self._moves.pop(number) if number is not None else None)
            case m.BeginWake(tags):
                return self._number(runner.begin_wake(tags))
            case m.Wake(tags, number):
                runner.wake(tags, self._moves[number] if number is not None else None)
                self._moves.pop(number, None)
            case m.AbandonMove(number):
                self._moves.pop(number).abandon()
        return None

    def _number(self, move: WeightMove | None) -> int | None:
        if move is None:
            return None
        number = next(self._numbers)
        self._moves[number] = move
        return number

    def _is_given_up(self) -> bool:
        now = time.monotonic()
        if now < self._next_tick:
            return False
        self._next_tick = now + self._tick_s
        self._steps.send(self._tick)
        return self._answers.decode(self._steps.recv()).give_up

    # ------------------------------------------------------------------ beside steps

    def _serve_beside(self, runner: Runner) -> None:
        """Run each call on a thread of its own, since a read may hang. This thread alone uses the socket."""
        calls: msgspec.msgpack.Decoder[m.BesideCall] = msgspec.msgpack.Decoder(m.BesideCall)
        poller = zmq.Poller()
        poller.register(self._beside, zmq.POLLIN)
        poller.register(self._results_fd, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._beside in ready:
                client, data = self._beside.recv_multipart()
                args = (runner, client, calls.decode(data))
                threading.Thread(target=self._run_beside, args=args, name="runner-call", daemon=True).start()
            if self._results_fd in ready:
                for _ in range(os.eventfd_read(self._results_fd)):
                    if (result := self._results.get()) is None:
                        self._beside.close()
                        return
                    self._beside.send_multipart(result)

    def _run_beside(self, runner: Runner, client: bytes, call: m.BesideCall) -> None:
        self._put((client, self._answer(lambda: self._beside_call(runner, call))))

    def _beside_call(self, runner: Runner, call: m.BesideCall) -> Any:
        match call:
            case m.AddSource(number, source, checksums, verify_checksum, form):
                return self._stagings[number].add(source, checksums, verify_checksum, form)
            case m.Finish(number):
                staged = self._stagings[number].finish()
                self._staged[number] = staged.weights
                if number not in self._stagings:  # abandoned meanwhile: nothing will commit the result
                    self._staged.pop(number, None)
                return m.StagedWeights(staged.fingerprint, staged.eos_token_ids)
            case m.RefreshStandby():
                runner.refresh_standby()
            case m.Abandon(number):
                self._stagings.pop(number).abandon()
                self._staged.pop(number, None)
            case m.CheckAdapter(config):
                runner.check_adapter(config)
            case m.ReadAdapter(path):
                adapter = runner.begin_adapter()
                info = adapter.read(path)
                number = next(self._numbers)
                self._adapters[number] = adapter.finish()
                return m.StagedAdapter(number, info)
            case m.Checksums():
                return runner.checksums()
            case m.Export(path):
                return runner.export(path)
            case m.RunMove(number):
                if (move := self._moves.get(number)) is None:
                    raise WrongOrder("this move of the weights was given up before it began")
                move.run()
        return None

    def _put(self, result: tuple[bytes, bytes] | None) -> None:
        self._results.put(result)
        os.eventfd_write(self._results_fd, 1)

    def _answer(self, work: Callable[[], Any]) -> bytes:
        try:
            return self._encoder.encode(m.Done(msgspec.Raw(self._encoder.encode(work()))))
        except Exception as error:
            return self._failed(error)

    def _failed(self, error: Exception) -> bytes:
        try:
            return self._encoder.encode(m.Failed.of(error))
        except Exception as unsendable:  # the detail of the error holds what msgpack cannot encode
            return self._encoder.encode(m.Failed.of(RuntimeError(f"{error!r}: {unsendable}")))
