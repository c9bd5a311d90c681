"""Checks of a dataloader's configuration before anything is built."""

from __future__ import annotations

import functools
import hashlib
import inspect
import itertools
import multiprocessing
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from ...core.base.config import check_call
from ...core.base.errors import ConfigError, counted, one_of, suggest
from ...core.base.registry import DATA_SAMPLERS
from .collate import check_collate, named_function
from .dataset_wrappers import DatasetWrapper, check_dataset_config, check_in_one_pass, is_config
from .samplers import HOLDERS, InfiniteSampler, chain_of, dealt_by, divided_sampler, follows_span, held_in
from .streams.divided_streams import SHARD
from .user_loaders import gives_batches, length_of, sampler_of

# ``num_batch_per_epoch`` of a dataloader: epochs of a few batches, for trying out a configuration.


KEY = "num_batch_per_epoch"


class FirstSamples(Dataset[Any]):
    """The first samples of a dataset, with the dataset's other attributes and methods."""

    def __init__(self, dataset: Any, length: int) -> None:
        self.dataset, self._length = dataset, length

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __len__(self) -> int:
        return self._length

    def __getattr__(self, name: str) -> Any:
        # Pickling is its own, the dataset not there yet while it is unpickled; an order of a pass has samples beyond the first.
        if name in ("dataset", "order_of_pass") or (name.startswith("__") and name != "__getitems__"):
            raise AttributeError(name)
        return getattr(self.dataset, name)


