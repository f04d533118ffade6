"""The manifests in deploy/ that start a fleet on Ray."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from fastdeploy.entrypoints.cli.main import make_parser

DEPLOY = Path(__file__).parents[2] / "deploy"
CRD = os.environ.get("KUBERAY_CRD", "")


def documents(name: str) -> dict[str, dict[str, Any]]:
    return {doc.get("kind", ""): doc for doc in yaml.safe_load_all((DEPLOY / name).read_text())}


def fleet_command(text: str) -> argparse.Namespace:
    """Parse the command of the gateway, which ends the given text."""
    words = shlex.split(text[text.index("fastdeploy fleet") :])
    return make_parser().parse_args(words[1:])


def test_the_gateway_of_kubernetes_has_its_keys_and_is_what_the_service_selects():
    manifest = documents("kuberay.yaml")
    groups = {group["groupName"]: group for group in manifest["RayCluster"]["spec"]["workerGroupSpecs"]}
    gateway = groups["gateway"]["template"]
    container = gateway["spec"]["containers"][0]
    args = fleet_command(container["args"][0])
    assert args.ray and args.keep_replicas and args.replicas == groups["replicas"]["replicas"]
    secrets = {env["name"] for env in container["env"] if "valueFrom" in env}
    assert secrets == {"FASTDEPLOY_FLEET_KEY", "FASTDEPLOY_CONTROL_KEY"}
    assert manifest["Service"]["spec"]["selector"].items() <= gateway["metadata"]["labels"].items()
    assert manifest["Service"]["spec"]["ports"][0]["targetPort"] in [port["name"] for port in container["ports"]]
    assert container["ports"][0]["containerPort"] == args.port
    cores = int(groups["replicas"]["template"]["spec"]["containers"][0]["resources"]["requests"]["cpu"])
    assert args.replica_cpus <= cores, "no pod has room for a replica"


@pytest.mark.slow
@pytest.mark.ray
def test_ray_up_takes_the_cluster():
    from ray.autoscaler._private.util import prepare_config, validate_config

    validate_config(prepare_config(documents("ray-cluster.yaml")[""]))


@pytest.mark.slow
@pytest.mark.ray
def test_the_ray_cluster_fits_the_schema_of_kuberay():
    """With KUBERAY_CRD, the path of ray.io_rayclusters.yaml; without, only what makes the difference is looked at."""
    cluster = documents("kuberay.yaml")["RayCluster"]
    assert cluster["apiVersion"] == "ray.io/v1" and cluster["spec"]["authOptions"]["mode"] == "token"
    if CRD:
        import jsonschema

        versions = yaml.safe_load(Path(CRD).read_text())["spec"]["versions"]
        schema = next(version for version in versions if version["name"] == "v1")["schema"]["openAPIV3Schema"]
        jsonschema.validate(cluster, strict({**schema, "properties": {**schema["properties"], "metadata": {}}}))


def strict(schema: Any) -> Any:
    """Return a schema of Kubernetes as JSON Schema, in which an unknown field is an error."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    closed = {name: strict(value) for name, value in schema.items()}
    if schema.get("type") == "object" and "properties" in schema:
        closed.setdefault("additionalProperties", False)
    return closed
