"""Context: the axis of MeshStrategy along which each process has some positions of every sequence."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ....core.base.errors import ConfigError, StrategyError, suggest, unchecked
from ....core.comm import collectives as dist
from ....core.device.precision import running_statistics
from ....core.hugging_face.transformers_private import (
    decoder_inputs,
    encoder_and_decoder,
    position_embeddings,
    pretrained_models,
    relative_attention,
)
from ....core.model.base_model import class_name, overrides
from ....core.model.token_counts import takes_number_of_items
from ....core.torch_compat.torch_private import has_values, is_compiled, repeating_in
from ...base import NOTHING, EvalStep, Optim, TrainStep
from ..axis import Axis, CheckWindow, Evaluate, RunWindow
from .attention import SequenceAttention
from .batches import CutBatch, SequenceBatches, gather_outputs
from .comparison import OneProcessComparison
from .transformers import Interception, Repetition, TransformersModel

# Checks of models that sequences are to be cut for, before anything is changed.


def check_without_cut(model: nn.Module, count: int) -> None:
    """Raise StrategyError for a model whose training a cut of its sequences would change; ``count`` processes."""
    if overrides(model, "train_step"):
        raise StrategyError(
            f"model: {class_name(model)} defines its own train_step, whose loss strategy.cp cannot weigh over the processes of a "
            "sequence; define forward only"
        )
    if found := next(iter(running_statistics(model)), None):
        raise StrategyError(
            f"model.{found}: strategy.cp={count} would keep statistics of a process's positions only; use LayerNorm, GroupNorm or "
            "RMSNorm"
        )


def attention_kind(config: Any, models: Sequence[Any]) -> str:
    """Return "ring" or "ulysses"; with "auto" the latter, whose kernels are torch's, if the heads are known to divide."""
    if config.cp_kind != "auto":
        return str(config.cp_kind)
    heads = [number for model in models for number in _heads(model) or [1]]
    return "ulysses" if heads and all(number % (config.cp * config.tp) == 0 for number in heads) else "ring"


def may_attend(module: nn.Module) -> bool:
    """Whether the module's own forward may call attention other than through transformers' interface."""
    known = type(module).__module__.partition(".")[0] in ("torch", "transformers", "peft") and "forward" not in vars(
        module
    )
    return not known or isinstance(module, nn.MultiheadAttention)


def check_alike(model: nn.Module, models: Sequence[Any], count: int) -> bool:
    """Return whether models of transformers in a model have an encoder and a decoder.

    Raises:
        ConfigError: only some do, or ``model`` around them does not take what the decoder is given.
    """
    having = [bool(getattr(found.config, "is_encoder_decoder", False)) for found in models]
    if any(having) and not all(having):
        raise ConfigError(
            f"strategy.cp: {count} is not possible for {class_name(model)}, of whose models only some have an encoder and a decoder; "
            "use dp_shard or tp instead"
        )
    if any(having) and not _takes(model, "decoder_input_ids"):
        raise ConfigError(
            f"model: {class_name(model)}.forward has no parameter decoder_input_ids, which strategy.cp={count} makes of whole labels; "
            "add it, and give it to the model of transformers"
        )
    return any(having)


def _takes(model: nn.Module, name: str) -> bool:
    parameters = inspect.signature(model.forward).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def check_positions(model: nn.Module, positions: str | None) -> None:
    """Raise ConfigError for a model that has to count positions itself, from 0 on every process."""
    if positions is not None and not _takes(model, positions):
        raise ConfigError(
            f"strategy.cp_positions: {class_name(model)}.forward has no parameter {positions or repr(positions)}, and would count positions "
            "from 0 on every process; add it, name another one, or give None if it needs no positions"
            f"{suggest(positions, inspect.signature(model.forward).parameters)}"
        )


