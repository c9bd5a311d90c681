"""Weighing: the weight of each micro-batch of each process in an update."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...core.base.errors import ConfigError
from ...core.comm import collectives as dist
from ...core.comm.topology import Topology
from ...core.model.base_model import NO_LOSS
from ...core.model.token_counts import IGNORED, NUMBER, takes_number_of_items
from ...core.torch_compat.torch_private import is_view, with_values
from ..data.readers import Counted

# The values to log of an update, from those of its micro-batches.


def kept(value: Tensor) -> Tensor:
    """Return a value to log, which is read only when a line is written.

    A parameter or a buffer, or a view of one, may change in place until then: it is copied.
    """
    return value.detach().clone() if value.grad_fn is None or is_view(value) else value.detach()


def mean_of(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the means of the values that all parts have; a sum of truth values or small integers would be of their dtype."""
    total = {name: value if value.is_floating_point() else value.float() for name, value in parts[0].items()}
    for part in parts[1:]:
        total = {name: total[name] + part[name] for name in total if name in part}
    return {name: value / len(parts) for name, value in total.items()}


def weighted_mean(
    parts: Sequence[Mapping[str, Tensor]],
    weights: Sequence[float],
    factors: Sequence[float],
    of_sums: bool = False,
) -> dict[str, Tensor]:
    """Return ``loss`` times the factors, so that its mean over processes is that over all items.

    Any other value is the mean over this process's items, and missing if it has none.

    Args:
        parts: the values of each micro-batch.
        weights: items of each micro-batch.
        factors: of each micro-batch's loss.
        of_sums: the model divides sums by the items of the update, and all of its losses have the factors.
    """
    counted = [(weight, part) for weight, part in zip(weights, parts, strict=True) if weight]
    used = [factor for factor in factors if factor]
    losses = [part["loss"] * f for f, (_, part) in zip(used, counted, strict=True)]
    loss = _sum(losses) if losses else torch.zeros_like(parts[0]["loss"])  # of a dtype with that of other processes
    own = sum(weights)
    shares = [weight / own for weight, _ in counted]
    names = [n for n in (counted[0][1] if counted else ()) if n != "loss" and all(n in part for _, part in counted)]
    others = {}
    for name in names:
        by = used if of_sums and "loss" in name else shares
        others[name] = _sum([part[name] * share for share, (_, part) in zip(by, counted, strict=True)])
    return {"loss": loss, **others}


