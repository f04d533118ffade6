"""A real Prometheus that scrapes as deploy/prometheus.yml says, and the expressions of deploy/grafana.json."""

from __future__ import annotations

import json
import math
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx

from e2e.server import until
from fastdeploy.testing.process import free_port

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
JOBS = ("fastdeploy", "fastdeploy-replicas")  # of deploy/prometheus.yml
SCRAPE_S = 0.25
RATE_S = 30  # window of a rate: many scrapes, also on a busy machine


def expressions() -> list[str]:
    """Return the expressions of all panels and annotations."""
    board = json.loads((DEPLOY / "grafana.json").read_text())
    of_panels = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    return of_panels + [entry["expr"] for entry in board["annotations"]["list"]]


def scrape_config(address: str) -> str:
    """Return deploy/prometheus.yml with both of its jobs, for the server at ``address``, with more scrapes."""
    lines = (DEPLOY / "prometheus.yml").read_text().replace("127.0.0.1:8180", address).splitlines()
    jobs = next(i for i, line in enumerate(lines) if line.startswith("#  - job_name"))
    lines[jobs:] = [line.removeprefix("#") for line in lines[jobs:]]
    text = "\n".join(lines).replace("[alerts.yml]", f"[{DEPLOY / 'alerts.yml'}]") + "\n"
    for wide in ("scrape_interval: 5s", "refresh_interval: 10s"):
        assert wide in text, wide
        text = text.replace(wide, f"{wide.partition(':')[0]}: {SCRAPE_S * 1000:.0f}ms")
    return text


class Prometheus:
    """A Prometheus with its files in ``folder``, which scrapes the server at ``address``. Stopped at the end of the
    block."""

    def __init__(self, binary: str, folder: Path, address: str):
        config = folder / "prometheus.yml"
        config.write_text(scrape_config(address))
        self._log = folder / "prometheus.log"
        port = free_port()
        command = [binary, f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=subprocess.STDOUT
            )
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30)
        self._began = time.time()

    def __enter__(self) -> Prometheus:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()
        self._process.kill()
        self._process.wait(30)

    def get(self, path: str, **params: Any) -> Any:
        """Return the data of an answer. Prometheus may not warn."""
        answer = self._http.get(f"/api/v1/{path}", params=params).raise_for_status().json()
        assert answer["status"] == "success" and "warnings" not in answer, (path, params, answer)
        return answer["data"]

    def wait_targets(self, count: int) -> None:
        """Wait until ``count`` targets are up, and have been scraped twice."""

        def up() -> bool:
            assert self._process.poll() is None, self._log.read_text()[-4000:]
            try:
                found = self.get("query", query="count_over_time(up[1h]) > 1 and up == 1")["result"]
            except (httpx.TransportError, httpx.HTTPStatusError):  # 503: Prometheus starts
                return False
            return len(found) == count

        until(up, 60, f"{count} targets are up")

    def wait_seen(self, *metrics: str) -> None:
        """Wait until each metric was other than 0 for two scrapes, in each job of Prometheus: ``largest`` sees it."""
        for name in metrics:
            query = f"group by (job) (count_over_time((fastdeploy:{name} > 0)[1h:{SCRAPE_S * 1000:.0f}ms]) > 2)"
            until(lambda query=query: len(self.get("query", query=query)["result"]) == len(JOBS), 60, query)

    def largest(self, expression: str, job: str) -> float | None:
        """Evaluate a dashboard's expression over the time of this Prometheus, and return its largest value. None: there
        is no value."""
        chosen = {"$job": job, "$instance": ".*", "$__rate_interval": f"{RATE_S}s"}
        for name, value in chosen.items():
            expression = expression.replace(name, value)
        period = {"start": self._began, "end": time.time(), "step": SCRAPE_S}
        series = self.get("query_range", query=expression, **period)["result"]
        values = [float(value) for one in series for _, value in one["values"]]
        return max((value for value in values if math.isfinite(value)), default=None)
