"""Predictions for every sample of a data set, on the host: what FlexibleRunner.predict returns."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import RandomSampler

from ..core.comm.collectives import broadcast_object, is_main
from ..core.config import check_call
from ..core.device import to_device
from ..core.errors import ConfigError
from .data.samplers import DefaultSampler
from .data.user_loaders import goes_its_own_way
from .loops.evaluate import TestLoop
from .metrics.base import BaseMetric

if TYPE_CHECKING:
    from .run import Run

_logger = logging.getLogger("flextrain")


class Predictions(BaseMetric):
    """Keeps what the model returns, sample by sample; the gathered ones are in ``found`` on rank 0.

    Args:
        samples: how many there are, if that is known.
        in_batches: processes have whole batches in turn, and not samples.
    """

    def __init__(self, samples: int | None = None, in_batches: bool = False) -> None:
        super().__init__()
        self.found: list[Any] = []
        self._samples, self._in_batches = samples, in_batches
        self._said: set[str] = set()

    def process(self, data_batch: Any, data_samples: Any) -> None:
        """Append a prediction for each sample of the batch."""
        outputs = to_device(data_samples, torch.device("cpu"))
        count = _count(outputs)
        if count is None:
            raise ConfigError(
                f"predict: the model returned {type(outputs).__name__}, return a tensor or list with an entry for each sample, or a "
                "dict of them"
            )
        left_out = [*_without_rows(outputs, count)] if isinstance(outputs, Mapping) else []
        if unsaid := [name for name in left_out if name not in self._said]:
            self._said.update(unsaid)
            _logger.info(f"predict: {', '.join(unsaid)} have no entry for each sample, and are left out")
        if isinstance(outputs, Mapping):
            outputs = {name: value for name, value in outputs.items() if name not in left_out}
        samples = [_sample(outputs, index) for index in range(count)]
        self.results += [samples] if self._in_batches else samples

    def compute_metrics(self, results: list[Any]) -> dict[str, Any]:
        """Keep the predictions, and return no metrics."""
        if self._in_batches:
            results = [sample for batch in results for sample in batch]
        if self._samples not in (None, len(results)):
            raise ConfigError(
                f"predict: the model returned {len(results)} predictions for {self._samples} samples; the first dimension of a tensor, "
                "and the length of a list, has to be that of the batch"
            )
        self.found = results
        return {}


def prediction_loop(run: Run, dataloader: Any, loader: Any, options: Mapping[str, Any]) -> TestLoop:
    """Return the loop whose ``run`` makes the predictions.

    Args:
        run: the run.
        dataloader: what the user has given.
        loader: what was built of it.
        options: of the loop.

    Raises:
        ConfigError: the predictions would come in a random order.
    """
    sampler = getattr(loader, "sampler", None)
    if getattr(sampler, "shuffle", False) is True or isinstance(sampler, RandomSampler):
        key = (
            "dataloader.shuffle"
            if isinstance(dataloader, Mapping) and "shuffle" in dataloader
            else "dataloader.sampler"
        )
        raise ConfigError(
            f"predict.{key}: predictions would come in another order than the data set's; give one that keeps it"
        )
    check_call(TestLoop, options, "predict", ("runner", "dataloader", "evaluator"))
    # Of a list of batches, and of a source of its own, whole batches are dealt to the processes.
    in_batches = goes_its_own_way(loader) or (loader.batch_size is None and loader.batch_sampler is None)
    samples = sampler.num_samples if isinstance(sampler, DefaultSampler) and not in_batches else None
    return TestLoop(run, loader, Predictions(samples, in_batches), **options)


def predictions_of(loop: TestLoop, everywhere: bool) -> list[Any] | None:
    """Run the loop, and return the predictions of all processes: on each of them, or on rank 0 alone; a collective."""
    loop.run()
    (predictions,) = loop.evaluator.metrics
    assert isinstance(predictions, Predictions)
    found = predictions.found
    if everywhere:
        return broadcast_object(found)
    return found if is_main() else None


def _count(outputs: Any) -> int | None:
    """Return the number of samples that outputs are of; None if they do not tell."""
    if isinstance(outputs, Tensor):
        return len(outputs) if outputs.dim() else None
    if isinstance(outputs, list):
        return len(outputs)
    parts = outputs.values() if isinstance(outputs, Mapping) else outputs if isinstance(outputs, tuple) else ()
    return next((count for part in parts if (count := _count(part)) is not None), None)


def _has_rows(value: Any, count: int) -> bool:
    if isinstance(value, (Tensor, list)):
        return _count(value) == count
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple) else ()
    return len(parts) > 0 and all(_has_rows(part, count) for part in parts)


def _without_rows(outputs: Mapping[str, Any], count: int) -> Iterator[str]:
    return (name for name, value in outputs.items() if not _has_rows(value, count))


def _sample(outputs: Any, index: int) -> Any:
    if isinstance(outputs, Tensor):
        return outputs[index].clone()  # a view would be sent with all that it is a view of
    if isinstance(outputs, Mapping):
        return {name: _sample(value, index) for name, value in outputs.items()}
    return tuple(_sample(part, index) for part in outputs) if isinstance(outputs, tuple) else outputs[index]