def check_of_transformers(model: Any, config: Any, kind: str) -> None:
    """Raise ConfigError for a model of transformers that context parallelism does not fit."""
    name, settings = class_name(model), _settings(model)
    has_encoder = bool(getattr(model.config, "is_encoder_decoder", False))
    if has_encoder:
        check_of_both(model, config)
    counts_itself = getattr(settings, "model_type", None) == "bloom"  # from its biases
    if counts_itself and config.tp > 1:
        raise ConfigError(
            f"strategy.tp: {config.tp} is not possible for {name} beside cp={config.cp}, whose attention adds biases for whole "
            "sequences to products of its own; use cp or tp alone"
        )
    if not (counts_itself or has_encoder) and "position_ids" not in inspect.signature(model.forward).parameters:
        raise ConfigError(
            f"strategy.cp: {config.cp} is not possible for {name}, whose forward has no position_ids and counts positions from 0; use "
            "dp_shard or tp instead"
        )
    if getattr(settings, "output_router_logits", False):
        raise ConfigError(
            f"model.config.output_router_logits: True is not possible with strategy.cp={config.cp}, the balancing loss is no "
            "mean over positions; set it to False"
        )
    if getattr(settings, "output_attentions", False):
        raise ConfigError(
            f"model.config.output_attentions: True is not possible with strategy.cp={config.cp}, whose attention has no weights of whole "
            "sequences; set it to False"
        )
    # In version 5 by kind of layer, where there are several.
    found = getattr(settings, "rope_parameters", None) or getattr(settings, "rope_scaling", None) or {}
    for each in (found, *(value for value in found.values() if isinstance(value, dict))):
        if (rope := each.get("rope_type", each.get("type"))) in ("dynamic", "longrope"):
            raise ConfigError(
                f'model.config: rotary positions of type "{rope}" depend on the length of a sequence, of which each of strategy.cp='
                f"{config.cp} processes has some; choose another type, such as yarn"
            )
    of_all = _heads(model)
    heads = next((number for number in of_all if number % (config.cp * config.tp)), of_all[0] if of_all else None)
    divides = heads is not None and heads % (config.cp * config.tp) == 0
    if kind == "ulysses" and heads is not None and not divides:
        raise ConfigError(
            f'strategy.cp_kind: "ulysses" needs a number of heads that cp * tp = {config.cp * config.tp} divides, {name} has '
            f'{heads}; choose "ring"'
        )
    if layerdrop := next((key for key in _LAYERDROP if getattr(settings, key, 0.0)), None):
        raise ConfigError(
            f"model.config.{layerdrop}: {getattr(settings, layerdrop)} is not possible with strategy.cp={config.cp}, whose processes "
            "would leave out different layers; set it to 0"
        )
    keys = ("attention_dropout", "attn_pdrop", *(["dropout_rate"] if has_encoder else []))
    dropout = next((key for key in keys if getattr(settings, key, 0.0)), None)
    if kind == "ring" and dropout is not None:
        raise ConfigError(
            f'model.config.{dropout}: {getattr(settings, dropout)} is not possible with strategy.cp_kind="ring"; '
            + (
                'choose "ulysses", or set it to 0'
                if divides
                else f"set it to 0, or let cp * tp divide the {heads} heads"
            )
        )


def check_of_both(model: Any, config: Any) -> None:
    """Raise ConfigError for a model of transformers with an encoder and a decoder that context parallelism does not fit."""
    stacks, name = encoder_and_decoder(model), class_name(model)
    if stacks is None or model.main_input_name != "input_ids":
        inputs = "no encoder and decoder of tokens" if stacks is None else f"its encoder reads {model.main_input_name}"
        raise ConfigError(
            f"strategy.cp: {config.cp} is not possible for {name}, {inputs}, and each of two sequences of tokens is cut; use dp_shard "
            "or tp instead"
        )
    if (attention := getattr(_settings(model), "attention_type", None)) is not None:
        raise ConfigError(
            f'model.config.attention_type: "{attention}" is not possible with strategy.cp={config.cp}, the encoder of {name} computes '
            "attention without transformers' interface; use dp_shard or tp instead"
        )
    for which, stack in zip(("encoder", "decoder"), stacks, strict=True):
        if not (position_embeddings(stack) or relative_attention(stack)):
            raise ConfigError(
                f"strategy.cp: {config.cp} is not possible for {name}, whose {which} counts positions from 0; use dp_shard or tp "
                "instead"
            )
    if config.tp > 1:
        raise ConfigError(
            f"strategy.tp: {config.tp} is not possible for {name} beside cp={config.cp}, which cuts an encoder and a decoder; use cp "
            "or tp alone"
        )


