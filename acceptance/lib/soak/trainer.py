"""The trainer of a soak, in a process of its own: makes the pause and the update of each cycle.

    python -m acceptance.lib.soak.trainer URL FOLDER SEED

Reads numbers of cycles from stdin, one a line. Prints events as JSON, one a line: "publishing" before a version can be
committed, "published" after its commit, "failed" if a call failed, and "done" at the end of a cycle. ``t`` is
time.monotonic(), which all processes of a machine share. The same cycle may come again.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from acceptance.lib.soak import plan
from acceptance.lib.soak.policy import Policy
from fastdeploy.core.errors import FastDeployError
from fastdeploy.embedded import MODEL_DIR
from fastdeploy.rl.sync_client import SyncRolloutClient

HOLD_TTL_S = 15.0  # a killed trainer leaves its hold for so long
LEASE_S = 60.0
RECOVERY_S = 600.0


def say(kind: str, **fields: Any) -> None:
    print(json.dumps({"kind": kind, "t": time.monotonic(), **fields}), flush=True)


class Trainer:
    """folder: for parts of publications that go by way of a folder."""

    def __init__(self, url: str, folder: Path, seed: int, client: SyncRolloutClient):
        self._seed, self._folder, self._client = seed, folder, client
        self._http = httpx.Client(base_url=url, timeout=120, trust_env=False)
        self._policy = Policy(seed, MODEL_DIR)
        self._served: str | None = None  # the version that this process has published last
        for left in folder.iterdir():  # by a trainer that was killed
            shutil.rmtree(left)

    def cycle(self, number: int) -> None:
        """Make one cycle. The step ``number`` + 1 of the weights serves at its end, whatever dies meanwhile."""
        cycle = plan.cycle(self._seed, number)
        self._policy.go_to(number + 1)
        try:
            if self._served is None:
                self._recover()
            if cycle.sleeps:
                self._client.sleep(*cycle.sleeps)
                self._client.wake()
            if cycle.mode is None:
                self._publish(cycle)
            else:
                # Without an own on_timeout, a pause that takes too long freezes what runs: nothing is lost.
                options: dict[str, Any] = {"timeout_s": 60.0, "clear_cache": cycle.clear_cache}
                with self._client.paused(cycle.mode, **options):
                    self._publish(cycle)
        except FastDeployError as error:
            self._failed(error)
            self._publish_whole(cycle)
        say("done", cycle=number)

    def _publish(self, cycle: plan.Cycle) -> None:
        partial = cycle.update == "partial" and self._served is not None
        names = self._policy.changed(self._policy.step) if partial else list(self._policy.state)
        options: dict[str, Any] = {"expected_version": self._served} if partial else {}
        version, self._served = str(self._policy.step), None
        say("publishing", version=version)
        done = self._client.publish(
            {name: self._policy.state[name] for name in names},
            version,
            partial=partial,
            kv=cycle.kv,
            via=cycle.via,
            folder=str(self._folder),
            lease_s=LEASE_S,
            **options,
        )
        self._served = version
        commit = done.report
        sent = "partial" if partial else "delta" if done.is_delta else "whole"
        say("published", version=version, boot_id=commit["boot_id"], weight_epoch=commit["weight_epoch"], sent=sent)

    def _publish_whole(self, cycle: plan.Cycle) -> None:
        """Publish until it succeeds."""
        end = time.monotonic() + RECOVERY_S
        while True:
            try:
                self._recover()
                return self._publish(cycle)
            except FastDeployError as error:
                self._failed(error)
                if time.monotonic() > end:
                    raise

    def _failed(self, error: FastDeployError) -> None:
        say("failed", code=error.code)

    def _recover(self) -> None:
        """Wait until an engine answers, end the weight session of a dead trainer, and wake what that has put to
        sleep."""
        self._served = None
        end = time.monotonic() + RECOVERY_S
        while not self._try_to_recover():
            if time.monotonic() > end:
                raise TimeoutError("the server does not answer")
            time.sleep(0.1)

    def _try_to_recover(self) -> bool:
        try:
            reply = self._http.get("/v1/weights")
            if reply.status_code != 200:
                return False
            found = reply.json()["result"]
            if found["session"] is not None:
                self._http.post("/v1/weights/abort", json={"session_id": found["session"]["session_id"]})
            if found["asleep"]:
                self._client.wake()
        except (httpx.TransportError, FastDeployError):
            return False
        return True


def main() -> None:
    url, folder, seed = sys.argv[1:]
    with (
        SyncRolloutClient(url, hold_ttl_s=HOLD_TTL_S, control_s=300.0) as client,
        contextlib.suppress(KeyboardInterrupt),
    ):
        trainer = Trainer(url, Path(folder), int(seed), client)
        for line in sys.stdin:
            trainer.cycle(int(line))


if __name__ == "__main__":
    main()
