"""deploy/alerts.yml with promtool: the rules are valid, and each alert fires when it should and not before."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from viewers.prometheus import DEPLOY

pytestmark = pytest.mark.slow


def promtool(prometheus_bin: str, *args: str) -> str:
    beside = Path(prometheus_bin).with_name("promtool")
    binary = str(beside) if beside.exists() else shutil.which("promtool")
    assert binary, "promtool is missing: it comes with Prometheus"
    run = subprocess.run([binary, *args], cwd=DEPLOY, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_the_rules_and_the_example_configuration_are_valid(prometheus_bin):
    promtool(prometheus_bin, "check", "rules", "alerts.yml")
    promtool(prometheus_bin, "check", "config", "prometheus.yml")


def test_each_alert_fires_when_it_should(prometheus_bin):
    promtool(prometheus_bin, "test", "rules", "alerts_test.yml")
    alerts = [rule["alert"] for rule in yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"][0]["rules"][1:]]
    text = (DEPLOY / "alerts_test.yml").read_text()
    assert not [name for name in alerts if name not in text], "each has a test"
