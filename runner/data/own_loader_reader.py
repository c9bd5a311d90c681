"""Reading loaders that go their own way: from the beginning of an epoch, or from where their own state says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

import torch

from ...core.generators import RandomStream
from ...core.json_values import pack, unpack
from .samplers import ShardedSampler
from .user_loaders import keeps_place, name_of

_END = object()


class Reader:
    """The batches of a loader whose order is its own, from any number on.

    What is drawn in this process while a batch is read comes from the seed and the batch's number, so that reading again
    gives the same batch, and neither the model's random numbers nor those of other batches matter.

    Args:
        loader: anything with ``__iter__``. One with ``state_dict`` and ``load_state_dict`` goes on where its state says; any
            other is read from the beginning of the epoch up to the batch that is wanted.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.keeps_place = keeps_place(loader)
        self._is_placed = False
        self._has_begun, self._has_ended = False, True

    def batches(self, seed: int, start: int, stop: int | None) -> Iterator[Any]:
        """The batches of an epoch, or of what is left of it, from number ``start`` up to ``stop``."""
        self._seed_generators(seed)
        first = start if self._is_placed else 0
        self._is_placed = self._has_ended = False
        again, self._has_begun = self._has_begun and start == 0, True
        stream = RandomStream(_mixed(seed, 0))
        with stream:
            own = begun_anew(self.loader) if again else iter(self.loader)
        for number in count(first) if stop is None else range(first, stop):
            if number:  # the first goes on where the beginning left off: a sampler may draw the order in either
                stream.begin(_mixed(seed, number))
            with stream:
                batch = next(own, _END)
            if batch is _END:
                self._has_ended = True
                return
            if number >= start:
                yield batch

    def _seed_generators(self, seed: int) -> None:
        """Have orders drawn from generators of their own begin with the seed, as those that flextrain makes do."""
        batches, sampler = getattr(self.loader, "batch_sampler", None), getattr(self.loader, "sampler", None)
        for part in (self.loader, sampler, batches, getattr(batches, "sampler", None)):
            generator = getattr(part, "generator", None)
            if isinstance(generator, torch.Generator):
                generator.manual_seed(seed)
            if isinstance(part, ShardedSampler):
                part.set_span(0)

    # The loader's own state

    def state(self) -> dict[str, Any] | None:
        """The loader's state as JSON can hold it, behind the batch that was given last; None for one that has none.

        Raises:
            CheckpointError: it holds something else than plain values and tensors.
        """
        if not self.keeps_place:
            return None
        where = f"train_dataloader ({name_of(self.loader)}.state_dict)"
        return {"state": pack(self.loader.state_dict(), where), "ended": self._has_ended}

    def load_state(self, saved: Mapping[str, Any], begins: bool) -> None:
        """Go on there, with what is read next; ``begins``: that is a whole epoch."""
        self.loader.load_state_dict(unpack(saved["state"]))
        self._is_placed = self._has_begun = True
        if begins and not saved["ended"]:
            # The pass that was left then, because another process had no more, is left again.
            next(iter(self.loader), None)


def begun_anew(loader: Any) -> Iterator[Any]:
    """A further pass; an iterator that the one before has left at its end is told to begin anew."""
    is_empty = True
    for batch in loader:
        is_empty = False
        yield batch
    if is_empty:
        reset = getattr(loader, "reset", None)
        if callable(reset):
            reset()
        yield from loader


def _mixed(seed: int, number: int) -> int:
    """One number of two, so that epochs and batches have unrelated streams."""
    return (seed * 6364136223846793005 + number * 1442695040888963407) % 2**63
