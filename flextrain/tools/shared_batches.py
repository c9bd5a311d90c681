"""Make the same global batches for one process and for several, from the user's own dataloader."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from ..core.errors import ConfigError
from ..core.generators import RandomStream
from ..core.precision import cast_tensors
from ..runner.data.dataloaders import build_dataloader
from ..runner.data.epochs import tell_epoch
from ..runner.data.user_loaders import goes_its_own_way, name_of

WHERE = "train_dataloader"


def shared_loader(
    cfg: Any,
    *,
    processes: int,
    shard: tuple[int, int],
    one_by_one: bool = False,
    exact: bool = False,
    seed: int,
    logger: logging.Logger,
) -> DataLoader[Any]:
    """A loader of global batches, each of ``processes`` configured batches; this process collates its part of each.

    Every process reads all samples, without workers and with the same random numbers, so that augmentation does not depend
    on the process that trains on a sample.

    Args:
        cfg: the runner's ``train_dataloader``.
        shard: (index, count) of the part; (0, 1) is the whole.
        one_by_one: give the configured batches one by one instead, in the order of the processes that would get them.
        exact: give floating-point numbers in float64.

    Raises:
        ConfigError: the data cannot be divided.
    """
    single = build_dataloader(cfg, training=True, seed=seed, shard=(0, 1), where=WHERE, logger=logger)
    if goes_its_own_way(single):
        raise ConfigError(
            f"{WHERE}: verify divides the batches of a sampler, and {name_of(single)} makes its own batches"
        )
    if isinstance(single.dataset, IterableDataset):
        raise ConfigError(f"{WHERE}.dataset: verify cannot divide an IterableDataset, give a dataset with a length")
    if single.batch_sampler is None:
        raise ConfigError(f"{WHERE}.batch_size: None makes no batches to divide, give a number")
    size = single.batch_size or getattr(single.batch_sampler, "batch_size", None)
    whole = shard[1] == 1 and not one_by_one
    return DataLoader(
        SameDraws(single.dataset, seed),
        batch_sampler=GlobalBatches(
            single.batch_sampler, processes, one_by_one, size * processes if size and whole else size
        ),
        collate_fn=ShardOf(single.collate_fn, (0, 1) if one_by_one else shard, exact),
    )


class SameDraws(Dataset[Any]):
    """A dataset whose random numbers come from its own stream, which is the same in every process."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self._stream = RandomStream(seed)

    def __getitem__(self, index: Any) -> Any:
        with self._stream:
            return self.dataset[index]

    def __len__(self) -> int:
        return len(self.dataset)

    def set_epoch(self, epoch: int) -> None:
        """Tell the dataset, if it wants to know."""
        tell_epoch(self.dataset, epoch)


class GlobalBatches(Sampler[list[Any]]):
    """Groups of ``count`` batches of another batch sampler, each joined to one batch, or one by one with ``one_by_one``.

    Incomplete groups at the end of an epoch and batches of unequal size are left out: the mean over unequal parts is not
    the mean over the whole.

    Args:
        batch_size: number of samples that one process computes at a time, for the runner's auto_scale_lr.
    """

    def __init__(self, batches: Iterable[list[Any]], count: int, one_by_one: bool, batch_size: int | None) -> None:
        self.batches, self.count, self.one_by_one, self.batch_size = batches, count, one_by_one, batch_size
        # The runner asks the sampler of a batch sampler whether it ends, and gives it the epoch.
        self.sampler = getattr(batches, "sampler", None)

    def set_epoch(self, epoch: int) -> None:
        """Tell the batch sampler, if it wants to know."""
        tell_epoch(self.batches, epoch)

    def __iter__(self) -> Iterator[list[Any]]:
        group: list[list[Any]] = []
        for batch in self.batches:
            group.append(list(batch))
            if len(group) < self.count:
                continue
            if len({len(part) for part in group}) == 1:
                yield from group if self.one_by_one else [[index for part in group for index in part]]
            group = []

    def __len__(self) -> int:
        return len(self.batches) // self.count * (self.count if self.one_by_one else 1)  # type: ignore[arg-type]


class ShardOf:
    """Collates one part of the samples of a global batch."""

    def __init__(self, collate: Callable[[list[Any]], Any], shard: tuple[int, int], exact: bool = False) -> None:
        self.collate, self.shard, self.exact = collate, shard, exact

    def __call__(self, samples: list[Any]) -> Any:
        index, count = self.shard
        size = len(samples) // count
        # Fewer samples than parts are a look at the data, not a global batch.
        part = samples[index * size : (index + 1) * size] if size else samples
        batch = self.collate(part)
        return cast_tensors(batch, torch.float64) if self.exact else batch


def without_workers(cfg: Any) -> Any:
    """``cfg`` without workers: data is read in the training process, whose random numbers are known."""
    if not isinstance(cfg, Mapping):
        return cfg
    of_workers = ("num_workers", "prefetch_factor", "persistent_workers", "timeout", "multiprocessing_context")
    return {key: value for key, value in cfg.items() if key not in of_workers}
