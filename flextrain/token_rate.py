"""TokenRateHook: tokens per second, and what share of the devices' peak the model's operations take."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .core.base.errors import ConfigError
from .core.base.registry import HOOKS
from .plan.machines import MACHINES, machine_named
from .runner.hooks.hook import Hook

if TYPE_CHECKING:
    from .runner.run import Run

_WINDOW = 10
_IGNORED = -100
_SLOWEST = 1e8
"""Operations per second that any device makes: a smaller number is meant in another unit."""


@HOOKS.register_module()
class TokenRateHook(Hook):
    """Logs ``tokens_per_s``, over all processes, and ``mfu``, the model FLOP utilisation: means over the last ten updates.

    The tokens of a batch are those that its ``attention_mask`` has, without one all of its ``input_ids``, without these its
    ``labels`` that are not -100. Only tensors on the CPU are counted; of others the elements of ``input_ids`` are, so that nothing
    waits for the device. Every data shard is taken to have as many as the process's own. At the end, a line tells of the whole
    training without validation.

    ``mfu`` is the number of the model's operations per second, as a share of the peak of all devices. A token takes 6 operations for
    each parameter that is trained and 4 for a frozen one, without the table of input embeddings, and 12 x layers x hidden size x
    length of the sequence for attention. Activations that are computed again do not count. Experts count as if every token used all
    of them: give ``flops_per_token``.

    Source: Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", 2022, appendix B.

    Args:
        mfu: log it too; False: only tokens.
        flops_per_token: operations of forward and backward for a token; None: by the formula above.
        peak: floating-point operations per second of one device, or a name of `flextrain list machines`; None: that of the
            device's name. If none is known, as on a CPU, ``mfu`` is left out, and a line says so.

    Raises:
        ConfigError: a number that is not above 0, or an unknown machine; when training begins, a batch without any of these.

    Example:
        custom_hooks=[dict(type="TokenRateHook", peak="h100")]
    """

    priority = "NORMAL"

    def __init__(
        self,
        mfu: bool = True,
        flops_per_token: float | None = None,
        peak: float | str | None = None,
        *,
        where: str = "custom_hooks.TokenRateHook",
    ) -> None:
        for key, value in (("flops_per_token", flops_per_token), ("peak", peak)):
            if isinstance(value, (int, float)) and not 0 < value < float("inf"):
                raise ConfigError(f"{where}.{key}: {value} is not allowed, give operations above 0")
            if key == "peak" and isinstance(value, (int, float)) and value < _SLOWEST:
                raise ConfigError(
                    f"{where}.peak: {value} is not allowed, give operations per second: {value} TFLOP/s are {value}e12"
                )
            if value is not None and not mfu:
                raise ConfigError(f"{where}.{key}: has no effect with mfu=False, leave it out")
        if isinstance(peak, str):
            machine_named(peak, f"{where}.peak")
        self._mfu, self._flops, self._peak = mfu, flops_per_token, peak
        self._where = where
        self._last = 0.0
        self._recent: deque[tuple[int, float]] = deque(maxlen=_WINDOW)
        self._tokens, self._seconds = 0, 0.0
        self._devices_peak: float | None = None
        self._per_token: float | None = None

    def before_train(self, runner: Run) -> None:
        """Begin to count, and find the peak of the devices."""
        self._recent.clear()
        self._tokens, self._seconds, self._per_token = 0, 0.0, None
        self._rates = runner.message_hub.history("train/tokens_per_s")
        self._shards = runner.strategy.topology.data.count
        if self._mfu:
            one = self._peak_of_one(runner)
            self._devices_peak = None if one is None else one * runner.world_size
            if one is None:
                runner.logger.info(
                    f"mfu is left out: no peak is known for {_device_name(runner.strategy.device)} in "
                    f"{_dtype(runner)}; give {self._where}.peak"
                )
            else:
                self._shares = runner.message_hub.history("train/mfu")
        self._last = time.perf_counter()

    def before_train_epoch(self, runner: Run) -> None:
        """Begin to measure after the dry pass, which is validation too."""
        if not self._recent:
            self._last = time.perf_counter()

    def after_val(self, runner: Run) -> None:
        """Restart the clock."""
        self._last = time.perf_counter()

    def after_train_iter(
        self, runner: Run, batch_idx: int, data_batch: Any = None, outputs: Mapping[str, Any] | None = None
    ) -> None:
        """Count the tokens of an update."""
        now = time.perf_counter()
        batches = [data_batch] if runner.accumulate == 1 else data_batch
        if self._per_token is None and self._devices_peak is not None:
            self._per_token = self._flops or _flops_per_token(runner, _length(batches))
        if runner.train_loop.ends_with_filler:
            batches = batches[:-1]
        tokens, seconds = self._shards * sum(map(self._count, batches)), now - self._last
        self._last = now
        self._tokens += tokens
        self._seconds += seconds
        self._recent.append((tokens, seconds))
        rate = sum(count for count, _ in self._recent) / sum(taken for _, taken in self._recent)
        self._rates.put(rate)
        if self._devices_peak is not None and self._per_token is not None:
            self._shares.put(rate * self._per_token / self._devices_peak)

    def after_train(self, runner: Run) -> None:
        """Log a line of the whole training."""
        if not self._tokens:
            return
        rate = self._tokens / self._seconds
        share = ""
        if self._devices_peak is not None and self._per_token is not None:
            share = f", model FLOP utilisation {rate * self._per_token / self._devices_peak:.1%}"
        runner.logger.info(f"Trained on {self._tokens:,} tokens, {rate:,.0f} tokens/s without validation{share}")

    def _count(self, batch: Any) -> int:
        if isinstance(batch, Mapping):
            mask, ids, labels = (batch.get(key) for key in ("attention_mask", "input_ids", "labels"))
            if isinstance(mask, Tensor) and mask.ndim == 2 and mask.device.type == "cpu":
                return int(torch.count_nonzero(mask))
            if isinstance(ids, Tensor):
                return ids.numel()
            if isinstance(labels, Tensor):
                return int((labels != _IGNORED).sum()) if labels.device.type == "cpu" else labels.numel()
        given = f"has {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else f"is a {type(batch).__name__}"
        raise ConfigError(
            f"{self._where}: counts attention_mask, input_ids or labels, and the batch {given}; remove the hook"
        )

    def _peak_of_one(self, runner: Run) -> float | None:
        if isinstance(self._peak, (int, float)):
            return float(self._peak)
        if isinstance(self._peak, str):
            return machine_named(self._peak, f"{self._where}.peak").rate(_dtype(runner))
        words = set(_device_name(runner.strategy.device).lower().replace("-", " ").split()) - {"cpu"}
        known = [name for name in MACHINES if set(name.split("-")) <= words]
        return MACHINES[max(known, key=len)].rate(_dtype(runner)) if known else None


def _device_name(device: torch.device) -> str:
    name = getattr(getattr(torch, device.type, None), "get_device_name", None)
    return str(name(device)) if callable(name) and device.type != "cpu" else device.type


def _dtype(runner: Run) -> str:
    """The dtype of products, by its name in the table of machines."""
    computed = runner.strategy.precision_report().compute
    name = str(computed[0] if computed else torch.float32).removeprefix("torch.")
    return "tfloat32" if name == "float32" and torch.get_float32_matmul_precision() != "highest" else name


def _length(batches: Sequence[Any]) -> int:
    ids = batches[0].get("input_ids", batches[0].get("labels")) if isinstance(batches[0], Mapping) else None
    return int(ids.shape[-1]) if isinstance(ids, Tensor) and ids.ndim else 0


def _flops_per_token(runner: Run, length: int) -> float:
    whole = runner.outline.whole
    operations = 6.0 * whole.trained + 4.0 * (whole.total - whole.trained)
    config: Any = getattr(runner.strategy.module, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    hidden, layers = getattr(text, "hidden_size", 0), getattr(text, "num_hidden_layers", 0)
    if not getattr(text, "tie_word_embeddings", True):
        embeddings: Any = runner.strategy.module.get_input_embeddings()  # type: ignore[operator]
        # Other stages of a pipeline do not have them.
        table = None if embeddings is None else next(iter(embeddings.parameters()), None)
        each = 6.0 if table is None or table.requires_grad else 4.0
        operations -= each * getattr(text, "vocab_size", 0) * hidden
    return operations + 12.0 * layers * hidden * length
