"""A server that speaks S3 on this machine, and a proxy in front of it that answers 500, or slowly, when it is told to."""

from __future__ import annotations

import http.client
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest


def access(port: int) -> dict[str, str]:
    """The environment variables by which S3's clients find a server, and ask it once only."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",
    }


class Proxy(ThreadingHTTPServer):
    """Passes requests on.

    Attributes:
        broken: the methods that are answered with 500.
        delay_s: how long every answer takes.
        refused: how many requests were answered with 500.
    """

    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.behind = port
        self.broken: frozenset[str] = frozenset()
        self.delay_s = 0.0
        self.refused = 0


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        time.sleep(self.server.delay_s)
        if self.command in self.server.broken:
            self.server.refused += 1
            self._send(500, {}, b"<Error><Code>InternalError</Code><Message>We have a problem</Message></Error>")
            return
        connection = http.client.HTTPConnection("127.0.0.1", self.server.behind)
        connection.request(self.command, self.path, body, dict(self.headers))
        answer = connection.getresponse()
        self._send(answer.status, dict(answer.getheaders()), answer.read())
        connection.close()

    def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        is_head = self.command == "HEAD"
        length = headers.get("Content-Length", "0") if is_head else str(len(body))
        self.send_header("Content-Length", length)
        self.end_headers()
        if not is_head:
            self.wfile.write(body)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _answer

    def log_message(self, format: str, *args: Any) -> None:
        """Write no log."""


@contextmanager
def proxied() -> Iterator[Proxy]:
    """A proxy in front of a server that has a bucket named runs."""
    boto3, moto = pytest.importorskip("boto3"), pytest.importorskip("moto.server")
    server = moto.ThreadedMotoServer(port=0)
    server.start()
    proxy = Proxy(server.get_host_and_port()[1])
    Thread(target=proxy.serve_forever, daemon=True).start()
    with pytest.MonkeyPatch.context() as patch:
        for key, value in access(proxy.server_port).items():
            patch.setenv(key, value)
        boto3.client("s3").create_bucket(Bucket="runs")
    try:
        yield proxy
    finally:
        proxy.shutdown()
        proxy.server_close()
        server.stop()
