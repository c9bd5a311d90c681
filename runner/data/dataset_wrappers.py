"""Datasets made of other datasets: joined, repeated, balanced; each may be given as a configuration."""

from __future__ import annotations

import copy
import inspect
import math
from collections import Counter
from collections.abc import Mapping
from itertools import chain, repeat
from pathlib import PurePath
from typing import Any

from torch.utils.data import ConcatDataset as TorchConcatDataset
from torch.utils.data import Dataset, IterableDataset

from ...core.base.config import PositiveInt
from ...core.base.errors import ConfigError, one_of
from ...core.base.registry import DATASETS
from .samplers import tell_epoch


class DatasetWrapper(Dataset[Any]):
    """Base class: makes samples of the samples of ``self.dataset``.

    Reading a batch of samples with the inner dataset's ``__getitems__`` is left to a subclass; random numbers of a
    sample follow from its position in the epoch, so a sample that is repeated draws other numbers every time.
    """

    def __init__(self, dataset: Any, lazy_init: bool, where: str) -> None:
        self.dataset = _with_length(build_dataset(dataset, f"{where}.dataset"), f"{where}.dataset")
        self._is_ready = False
        if not lazy_init:
            self.full_init()

    @property
    def metainfo(self) -> dict[str, Any]:
        """The inner dataset's ``metainfo``, as a copy; empty if it has none."""
        return copy.deepcopy(getattr(self.dataset, "metainfo", {}))

    def full_init(self) -> None:
        """Load what the inner dataset's ``full_init`` loads; called before the first sample is read."""
        if not self._is_ready:
            _full_init(self.dataset)
            self._is_ready = True

    def set_epoch(self, epoch: int) -> None:
        """Tell the inner dataset the number of the epoch."""
        tell_epoch(self.dataset, epoch)

    def index_of(self, index: int) -> int:
        """Return the index of a sample in the inner dataset."""
        raise NotImplementedError

    def __getitem__(self, index: int) -> Any:
        self.full_init()
        return self.dataset[self.index_of(index)]

    def get_data_info(self, index: int) -> Any:
        """Return the inner dataset's ``get_data_info`` of a sample, as MMEngine's datasets have it."""
        self.full_init()
        return self.dataset.get_data_info(self.index_of(index))

    def get_cat_ids(self, index: int) -> Any:
        """Return the inner dataset's ``get_cat_ids`` of a sample: the categories in it."""
        self.full_init()
        return self.dataset.get_cat_ids(self.index_of(index))


class RepeatDataset(DatasetWrapper):
    """A dataset several times over, as one epoch.

    Args:
        dataset: a dataset, or ``dict(type=...)``.
        times: how often.
        lazy_init: call ``full_init`` of MMEngine's kind of dataset when the first sample is read, and not at once.
    """

    def __init__(
        self, dataset: Any, times: PositiveInt, lazy_init: bool = False, *, where: str = "RepeatDataset"
    ) -> None:
        self.times = times
        super().__init__(dataset, lazy_init, where)

    def index_of(self, index: int) -> int:
        """See DatasetWrapper."""
        return range(len(self))[index] % len(self.dataset)

    def __len__(self) -> int:
        self.full_init()
        return self.times * len(self.dataset)


class ClassBalancedDataset(DatasetWrapper):
    """A dataset in which samples of rare categories are repeated.

    A category in a share ``f`` of the samples asks for ``sqrt(oversample_thr / f)`` repetitions, at least 1; a sample is
    repeated as often as its rarest category asks, rounded up.

    Source: Gupta, Dollar, Girshick, "LVIS: A Dataset for Large Vocabulary Instance Segmentation", 2019, section 5.

    Args:
        dataset: a dataset, or ``dict(type=...)``; its method ``get_cat_ids(index)`` returns the categories in a sample.
        oversample_thr: the share of samples below which a category is repeated.
        lazy_init: see RepeatDataset.
    """

    def __init__(
        self, dataset: Any, oversample_thr: float, lazy_init: bool = False, *, where: str = "ClassBalancedDataset"
    ) -> None:
        if oversample_thr <= 0:
            raise ConfigError(f"{where}.oversample_thr: {oversample_thr} is not allowed, give a number above 0")
        self.oversample_thr = oversample_thr
        self.repeat_indices: list[int] = []
        self._where = where
        super().__init__(dataset, lazy_init, where)

    def full_init(self) -> None:
        """Load the inner dataset, and count the categories in it."""
        if self._is_ready:
            return
        _full_init(self.dataset)
        if not callable(getattr(self.dataset, "get_cat_ids", None)):
            raise ConfigError(
                f"{self._where}.dataset: {type(self.dataset).__name__} has no get_cat_ids(index), which says the categories "
                "in a sample"
            )
        categories = [set(self.dataset.get_cat_ids(index)) for index in range(len(self.dataset))]
        counts = Counter(chain.from_iterable(categories))
        factors = {
            category: math.sqrt(self.oversample_thr * len(categories) / count) for category, count in counts.items()
        }
        self.repeat_indices = list(
            chain.from_iterable(
                repeat(index, math.ceil(max((1.0, *map(factors.__getitem__, own)))))
                for index, own in enumerate(categories)
            )
        )
        self._is_ready = True

    def index_of(self, index: int) -> int:
        """See DatasetWrapper."""
        return self.repeat_indices[index]

    def __len__(self) -> int:
        self.full_init()
        return len(self.repeat_indices)