_LAYERDROP = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")


def _settings(model: Any) -> Any:
    return model.config.get_text_config()


def _heads(model: Any) -> list[int]:
    """The numbers of heads, as far as they are known: an encoder and a decoder may have different ones."""
    names = ("num_attention_heads", "encoder_attention_heads", "decoder_attention_heads")
    found = (getattr(_settings(model), name, None) for name in names)
    return [number for number in found if isinstance(number, int)]


class Context(Axis):
    """Each process has some positions of every sequence, and attention goes over all processes.

    Everything else in a transformer works on each position alone. Therefore the parameters are those of one replica, which
    FSDP shards over these processes too. Attention is found in transformers' models by their attention interface, and in
    all others by ``scaled_dot_product_attention``. The first batch is compared with one process that has all positions.

    Source: Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023.
    """

    name = "cp"
    folds = True
    fast = True

    @property
    def pairs(self) -> bool:  # type: ignore[override]
        """See Axis; heads go for positions by collectives."""
        return self.config.cp_kind != "ulysses"

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

    def check(self, model: nn.Module, optim: Optim | None) -> None:
        """See Axis."""
        check_without_cut(model, self.size)
        self._models = list(pretrained_models(model).values())
        self._has_encoder = check_alike(model, self._models, self.size)
        if not self._has_encoder:
            check_positions(model, self.config.cp_positions)
        if takes_number_of_items(model) and getattr(model, "loss_weight", None) is not None:
            raise StrategyError(
                f"model: {type(model).__name__}.forward divides by num_items_in_batch, and cp needs a mean over the targets "
                "of a process; leave out the argument, and define loss_weight(data)"
            )
        self._kind = attention_kind(self.config, self._models)
        for found in self._models:
            check_of_transformers(found, self.config, self._kind)

    def apply(self, model: nn.Module) -> nn.Module:
        """See Axis."""
        self._model, self._attention = model, SequenceAttention(self._kind, self.mesh)
        if self.config.compile or is_compiled(model):
            self._attention.stay_uncompiled()
        self._adapted = [TransformersModel(found, self._attention) for found in self._models]
        self._batches = SequenceBatches(
            self.config.cp_keys or {},
            self.config.cp_positions,
            self._attention.shards,
            self.index,
            bool(self._adapted),
            any(adapted.shifts for adapted in self._adapted),
            any(adapted.divides for adapted in self._adapted),
            decoder_inputs=partial(decoder_inputs, self._models[0]) if self._has_encoder else None,
        )
        weight = getattr(model, "loss_weight", None)
        self._is_weighed = callable(weight) and not isinstance(weight, nn.Module)
        if self._is_weighed:
            self._batches.loss_weight = weight
            model.loss_weight = self._weight_of  # type: ignore[assignment]
        self._interception, self._intercepts = Interception(self._attention), True
        self._may_attend = any(may_attend(module) for module in model.modules())
        self._comparison = OneProcessComparison(
            self._model, self._batches, self._attention, self._adapted, self._interception, self.mesh, self._is_weighed
        )
        self._names: list[str] | None = None
        self._left_out: set[str] = set()
        return model

    def _weight_of(self, batch: Any) -> Any:
        assert self._batches.loss_weight is not None
        if isinstance(batch, CutBatch):
            return batch.weight if batch.is_weighed else self._batches.loss_weight(batch.whole)
        return self._batches.loss_weight(batch)

    def prepare_whole(self, model: nn.Module) -> None:
        """See Axis."""
        for adapted, copied in zip(self._adapted, pretrained_models(model).values(), strict=True):
            adapted.restore_in(copied)

    def release(self) -> None:
        """See Axis."""
        for adapted in self._adapted:
            adapted.release()
        if self._is_weighed:
            vars(self._model).pop("loss_weight", None)

    def split(self, batch: Any) -> CutBatch:
        """See Axis."""
        return self._batches.cut(batch)

    def check_window(self, window: Sequence[Any], step: TrainStep, inner: CheckWindow) -> None:
        """See Axis."""
        self._batches.check_keys([batch.whole for batch in window])
        if not has_values(next(self._model.parameters())):
            unchecked.warning(
                "strategy.cp: the first batch was not compared with one process that has all positions; a real run compares it, and "
                "refuses a model that cannot be cut"
            )
            self._intercepts, self._attention.has_documents = self._may_attend, True
        else:
            try:
                with _repeating():
                    first = next((batch for batch in window if batch.documents is not None), window[0])
                    self._comparison.of_training(first, step)
            finally:
                self._attention.end()
            self._compared()
        inner(window, step)

    def run_window(self, window: Sequence[Any], step: TrainStep, inner: RunWindow) -> dict[str, Tensor]:
        """See Axis."""
        for batch in window:
            self._batches.check_counting(batch, "train")
        # A shard with fewer targets counts less; the model's own weights know that.
        factors = [1.0 if self._is_weighed else batch.factor for batch in window]
        shares = (1.0 if share is None else share for share in step.shares)
        step.shares = [
            1.0 if batch.is_void else factor * share
            for batch, factor, share in zip(window, factors, shares, strict=True)
        ]
        try:
            with self._attending(), self.own_random_numbers(), _repeating():
                outputs = inner(window, _Scaled(step, window, factors, self._attention))
        finally:
            self._attention.end()
        return self._averaged(outputs, window)

    def evaluate(self, batch: Any, step: EvalStep, inner: Evaluate) -> Any:
        """See Axis."""
        if step.mode not in self._batches.needs:  # a model may test by another method than it validates
            self._comparison.of_evaluation(batch, step)
            self._compared()
        self._batches.check_counting(batch, step.mode)
        self._attention.begin(batch)
        try:
            with self._attending():
                outputs = inner(batch, step)
        finally:
            self._attention.end()
        return gather_outputs(outputs, batch, self.mesh)

    def described(self) -> str:
        """See Axis."""
        return f"attention over {self.size} shards of each sequence, by {self._kind}"

    def _attending(self) -> AbstractContextManager[Any]:
        if self._intercepts:
            return self._interception.everywhere()
        is_repeated = self.config.activation_checkpointing is not None and not self.config.compile
        return repeating_in(lambda: (nullcontext(), Repetition(self._attention))) if is_repeated else NOTHING

    def _compared(self) -> None:
        # Otherwise all attention goes through transformers' interface, in branches that later batches take too.
        self._intercepts = self._interception.calls > 0 or self._may_attend

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
        total = torch.tensor(weights, dtype=dtype).to(outputs["loss"].device)
        sent = torch.stack([value.to(total) * weight for value, weight in zip(values, weights, strict=True)])
        both = torch.stack([sent, total])
        torch.distributed.all_reduce(both, group=self.mesh.get_group())
        means = dict(zip(self._names, (both[0] / both[1]).unbind(), strict=True))
        if left_out := sorted(outputs.keys() - means.keys() - self._left_out):
            self._left_out.update(left_out)
            logging.getLogger("flextrain").warning(
                f"strategy.cp: the log leaves out {', '.join(left_out)}, which the model did not give in the first update; give it in each"
            )
        # A mean that nobody has a value for is none; one without items has those of others.
        return {name: mean for name, mean in means.items() if name in outputs or not own}


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
            self._attention.begin(batch)
            logs = self._step.run(batch, index)
        return self._scaled(logs, self._factors[index])

    def forward(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """See TrainStep."""
        self._attention.begin(batch)
        return self._step.forward(batch)

    def backward(self, loss: Tensor, index: int) -> None:
        """See TrainStep."""
        self._step.backward(loss * 0.0 if self._is_void[index] else loss, index)

    def _scaled(self, logs: dict[str, Tensor], factor: float) -> dict[str, Tensor]:
        if factor == 0:  # a mean over nothing
            return {name: torch.zeros_like(value) for name, value in logs.items()}
        return logs if factor == 1 else {name: value * factor for name, value in logs.items()}


@contextmanager
def _repeating() -> Iterator[None]:
    """Context in which the older way of repeating forward, which would not repeat attention over all processes, is refused."""
    try:
        yield
    except ValueError as error:
        if "context_fn" not in str(error):
            raise
        raise StrategyError(
            "model: checkpoint(use_reentrant=True) would repeat attention over this process's positions only; with strategy.cp "
            "give use_reentrant=False"
        ) from error
