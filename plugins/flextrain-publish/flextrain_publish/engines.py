"""vLLM and SGLang: publish to a folder that their servers reach, and let them load it from there while they answer nothing.

Sources: vLLM 0.32, ``vllm/entrypoints/serve/dev/rlhf`` and ``collective_rpc``, which need ``VLLM_SERVER_DEV_MODE=1``, and its page
"Layerwise reloading"; SGLang, "SGLang for RL Systems", ``srt/managers/io_struct.py`` and ``srt/entrypoints/http_server.py``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from flextrain import ConfigError, LiveWeights

from .folder import FolderTarget, Published, published
from .manifest import PublishError
from .requests import Server


class EngineTarget:
    """Publishes to a folder, then pauses engines, lets each load the new version, and lets them go on.

    A version is complete and compared with its checksums before an engine hears of it. Engines load into the weights that they
    compute with. Therefore one that has failed to load stays paused: it may have a part of the new weights.

    Args:
        urls: of one server, or of several.
        path: the folder, which rank 0 and the servers reach under this name.
        timeout_s: seconds that one answer may take.
        headers: sent with every request.
        options: see ``FolderTarget``.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        path: str | os.PathLike[str],
        *,
        timeout_s: float = 600.0,
        headers: dict[str, str] | None = None,
        **options: Any,
    ) -> None:
        given = [urls] if isinstance(urls, str) else list(urls)
        if not given:
            raise ConfigError("urls: is empty, give the URL of a server")
        self.servers = [Server(url, timeout_s, headers) for url in given]
        self.folder = FolderTarget(path, **options)

    def __str__(self) -> str:
        return ", ".join(server.url for server in self.servers)

    def publish(self, weights: LiveWeights) -> dict[str, Any]:
        """Publish, and let the engines load.

        Returns:
            See ``FolderTarget.publish``; and ``paused_s``, the seconds in which an engine stood still.

        Raises:
            PublishError: as there; or an engine did not pause, load or go on.
        """
        told = self.folder.publish(weights)
        version = published(told["folder"])
        assert version is not None  # it was written a moment ago
        begin = time.perf_counter()
        for number, server in enumerate(self.servers, 1):
            try:
                self.pause(server)
            except PublishError:
                for asked in self.servers[:number]:  # they have their old weights; an answer may have been lost
                    with suppress(PublishError):
                        self.resume(asked)
                raise
        failed = [reason for server in self.servers if (reason := self._loaded(server, version))]
        told["paused_s"] = time.perf_counter() - begin
        if failed:
            raise PublishError(f"version {version.version} was not loaded: {'; '.join(failed)}")
        return told

    def _loaded(self, server: Server, version: Published) -> str:
        """Let one engine load and go on; return why it has not, or nothing."""
        try:
            self.load(server, version)
        except PublishError as error:
            return f"{error}; the engine stays paused, because it may have a part of the new weights"
        try:
            self.resume(server)
        except PublishError as error:
            return f"{error}; the engine has the new weights, and did not go on"
        return ""

    def pause(self, server: Server) -> None:
        """Let an engine answer nothing."""
        raise NotImplementedError

    def load(self, server: Server, version: Published) -> None:
        """Let an engine load."""
        raise NotImplementedError

    def resume(self, server: Server) -> None:
        """Let an engine go on."""
        raise NotImplementedError


class VLLMTarget(EngineTarget):
    """vLLM's server, started with ``VLLM_SERVER_DEV_MODE=1``.

    Args:
        mode: what becomes of requests that have begun: "wait" until they are answered, "abort" them, or "keep" them for the new
            weights.
        more: see ``EngineTarget``.
    """

    def __init__(
        self, urls: str | Sequence[str], path: str | os.PathLike[str], *, mode: str = "wait", **more: Any
    ) -> None:
        super().__init__(urls, path, **more)
        self.mode = _one_of("mode", mode, ("wait", "abort", "keep"))

    def pause(self, server: Server) -> None:
        server.post(f"/pause?mode={self.mode}")

    def load(self, server: Server, version: Published) -> None:
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(version.folder)}}
        server.post("/collective_rpc", {**body, "timeout": server.timeout_s})
        server.post("/reset_prefix_cache")  # what is there was computed with the old weights

    def resume(self, server: Server) -> None:
        server.post("/resume")


class SGLangTarget(EngineTarget):
    """SGLang's server; it is asked afterwards which version it has.

    Args:
        mode: what becomes of requests that have begun: "abort" them, or "retract" them, which go on with the new weights.
        more: see ``EngineTarget``.
    """

    def __init__(
        self, urls: str | Sequence[str], path: str | os.PathLike[str], *, mode: str = "abort", **more: Any
    ) -> None:
        super().__init__(urls, path, **more)
        # "in_place" keeps what is cached of the old weights, and the cache cannot be flushed.
        self.mode = _one_of("mode", mode, ("abort", "retract"))

    def pause(self, server: Server) -> None:
        server.post("/pause_generation", {"mode": self.mode})

    def load(self, server: Server, version: Published) -> None:
        wanted = str(version.version)
        answer = server.post(
            "/update_weights_from_disk",
            {"model_path": str(version.folder), "weight_version": wanted, "flush_cache": True},
        )
        if not isinstance(answer, dict) or not answer.get("success"):
            raise PublishError(f"{server.url}: did not load, {answer}")
        has = (server.get("/model_info") or {}).get("weight_version")
        if has != wanted:
            raise PublishError(f"{server.url}: says that it has version {has}, and {wanted} was loaded")

    def resume(self, server: Server) -> None:
        server.post("/continue_generation")


def _one_of(name: str, given: str, allowed: Sequence[str]) -> str:
    if given not in allowed:
        raise ConfigError(f'{name}: "{given}" is not allowed, give {", ".join(allowed[:-1])} or {allowed[-1]}')
    return given
