"""Perplexity: of a language model, over all tokens of all processes."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...core.base.errors import ConfigError
from ...core.base.registry import METRICS
from ...core.comm import collectives as dist
from ...core.model.token_counts import labels_in_loss
from .base import BaseMetric

# Which labels the loss of a model is a mean over: all of them, or all but the first of each sequence.


def counts_first_label(model: nn.Module) -> bool | None:
    """Return whether the first label of a sequence counts; None: not known.

    Args:
        model: any. In a model that is not of transformers, the parts that are decide, if all of them say the same.
    """
    found = {_counts_first(part) for part in _of_transformers(model)} - {None}
    return found.pop() if len(found) == 1 else None


def _of_transformers(model: nn.Module) -> Iterator[nn.Module]:
    """The outermost models of transformers, with peft's wrapper around them."""
    if hasattr(model, "get_base_model") or _is_of_transformers(model):
        yield model
        return
    for child in model.children():
        yield from _of_transformers(child)


def _counts_first(model: Any) -> bool | None:
    if (labels := labels_in_loss(model)) is not None:
        return labels == "all"
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if getattr(getattr(base, "config", None), "is_encoder_decoder", False):
        return True
    return True if any(kind.__name__.endswith("ForMaskedLM") for kind in type(base).__mro__) else None


def _is_of_transformers(model: nn.Module) -> bool:
    """Without importing the package for the question."""
    kinds = {f"{kind.__module__}.{kind.__name__}" for kind in type(model).__mro__}
    return "transformers.modeling_utils.PreTrainedModel" in kinds


_logger = logging.getLogger("flextrain")
_IGNORED = -100


