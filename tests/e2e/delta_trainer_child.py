"""A trainer in a process of its own, which may be killed: publishes small changes again and again, and in between does
what a server must refuse. A new process goes on from the state that the last one has written.

    python delta_trainer_child.py URL FOLDER DELTAS

Ends after ``DELTAS`` deltas. Prints one line for each thing that has happened, which starts with its name.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from e2e.server import until
from fastdeploy.core import delta_format
from fastdeploy.core.errors import FastDeployError
from fastdeploy.core.fingerprint import fingerprint, over_all
from fastdeploy.core.serving_dtype import in_dtype
from fastdeploy.rl.state_encoding import HostTensor, pieces
from fastdeploy.rl.sync_client import SyncRolloutClient
from rl.embedded_weights import embedded_weights

CHECK_EVERY = 10  # steps
State = dict[str, np.ndarray]


class Interrupted(Exception):
    """A process of the server died meanwhile."""


def say(*words: object) -> None:
    print(*words, flush=True)


def bits_of(state: State) -> State:
    """Return the state as a server of bfloat16 has it."""
    return {name: in_dtype(value, "bfloat16") for name, value in state.items()}


def over_all_of(bits: State) -> str:
    return over_all({name: fingerprint(value) for name, value in bits.items()})


def changed(state: State, rng: np.random.Generator) -> State:
    """Return the state with 1 to 3 % other values."""
    share, new = rng.uniform(0.01, 0.03), {}
    for name, value in state.items():
        new[name] = value.copy()
        index = rng.integers(0, value.size, int(np.ceil(share * value.size)))
        new[name].reshape(-1)[index] *= rng.choice(np.array([0.95, 1.05, -1.0], np.float32), index.size)
    return new


class Checkpoint:
    """The state of the trainer and the number of its step, in a file that is replaced as a whole."""

    def __init__(self, folder: Path):
        self._path = folder / "state.npz"

    def read(self) -> tuple[State, int]:
        if not self._path.exists():
            return embedded_weights(), 0
        with np.load(self._path) as file:
            state = {name: file[name] for name in file.files}
        return state, int(state.pop("step"))

    def write(self, state: State, step: int) -> None:
        new = self._path.with_name("new.npz")
        np.savez(new, step=np.array(step), **state)
        os.replace(new, self._path)


class Trainer:
    """See the module. deltas: published by this process."""

    def __init__(self, url: str, folder: Path, client: SyncRolloutClient):
        self._folder, self._client = folder, client
        self._http = httpx.Client(base_url=url, timeout=60, limits=httpx.Limits(max_keepalive_connections=0))
        self._checkpoint = Checkpoint(folder)
        self._state, self._step = self._checkpoint.read()
        self._boot_id = ""
        self._older = "0" * 64  # fingerprint of a state that was published before
        self.deltas = 0

    def step(self) -> None:
        """Publish the next state, and let one event happen."""
        self._rng = np.random.default_rng(self._step)
        self._older = over_all_of(bits_of(self._state))
        self._advance()
        self._publish()
        events = [self._wrong_base, self._refused_part, self._refused_commit, self._abort, self._sleep, self._by_hand]
        event: Callable[[], None] = self._rng.choice(np.array([*events, None, None, None, None], object))
        try:
            if event is not None:
                event()
            self._check(checksums=self._step % CHECK_EVERY == 0)
        except Interrupted as why:
            say("interrupted", why)
            self.recover()

    def recover(self) -> None:
        """Wait until the server answers, end the session of a dead trainer, and wake the server."""

        def is_idle() -> bool:
            try:
                self._client.reset()
                if self._http.get("/v1/weights").json()["result"]["asleep"]:
                    self._client.wake()
            except (FastDeployError, httpx.TransportError, KeyError):
                return False
            return True

        until(is_idle, 120, "the server answers")

    def _advance(self) -> None:
        self._state, self._step = changed(self._state, self._rng), self._step + 1
        self._checkpoint.write(self._state, self._step)

    def _publish(self) -> None:
        options = {"via": str(self._rng.choice(["upload", "folder"])), "folder": str(self._folder)}
        options["compression"] = str(self._rng.choice(["none", "zstd"]))
        while True:
            try:
                done = self._client.publish(self._state, self._step, **options)
            except FastDeployError as error:
                say("failed", error.code)
                self.recover()
                continue
            self._boot_id = done.report["boot_id"]
            self.deltas += done.is_delta
            say("delta" if done.is_delta else "whole", done.version)
            return

    # ---------------------------------------------------------------- what happens between two publications

    def _wrong_base(self) -> None:
        right = over_all_of(bits_of(self._state))
        for base in (
            {"base_fingerprint": self._older},
            {"base_fingerprint": right, "base_version": "nobody's"},
            {"base_fingerprint": right, "base_epoch": 1_000_000},
        ):
            self._refused("base_mismatch", "begin", {**base, "fingerprint": right})
        say("wrong-base")

    def _refused_part(self) -> None:
        """Send a part that is cut off, or has a wrong bit, after a good one."""
        new = changed(self._state, self._rng)
        session = self._begin(new)
        first, *rest = self._parts(new, 2)
        self._chunk(session, *first)
        content, form = rest[0]
        broken = bytearray(content)
        if self._rng.integers(2):
            kind = "truncated"
            del broken[int(self._rng.integers(0, len(broken))) :]
        else:
            kind = "flipped"
            start = 8 + int.from_bytes(content[:8], "little")
            broken[int(self._rng.integers(start, len(broken)))] ^= 1 << int(self._rng.integers(8))
        self._refused("weight_update_refused", f"chunk?{self._query(session, form)}", bytes(broken))
        self._refused("session_not_found", "commit", {"session_id": session})
        say(kind)

    def _refused_commit(self) -> None:
        """Send a delta with one wrong bit that only the fingerprint over all tells."""
        new = changed(self._state, self._rng)
        session = self._begin(new)
        new = {name: value.copy() for name, value in new.items()}
        name = str(self._rng.choice(list(new)))
        new[name].reshape(-1)[0] *= -1
        for content, form in self._parts(new, 2):
            self._chunk(session, content, form | {"fingerprints": {}})
        self._refused("weight_update_refused", "commit", {"session_id": session})
        say("wrong-result")

    def _abort(self) -> None:
        new = changed(self._state, self._rng)
        session = self._begin(new)
        for content, form in self._parts(new, 3)[: int(self._rng.integers(0, 4))]:
            self._chunk(session, content, form)
        assert self._call("abort", {"session_id": session}).json()["result"]["aborted"] == [session]
        say("aborted")

    def _sleep(self) -> None:
        tags = self._rng.choice(np.array([["weight"], ["kv_cache"], ["weight", "kv_cache"]], object))
        try:
            self._client.sleep(*tags)
            if "weight" in tags:
                right = over_all_of(bits_of(self._state))
                self._refused("wrong_order", "begin", {"base_fingerprint": right, "fingerprint": right})
            self._client.wake()
        except FastDeployError as error:
            raise Interrupted("sleep") from error
        say("slept")

    def _by_hand(self) -> None:
        """Publish a delta without the client, as another trainer would."""
        state, self._state = self._state, changed(self._state, self._rng)
        target, self._state = self._state, state
        session = self._begin(target)
        for content, form in self._parts(target, 3, "overwrite"):
            self._chunk(session, content, form)
        self._checkpoint.write(target, self._step + 1)  # from here on it may be committed
        self._state, self._step = target, self._step + 1
        if self._call("commit", {"session_id": session}).status_code == 200:
            self.deltas += 1
            say("delta", "by hand")
        else:
            raise Interrupted("commit")

    # ---------------------------------------------------------------- calls without the client

    def _begin(self, new: State) -> str:
        body = {"base_fingerprint": over_all_of(bits_of(self._state)), "fingerprint": over_all_of(bits_of(new))}
        return str(self._succeed("begin", body)["session_id"])

    def _chunk(self, session: str, content: bytes, form: dict[str, Any]) -> None:
        self._succeed(f"chunk?{self._query(session, form)}", content)

    def _query(self, session: str, form: dict[str, Any]) -> str:
        fields = {**form, "session_id": session, "fingerprints": json.dumps(form["fingerprints"])}
        return str(httpx.QueryParams(fields))

    def _parts(self, new: State, count: int, encoding: str = "overwrite") -> list[tuple[bytes, dict[str, Any]]]:
        """Return uploads of the difference from the served state to ``new``, and their fields."""
        compression = str(self._rng.choice(["none", "zstd"]))
        old, now = bits_of(self._state), bits_of(new)
        parts = []
        for i in range(count):
            payloads = {}
            for name in list(new)[i::count]:
                was, value = old[name].reshape(-1), now[name].reshape(-1)
                index = np.flatnonzero(was != value)
                payload = delta_format.overwrite(index, value[index]) if encoding == "overwrite" else was ^ value
                payload = payload.view(np.uint8)
                payload = delta_format.compress(payload) if compression == "zstd" else payload
                payloads[name] = HostTensor("U8", payload.shape, payload.data)
            fingerprints = {name: fingerprint(now[name]).hex for name in payloads}
            form = {"encoding": encoding, "compression": compression, "fingerprints": fingerprints}
            parts.append((b"".join(pieces(payloads)), form))
        return parts

    def _succeed(self, path: str, body: Any) -> dict[str, Any]:
        reply = self._call(path, body)
        assert reply.status_code == 200, f"{path}: {reply.text}"
        result: dict[str, Any] = reply.json()["result"]
        return result

    def _refused(self, code: str, path: str, body: Any) -> None:
        reply = self._call(path, body)
        assert reply.status_code in (400, 404, 409), f"{path}: {reply.text}"
        assert reply.json()["error"]["code"] == code, f"{path}: {reply.text}"

    def _call(self, path: str, body: Any) -> httpx.Response:
        """Make a call of /v1/weights. Raises Interrupted if the server, or the engine with its state, is gone."""
        upload = {"content": body, "headers": {"Content-Type": "application/octet-stream"}}
        try:
            reply = self._http.post(f"/v1/weights/{path}", **(upload if isinstance(body, bytes) else {"json": body}))
        except httpx.TransportError as error:
            raise Interrupted(path) from error
        if reply.status_code >= 500:
            raise Interrupted(path, reply.status_code, reply.json()["error"]["code"])
        if reply.status_code != 200:
            self._weights()
        return reply

    def _weights(self, checksums: bool = False) -> dict[str, Any]:
        """Return /v1/weights of the engine that was published to. Raises Interrupted if there is another one."""
        try:
            reply = self._http.get("/v1/weights", params={"checksums": str(checksums).lower()})
        except httpx.TransportError as error:
            raise Interrupted("weights") from error
        found: dict[str, Any] = reply.json().get("result", {})
        if reply.status_code >= 500 or found.get("boot_id") != self._boot_id:
            raise Interrupted("weights")
        return found

    def _check(self, checksums: bool) -> None:
        """Assert that the server has the state of this trainer, bit for bit."""
        found, bits = self._weights(checksums), bits_of(self._state)
        assert found["fingerprint"] == over_all_of(bits), f"step {self._step}: other weights serve"
        if checksums:
            sums = {name: hashlib.sha256(value.tobytes()).hexdigest() for name, value in bits.items()}
            assert found["checksums"] == sums, f"step {self._step}: other checksums"
            say("checked")


def main() -> None:
    url, folder, deltas = sys.argv[1:]
    with SyncRolloutClient(url) as client:
        trainer = Trainer(url, Path(folder), client)
        trainer.recover()
        while trainer.deltas < int(deltas):
            trainer.step()


if __name__ == "__main__":
    main()
