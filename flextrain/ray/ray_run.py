"""What Ray tells a worker of its run: the storage, and what Ray can report."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from types import ModuleType
from typing import Any

from ..core.checkpoint.manifest import VALUES
from ..core.errors import ConfigError
from ..runner.reporting.reporter import import_extra


def ray_train(needed_by: str) -> ModuleType:
    """Return the module ``ray.train``.

    Raises:
        ConfigError: Ray is not installed, or its version or setting has no ``report`` that takes checkpoints of any folder.
    """
    module = import_extra("ray.train", "ray", needed_by)
    if "checkpoint_upload_fn" not in inspect.signature(module.report).parameters:
        raise ConfigError(
            f"{needed_by}: needs Ray Train V2, which is in ray 2.51 or later unless RAY_TRAIN_V2_ENABLED=0 is set; "
            "pip install flextrain[ray]"
        )
    return module


class RayRun:
    """The run of Ray Train that this process is a worker of.

    Args:
        needed_by: begins the messages.

    Raises:
        ConfigError: this process is no worker of Ray Train.
    """

    def __init__(self, needed_by: str) -> None:
        self.train = ray_train(needed_by)
        try:
            context = self.train.get_context()
            self.name: str = context.get_experiment_name()
        except RuntimeError:
            raise ConfigError(
                f"{needed_by}: this process is no worker of Ray Train, use it in the function that TorchTrainer gets"
            ) from None
        try:
            self._storage: Any = context.get_storage()
        except NotImplementedError:  # ScalingConfig(num_workers=0) trains in the program itself
            self._storage = None

    @property
    def checkpoint(self) -> Any:
        """The checkpoint that was reported last, of earlier starts too; None if there is none. Equal on every process."""
        return self.train.get_checkpoint()

    def reported_iteration(self) -> int:
        """Updates after which the checkpoint was saved that was reported last; -1 if there is none that can be read."""
        if (found := self.checkpoint) is None:
            return -1
        try:  # without fetching the rest of it, which may be large and far away
            with found.filesystem.open_input_stream(f"{found.path}/{VALUES}") as file:
                return int(json.loads(file.read())["loop"]["iter"])
        except (OSError, KeyError, TypeError, ValueError):
            return -1

    @property
    def has_storage(self) -> bool:
        """False if the program itself trains, without a storage."""
        return self._storage is not None

    @property
    def folder(self) -> Path | None:
        """The run's folder in the storage; None if the storage is no file system of this machine."""
        if self._storage is None or self._storage.storage_filesystem.type_name != "local":
            return None
        return Path(self._storage.experiment_fs_path)

    @property
    def storage(self) -> str:
        """The storage in words."""
        if self._storage is None:
            return "none, as num_workers=0 trains without one"
        return f"{self._storage.storage_filesystem.type_name}, {self._storage.experiment_fs_path}"

    @property
    def own_folder(self) -> Path | None:
        """Ray's folder on this machine, in which its workers start; it is not shared, and goes with the machine."""
        return None if self._storage is None else Path(self._storage.local_working_directory)
