"""KubeflowHook: tells Kubeflow Trainer how far a run has come, while it trains.

Source: the user guide "TrainJob progress" of kubeflow/trainer (2.2 and later, feature gate TrainJobStatus).
"""

from __future__ import annotations

import datetime
import http.client
import json
import math
import os
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flextrain import ConfigError, Hook
from flextrain.runner.reporting import Reporter

_URL, _CA, _TOKEN = (f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "CA_CERT", "TOKEN"))
_TIMEOUT_S = 5.0
_MOST, _LONGEST = 256, 64  # metrics, and characters of a name or value, that the server takes


class KubeflowHook(Hook):
    """Tells Kubeflow Trainer a run's per cent, the seconds left and the figures of its log lines: ``trainerStatus`` of its TrainJob.

    The first process sends, in a thread of its own: training never waits for the server. What cannot be sent is logged once until
    something gets through again. Outside of a TrainJob, where the variables of Trainer's are not set, one line says that nothing
    is sent.

    Args:
        interval_s: seconds between two messages; Trainer asks for 5 or more.

    Raises:
        ConfigError: ``interval_s`` is below 5; in ``before_train``: a variable of Trainer's is missing, or its address is not https.
    """

    priority = "LOWEST"

    def __init__(self, interval_s: float = 10.0) -> None:
        if not interval_s >= 5:
            raise ConfigError(f"KubeflowHook.interval_s: {interval_s} is not allowed, give 5 or more")
        self.interval_s = interval_s
        self._figures = _LastFigures()
        self._thread: threading.Thread | None = None
        self._is_over = threading.Event()

    def before_train(self, runner: Any) -> None:
        if runner.rank:
            return
        server = StatusServer.of_environment()
        if server is None:
            runner.logger.info(f"KubeflowHook: {_URL} is not set, this is no TrainJob that is told of; nothing is sent")
            return
        if self._figures not in runner.visualizer.reporters:
            runner.visualizer.reporters.append(self._figures)
        self._is_over.clear()
        self._thread = threading.Thread(target=self._send_often, args=(runner, server), daemon=True)
        self._thread.start()

    def after_train(self, runner: Any) -> None:
        self._end()

    def on_exception(self, runner: Any, exception: BaseException) -> None:
        self._end()

    def _end(self) -> None:
        """Send the last state, waiting as long as one message may take."""
        if self._thread is not None:
            self._is_over.set()
            self._thread.join(2 * _TIMEOUT_S)
            self._thread = None

    def _send_often(self, runner: Any, server: StatusServer) -> None:
        said, is_last = "", False
        while True:
            fault = server.send(status_of(runner, self._figures.newest))
            if fault and fault != said:
                runner.logger.warning(f"KubeflowHook: the progress cannot be sent, {fault}")
            said = fault
            if is_last:
                return
            self._is_over.wait(self.interval_s)
            is_last = self._is_over.is_set()


def status_of(runner: Any, figures: Mapping[str, float]) -> dict[str, Any]:
    """What Trainer takes as ``trainerStatus``: per cent rounded down, so that 100 means that all updates are made."""
    status: dict[str, Any] = {"progressPercentage": min(100 * runner.iter // max(runner.max_iters, 1), 100)}
    left = runner.message_hub.get_info("eta")
    if left is not None and math.isfinite(left):
        status["estimatedRemainingSeconds"] = max(round(left), 0)
    metrics = [{"name": name[:_LONGEST], "value": f"{value:.6g}"} for name, value in figures.items()]
    now = datetime.datetime.now(datetime.timezone.utc)
    return {**status, "metrics": metrics[:_MOST], "lastUpdatedTime": now.strftime("%Y-%m-%dT%H:%M:%SZ")}


class StatusServer:
    """The endpoint of Kubeflow Trainer for one TrainJob.

    Args:
        url: of the endpoint; https.
        authority: file with the certificate of the authority that has signed the server's.
        token: file with the token, which is written anew from time to time.

    Raises:
        ConfigError: the address is not https, or the authority's file cannot be read.
    """

    def __init__(self, url: str, authority: str, token: str) -> None:
        if not url.startswith("https://"):
            raise ConfigError(f"KubeflowHook: {_URL}={url} is not allowed, the token is sent by https only")
        try:
            context = ssl.create_default_context(cafile=authority)
        except OSError as error:
            raise ConfigError(f"KubeflowHook: {_CA}={authority} cannot be read, {error.strerror or error}") from None
        self._url, self._token = url, Path(token)
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context), _NoRedirect()
        )

    @classmethod
    def of_environment(cls) -> StatusServer | None:
        """The server that Trainer's variables name; None outside of a TrainJob.

        Raises:
            ConfigError: some of them are missing.
        """
        given = {name: os.environ.get(name, "") for name in (_URL, _CA, _TOKEN)}
        if not given[_URL]:
            return None
        for name, value in given.items():
            if not value:
                raise ConfigError(f"KubeflowHook: {name} is not set, and {_URL} is; both are Kubeflow Trainer's")
        return cls(given[_URL], given[_CA], given[_TOKEN])

    def send(self, status: Mapping[str, Any]) -> str:
        """Send a status; return what has prevented it, or an empty text."""
        try:
            token = self._token.read_text(encoding="utf-8").strip()
            headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
            body = json.dumps({"trainerStatus": status}).encode()
            request = urllib.request.Request(self._url, body, headers, method="POST")
            with self._opener.open(request, timeout=_TIMEOUT_S):
                return ""
        except urllib.error.HTTPError as error:
            return f"{self._url} answers {error.code}: {_message(error)}"
        # OSError: also of ssl and of a name without an address.
        except (OSError, ValueError, http.client.HTTPException) as error:
            return f"{self._url}: {getattr(error, 'reason', None) or error}"


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """The token goes to no other server."""

    def redirect_request(self, *_: Any) -> None:
        """Follow none."""


def _message(error: urllib.error.HTTPError) -> str:
    """What the server says, as Kubernetes' Status or as text, in one line."""
    text = error.read(2000).decode(errors="replace")
    try:
        text = str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        text = text or error.reason
    return " ".join(text.split())[:200]


class _LastFigures(Reporter):
    """Keeps the figures of the last log line and of the last validation, as ``train/loss`` and ``val/accuracy``."""

    def __init__(self) -> None:
        super().__init__()
        self.newest: dict[str, float] = {}

    def on_scalars(self, scalars: Mapping[str, Any], step: int, mode: str) -> None:
        if mode in ("train", "val"):
            found = {f"{mode}/{name.removeprefix(f'{mode}/')}": value for name, value in scalars.items()}
            numbers = {name: float(value) for name, value in found.items() if isinstance(value, (int, float))}
            self.newest = {**self.newest, **numbers}  # a new one: another thread may be reading it
