"""Context: the axis of MeshStrategy along which each process has some positions of every sequence."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ....core.comm import collectives as dist
from ....core.device import DEVICES
from ....core.errors import ConfigError, StrategyError
from ....core.model import class_name, overrides
from ....core.normalisation_layers import running_statistics
from ....core.random_state import torch_states
from ...base import NOTHING
from ...state import Optim
from ...steps import EvalStep, TrainStep
from ..axis import Axis, Evaluate, RunWindow
from .batches import CutBatch, SequenceBatches
from .comparison import OneProcessComparison
from .interception import Interception
from .of_transformers import TransformersModel, models_of_transformers
from .outputs import gather_outputs
from .sequence_attention import SequenceAttention


class Context(Axis):
    """Each process has some positions of every sequence, and attention goes over all processes.

    Everything else in a transformer works on each position alone. Therefore the parameters are those of one replica, which
    FSDP shards over these processes too. Attention is found in transformers' models by their attention interface, and in
    all others by ``scaled_dot_product_attention``. The first batch is compared with one process that has all positions.

    Source: Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023.
    """

    name = "cp"
    folds = True

    @classmethod
    def check_config(cls, config: Any) -> None:
        """See Axis."""
        if config.cp == 1:
            for key in ("cp_kind", "cp_keys", "cp_positions"):
                if key in config.model_fields_set:
                    raise ConfigError(f"strategy.{key}: has no effect with strategy.cp=1; give cp, or leave it out")
        elif config.pp != 1:
            raise ConfigError(
                f"strategy.pp: {config.pp} is not possible with strategy.cp={config.cp}; give pp=1 or cp=1"
            )
        elif config.compile:
            raise ConfigError(f"strategy.compile: is not possible with strategy.cp={config.cp}; leave it out")

    def check(self, model: nn.Module, optim: Optim | None) -> None:
        """See Axis."""
        name = class_name(model)
        if overrides(model, "train_step"):
            raise StrategyError(
                f"model: {name} defines its own train_step, whose loss strategy.cp cannot weigh over the processes of a "
                "sequence; define forward only"
            )
        if found := next(iter(running_statistics(model)), None):
            raise StrategyError(
                f"model.{found}: strategy.cp={self.size} would keep statistics of a process's positions only; use LayerNorm, "
                "GroupNorm or RMSNorm"
            )
        _check_positions(model, self.config.cp_positions)
        self._models = models_of_transformers(model)
        self._kind = _kind(self.config, [_settings(found) for found in self._models])
        for found in self._models:
            _check_of_transformers(found, self.config, self._kind)

    def apply(self, model: nn.Module) -> nn.Module:
        """See Axis."""
        self._model, self._attention = model, SequenceAttention(self._kind, self.mesh)
        self._adapted = [TransformersModel(found, self._attention) for found in self._models]
        self._batches = SequenceBatches(
            self.config.cp_keys or {},
            self.config.cp_positions,
            self._attention.shards,
            self.index,
            bool(self._adapted),
            any(adapted.shifts for adapted in self._adapted),
        )
        weight = getattr(model, "loss_weight", None)
        self._is_weighed = callable(weight) and not isinstance(weight, nn.Module)
        if self._is_weighed:
            self._batches.loss_weight = weight
            model.loss_weight = self._weight_of  # type: ignore[assignment]
        self._interception: Interception | None = Interception(self._attention)
        self._comparison: OneProcessComparison | None = OneProcessComparison(
            self._model, self._batches, self._attention, self._adapted, self._interception, self.mesh, self._is_weighed
        )
        self._names: list[str] | None = None
        return model

    def _weight_of(self, batch: Any) -> Any:
        assert self._batches.loss_weight is not None
        return batch.weight if isinstance(batch, CutBatch) else self._batches.loss_weight(batch)

    def release(self) -> None:
        """See Axis."""
        for adapted in self._adapted:
            adapted.release()
        if self._is_weighed:
            vars(self._model).pop("loss_weight", None)

    def split(self, batch: Any) -> CutBatch:
        """See Axis."""
        return self._batches.cut(batch)

    def run_window(self, window: Sequence[Any], step: TrainStep, inner: RunWindow) -> dict[str, Tensor]:
        """See Axis."""
        if self._comparison is not None:
            self._comparison.of_training(window[0], step)
            self._compared()
        # A shard with fewer targets counts less; the model's own weights know that.
        factors = [1.0 if self._is_weighed else batch.factor for batch in window]
        shares = (1.0 if share is None else share for share in step.shares)
        step.shares = [
            1.0 if batch.is_void else factor * share
            for batch, factor, share in zip(window, factors, shares, strict=True)
        ]
        with self._attending(), _own_random_numbers(self.layout.device_type, self.index):
            outputs = inner(window, _Scaled(step, window, factors, self._attention))
        return self._averaged(outputs, window)

    def evaluate(self, batch: Any, step: EvalStep, inner: Evaluate) -> Any:
        """See Axis."""
        if self._comparison is not None:
            self._comparison.of_evaluation(batch, step)
            self._compared()
        self._attention.length = batch.shards.length
        with self._attending():
            outputs = inner(batch, step)
        return gather_outputs(outputs, batch, self.mesh)

    def described(self) -> str:
        """See Axis."""
        return f"attention over {self.size} shards of each sequence, by {self._kind}"

    def _attending(self) -> AbstractContextManager[Any]:
        return NOTHING if self._interception is None else self._interception.everywhere()

    def _compared(self) -> None:
        self._comparison = None
        if self._interception is not None and not self._interception.calls:
            self._interception = None  # all attention goes through transformers' interface

    def _averaged(self, outputs: Mapping[str, Tensor], window: Sequence[CutBatch]) -> dict[str, Tensor]:
        """The values to log of the whole sequences, equal on all of their processes."""
        if self._names is None:
            everyones = dist.all_gather_object(list(outputs), self.mesh.get_group())
            self._names = max(everyones, key=len)
        own = sum(batch.count for batch in window) if self._is_weighed else 1.0
        # With the model's weights, ``loss`` has them, and other values are means over what a process has.
        weights = [1.0 if name == "loss" else own if name in outputs else 0.0 for name in self._names]
        values = [outputs.get(name, outputs["loss"].new_zeros(())) for name in self._names]
        dtype = torch.float64 if any(value.dtype == torch.float64 for value in values) else torch.float32
        sent = torch.stack([value.to(dtype) * weight for value, weight in zip(values, weights, strict=True)])
        total = torch.tensor(weights, dtype=dtype).to(sent.device)
        both = torch.stack([sent, total])
        torch.distributed.all_reduce(both, group=self.mesh.get_group())
        means = both[0] / both[1]
        return {**outputs, **dict(zip(self._names, means.unbind(), strict=True))}


class _Scaled:
    """A TrainStep whose values to log have the weight of a process's shard of the batch."""

    def __init__(
        self, step: TrainStep, window: Sequence[CutBatch], factors: Sequence[float], attention: SequenceAttention
    ) -> None:
        self._step, self._factors, self._attention = step, factors, attention
        self._is_void = [batch.is_void for batch in window]
        self.shares = step.shares
        self.begin, self.prepare, self.mean = step.begin, step.prepare, step.mean

    def run(self, batch: Any, index: int) -> dict[str, Tensor]:
        """See TrainStep."""
        if self._is_void[index]:
            loss, logs = self.forward(batch)
            self._step.backward(loss * 0.0, index)
        else:
            self._attention.length = batch.shards.length
            logs = self._step.run(batch, index)
        return self._scaled(logs, self._factors[index])

    def forward(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """See TrainStep."""
        self._attention.length = batch.shards.length
        return self._step.forward(batch)

    def backward(self, loss: Tensor, index: int) -> None:
        """See TrainStep."""
        self._step.backward(loss * 0.0 if self._is_void[index] else loss, index)

    def _scaled(self, logs: dict[str, Tensor], factor: float) -> dict[str, Tensor]:
        if factor == 0:  # a mean over nothing
            return {name: torch.zeros_like(value) for name, value in logs.items()}
        return logs if factor == 1 else {name: value * factor for name, value in logs.items()}


@contextmanager
def _own_random_numbers(device_type: str, index: int) -> Iterator[None]:
    """Let each process draw other numbers on its device, because it has other positions; afterwards as before.

    Numbers of the host, by which a model may skip layers, stay the same on all of them if the device is another.
    """
    device = torch.device(device_type)
    seed = int(torch.randint(2**62, (), dtype=torch.int64, device="cpu"))  # the same in all processes of a sequence
    states = torch_states(device)
    if device_type == "cpu":
        torch.default_generator.manual_seed(seed + index)
    else:
        DEVICES[device_type].module.manual_seed(seed + index)
    try:
        yield
    finally:
        if device_type == "cpu":
            torch.set_rng_state(states["torch"])
        else:
            DEVICES[device_type].module.set_rng_state(states[device_type], device)


def _settings(model: Any) -> Any:
    return model.config.get_text_config()


def _kind(config: Any, settings: Sequence[Any]) -> str:
    """Return "ring" or "ulysses"; with "auto" the latter, whose kernels are torch's, if the heads are known to divide."""
    if config.cp_kind != "auto":
        return str(config.cp_kind)
    heads = [getattr(found, "num_attention_heads", 1) for found in settings]
    return "ulysses" if heads and all(number % (config.cp * config.tp) == 0 for number in heads) else "ring"


def _check_positions(model: nn.Module, positions: str | None) -> None:
    """Raise ConfigError for a model that has to count positions itself, from 0 on every process."""
    if positions is None:
        return
    parameters = inspect.signature(model.forward).parameters
    if positions not in parameters and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        raise ConfigError(
            f"strategy.cp_positions: {class_name(model)}.forward has no parameter {positions}, and would count positions from 0 on "
            "every process; add it, name another one, or give None if it needs no positions"
        )


def _check_of_transformers(model: Any, config: Any, kind: str) -> None:
    """Raise ConfigError for a model of transformers that context parallelism does not fit."""
    name, settings = class_name(model), _settings(model)
    if getattr(model.config, "is_encoder_decoder", False):
        raise ConfigError(
            f"strategy.cp: {config.cp} is not possible for {name}, an encoder and a decoder have two sequences"
        )
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ConfigError(
            f"strategy.cp: {config.cp} is not possible for {name}, whose forward has no position_ids and counts positions from 0"
        )
    if getattr(settings, "output_router_logits", False):
        raise ConfigError(
            f"model.config.output_router_logits: True is not possible with strategy.cp={config.cp}, the balancing loss is no "
            "mean over positions; set it to False"
        )
    heads = getattr(settings, "num_attention_heads", None)
    if kind == "ulysses" and heads is not None and heads % (config.cp * config.tp):
        raise ConfigError(
            f'strategy.cp_kind: "ulysses" needs a number of heads that cp * tp = {config.cp * config.tp} divides, {name} has '
            f'{heads}; choose "ring"'
        )
    dropout = next((key for key in ("attention_dropout", "attn_pdrop") if getattr(settings, key, 0.0)), None)
    if kind == "ring" and dropout is not None:
        raise ConfigError(
            f'model.config.{dropout}: {getattr(settings, dropout)} is not possible with strategy.cp_kind="ring"; choose '
            '"ulysses", or set it to 0'
        )