@METRICS.register_module()
class Perplexity(BaseMetric):
    """The exponential of the mean loss of a token. Every token has the same weight, however they are split over batches.

    A batch has ``labels``, integers of shape (samples, positions); positions with -100 do not count. The model's outputs have
    ``loss``, its mean over the labels of the batch, or ``logits`` of shape (samples, positions, vocabulary), as outputs of
    transformers do. A tensor ``shift_labels`` in the batch, which models of transformers then take, is read in place of them.
    Beside an auxiliary loss of routers (``aux_loss``, ``z_loss``), which mixtures of experts add to theirs, logits are read.
    Tensors stay on the device until the end of the evaluation.

    Args:
        shift: the label of a position is predicted from those before it, as by causal models: the first position of each
            sample does not count. False: every label counts, as in masked models, and in those with an encoder and a
            decoder. None: as in the loss of the model, or of its parts, of transformers; True for other models.
        source: "loss" or "logits"; None: the loss if there is one, which takes less time, and it is that of tokens alone.
        labels: key of the labels in a batch.
        prefix: see BaseMetric.

    Raises:
        ConfigError: another ``source``; when a batch comes, it has no labels, or the outputs have neither.

    Example:
        val_evaluator=dict(type="Perplexity")
    """

    def __init__(
        self,
        shift: bool | None = None,
        source: Literal["loss", "logits"] | None = None,
        labels: str = "labels",
        prefix: str | None = None,
        *,
        where: str = "evaluator",
    ) -> None:
        super().__init__(prefix=prefix)
        if source not in (None, "loss", "logits"):
            raise ConfigError(f'{where}.source: "{source}" is not allowed, give "loss" or "logits", or leave it out')
        self._given, self._source, self._labels = shift, source, labels
        self._shift = shift is None or shift
        self._has_said = False

    def _look_at(self, model: nn.Module) -> None:
        """See BaseMetric."""
        if self._given is None:
            self._shift = not counts_first_label(model)

    def process(self, data_batch: Any, data_samples: Any) -> None:
        """See BaseMetric; keeps the sum of the losses and the number of tokens of a batch."""
        batch = data_batch if isinstance(data_batch, Mapping) else {}
        labels, shift = batch.get(self._labels), self._shift
        follows = self._given is None and self._labels == "labels"
        if follows and isinstance(shifted := batch.get("shift_labels"), Tensor):
            labels, shift = shifted, False
        if not isinstance(labels, Tensor):
            given = f"has {', '.join(map(str, data_batch))}" if isinstance(data_batch, Mapping) else "is no dict"
            raise ConfigError(f'evaluator: Perplexity needs a batch with a tensor "{self._labels}", this one {given}')
        counted = labels[..., 1:] if shift else labels
        tokens = (counted != _IGNORED).sum()
        if labels.device.type == "cpu" and not int(tokens):
            return  # the mean of no losses is NaN
        self.results.append((self._sum(data_samples, counted, tokens, shift), tokens))

    def _sum(self, outputs: Any, labels: Tensor, tokens: Tensor, shift: bool = False) -> Tensor:
        loss, logits = (_of(outputs, name) for name in ("loss", "logits"))
        has_more = isinstance(loss, Tensor) and self._source is None and _has_auxiliary_loss(outputs)
        if has_more and not isinstance(logits, Tensor) and not self._has_said:
            self._has_said = True
            _logger.warning(
                "Perplexity: the outputs have an auxiliary loss and no logits, and the loss is taken to be that of tokens alone; "
                "leave the auxiliary loss out of evaluation, or return logits"
            )
        if isinstance(loss, Tensor) and self._source != "logits" and not (has_more and isinstance(logits, Tensor)):
            count = tokens.to(loss.device)
            # Without tokens the mean is 0/0.
            return torch.where(count > 0, loss.detach().float().mean() * count, 0.0)
        if not isinstance(logits, Tensor) or self._source == "loss":
            wanted = self._source or "loss nor logits"
            has = "has neither" if self._source is None else "has no"
            raise ConfigError(
                f"evaluator: Perplexity reads the model's outputs, and {type(outputs).__name__} {has} {wanted}; return a dict or an "
                "output of transformers, with labels in the batch"
            )
        logits = logits.detach()[..., :-1, :] if shift else logits.detach()
        if logits.shape[:-1] != labels.shape:
            raise ConfigError(
                f"evaluator: Perplexity has logits of shape {[*logits.shape]} for labels of shape {[*labels.shape]}"
                f"{', without the last position and the first label' if shift else ''}; give the labels of these positions, or "
                'source="loss"'
            )
        return functional.cross_entropy(
            logits.flatten(0, -2).float(), labels.flatten().to(logits.device), ignore_index=_IGNORED, reduction="sum"
        )

    def evaluate(self, size: int | None = None) -> dict[str, Any]:
        """See BaseMetric."""
        if self.results:  # one copy from the device, in place of one for each batch
            losses, tokens = (torch.stack(values).cpu() for values in zip(*self.results, strict=True))
            self.results[:] = [(float(losses.double().sum()), int(tokens.sum()))]
        if size is not None and dist.is_main():
            _logger.warning(
                "Perplexity: the sampler of the evaluation repeats samples to make all processes even, and their tokens count "
                "again; give dict(type='DefaultSampler')"
            )
        return super().evaluate(None)

    def compute_metrics(self, results: list[Any]) -> dict[str, Any]:
        """See BaseMetric."""
        tokens = sum(count for _, count in results)
        if not tokens:
            _logger.warning("Perplexity: the data has no label that counts")
            return {"perplexity": math.nan}
        mean = sum(loss for loss, _ in results) / tokens
        return {"perplexity": math.exp(mean) if mean < 700 else math.inf}  # beyond, a float has no value for it


def _of(outputs: Any, name: str) -> Any:
    return outputs.get(name) if isinstance(outputs, Mapping) else getattr(outputs, name, None)


def _has_auxiliary_loss(outputs: Any) -> bool:
    """Whether the loss of a mixture of experts may contain more than that of tokens; names are those of transformers."""
    names = outputs if isinstance(outputs, Mapping) else getattr(outputs, "__dict__", {})
    return any(str(name).endswith(("aux_loss", "z_loss")) and _of(outputs, name) is not None for name in names)
