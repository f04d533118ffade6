"""/health and /ready say how far an engine is that starts."""

from __future__ import annotations

import pytest
from starlette.testclient import TestClient

from fastdeploy.client.engine_client import EngineClient
from fastdeploy.core.config import ServeConfig
from fastdeploy.core.loading import Loading, LoadingStage
from fastdeploy.http.app import create_app
from fastdeploy.inter_communicator.zmq_transport import ZmqConnector


@pytest.mark.parametrize("path", ["/health", "/ready", "/liveness"])
def test_a_server_whose_engine_loads_says_how_far_it_is(tmp_path, path):
    states = [Loading(LoadingStage.WEIGHTS, 1, 4)]
    connector = ZmqConnector(f"ipc://{tmp_path}/nobody.sock")
    client = EngineClient(connector, first_connection_s=0.0, read_loading=lambda: states[0] if states else None)
    with TestClient(create_app(client, None, ServeConfig(model="m")), base_url="http://localhost") as http:
        reply = http.get(path)
        assert reply.status_code == 503 and reply.headers["retry-after"] == "2"
        body = reply.json()
        assert body["status"] == "loading" and "it is starting: reading and packing the weights: 25%" in body["reason"]
        assert body["loading"] == {"stage": "reading and packing the weights", "share": 0.25}
        states.clear()
        body = http.get(path).json()
        assert body["status"] == "no engine" and body["reason"].endswith("it is starting")
