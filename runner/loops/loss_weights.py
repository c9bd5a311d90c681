"""Weighing: the weight of each micro-batch of each process in an update."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...core.comm import collectives as dist
from ...core.comm.topology import Topology
from ...core.errors import ConfigError
from ...core.rehearsing import rehearsing, with_values
from ...core.token_counts import NUMBER, takes_number_of_items
from ...core.token_losses import IGNORED
from ..data.exact_epochs import Counted
from .logged_values import weighted_mean

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
    ) -> None:
        self._loss_weight, self._device, self._topology = loss_weight, device, topology
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
        self._weights = [self._weight(batch) for batch in window]
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
        return self._weight(batch) > 0

    def _weight(self, batch: Any) -> float:
        if rehearsing():  # the batch has no values to count
            return 1.0
        value = self._loss_weight(batch)
        if isinstance(value, Tensor) and value.device.type != "cpu":
            self._say(
                "is on the device, so the host waits for the device at every update; compute it on the CPU, from the dataloader's batch"
            )
        weight = float(value)
        if not (math.isfinite(weight) and weight >= 0):
            raise ConfigError(f"model.loss_weight: gave {weight}, give the number of items, 0 or more")
        return weight

    def mean(self, parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return what to log for a window: ``loss`` uses the factors, so its mean over processes is that over items.

        So do all losses of a model that divides sums. Any other value is the mean over this process's items, and missing if
        it has none.
        """
        return weighted_mean(parts, self._weights, self.factors, self._device, of_sums=self._hands_number)

    def _say(self, what: str) -> None:
        if what not in self._has_said and dist.is_main():
            self._has_said.add(what)
            logger.warning(f"model.loss_weight: {what}")


class UnequalMeans:
    """Warns once if batches of a model without ``loss_weight`` have different numbers of labels that count.

    Such a model gives a mean over each batch, so that the labels of a short batch count more. The first updates are
    looked at, and only labels of tokens on the CPU; no communication.
    """

    def __init__(self) -> None:
        self._left = _UPDATES
        self._seen: set[int] = set()

    def look(self, stepper: Any, shards: int, window: Sequence[Any]) -> bool:
        """Look at the micro-batches of an update, and return whether to look at the next one too.

        Args:
            stepper: makes the updates.
            shards: number of processes that train on different data.
            window: the micro-batches.
        """
        is_single = len(window) == 1 and shards == 1
        # None says that the model means it so.
        if is_single or stepper.custom_train or hasattr(stepper.module, "loss_weight"):
            return False
        for batch in window:
            labels = batch.get("labels") if isinstance(batch, Mapping) else None
            if not isinstance(labels, Tensor) or labels.dim() < 2 or labels.is_floating_point() or not labels.is_cpu:
                return False
            self._seen.add(int((labels != IGNORED).sum()))
        if len(self._seen) > 1:
            if dist.is_main():
                few, many = min(self._seen), max(self._seen)
                logger.warning(
                    f"model: micro-batches with {few} and {many} labels that count have the same weight, because the loss is a "
                    "mean over each; define loss_weight(data) in the model, and each label counts the same"
                )
            return False
        self._left -= 1
        return self._left > 0
