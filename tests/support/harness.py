"""An engine on a fake runner, with a transport made of lists and a clock that stands. Tests run the loop by rounds,
advance ``now`` (seconds), and see every message. ``running_pids``: the processes of clients that live and are not
stopped, as the engine is told when a client is mute."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

from fastdeploy.core.config import EngineConfig
from fastdeploy.core.outputs import Logprob, Span
from fastdeploy.core.request_fields import AddRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.core.served_weights import ServedWeights
from fastdeploy.core.weight_source import FolderSource
from fastdeploy.engine.common_engine import CommonEngine
from fastdeploy.inter_communicator import messages as m
from support.fake_runner import FakeRunner, nothing
from support.runner_thread import serve_in_thread


class ListTransport:
    """``inbox`` holds what the engine will receive; ``sent[client]`` what it sent. A client in ``gone`` is dead; one
    in ``mute`` receives, but acknowledges no fence. ``acked[client]``: how much of sent it has acknowledged."""

    def __init__(self) -> None:
        self.inbox: deque[tuple[str, m.ToEngine]] = deque()
        self.sent: dict[str, list[m.ToClient]] = {}
        self.gone: set[str] = set()
        self.mute: set[str] = set()
        self.acked: dict[str, int] = {}

    def recv(self, timeout_s: float | None) -> list[tuple[str, m.ToEngine]]:
        batch = list(self.inbox)
        self.inbox.clear()
        return batch

    def send(self, client: str, message: m.ToClient) -> bool:
        if client in self.gone:
            return False
        self.sent.setdefault(client, []).append(message)
        if isinstance(message, m.Fence) and client not in self.mute:
            self.inbox.append((client, m.FenceAck(message.fence_id)))
            self.acked[client] = len(self.sent[client])
        return True

    def wake(self) -> None:
        pass

    def close(self) -> None:
        pass


class Stream:
    """What a client has seen of one choice."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[Logprob] = []
        self.spans: list[Span] = []
        self.finals: list[m.Output] = []

    @property
    def reason(self) -> str | None:
        return self.finals[0].finish_reason if self.finals else None


class Harness:
    """runner_over_zmq: the engine has the runner at the other end of a socket. ``runner`` is the runner itself."""

    runner_over_zmq = False

    def __init__(self, runner: FakeRunner | None = None, **config):
        self.runner = runner or FakeRunner()
        self.transport = ListTransport()
        self.close = nothing  # ends the runner's thread, where the runner is remote
        if Harness.runner_over_zmq:
            served, self.close = serve_in_thread(self.runner)
        else:
            served = self.runner
        config = {"model": "fake", "max_num_seqs": 4, "max_num_batched_tokens": 32, "model_roots": ("/",), **config}
        self.now = 1000.0
        self.running_pids: set[int] = set()
        self.engine = CommonEngine(
            EngineConfig(**config),
            served,
            self.transport,
            boot_id="boot",
            clock=lambda: self.now,
            runs=lambda pid: pid in self.running_pids,
        )
        self._calls = count(1)
        self.connect("a")

    # ---------------------------------------------------------------- a client's side

    def connect(self, client: str, pid: int = 1) -> None:
        self.send(m.Hello(pid), client)
        self.engine.run_once(block=False)

    def send(self, message: m.ToEngine, client: str = "a") -> None:
        self.transport.inbox.append((client, message))

    def add(self, request_id: str, prompt: list[int], client: str = "a", **fields) -> None:
        """Fields of AddRequest and of SamplingParams alike."""
        own = {"n", "priority", "cache_salt", "group", "resumed_tokens", "first_choice", "scope"}
        of_request = {k: fields.pop(k) for k in own & fields.keys()}
        params = SamplingParams(**{"max_tokens": 8, "ignore_eos": True, **fields})
        self.send(AddRequest(request_id, prompt, params, **of_request), client)

    def call(self, args: m.Args, client: str = "a") -> int:
        call_id = next(self._calls)
        self.send(m.Call(call_id, args), client)
        return call_id

    def ask(self, args: m.Args, client: str = "a", rounds: int = 1) -> m.Reply:
        """Call and run the loop until the answer is there (it must be, within ``rounds``)."""
        call_id = self.call(args, client)
        for _ in range(rounds):
            self.run_rounds()
            reply = self.reply(call_id, client)
            if reply is not None:
                return reply
        raise AssertionError(f"no reply to {args} within {rounds} rounds")

    def update(self, folder: str, rounds: int = 3, **args) -> m.Reply:
        return self.ask(m.UpdateWeightsArgs(FolderSource(str(folder)), **args), rounds=rounds)

    def pause(self, rounds: int = 50, **args) -> m.Reply:
        return self.ask(m.PauseArgs(**args), rounds=rounds)

    def resume(self, hold_id: str | None = None) -> m.Reply:
        return self.ask(m.ResumeArgs(hold_id=hold_id))

    def status(self) -> dict:
        return self.engine.pause.status()

    @property
    def served(self) -> ServedWeights:
        """The weights that serve the whole engine."""
        return self.engine.scopes.whole.served

    # ---------------------------------------------------------------- the loop

    def run_rounds(self, times: int = 1) -> None:
        for _ in range(times):
            with self._staging_held_up():
                self.engine.run_once(block=False)
            self.join_staging()
            self.engine.lifecycle.check_integrity()

    @contextmanager
    def _staging_held_up(self) -> Iterator[None]:
        """Staging runs on a thread: it ends between two rounds, never within one, so that each run is the same."""
        free = self.runner.may_stage.is_set()
        self.runner.may_stage.clear()
        yield
        if free:
            self.runner.may_stage.set()

    def join_staging(self) -> None:
        """Wait for it, unless a test holds it up."""
        if self.runner.may_stage.is_set():
            for thread in threading.enumerate():
                if thread.name == "stage-weights":
                    thread.join()

    def run_out(self, limit: int = 2000) -> None:
        """Run the loop until nothing is left in the engine."""
        for _ in range(limit):
            self.run_rounds()
            if not len(self.engine.lifecycle.requests):
                return
        raise AssertionError("the engine does not run dry")

    # ---------------------------------------------------------------- what was seen

    def reply(self, call_id: int, client: str = "a") -> m.Reply | None:
        found = [x for x in self.transport.sent[client] if isinstance(x, m.Reply) and x.call_id == call_id]
        assert len(found) <= 1, "a call was answered twice"
        return found[0] if found else None

    def rejected(self, request_id: str, client: str = "a") -> m.Failure | None:
        found = [x for x in self.transport.sent[client] if isinstance(x, m.Rejected) and x.request_id == request_id]
        return found[0].failure if found else None

    def stream(self, request_id: str, choice: int = 0, client: str = "a") -> Stream:
        stream = Stream()
        for message in self.transport.sent.get(client, []):
            for output in message.outputs if isinstance(message, m.Outputs) else ():
                if (output.request_id, output.choice) != (request_id, choice):
                    continue
                assert not stream.finals, f"{request_id}: an output after the final one"
                stream.tokens += output.token_ids
                stream.logprobs += output.logprobs
                stream.spans += output.spans
                if output.finish_reason is not None:
                    stream.finals.append(output)
        return stream