class ConcatDataset(TorchConcatDataset[Any]):
    """torch's ConcatDataset: several datasets, one after the other.

    Args:
        datasets: datasets, or their configurations.
        lazy_init: see RepeatDataset.
        ignore_keys: keys of ``metainfo`` that may differ between the datasets.

    Raises:
        ConfigError: the datasets' ``metainfo`` differ; that of the first is the whole one's.
    """

    def __init__(
        self,
        datasets: list[Any] | tuple[Any, ...],
        lazy_init: bool = False,
        ignore_keys: str | list[str] | None = None,
        *,
        where: str = "ConcatDataset",
    ) -> None:
        if not datasets:
            raise ConfigError(f"{where}.datasets: {datasets!r} is not allowed, give a list of at least one dataset")
        self.datasets = [
            _with_length(build_dataset(item, at), at) for at, item in _each(list(datasets), f"{where}.datasets")
        ]
        self.ignore_keys = [ignore_keys] if isinstance(ignore_keys, str) else list(ignore_keys or ())
        self._check_metainfo(where)
        self._is_ready = False
        if not lazy_init:
            self.full_init()

    def _check_metainfo(self, where: str) -> None:
        first, *others = (getattr(dataset, "metainfo", None) or {} for dataset in self.datasets)
        for i, other in enumerate(others, 1):
            for key in sorted({*first, *other} - {*self.ignore_keys}):
                if key not in first or key not in other or not _equal(first[key], other[key]):
                    raise ConfigError(
                        f"{where}.datasets[{i}]: its metainfo[{key!r}] differs from that of datasets[0]; give "
                        f"ignore_keys=[{key!r}] if that may be"
                    )

    @property
    def metainfo(self) -> dict[str, Any]:
        """The first dataset's ``metainfo``, as a copy; empty if it has none."""
        return copy.deepcopy(getattr(self.datasets[0], "metainfo", {}))

    def full_init(self) -> None:
        """Load what the datasets' ``full_init`` load, and add up their lengths."""
        if not self._is_ready:
            for dataset in self.datasets:
                _full_init(dataset)
            super().__init__(self.datasets)
            self._is_ready = True

    def set_epoch(self, epoch: int) -> None:
        """Tell all datasets the number of the epoch."""
        for dataset in self.datasets:
            tell_epoch(dataset, epoch)

    def __len__(self) -> int:
        self.full_init()
        return super().__len__()

    def __getitem__(self, index: int) -> Any:
        self.full_init()
        return super().__getitem__(index)  # type: ignore[no-untyped-call,unused-ignore]

    def get_data_info(self, index: int) -> Any:
        """Return ``get_data_info`` of a sample, as MMEngine's datasets have it."""
        dataset, own = self._find(index)
        return dataset.get_data_info(own)

    def get_cat_ids(self, index: int) -> Any:
        """Return ``get_cat_ids`` of a sample: the categories in it."""
        dataset, own = self._find(index)
        return dataset.get_cat_ids(own)

    def _find(self, index: int) -> tuple[Any, int]:
        at = range(len(self))[index]
        number = next(i for i, end in enumerate(self.cumulative_sizes) if at < end)
        return self.datasets[number], at - (self.cumulative_sizes[number - 1] if number else 0)


_INNER = {RepeatDataset: "dataset", ClassBalancedDataset: "dataset", ConcatDataset: "datasets"}
"""The argument in which a class takes other datasets."""


# A lookup, not a registration: a class of the user's with such a name comes first.
DATASETS.add_lookup({kind.__name__: kind for kind in _INNER}.get, lambda: [kind.__name__ for kind in _INNER])