def check_limit(cfg: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError if the number of batches cannot be honoured."""
    limit = cfg.get(KEY)
    if limit is None:
        return
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        raise ConfigError(f"{where}.{KEY}: {limit!r} is not allowed, give 1 or more")
    for key in ("sampler", "batch_sampler"):
        if cfg.get(key) is not None and not isinstance(cfg[key], (Mapping, str, type)):
            raise ConfigError(f"{where}.{KEY}: has no effect on a {key} that is already built, give dict(type=...)")


def limited(dataset: Any, limit: int | None, cfg: Mapping[str, Any], shards: int, where: str) -> Any:
    """Return as much of the dataset as ``limit`` batches of each of ``shards`` data shards need; None: all of it."""
    if limit is None:
        return dataset
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise ConfigError(f"{where}.{KEY}: needs a dataset with a length, {type(dataset).__name__} has none")
    length = limit * int(cfg.get("batch_size", 1)) * shards
    return dataset if length >= len(dataset) else FirstSamples(dataset, length)


AUTO = "auto"
"""The ``batch_size`` of training data for which the runner finds the largest that fits into memory."""

# Parts that a configuration may describe as dict(type=...), which torch's DataLoader does not accept.
_BUILT = ("dataset", "sampler", "batch_sampler", "collate_fn", "worker_init_fn")


def check_dataloader(cfg: Any, where: str, training: bool = True) -> None:
    """Raise ConfigError if a dataloader or its configuration is invalid; nothing is built.

    Args:
        cfg: see ``build_dataloader``.
        where: the configuration key, for messages.
        training: True for the training data, which may be endless or have no length.
    """
    if isinstance(cfg, Mapping):
        shard = cfg.get(SHARD)
        if not isinstance(shard, (bool, type(None))):
            raise ConfigError(f"{where}.{SHARD}: {shard!r} is not allowed, give True or False")
        if "loader" in cfg:
            check_call(_with_loader, cfg, where)
    cfg, _ = loader_and_shard(cfg)
    options = cfg if isinstance(cfg, Mapping) else vars(cfg) if isinstance(cfg, DataLoader) else {}
    if training and not options.get("in_order", True) and options.get("num_workers") not in (None, 0, 1):
        raise ConfigError(f"{where}.in_order: False loses and repeats batches when a run is resumed; leave it out")
    if isinstance(cfg, DataLoader):
        check_dataset(cfg.dataset, {}, where, training)
        check_has_batches(cfg.dataset, cfg.batch_size, cfg.drop_last, where)
        if not training:
            _check_has_end(sampler_of(cfg), f"{where}.sampler")
        return
    if not isinstance(cfg, Mapping):
        _check_elsewhere(cfg, where, training)
        return
    check_limit(cfg, where)
    if cfg.get("batch_size") == AUTO and where == "train_dataloader":  # only the runner's training data may have it
        cfg = {**cfg, "batch_size": 1}
    known = {key: None if key in _BUILT else value for key, value in cfg.items() if key != KEY}
    check_call(DataLoader, {**known, "dataset": []}, where, ("generator",))
    if "dataset" not in cfg:
        raise ConfigError(f"{where}.dataset: missing, it must be given")
    dataset, sampler = cfg["dataset"], cfg.get("sampler")
    if is_config(dataset):
        check_dataset_config(dataset, f"{where}.dataset")
    else:
        check_dataset(dataset, cfg, where, training)
        own_batches = cfg.get("batch_sampler") is not None
        check_has_batches(dataset, None if own_batches else cfg.get("batch_size", 1), cfg.get("drop_last"), where)
    if sampler is not None and "shuffle" in cfg:
        raise ConfigError(f"{where}.shuffle: a sampler is given too, say {where}.sampler.shuffle")
    if sampler is not None:
        _check_sampler(sampler, f"{where}.sampler", ("dataset", "shard"))
    if not training:
        _check_has_end(sampler or getattr(cfg.get("batch_sampler"), "sampler", None), f"{where}.sampler")
    if cfg.get("batch_sampler") is not None:
        _check_sampler(cfg["batch_sampler"], f"{where}.batch_sampler", ("sampler", "batch_size", "drop_last"))
        if not is_config(cfg["batch_sampler"]):
            for key in ("batch_size", "shuffle", "sampler", "drop_last"):
                if key in cfg:
                    raise ConfigError(f"{where}.{key}: has no meaning beside a batch_sampler that is already built")
    check_collate(cfg.get("collate_fn", "pseudo_collate"), f"{where}.collate_fn")
    _check_workers(cfg, where)


def loader_and_shard(cfg: Any) -> tuple[Any, bool | None]:
    """Return a dataloader or its configuration without ``shard``, and that, which is None if it is not given."""
    if not isinstance(cfg, Mapping):
        return cfg, None
    without = {key: value for key, value in cfg.items() if key != SHARD}
    return without.get("loader", without), cfg.get(SHARD)


def _with_loader(loader: Any, shard: bool | None = None) -> None:
    """The keys beside ``loader``."""


def check_same_begin(begins: Sequence[Any], where: str) -> None:
    """Raise ConfigError if a sampler whose items the processes divide did not begin alike on all of them."""
    for rank, begin in enumerate(begins):
        if begin != begins[0]:
            raise ConfigError(
                f"{where}.sampler: gives other samples on process {rank} than on process 0, so that each cannot keep its part of one "
                f"order; seed it alike on all of them, or give {SHARD}=False if it divides the data itself"
            )


def _check_elsewhere(source: Any, where: str, training: bool) -> None:
    """Check an object that gives batches but is not a DataLoader: it must allow more than one pass."""
    name = type(source).__name__
    if inspect.isgenerator(source):
        raise ConfigError(
            f"{where}: the generator {source.__name__} can be read once, give the function that makes it, "
            f"{source.__name__} without brackets"
        )
    if isinstance(source, (list, tuple)) and not source:
        raise ConfigError(f"{where}: is empty, give at least one batch")
    if isinstance(source, Iterator) and type(source).__module__ in ("builtins", "itertools"):
        if not isinstance(source, _ENDLESS):
            raise ConfigError(f"{where}: {name} can be read once, give a list, or a function that returns a new one")
        if not training:
            raise ConfigError(f"{where}: itertools.{name} has no end, evaluation needs one")
    if (isinstance(source, (Dataset, str, bytes)) and not isinstance(source, IterableDataset)) or not gives_batches(
        source
    ):
        raise ConfigError(
            f"{where}: {name} is not allowed, give dict(dataset=..., batch_size=...), a DataLoader, a list of batches, or "
            "a function that gives batches"
        )
    if not hasattr(source, "__iter__"):
        check_call(source, {}, where)


_ENDLESS = (itertools.cycle, itertools.count, itertools.repeat)


def _check_workers(cfg: Mapping[str, Any], where: str) -> None:
    for key, least in (("batch_size", 1), ("num_workers", 0), ("prefetch_factor", 1), ("timeout", 0)):
        value = cfg.get(key)
        if value is not None and value < least:
            raise ConfigError(f"{where}.{key}: {value} is not allowed, give {least} or more")
    context, methods = cfg.get("multiprocessing_context"), multiprocessing.get_all_start_methods()
    if isinstance(context, str) and context not in methods:
        raise ConfigError(
            f'{where}.multiprocessing_context: "{context}" is not allowed, choose {one_of(methods)}'
            f"{suggest(context, methods)}"
        )
    init = cfg.get("worker_init_fn")
    if isinstance(init, (Mapping, str)):
        function, arguments = named_function(init, f"{where}.worker_init_fn")
        worker = next(iter(inspect.signature(function).parameters), "")
        provided = (worker, *worker_facts(function, arguments))
        check_call(function, arguments, f"{where}.worker_init_fn", provided)
    elif init is not None and not callable(init):
        raise ConfigError(
            f"{where}.worker_init_fn: {init!r} is not allowed, give a function, its name, or dict(type=...)"
        )
    if not cfg.get("num_workers", 0):
        for key in ("persistent_workers", "prefetch_factor", "timeout", "multiprocessing_context"):
            if cfg.get(key):
                raise ConfigError(f"{where}.{key}: needs num_workers of 1 or more")


def check_dataset(dataset: Any, cfg: Mapping[str, Any], where: str, training: bool) -> None:
    """Raise ConfigError if a built dataset, or another key beside it, is invalid."""
    if not (hasattr(dataset, "__getitem__") or hasattr(dataset, "__iter__")):
        raise ConfigError(f"{where}.dataset: {type(dataset).__name__} is no dataset, it has no __getitem__")
    if isinstance(dataset, IterableDataset):
        for key in ("sampler", "batch_sampler", "shuffle"):
            if cfg.get(key):
                raise ConfigError(f"{where}.{key}: has no meaning with an IterableDataset, which has its own order")
    if not training and not isinstance(dataset, IterableDataset) and not hasattr(dataset, "__len__"):
        raise ConfigError(f"{where}.dataset: {type(dataset).__name__} has no length, which evaluation needs")
    if isinstance(dataset, HOLDERS):
        _check_held(dataset, f"{where}.dataset")


def _check_held(dataset: Any, where: str) -> None:
    """Raise ConfigError if a dataset of torch holds one that has several passes."""
    for held in held_in(dataset):
        check_in_one_pass(held, f"{where} ({type(dataset).__name__})")
        _check_held(held, where)


def check_has_batches(dataset: Any, batch_size: int | None, drop_last: Any, where: str) -> None:
    """Raise ConfigError if a dataset of known length gives no batch."""
    size = None if isinstance(dataset, IterableDataset) else length_of(dataset)
    if size == 0:
        raise ConfigError(f"{where}.dataset: {type(dataset).__name__} is empty, check its path and filters")
    if drop_last is True and size is not None and isinstance(batch_size, int) and batch_size > size:
        raise ConfigError(
            f"{where}.batch_size: {batch_size} is more than the {counted(size, 'sample')} of the dataset, and drop_last=True drops "
            f"the only batch; give at most {size}, or drop_last=False"
        )


def _check_sampler(sampler: Any, where: str, provided: tuple[str, ...]) -> None:
    kind = DATA_SAMPLERS.check(sampler, where, provided) if is_config(sampler) else None
    if inspect.isclass(kind) and not hasattr(kind, "__iter__"):
        raise ConfigError(f"{where}.type: {kind.__name__} is no sampler, it has no __iter__")
    if kind is None and not hasattr(sampler, "__iter__"):
        raise ConfigError(f"{where}: {type(sampler).__name__} is not allowed, give dict(type=...) or a sampler")


def _check_has_end(sampler: Any, where: str) -> None:
    """Raise ConfigError if a sampler is endless or repeats samples, because evaluation reads the data once."""
    if is_infinite(sampler):
        raise ConfigError(f"{where}: an InfiniteSampler has no end, evaluation needs one")
    repeats = sampler.get("round_up") if isinstance(sampler, Mapping) else getattr(sampler, "round_up", False)
    if repeats is True:
        raise ConfigError(f"{where}.round_up: True would count repeated samples in evaluation, leave it out")


def check_follows_order(loader: Any, where: str) -> Any:
    """Return a loader; raise ConfigError if its dataset has meaning only in its own order, and its sampler has another."""
    dataset, sampler = getattr(loader, "dataset", None), sampler_of(loader)
    if getattr(dataset, "follows_order", False) is True and not follows_span(sampler):
        raise ConfigError(
            f"{where}.sampler: {type(sampler).__name__} has an order of its own, and that of {type(dataset).__name__} follows its "
            "weights; give DefaultSampler or InfiniteSampler, or leave it out"
        )
    return loader


def needs_same_data(loader: Any, shard: tuple[int, int]) -> bool:
    """True if all processes have to have the same dataset: a sampler deals it to them, or they share a shard of it."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    return divided_sampler(loader) is not None or any(dealt_by(part) == shard for part in chain_of(sampler_of(loader)))


def check_same_length(lengths: Sequence[int | None], where: str) -> None:
    """Raise ConfigError if the datasets of the processes, which need the same one, differ in length."""
    known = {length or 0 for length in lengths}
    if len(known) > 1:
        raise ConfigError(
            f"{where}.dataset: has {min(known)} to {max(known)} samples depending on the process, but its sampler needs the same dataset "
            "on every process; if each process has its own, give an IterableDataset or another sampler, or shard=False"
        )


def check_same_data(prints: Sequence[str | None], where: str) -> None:
    """Raise ConfigError if the fingerprints that the processes have of their dataset differ; a sampler splits one for all."""
    for rank, other in enumerate(prints):
        if other != prints[0]:
            raise ConfigError(
                f"{where}.dataset: is {prints[0]} on process 0 and {other} on process {rank}, which read other files, chose "
                "other samples or have other settings; give all the same"
            )


def prints_of_all(prints: Sequence[str | None], deals: bool) -> str:
    """Check that all processes have the same data, if a sampler ``deals`` them; else return the prints, if they differ, as one."""
    if deals:
        check_same_data(prints, "train_dataloader")
    each = dict.fromkeys(map(str, prints))
    return "; ".join(each) if len(each) > 1 else ""


MADE_OF_OTHERS = (*HOLDERS, DatasetWrapper)
"""Datasets that hold others."""
_COMPARED = 64  # indices of a choice of samples, at its beginning, at its end, and of all


def print_of(dataset: Any) -> str | None:
    """What a dataset, or those of which it is made, say of their content, and which of their samples it has; None if they say nothing."""
    found = getattr(dataset, "fingerprint", None)
    if isinstance(found, str):
        return found
    if not isinstance(dataset, MADE_OF_OTHERS) and "datasets" not in sys.modules:  # Hugging Face's
        return None
    inner = [dataset.dataset] if isinstance(dataset, DatasetWrapper) else held_in(dataset)
    parts, chosen = [print_of(one) for one in inner], _chosen(dataset)
    if chosen is None and not any(parts):
        return None
    digest = hashlib.sha256(repr([parts, chosen]).encode()).hexdigest()
    return f"{type(dataset).__name__} of {length_of(dataset)} samples ({digest[:16]})"


def _chosen(dataset: Any) -> list[str] | None:
    """Some of the indices that a Subset, or a dataset of Hugging Face's, has of another one, or of the latter's rows; None for others."""
    of_hugging_face = type(dataset).__module__ == "datasets.arrow_dataset"
    if not isinstance(dataset, Subset) and not of_hugging_face:
        return None
    indices = next((held for name, held in vars(dataset).items() if name.lstrip("_") == "indices"), None)
    if indices is None and of_hugging_face:
        rows = dataset.with_format("arrow")
        return [repr(_without_folders(rows[at].to_pydict())) for at in _compared(len(rows), _COMPARED // 8)]
    if indices is None:
        return None
    if hasattr(indices, "column"):  # a table
        indices = indices.column(0)
    return [
        str(getattr(one, "item", lambda one=one: one)()) for one in map(indices.__getitem__, _compared(len(indices)))
    ]


def _compared(size: int, most: int = _COMPARED) -> list[int]:
    numbers = {*range(min(most, size)), *range(max(0, size - most), size), *(size * at // most for at in range(most))}
    return sorted(at for at in numbers if at < size)


def _without_folders(value: Any) -> Any:
    """A row whose files may lie elsewhere on another machine."""
    if isinstance(value, dict):
        return {key: _without_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_folders(item) for item in value]
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value


def is_infinite(sampler: Any) -> bool:
    """True if a sampler, or the one that a configuration describes, is an InfiniteSampler."""
    if is_config(sampler):
        kind = sampler["type"] if isinstance(sampler, Mapping) else sampler
        sampler_class = DATA_SAMPLERS.resolve(kind)
    else:
        sampler_class = type(sampler)
    return inspect.isclass(sampler_class) and issubclass(sampler_class, InfiniteSampler)


def worker_facts(function: Any, arguments: Mapping[str, Any]) -> list[str]:
    """Return the names of what a ``worker_init_fn`` is told beside the worker: those that it takes and are not given."""
    parameters = inspect.signature(function).parameters
    return [name for name in ("num_workers", "rank", "seed") if name in parameters and name not in arguments]


def build_worker_init(init: Any, facts: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the ``worker_init_fn`` that a configuration names, told those of the facts that it takes; nothing for others."""
    if not isinstance(init, (Mapping, str)):
        return {}
    function, arguments = named_function(init, where)
    told = {name: facts[name] for name in worker_facts(function, arguments)}
    return {"worker_init_fn": functools.partial(function, **arguments, **told)}
