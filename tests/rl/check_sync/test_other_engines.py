"""Engines that are not ours, as far as their routes show weights, and servers that cannot be asked. The engines are
played by a server that answers as SGLang and vLLM do."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from fastdeploy.core.errors import InvalidField
from fastdeploy.core.fingerprint import over_all
from fastdeploy.core.serving_dtype import in_dtype, widen
from fastdeploy.rl.check_sync import SyncReport, Verdict, check_sync
from fastdeploy.rl.check_sync.weights import TrainerWeights
from support.checkpoints import SPECS, random_tensors

LAYER = "model.layers.0."
Q, K, V = (f"{LAYER}self_attn.{letter}_proj.weight" for letter in "qkv")
Tensors = dict[str, np.ndarray]


class Played:
    """The routes of an engine: for each (method, path) a function of the JSON body that returns a status and JSON."""

    def __init__(self) -> None:
        self.routes: dict[tuple[str, str], Any] = {}
        self.keys: list[str | None] = []
        played = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                played.keys.append(self.headers.get("Authorization"))
                route = played.routes.get((self.command, self.path.partition("?")[0]))
                status, reply = (404, {"detail": "Not Found"}) if route is None else route(json.loads(body or b"{}"))
                data = json.dumps(reply).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = answer

            def log_message(self, *args: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def played() -> Iterator[Played]:
    one = Played()
    yield one
    one.server.shutdown()
    one.server.server_close()


def as_sglang(played: Played, tensors: Tensors, hidden: str = "none", **settings: Any) -> None:
    """Serve tensors as SGLang does: by name, the first rows, as numbers."""

    def weights(body: dict[str, Any]) -> tuple[int, Any]:
        if body["name"] not in tensors or hidden in body["name"]:
            return 400, {"error": {"message": "Get parameter by name failed"}}
        return 200, tensors[body["name"]][: body["truncate_size"]].tolist()

    info = {"model_path": "m", "is_generation": True, "weight_version": "step-7"}
    played.routes = {
        ("GET", "/get_model_info"): lambda body: (200, info),
        ("GET", "/get_server_info"): lambda body: (200, {"dtype": "auto", "quantization": None} | settings),
        ("POST", "/get_weights_by_name"): weights,
    }


def bfloat16(tensors: Tensors) -> Tensors:
    return {name: widen(in_dtype(one, "bfloat16")) for name, one in tensors.items()}


def check(played: Played, tensors: Tensors, folder, **options: Any) -> SyncReport:
    return check_sync(played.url, tensors, model=folder, answers=False, **options)


def test_weights_of_sglang_are_compared_by_name_in_the_dtype_that_serves(played, checkpoints):
    tensors = random_tensors(SPECS["qwen3"])
    as_sglang(played, bfloat16(tensors), dtype="bfloat16")
    report = check(played, tensors, checkpoints["qwen3"])
    assert (report.verdict, report.state.engine, report.state.version) == (Verdict.EQUAL, "sglang", "step-7")
    assert report.tensors == len(tensors) and "/get_weights_by_name" in report.method
    as_sglang(played, tensors, dtype="auto")  # that of config.json
    assert check(played, tensors, checkpoints["qwen3"]).ok


def test_a_tensor_of_sglang_that_differs_is_named_and_hidden_ones_are_counted(played, checkpoints):
    tensors = random_tensors(SPECS["qwen3"])
    old = {name: one * np.float32(1.01) for name, one in tensors.items()}
    as_sglang(played, tensors | {Q: old[Q], K: tensors[K][::-1]}, hidden="mlp")
    report = check(played, tensors, checkpoints["qwen3"], previous=[old])
    assert [(one.tensor, one.kind) for one in report.differences] == [(Q, "stale"), (K, "rows")]
    assert "6 tensors are not shown" in report.notes[0]
    as_sglang(played, tensors, hidden="mlp")
    report = check(played, tensors, checkpoints["qwen3"])
    assert report.verdict is Verdict.UNKNOWN and "its answers were not checked" in report.how


def test_only_the_first_rows_of_a_large_tensor_of_sglang_are_asked_for(played, checkpoints, monkeypatch):
    monkeypatch.setattr("fastdeploy.rl.check_sync.other_engines.SHOWN_VALUES", 640)
    tensors = random_tensors(SPECS["qwen3"])
    beyond, within = tensors[Q].copy(), tensors[Q].copy()
    beyond[10], within[9] = 7, 7
    as_sglang(played, tensors | {Q: beyond})
    assert check(played, tensors, checkpoints["qwen3"]).ok
    as_sglang(played, tensors | {Q: within})
    [difference] = check(played, tensors, checkpoints["qwen3"]).differences
    assert (difference.shape, difference.first, difference.changed) == ((10, 64), 9 * 64, 64)


def test_a_quantized_sglang_shows_no_tensors(played, checkpoints):
    tensors = random_tensors(SPECS["qwen3"])
    as_sglang(played, tensors, quantization="fp8")
    report = check(played, tensors, checkpoints["qwen3"])
    assert (report.verdict, report.tensors, report.state.quantization) == (Verdict.UNKNOWN, 0, "fp8")


@pytest.mark.parametrize("name", ["qwen3_bf16", "qwen3_moe"])
def test_checksums_of_vllm_are_those_of_fused_tensors(name, played, checkpoints):
    spec, tensors = SPECS[name], random_tensors(SPECS[name])
    old = {name: one * np.float32(1.01) for name, one in tensors.items()}
    dtype = "bfloat16" if name.endswith("bf16") else "float32"

    def as_vllm(tensors: Tensors) -> None:
        found = {one: in_dtype(array, dtype) for one, array in tensors.items()}
        for one in list(found):
            for parts, fused in (("qkv", "qkv_proj"), (("gate", "up"), "gate_up_proj")):
                if f".{parts[0]}_proj." in one and ".experts." not in one:
                    arrays = [found.pop(one.replace(f".{parts[0]}_proj.", f".{part}_proj.")) for part in parts]
                    found[one.replace(f"{parts[0]}_proj", fused)] = np.concatenate(arrays)
            if one.endswith(".experts.0.gate_proj.weight"):
                prefix = one.removesuffix("0.gate_proj.weight")
                for fused, kinds in (("w13_weight", ("gate", "up")), ("w2_weight", ("down",))):
                    names = [f"{prefix}{i}.{kind}_proj.weight" for i in range(spec.experts) for kind in kinds]
                    found[prefix + fused] = np.concatenate([found.pop(part) for part in names])
        sums = {f"0:{one}": hashlib.sha256(array.tobytes()).hexdigest() for one, array in found.items()}
        config = {"vllm_config": {"model_config": {"dtype": f"torch.{dtype}", "quantization": None}}}
        played.routes = {
            ("GET", "/version"): lambda body: (200, {"version": "0.25"}),
            ("GET", "/server_info"): lambda body: (200, config),
            ("GET", "/weight_info"): lambda body: (200, {"weight_version": "9"}),
            ("POST", "/weight_checker"): lambda body: (200, {"checksums": sums}),
        }

    as_vllm(tensors)
    report = check(played, tensors, checkpoints[name])
    assert (report.verdict, report.state.engine, report.state.version) == (Verdict.EQUAL, "vllm", "9")
    assert (report.tensors, report.state.dtype) == (len(tensors), dtype)
    as_vllm(tensors | {one: old[one] for one in (Q, K, V)})
    report = check(played, tensors, checkpoints[name], previous=[old])
    assert [(one.tensor, one.kind, one.changed) for one in report.differences] == [
        (one, "stale", None) for one in (Q, K, V)
    ]
    as_vllm(tensors | {V: old[V]})
    assert [one.kind for one in check(played, tensors, checkpoints[name]).differences] == ["unknown"] * 3


def test_an_engine_without_a_route_for_weights_shows_none(played, checkpoints):
    played.routes = {("GET", "/version"): lambda body: (200, {"version": "0.19"})}
    report = check(played, random_tensors(SPECS["qwen3"]), checkpoints["qwen3"])
    assert (report.verdict, report.state.engine, report.tensors) == (Verdict.UNKNOWN, "vllm", 0)
    played.routes = {}
    report = check(played, random_tensors(SPECS["qwen3"]), checkpoints["qwen3"])
    assert (report.verdict, report.state.engine) == (Verdict.UNKNOWN, "unknown")


def test_replicas_that_serve_different_weights_are_named(played, checkpoints):
    tensors = random_tensors(SPECS["qwen3"])
    with TrainerWeights(tensors, checkpoints["qwen3"], "float32") as trainer:
        right = over_all(trainer.fingerprints())
    served = {
        name: {"version": "3", "weight_epoch": 3, "fingerprint": fingerprint, "eos_token_ids": [2]}
        for name, fingerprint in (("r0", right), ("r1", "f" * 64), ("r2", right))
    }
    error = {"message": "the replicas do not serve the same weights", "code": "fleet_call_failed", "served": served}
    played.routes = {("GET", "/v1/weights"): lambda body: (502, {"error": error})}
    report = check(played, tensors, checkpoints["qwen3"])
    assert report.exit_status == 1 and [one.replica for one in report.differences] == ["r1"]
    assert "r1" in report.text() and "ffff" in report.text()


def test_a_server_that_cannot_be_asked_leaves_the_question_open(played, checkpoints):
    tensors = random_tensors(SPECS["qwen3"])
    error = {"message": "expected a valid key", "code": "unauthorized"}
    played.routes = {("GET", "/v1/weights"): lambda body: (401, {"error": error})}
    report = check(played, tensors, checkpoints["qwen3"], control_key="secret")
    assert report.exit_status == 2 and "expected a valid key" in report.how
    assert set(played.keys) == {"Bearer secret"}
    report = check_sync("http://127.0.0.1:9", tensors, model=checkpoints["qwen3"])
    assert report.exit_status == 2 and "GET http://127.0.0.1:9/v1/weights: ConnectError" in report.how


@pytest.mark.parametrize(
    ("options", "field"),
    [({"layout": "megatron"}, "layout"), ({"model": None}, "model"), ({"model": "/nowhere"}, "model: the folder")],
)
def test_wrong_arguments_are_refused_by_name(options, field, played, checkpoints):
    as_sglang(played, {})
    with pytest.raises(InvalidField, match=field):
        check_sync(played.url, {}, **{"model": checkpoints["qwen3"], **options})
