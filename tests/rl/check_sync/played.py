"""A server that answers as another engine does."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

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
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def __enter__(self) -> Played:
        return self

    def __exit__(self, *exc: object) -> None:
        self.server.shutdown()
        self.server.server_close()


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