def is_config(value: Any) -> bool:
    """True if a part is described by a configuration, False if it is built already."""
    return isinstance(value, (Mapping, str, type))


def build_dataset(cfg: Any, where: str) -> Any:
    """Return a dataset, built if it is described by a configuration, with the datasets inside it."""
    _check_is_one(cfg, where)
    if not is_config(cfg):
        return cfg
    try:
        dataset = DATASETS.build(_named(cfg), where)
    except ConnectionError as error:  # a name of the hub, without internet
        raise ConfigError(f"{where}: {' '.join(str(error).split())[:300]}") from error
    _check_is_one(dataset, where)
    return dataset


def _check_is_one(dataset: Any, where: str) -> None:
    """Raise ConfigError for splits in a dict, as Hugging Face's load_dataset gives, and for a file."""
    if type(dataset).__name__ in ("DatasetDict", "IterableDatasetDict"):
        names = list(dataset)
        raise ConfigError(
            f"{where}: is a {type(dataset).__name__} of {one_of(map(str, names))}, give one of its splits: "
            f'split="{names[0] if names else "train"}" of load_dataset, or datasets["{names[0] if names else "train"}"]'
        )
    if isinstance(dataset, str) and (kind := _KINDS.get(PurePath(dataset).suffix)):
        raise ConfigError(f'{where}: "{dataset}" is a file, give dict(type="{kind}", paths="{dataset}")')


_KINDS = {
    ".jsonl": "JsonlFiles",
    ".ndjson": "JsonlFiles",
    ".parquet": "ParquetFiles",
    ".arrow": "ArrowFiles",
    ".tar": "TarFiles",
    ".bin": "TokenFiles",
    ".npy": "TokenFiles",
}


def check_dataset_config(cfg: Any, where: str) -> Any:
    """Check the configuration of a dataset and of those inside it, without building; return its class.

    Raises:
        ConfigError: an unknown type, an invalid argument, or a class that is no dataset.
    """
    _check_is_one(cfg, where)
    cfg = _named(cfg)
    kind = DATASETS.check(cfg, where)
    if inspect.isclass(kind) and not (hasattr(kind, "__getitem__") or hasattr(kind, "__iter__")):
        raise ConfigError(f"{where}.type: {kind.__name__} is no dataset, it has no __getitem__")
    if isinstance(cfg, Mapping) and inspect.isclass(kind):
        key = next((key for wrapper, key in _INNER.items() if issubclass(kind, wrapper)), None)
        key = key or getattr(kind, "inner_datasets", None)
        inner = cfg.get(key) if key else None
        if key and not key.endswith("s") and isinstance(inner, (list, tuple)):
            inner = None  # of samples: it is the one dataset that is asked for
        for at, item in _each(inner, f"{where}.{key}"):
            if is_config(item):
                check_dataset_config(item, at)
    return kind


def _each(inner: Any, where: str) -> list[tuple[str, Any]]:
    if isinstance(inner, (list, tuple)):
        return [(f"{where}[{i}]", item) for i, item in enumerate(inner)]
    return [(where, inner)]


def _named(cfg: Any) -> Any:
    """Return a configuration with this library's ConcatDataset in place of torch's, which would not build datasets."""
    kind = cfg.get("type") if isinstance(cfg, Mapping) else cfg
    if kind is TorchConcatDataset or kind in ("torch.utils.data:ConcatDataset", "torch.utils.data.ConcatDataset"):
        return {**(cfg if isinstance(cfg, Mapping) else {}), "type": ConcatDataset}
    return cfg


def _with_length(dataset: Any, where: str) -> Any:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise ConfigError(
            f"{where}: {type(dataset).__name__} is not allowed, give a dataset with __getitem__ and __len__"
        )
    check_in_one_pass(dataset, where)
    return dataset


def check_in_one_pass(dataset: Any, where: str) -> None:
    """Raise ConfigError if a dataset inside of another one goes on in its later passes, of which that knows nothing."""
    if getattr(dataset, "in_one_pass", True) is False:
        raise ConfigError(
            f"{where}: a {type(dataset).__name__} with weights or num_samples goes on in every pass where the last one ended, and other "
            "datasets know one pass, so that some of its samples would never come; give its sources what is to be around it"
        )


def _full_init(dataset: Any) -> None:
    if hasattr(dataset, "full_init"):
        dataset.full_init()


def _equal(a: Any, b: Any) -> bool:
    same: Any = a == b
    return bool(same.all()) if hasattr(same, "all") else bool(same)
