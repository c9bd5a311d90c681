"""Publish the weights of a run as it is now: give them to a target, such as an inference engine, without a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ...core.base.errors import CheckpointError, ConfigError, one_of
from ...core.base.tensors import dtype_name, is_quantised
from ...core.checkpoint.chunks import is_ordinary
from ...core.comm.agreement import gather_differing, raising_together
from ...core.device.precision import to_dtype
from ...core.hugging_face.pretrained import META_KEY
from ...strategies.parts import aliases, state_left_out
from .weights import ADAPTERS, adapter_configurations, transposed_layers

if TYPE_CHECKING:
    from ...core.checkpoint.export.live_weights import LiveWeights
    from ..run import Run

_MODEL = "model."
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class Target(Protocol):
    """What takes the weights of a run."""

    def publish(self, weights: LiveWeights) -> Any:
        """Take the weights; rank 0 alone calls it. What it returns must be picklable."""


def check_target(target: Any) -> None:
    """Raise ConfigError if ``target`` takes no weights."""
    if not callable(getattr(target, "publish", None)):
        raise ConfigError(f"publish: {target!r} is not allowed, give an object with a method publish(weights)")


def check_dtype(given: str | torch.dtype | None) -> torch.dtype | None:
    """Return the dtype of floating-point tensors; None: their own.

    Raises:
        ConfigError: engines need more than such numbers to compute with it, as the scales of float8.
    """
    kind = None if given is None else to_dtype(given, "publish: dtype")
    if kind not in (None, *_DTYPES):
        raise ConfigError(f"publish: dtype: {given} is not allowed, choose {one_of(map(dtype_name, _DTYPES))}")
    return kind


def _check_values(state: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError if a tensor has no values to read."""
    for key, value in state.items():
        name = key.removeprefix(_MODEL)
        if is_quantised(value):
            raise CheckpointError(
                f"{name}: is quantised ({type(value).__name__}), and quantised weights cannot be published"
            )
        # In a forward FSDP has freed what other blocks need.
        if is_ordinary(value) and value.numel() and not value.untyped_storage().nbytes():
            raise CheckpointError(f"{name}: has no values now, call publish() between two updates, not inside of one")


def publish(run: Run, target: Target, dtype: torch.dtype | None) -> Any:
    """Call ``target.publish`` on rank 0; return its result on every process. A collective."""
    from ...core.checkpoint.export.live_weights import live_weights
    from ...core.checkpoint.export.peft_adapters import TRANSPOSED
    from ...core.checkpoint.live import read_on_rank_0

    strategy = run.strategy
    state = {key: value for key, value in strategy.state().items() if key.startswith(_MODEL)} | state_left_out(strategy)
    with raising_together():
        _check_values(state)
    found = adapter_configurations(strategy.module)
    # Stages of a pipeline have different layers.
    adapted = [one for one in gather_differing([found, transposed_layers(strategy.module) if found else []]) if one[0]]
    values: dict[str, Any] = {"aliases": aliases(strategy)}
    if adapted:
        values |= {ADAPTERS: adapted[0][0], TRANSPOSED: sorted({name for _, names in adapted for name in names})}
    if run.hugging_face is not None:
        values["meta"] = {META_KEY: run.hugging_face.values()}

    def use(source: Any) -> Any:
        with live_weights(source, dtype) as weights:
            return target.publish(weights)

    return read_on_rank_0(type(target).__name__, state, values, use, timeout_s=float(strategy.config.timeout_s))
