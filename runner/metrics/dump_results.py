"""DumpResults: writes predictions to a file."""

from __future__ import annotations

import logging
import pickle
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ...core.base.errors import ConfigError, counted, one_of
from ...core.base.registry import METRICS
from ...core.comm import collectives as dist
from ...core.device.device import to_device
from .base import BaseMetric

_PICKLES, _TENSORS = (".pkl", ".pickle"), (".pt", ".pth")


class DumpResults(BaseMetric):
    """Writes what the model predicts to a file, for ``Evaluator.offline_evaluate``; it has no metrics.

    The file holds a list in the sampler's order: an entry for each sample if the model gives a list or tuple of them,
    otherwise an entry for each batch. Its tensors are on the CPU. It is written by rank 0 at the end of an evaluation.

    Args:
        out_file_path: the file. ``.pt`` or ``.pth``: ``torch.load(path, weights_only=True)`` reads it, which executes
            nothing; predictions then are tensors, arrays (written as tensors), numbers, strings, and lists, tuples and
            dicts of them. ``.pkl`` or ``.pickle``: any type, as MMEngine writes it; read such a file only if you trust
            whoever wrote it.
        collect_device: see BaseMetric.
        collect_dir: see BaseMetric.

    Raises:
        ConfigError: another ending, or a folder that cannot be written to; at the end of an evaluation, a type that ``.pt`` files cannot hold.
    """

    writes_files = True

    def __init__(
        self,
        out_file_path: str | Path,
        collect_device: Literal["cpu", "gpu"] = "cpu",
        collect_dir: str | None = None,
        *,
        where: str = "evaluator",
    ) -> None:
        super().__init__(collect_device, collect_dir=collect_dir)
        self.out_file_path = Path(out_file_path)
        self._where = f"{where}.out_file_path"
        if self.out_file_path.suffix not in (*_PICKLES, *_TENSORS):
            raise ConfigError(
                f'{self._where}: "{out_file_path}" is not allowed, its ending is one of {one_of((*_TENSORS, *_PICKLES))}'
            )
        if dist.is_main():
            self._check_folder()

    def _check_folder(self) -> None:
        """Make the folder, and try to write to it: an evaluation may take hours before it writes."""
        folder = self.out_file_path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise ConfigError(f'{self._where}: "{folder}" cannot be written to, {error.strerror or error}') from None

    def process(self, data_batch: Any, data_samples: Any) -> None:
        """Keep the predictions on the CPU."""
        kept = to_device(data_samples, torch.device("cpu"))
        self.results.extend(kept) if isinstance(kept, (list, tuple)) else self.results.append(kept)

    def compute_metrics(self, results: list[Any]) -> dict[str, Any]:
        """Write the file, and return no metrics."""
        path = self.out_file_path
        unfinished = path.with_name(f"{path.name}.unfinished")
        if path.suffix in _TENSORS:
            torch.save(_safe(results, "results"), unfinished)
        else:
            with unfinished.open("wb") as file:
                pickle.dump(results, file)
        unfinished.replace(path)
        logging.getLogger("flextrain").info(f"Wrote {counted(len(results), 'result')} to {path}")
        return {}


def _safe(value: Any, where: str) -> Any:
    """Return a value with only such types as ``torch.load(weights_only=True)`` reads.

    Raises:
        ConfigError: it has another type.
    """
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return torch.from_numpy(np.ascontiguousarray(value))
    if isinstance(value, Tensor):
        return value.detach().clone()  # a view would be written with all that it is a view of
    if value is None or type(value) in (bool, int, float, complex, str, bytes):
        return value
    if isinstance(value, Mapping):
        return {_safe(key, where): _safe(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_safe(item, f"{where}[{i}]") for i, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    raise ConfigError(
        f"evaluator: DumpResults cannot write {where}, a {type(value).__name__}, to a .pt file; give out_file_path='....pkl'"
    )


# A lookup, not a registration: a class of the user's with this name comes first.
METRICS.add_lookup({"DumpResults": DumpResults}.get, lambda: ["DumpResults"])
