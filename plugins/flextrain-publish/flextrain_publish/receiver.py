"""The receiving side of ``HTTPTarget``: a version of the weights is taken as a whole, or not at all."""

from __future__ import annotations

import base64
import binascii
import threading
from collections.abc import Callable, Mapping
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from .manifest import Entry, PublishError, check


class Receiver:
    """Collects the tensors of a version, compares each with its checksum, and hands them over when all are there.

    It knows nothing of HTTP: a server gives it the path and the JSON of each request, and sends back what it returns.

    Args:
        load: called with the changed tensors of a complete version, by name, while the server is paused.
        pause, resume: called for the requests of these names, if the server has something to stop.
    """

    def __init__(
        self,
        load: Callable[[Mapping[str, Tensor]], None],
        *,
        pause: Callable[[], None] | None = None,
        resume: Callable[[], None] | None = None,
    ) -> None:
        self.version = 0
        self.sums: dict[str, str] = {}
        self.is_paused = False
        self._load, self._pause, self._resume = load, pause, resume
        self._broken = False
        self._next: int | None = None
        self._pending: dict[str, Tensor] = {}
        self._pending_sums: dict[str, str] = {}
        self._lock = threading.Lock()

    def handle(self, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        """Return the status and the JSON of the answer to a request; 409 for what cannot be taken, and 404 for other paths."""
        calls: dict[str, Callable[[Mapping[str, Any]], None]] = {
            "/weights": lambda body: None,
            "/start_weight_update": self._start,
            "/update_weights": self._take,
            "/finish_weight_update": self._finish,
            "/pause": lambda body: self._pauses(True),
            "/resume": lambda body: self._pauses(False),
        }
        path = path.partition("?")[0]
        if path not in calls:
            return 404, {"error": f"{path}: is unknown"}
        with self._lock:
            try:
                calls[path](body or {})
            except PublishError as error:
                self._drop()
                return 409, {"error": str(error)}
            return 200, {"version": self.version, **({"tensors": self.sums} if path == "/weights" else {})}

    def _pauses(self, paused: bool) -> None:
        if self._broken and not paused:
            raise PublishError(f"a version after {self.version} was not loaded as a whole; publish another one")
        if (call := self._pause if paused else self._resume) is not None:
            call()
        self.is_paused = paused

    def _start(self, body: Mapping[str, Any]) -> None:
        self._drop()  # of a version that its sender did not finish
        if body.get("version") != self.version + 1:
            raise PublishError(f"version {body.get('version')} cannot follow {self.version}")
        self._next = self.version + 1

    def _take(self, body: Mapping[str, Any]) -> None:
        if self._next is None:
            raise PublishError("no version was started")
        info = body.get("update_info")
        try:
            columns = [info[key] for key in ("names", "dtype_names", "shapes", "sha256")]  # type: ignore[index]
            entries = {str(n): Entry(str(d), tuple(map(int, s)), str(c)) for n, d, s, c in zip(*columns, strict=True)}
            tensors = load(base64.b64decode(info["safetensors"], validate=True))  # type: ignore[index]
        except (KeyError, TypeError, ValueError, binascii.Error, SafetensorError) as error:
            raise PublishError(f"version {self._next}: cannot be read, {error!r}") from None
        if differing := entries.keys() ^ tensors.keys():
            raise PublishError(f"version {self._next}: {min(differing)} was named or sent, not both")
        for name, tensor in tensors.items():
            check(name, tensor, entries[name], f"version {self._next}")
            self._pending[name], self._pending_sums[name] = tensor, entries[name].sha256

    def _finish(self, body: Mapping[str, Any]) -> None:
        if self._next is None or body.get("version") != self._next:
            raise PublishError(f"version {body.get('version')} was not started")
        wanted = body.get("tensors")
        if not isinstance(wanted, Mapping) or not wanted:
            raise PublishError(f"version {self._next}: has no list of its tensors")
        has = {**self.sums, **self._pending_sums}
        for name, checksum in wanted.items():
            if has.get(name) != checksum:
                raise PublishError(f"version {self._next}: {name} did not come")
        if strays := self._pending_sums.keys() - wanted.keys():
            raise PublishError(f"version {self._next}: {min(strays)} came, and is none of its tensors")
        try:
            self._load(self._pending)
        except Exception as error:
            self.sums, self._broken = {}, True  # the next version comes whole
            raise PublishError(
                f"version {self._next}: could not be loaded, {error!r}; a part of it may be in use"
            ) from error
        self._broken = False
        self.version, self.sums = self._next, dict(wanted)
        self._drop()

    def _drop(self) -> None:
        self._next = None
        self._pending, self._pending_sums = {}, {}