def of_filler(part: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return zeros for the values of a window that has nothing but a filler, see Counted."""
    return {name: torch.zeros_like(value) for name, value in part.items()}


def _sum(values: Sequence[Tensor]) -> Tensor:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


_UPDATES = 16
logger = logging.getLogger("flextrain")


class Weighing:
    """Gives every item of an update the same weight, using the model's ``loss_weight(data)``.

    It returns the number of items (tokens, samples) that the loss of a batch is a mean of. The update then does not
    depend on how items are split over micro-batches and processes; without it, every micro-batch of every process has
    the same weight. A micro-batch without items does not count, even if its mean is 0/0. An update without items on all
    processes is skipped, as with loss scaling: no weight, no average and no schedule changes.

    Args:
        loss_weight: the model's; returns a number, or a CPU tensor: for one on the device the host has to wait.
        device: device of the losses.
        topology: the processes that make an update together.
        hands_number: the loss of a batch is a sum, which the model divides by the items of the update.
        where: what gave ``loss_weight``, for messages.

    Attributes:
        factors: a factor for the loss of each micro-batch.
        arguments: for the model's forward: ``num_items_in_batch`` of the update under way, float32, where it is handed.
    """

    def __init__(
        self,
        loss_weight: Callable[[Any], Any],
        device: torch.device,
        topology: Topology,
        hands_number: bool = False,
        where: str = "model.loss_weight",
    ) -> None:
        self._loss_weight, self._device, self._topology, self._where = loss_weight, device, topology, where
        self._hands_number, self.arguments = hands_number, dict[str, Tensor]()
        self._weights: list[float] = []
        self.factors: list[float] = []
        self._has_said: set[str] = set()

    @classmethod
    def of(cls, module: nn.Module, device: torch.device, topology: Topology) -> Weighing | None:
        """Return the Weighing of a model, or None if its ``loss_weight`` is missing, a number or a submodule."""
        found = getattr(module, "loss_weight", None)
        if not callable(found) or isinstance(found, nn.Module):
            return None
        return cls(found, device, topology, takes_number_of_items(module))

    def weigh(self, window: Sequence[Any], counted: Counted | None = None) -> bool:
        """Weigh the micro-batches of a window, and return True if any process has an item.

        The factor of a mean is its share of all items, times the number of processes, because gradients are averaged over
        them; that of a sum over all items is the number of data shards.

        Args:
            window: the micro-batches.
            counted: of whose samples these count; None: all.
        """
        self._weights = [self.weight(batch) for batch in window]
        if counted is not None and counted.ends_with_filler:
            self._weights[-1] = 0.0
        # The sum is over all processes. Items that several processes count, because they share a data shard, cancel out
        # below, and parts that a strategy cuts a batch into (``split``) count once each.
        with with_values():
            total = float(dist.all_reduce(torch.tensor(sum(self._weights), dtype=torch.float64, device="cpu")))
        if total == 0:
            self._say("an update had no items on any process and was skipped; later ones are skipped without a warning")
            return False
        world, shards = self._topology.world_size, self._topology.data.count
        self.factors = [weight * world / total for weight in self._weights]
        if self._hands_number and getattr(self._loss_weight, "is_known", True):
            # Filled on the device, so that nothing is copied to it.
            self.arguments[NUMBER] = torch.full((), total * shards / world, dtype=torch.float32, device=self._device)
            self.factors = [float(shards) if weight else 0.0 for weight in self._weights]
        return True

    def counts(self, batch: Any) -> bool:
        """Return True if a micro-batch has an item."""
        return self.weight(batch) > 0

    def weight(self, batch: Any) -> float:
        """Return the number of items in a micro-batch."""
        value = self._loss_weight(batch)
        if isinstance(value, Tensor) and value.device.type != "cpu":
            self._say(
                "is on the device, so the host waits for the device at every update; compute it on the CPU, from the dataloader's batch"
            )
        weight = float(value)
        if not (math.isfinite(weight) and weight >= 0):
            raise ConfigError(f"{self._where}: gave {weight}, give the number of items, 0 or more")
        return weight

    def mean(self, parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return what to log for a window: ``loss`` uses the factors, so its mean over processes is that over items.

        So do all losses of a model that divides sums. Any other value is the mean over this process's items, and missing if
        it has none.
        """
        return weighted_mean(parts, self._weights, self.factors, of_sums=self._hands_number)

    def _say(self, what: str) -> None:
        if what not in self._has_said and dist.is_main():
            self._has_said.add(what)
            logger.warning(f"{self._where}: {what}")


class UnequalMeans:
    """Warns once if batches of a model without ``loss_weight`` have different numbers of labels that count.

    Such a model gives a mean over each batch, so that the labels of a short batch count more. So does a ``train_step``, as a rule. The first updates are
    looked at, and only labels of tokens on the CPU; no communication.

    Args:
        shards: number of processes that train on different data.
    """

    def __init__(self, shards: int) -> None:
        self._shards, self._left = shards, _UPDATES
        self._seen: set[int] = set()

    def look(self, stepper: Any, window: Sequence[Any]) -> bool:
        """Look at the micro-batches of an update, and return whether to look at the next one too.

        Args:
            stepper: makes the updates.
            window: the micro-batches.
        """
        is_single = len(window) == 1 and self._shards == 1
        # None says that the model means it so.
        if is_single or hasattr(stepper.module, "loss_weight"):
            return False
        for batch in window:
            labels = batch.get("labels") if isinstance(batch, Mapping) else None
            if not isinstance(labels, Tensor) or labels.dim() < 2 or labels.is_floating_point() or not labels.is_cpu:
                return False
            self._seen.add(int((labels != IGNORED).sum()))
        if len(self._seen) > 1:
            if dist.is_main():
                few, many = min(self._seen), max(self._seen)
                why = "because the loss is a mean over each; define loss_weight(data) in the model, and each label counts the same"
                if stepper.custom_train:
                    why = (
                        "unless train_step weighs them, which it would have to do by those of all processes and micro-batches: leave it out, "
                        "define loss_weight(data), and each label counts the same; or set model.loss_weight = None"
                    )
                logger.warning(
                    f"model: micro-batches with {few} and {many} labels that count have the same weight, {why}"
                )
            return False
        self._left -= 1
        return self._left > 0


# The losses in what a model gives whose forward has no mode.


def losses_of(result: Any, module: nn.Module, batch: Any) -> dict[str, Any]:
    """Return the ``loss`` of a result, or the parts of one in a dict.

    Args:
        result: what the model's forward gave.
        module: the model, for the message.
        batch: what its forward was given, for the message.

    Raises:
        ConfigError: there is none.
    """
    is_dict = isinstance(result, Mapping)
    loss = result["loss"] if is_dict and "loss" in result else getattr(result, "loss", None)
    if isinstance(loss, Tensor) or (is_dict and loss is not None):
        return {"loss": loss}
    # An object with a loss that is None was not given what its loss is computed from.
    if is_dict and "loss" not in result and not hasattr(result, "loss"):
        losses = {name: value for name, value in result.items() if isinstance(name, str) and "loss" in name}
        if losses:
            return losses
    raise _no_loss(result, module, batch)


def _no_loss(result: Any, module: nn.Module, batch: Any) -> ConfigError:
    name, kind = type(module).__name__, type(result).__name__
    if (
        isinstance(batch, Mapping)
        and batch.get("labels") is None
        and "labels" in inspect.signature(module.forward).parameters
    ):
        return ConfigError(
            f"model: the batch has no labels, without which {name}.forward gives no loss; add them, as "
            "DataCollatorForLanguageModeling(tokenizer, mlm=False) of transformers does for a causal language model"
        )
    return ConfigError(
        f"model: {name}.forward has no parameter mode and gave {kind} without a loss; return an object or dict with a "
        f"loss, or take mode{f': {NO_LOSS}' if isinstance(result, Mapping) else ''}"
    )


def losses_left_out(result: Any) -> list[str]:
    """Return the names of losses beside ``loss`` in a result that would have gradients, and that ``loss`` does not contain.

    Models of transformers, and many others, give parts of their loss beside it; these belong to its graph. Where ``loss`` and
    another one come out of one operation, as of a compiled model, the graph does not tell; then only transformers is believed.
    """
    values = _values(result)
    loss = values.get("loss")
    names = [name for name in values if isinstance(name, str) and "loss" in name and name != "loss"]
    others = {name: value for name in names if isinstance(value := values[name], Tensor) and value.requires_grad}
    if not others or not isinstance(loss, Tensor):
        return []
    pending, seen = [(loss.grad_fn, loss.output_nr)], set[Any]()
    while pending:
        node = pending.pop()
        if node[0] is not None and node not in seen:
            seen.add(node)
            pending += node[0].next_functions
    is_output = any(kind.__name__ == "ModelOutput" for kind in type(result).__mro__)
    return [
        name
        for name, value in others.items()
        if (value.grad_fn, value.output_nr) not in seen and not (is_output and value.grad_fn is loss.grad_fn)
    ]


def _values(result: Any) -> Mapping[Any, Any]:
    if isinstance(result, Mapping):
        return result
    if dataclasses.is_dataclass(result):
        return {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    return result._asdict() if hasattr(result, "_asdict") else getattr(result, "__dict__", {})
