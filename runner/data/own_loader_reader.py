"""Reader: reads custom loaders from the beginning of an epoch, or from their own saved state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

from ...core.generators import RandomStream
from ...core.json_values import pack, unpack
from .epochs import chain_of
from .samplers import ShardedSampler, seed_own_generators
from .user_loaders import keeps_position, name_of

_END = object()


class Reader:
    """The batches of a loader with an order of its own, from any number on.

    Random numbers drawn in this process for a batch depend only on the seed and the batch's number. So reading again
    gives the same batch, whatever the model or other batches have drawn.

    Args:
        loader: an object with ``__iter__``. If it has ``state_dict`` and ``load_state_dict``, reading continues from
            its state; any other loader is read from the beginning of the epoch up to the wanted batch.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.keeps_position = keeps_position(loader)
        self.is_placed = False
        """True if the loader's state was restored and nothing has been read since."""
        self._has_begun, self._has_ended = False, True

    def batches(self, seed: int, start: int, stop: int | None) -> Iterator[Any]:
        """Yield the batches of an epoch, or of the rest of it, from number ``start`` to ``stop``."""
        self._seed_generators(seed)
        first = start if self.is_placed else 0
        self.is_placed = self._has_ended = False
        again, self._has_begun = self._has_begun and start == 0, True
        stream = RandomStream(_mixed(seed, 0))
        with stream:
            own = begun_anew(self.loader) if again else iter(self.loader)
        for number in count(first) if stop is None else range(first, stop):
            if number:  # number 0 continues the stream of iter(): a sampler may draw its order in either
                stream.begin(_mixed(seed, number))
            with stream:
                batch = next(own, _END)
            if batch is _END:
                self._has_ended = True
                return
            if number >= start:
                yield batch

    def _seed_generators(self, seed: int) -> None:
        """Seed the generators inside the loader and its samplers, like those of flextrain's own loaders."""
        seed_own_generators(self.loader, seed)
        seed_own_generators(getattr(self.loader, "batch_sampler", None), seed)
        for part in (
            *chain_of(getattr(self.loader, "sampler", None)),
            *chain_of(getattr(self.loader, "batch_sampler", None)),
        ):
            if isinstance(part, ShardedSampler):
                part.set_span(0)

    # The loader's own state

    def state(self) -> dict[str, Any] | None:
        """Return the loader's state after the last batch, as JSON can represent it; None if the loader has no state.

        Raises:
            CheckpointError: the state holds something other than plain values and tensors.
        """
        if not self.keeps_position:
            return None
        where = f"train_dataloader ({name_of(self.loader)}.state_dict)"
        return {"state": pack(self.loader.state_dict(), where), "ended": self._has_ended}

    def load_state(self, saved: Mapping[str, Any], begins: bool) -> None:
        """Restore the loader's state for the next read; ``begins``: a whole epoch is read next."""
        self.loader.load_state_dict(unpack(saved["state"]))
        self.is_placed = self._has_begun = True
        if begins and not saved["ended"]:
            # The saved epoch ended early because another process had no more batches; end it early again.
            next(iter(self.loader), None)


def begun_anew(loader: Any) -> Iterator[Any]:
    """Yield the batches of a further pass; an iterator that is at its end is reset first."""
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
    """Return one seed from two numbers, so that epochs and batches have independent streams."""
    return (seed * 6364136223846793005 + number * 1442695040888963407) % 2**63
