"""What is in deploy/ fits the server: flags, variables, routes and times exist and agree.

`make test-deploy` checks the files with the programs of others: hadolint, the schemas of Kubernetes, and systemd.
"""

from __future__ import annotations

import configparser
import http.server
import re
import runpy
import shlex
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from fastdeploy.core.config import ServeConfig
from fastdeploy.entrypoints.cli.main import make_parser
from fastdeploy.http.app import create_app
from support.http_calls import route_table

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
MANIFESTS = ("server.yaml", "fleet.yaml")
SERVE = make_parser()._subparsers._group_actions[0].choices["serve"]  # type: ignore[union-attr]
VARIABLES = {f"FASTDEPLOY_{action.dest.upper()}" for action in SERVE._actions} | {
    "FASTDEPLOY_CPU_THREADS", "FASTDEPLOY_FLEET_KEY",
}  # fmt: skip
DRAIN = runpy.run_path(str(DEPLOY / "drain.py"))
HEALTHY = runpy.run_path(str(DEPLOY / "healthy.py"))


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text()))


def pods() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yield the name of the workload, its pod, and the container of it, for every workload."""
    for name in MANIFESTS:
        for document in documents(name):
            if "template" in document["spec"]:
                spec = document["spec"]["template"]["spec"]
                yield document["metadata"]["name"], spec, spec["containers"][0]


PODS = pytest.mark.parametrize(("pod", "container"), [p[1:] for p in pods()], ids=[p[0] for p in pods()])


@PODS
def test_the_command_and_the_variables_of_a_container_exist(pod, container, monkeypatch):
    variables = {env["name"]: env.get("value") for env in container["env"]}
    assert variables.keys() <= VARIABLES
    for name, value in variables.items():
        monkeypatch.setenv(name, value or "1")
    args = make_parser().parse_args(container["args"])
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports["http"] == args.port and ports.get("metrics") == args.metrics_port
    assert args.host == "0.0.0.0"
    secrets = {env["name"] for env in container["env"] if "secretKeyRef" in env.get("valueFrom", {})}
    assert "FASTDEPLOY_CONTROL_KEY" in secrets, "control routes are refused without it"
    endpoint = getattr(args, "fleet_endpoint", "")
    assert not endpoint or endpoint.endswith(f":{ports['fleet']}")


@PODS
def test_the_probes_ask_routes_that_are_open_and_the_stop_has_time_for_the_drain(pod, container):
    routes = route_table(create_app(None, None, ServeConfig(model="m"))).classes
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert routes[container[probe]["httpGet"]["path"]].name == "OPEN"
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert container["livenessProbe"]["httpGet"]["path"] == "/version", "loading is no reason to restart"
    drain = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["", "0"])
    assert drain[0] in ("", "fastdeploy-drain")
    shutdown_s = make_parser().parse_args(container["args"]).shutdown_s
    assert pod["terminationGracePeriodSeconds"] >= float(drain[1]) + 2 * shutdown_s


@PODS
def test_a_container_has_no_rights_that_it_does_not_need(pod, container):
    assert pod["securityContext"]["runAsNonRoot"] and not pod["automountServiceAccountToken"]
    rights = container["securityContext"]
    assert rights["readOnlyRootFilesystem"] and not rights["allowPrivilegeEscalation"]
    assert rights["capabilities"] == {"drop": ["ALL"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


@pytest.mark.parametrize("name", MANIFESTS)
def test_services_and_budgets_select_pods_and_name_their_ports(name):
    workloads = [one["spec"]["template"] for one in documents(name) if "template" in one["spec"]]
    services = {one["metadata"]["name"]: one for one in documents(name) if one["kind"] == "Service"}
    for one in services.values():
        [pod] = [w for w in workloads if one["spec"]["selector"].items() <= w["metadata"]["labels"].items()]
        ports = {port["name"] for port in pod["spec"]["containers"][0]["ports"]}
        assert {port["targetPort"] for port in one["spec"]["ports"]} <= ports
    assert services["fastdeploy-control"]["spec"]["publishNotReadyAddresses"], "a trainer must reach a paused server"
    for one in documents(name):
        if one["kind"] == "PodDisruptionBudget":
            labels = one["spec"]["selector"]["matchLabels"]
            assert any(labels.items() <= w["metadata"]["labels"].items() for w in workloads)
        if one["kind"] == "StatefulSet":
            assert one["spec"]["serviceName"] in services


def test_the_gateway_names_every_engine():
    engines, gateway = (d for d in documents("fleet.yaml") if "template" in d["spec"])
    args = make_parser().parse_args(gateway["spec"]["template"]["spec"]["containers"][0]["args"])
    assert len(args.replica) == engines["spec"]["replicas"]
    for number, replica in enumerate(args.replica):
        host = f"{engines['metadata']['name']}-{number}.{engines['spec']['serviceName']}"
        assert replica == f"tcp://{host}:8182=http://{host}:8180"


def test_the_image_copies_what_its_ignore_file_leaves_and_sets_settings_that_exist():
    text = (DEPLOY / "Dockerfile").read_text()
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {word for line in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE) for word in line.split()}
    assert copied == kept and all((ROOT / name).exists() for name in kept)
    assert set(re.findall(r"(FASTDEPLOY_\w+)=", text)) <= VARIABLES
    assert re.search(r"^USER 10001", text, re.MULTILINE)
    assert re.findall(r"^(?:ENTRYPOINT|CMD) (.*)$", text, re.MULTILINE) == ['["fastdeploy"]', '["serve"]']


def test_the_unit_starts_a_command_that_exists_and_leaves_it_time_to_stop():
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(DEPLOY / "fastdeploy.service")
    service = unit["Service"]
    program, *words = shlex.split(service["ExecStart"])
    assert program == "/opt/fastdeploy/bin/fastdeploy"
    assert words[0] in ("serve",) and words[1] == "--config"
    assert float(service["TimeoutStopSec"]) >= 2 * ServeConfig(model="m").shutdown_s
    assert (service["KillMode"], service["RestartPreventExitStatus"]) == ("mixed", "2")


class Metrics(http.server.BaseHTTPRequestHandler):
    """Answers /metrics with fewer and fewer requests, and /health with 503 and then 200."""

    left: list[int] = []
    health = 503

    def do_GET(self) -> None:
        counts = Metrics.left.pop(0) if Metrics.left else 0
        self.send_response(200 if self.path == "/metrics" else Metrics.health)
        self.end_headers()
        text = f'fastdeploy:num_requests_running{{replica="a"}} {counts}\nfastdeploy:num_requests_waiting 0.0\n'
        self.wfile.write(text.encode() if self.path == "/metrics" else b"it loads")

    def log_message(self, *args: object) -> None: ...


@pytest.fixture
def port(monkeypatch) -> Iterator[int]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metrics)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setenv("FASTDEPLOY_PORT", str(server.server_port))
    monkeypatch.setitem(DRAIN, "SETTLE_S", 0.0)
    DRAIN["main"].__globals__.update(SETTLE_S=0.0, POLL_S=0.001)
    yield server.server_port
    server.shutdown()
    server.server_close()


def test_the_drain_waits_until_no_request_is_left(port, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["drain"])
    Metrics.left = [3, 1, 0, 99]
    assert DRAIN["main"]() == 0 and Metrics.left == [99] and capsys.readouterr().out == ""
    Metrics.left = [2] * 10000
    monkeypatch.setattr("sys.argv", ["drain", "0.05"])
    assert DRAIN["main"]() == 0 and "2 choices still run" in capsys.readouterr().out
    monkeypatch.setenv("FASTDEPLOY_METRICS_PORT", "1")
    assert DRAIN["main"]() == 0 and "nothing to wait for" in capsys.readouterr().out


def test_the_health_check_says_why_the_server_is_not_healthy(port, capsys):
    assert HEALTHY["main"]() == 1 and capsys.readouterr().out.strip() == "it loads"
    for Metrics.health in (200, 304):  # 304: a server in FastDeploy's form, while a trainer writes new weights
        assert HEALTHY["main"]() == 0 and capsys.readouterr().out == ""


def test_the_url_that_kubernetes_puts_into_the_variable_of_the_port_is_no_port(monkeypatch, capsys):
    asked: list[str] = []

    def ask(url: str, timeout: float) -> None:
        asked.append(url)
        raise OSError("nobody listens")

    monkeypatch.setenv("FASTDEPLOY_PORT", "tcp://10.0.0.1:8180")
    monkeypatch.setattr("urllib.request.urlopen", ask)
    monkeypatch.setattr("sys.argv", ["drain", "1"])
    DRAIN["main"].__globals__.update(SETTLE_S=0.0)
    assert HEALTHY["main"]() == 1 and DRAIN["main"]() == 0
    assert asked == ["http://127.0.0.1:8180/health", "http://127.0.0.1:8180/metrics"]
