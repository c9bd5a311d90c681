"""Send weights without a folder: by an engine of vLLM's weight transfer, or over HTTP to a ``Receiver``, only what has changed."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch
from safetensors.torch import save
from torch import Tensor

from flextrain import ConfigError, LiveWeights

from .manifest import Entry, PublishError, entry_of
from .requests import Server


class TrainerEngine(Protocol):
    """The trainer's side of a weight transfer, as vLLM's ``WeightTransferTrainerFactory.trainer_init`` returns it."""

    def send_weights(self) -> None:
        """Send what its source yields, and drive the engine."""


class _Source:
    """A ``WeightSource`` that stays while the weights are those of the present call."""

    now: LiveWeights | None = None

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def metadata(self) -> list[Any]:
        return self._weights().metadata()

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, tensor.to(self._device)) for name, tensor in self._weights())

    def _weights(self) -> LiveWeights:
        if self.now is None:
            raise PublishError("weights can be read during publish() only")
        return self.now


class TransferTarget:
    """Sends by an engine of vLLM's weight transfer (NCCL and so on), which is made once, at the first call.

    Source: vLLM 0.32, ``vllm/distributed/weight_transfer/base.py``.

    Args:
        trainer: called with a ``WeightSource`` on rank 0, which is the sender; returns an object with ``send_weights()``. With
            vLLM: ``lambda source: WeightTransferTrainerFactory.trainer_init(config, init_info, client=client, source=source)``.
        device: where the engine takes tensors, one at a time; default: the accelerator, as NCCL needs it, or the CPU if there is none.
    """

    def __init__(self, trainer: Callable[[Any], TrainerEngine], device: str | torch.device | None = None) -> None:
        if not callable(trainer):
            raise ConfigError(
                f"TransferTarget.trainer: {trainer!r} is not allowed, give a function of a source of weights"
            )
        if device is None:
            device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        self._make, self._source = trainer, _Source(torch.device(device or "cpu"))
        self._engine: TrainerEngine | None = None

    def publish(self, weights: LiveWeights) -> dict[str, Any]:
        """Send all weights; return ``tensors`` and ``seconds``."""
        begin = time.perf_counter()
        self._source.now = weights
        try:
            if self._engine is None:
                self._engine = self._make(self._source)
            self._engine.send_weights()
        finally:
            self._source.now = None
        return {"tensors": len(weights.metadata()), "seconds": time.perf_counter() - begin}


class HTTPTarget:
    """Sends what has changed to a server with a ``Receiver``, which takes all of a version or nothing.

    The calls are the phases of vLLM's weight transfer: ``/start_weight_update``, ``/update_weights`` for each bucket,
    ``/finish_weight_update``. The server is paused for the last one alone, because until then tensors lie beside those in use.

    Args:
        url: of the server.
        size: bytes of tensors in one call, of which rank 0 needs five times as much memory; a larger tensor has a call of its own.
        timeout_s: seconds that one answer may take.
        headers: sent with every request.
    """

    def __init__(
        self, url: str, *, size: int | str = "256MB", timeout_s: float = 600.0, headers: dict[str, str] | None = None
    ) -> None:
        self.server, self.size = Server(url, timeout_s, headers), size

    def __str__(self) -> str:
        return self.server.url

    def publish(self, weights: LiveWeights) -> dict[str, Any]:
        """Send a version.

        Returns:
            ``version``, ``tensors``, ``changed``, ``sent_bytes``, ``seconds``, and ``paused_s``, in which the server stood still.

        Raises:
            PublishError: the server cannot be reached, or has refused the version; it has the one before.
        """
        begin = time.perf_counter()
        has = self.server.get("/weights")
        try:
            known, number = dict(has["tensors"]), int(has["version"]) + 1
        except (KeyError, TypeError, ValueError):
            raise PublishError(f"{self.server.url}/weights: answers {str(has)[:100]}, which no Receiver does") from None
        self.server.post("/start_weight_update", {"version": number})
        sums: dict[str, str] = {}
        changed = sent = 0
        for bucket in weights.buckets(self.size):
            found = self._send(weights, bucket, known)
            sums |= found
            news = [one.nbytes for one in bucket if known.get(one.name) != found[one.name]]
            changed, sent = changed + len(news), sent + sum(news)
        paused = time.perf_counter()
        try:
            self.server.post("/pause")
            self.server.post("/finish_weight_update", {"version": number, "tensors": sums})
        except PublishError:
            with suppress(PublishError):  # it refuses if it has a part of the new version
                self.server.post("/resume")
            raise
        self.server.post("/resume")
        paused_s = time.perf_counter() - paused
        return {
            "version": number,
            "tensors": len(sums),
            "changed": changed,
            "sent_bytes": sent,
            "seconds": time.perf_counter() - begin,
            "paused_s": paused_s,
        }

    def _send(self, weights: LiveWeights, bucket: Sequence[Any], known: Mapping[str, str]) -> dict[str, str]:
        """Send the tensors of a bucket with another checksum than the known one; return all checksums. It keeps no tensor."""
        tensors = {one.name: weights.read(one) for one in bucket}
        entries = {name: entry_of(name, tensor) for name, tensor in tensors.items()}
        news = {name: entry for name, entry in entries.items() if known.get(name) != entry.sha256}
        if news:
            self.server.post("/update_weights", {"update_info": _packed({name: tensors[name] for name in news}, news)})
        return {name: entry.sha256 for name, entry in entries.items()}


def _packed(tensors: dict[str, Tensor], entries: dict[str, Entry]) -> dict[str, Any]:
    return {
        "names": list(entries),
        "dtype_names": [entry.dtype for entry in entries.values()],
        "shapes": [list(entry.shape) for entry in entries.values()],
        "sha256": [entry.sha256 for entry in entries.values()],
        "safetensors": base64.b64encode(save(tensors)).decode(),
    }
