"""Small servers on this machine that speak the protocols of engines, with weights in the host's memory."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from flextrain_publish import published
from torch import Tensor

Answer = tuple[int, dict[str, Any]]


@contextmanager
def served(handle: Callable[[str, dict[str, Any]], Answer]) -> Iterator[str]:
    """Context with the URL of a server that answers with what ``handle(path, body)`` returns."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, answer = handle(self.path, json.loads(body or b"{}"))
            text = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_POST = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Engine:
    """What vLLM's and SGLang's servers do with these requests; it computes with ``weights`` unless it is paused.

    Attributes:
        calls: the requests that it got.
        fails: path of a request that it answers with an error, once.
    """

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}
        self.version = "default"
        self.is_paused = False
        self.calls: list[str] = []
        self.fails = ""
        self.ignores_version = False

    def handle(self, path: str, body: dict[str, Any]) -> Answer:
        self.calls.append(path)
        name = path.partition("?")[0]
        if name == self.fails:
            self.fails = ""
            return 500, {"error": "out of memory"}
        if name in ("/pause", "/pause_generation"):
            self.is_paused = True
        elif name in ("/resume", "/continue_generation"):
            self.is_paused = False
        elif name == "/collective_rpc":
            assert body["method"] == "reload_weights"
            self._load(body["kwargs"]["weights_path"])
        elif name == "/update_weights_from_disk":
            self._load(body["model_path"])
            self.version = self.version if self.ignores_version else body["weight_version"]
            return 200, {"success": True, "message": "Succeeded to update model weights."}
        elif name == "/model_info":
            return 200, {"weight_version": self.version}
        elif name != "/reset_prefix_cache":
            return 404, {"error": path}
        return 200, {}

    def _load(self, folder: str) -> None:
        assert self.is_paused
        found = published(folder)
        assert found is not None
        assert str(found.folder) == folder
        self.weights = dict(found.read())
