"""IterableDatasets that have a state, such as those of Hugging Face datasets: read by a loader that keeps it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch.utils.data import DataLoader

from ....core.errors import CheckpointError
from ..user_loaders import keeps_position, say_how_it_resumes


def loader_of_stream(
    dataset: Any, kwargs: Mapping[str, Any], training: bool, where: str, logger: logging.Logger
) -> Any:
    """Return the DataLoader of an IterableDataset; one that keeps the position if the dataset has a state.

    With worker processes that is torchdata's StatefulDataLoader, because the state is in the workers.
    """
    if not training or not keeps_position(dataset):
        return DataLoader(dataset, **kwargs)
    if not kwargs.get("num_workers"):
        return _said(StreamLoader(dataset, **kwargs), where, logger)
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError:
        logger.warning(
            f"{where}: {type(dataset).__name__} has a state_dict, which is in its workers: a resumed run reads it again from "
            "the beginning; pip install torchdata, or give num_workers=0, to save the position"
        )
        return DataLoader(dataset, **kwargs)
    return _said(StatefulDataLoader(dataset, **kwargs), where, logger)


def _said(loader: Any, where: str, logger: logging.Logger) -> Any:
    say_how_it_resumes(loader, where, logger)
    return loader


class StreamLoader(DataLoader[Any]):
    """A DataLoader without workers whose state is that of its IterableDataset.

    The state is taken after the last batch that was given: no sample is read ahead.
    """

    def __iter__(self) -> Any:
        # DataLoader's own, which reads no further than the batch that it gives. A class that has this method is read by
        # its state.
        return super().__iter__()

    def state_dict(self) -> dict[str, Any]:
        """Return the dataset's state."""
        return {"dataset": self.dataset.state_dict()}  # type: ignore[attr-defined]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the dataset's state; the next iteration begins there.

        Raises:
            CheckpointError: the state is that of another loader.
        """
        if set(state) != {"dataset"}:
            raise CheckpointError(
                "train_dataloader: the checkpoint has the state of another loader, with other keys; num_workers has to be 0 as "
                "it was, or above 0 as it was"
            )
        self.dataset.load_state_dict(state["dataset"])  # type: ignore[attr-defined]
