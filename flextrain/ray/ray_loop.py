"""train_loop: makes the function that Ray's TorchTrainer runs in every worker."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..core.base.errors import CheckpointError, ConfigError, LaunchError
from ..core.checkpoint import Checkpoint
from ..core.comm import collectives as dist
from ..runner.resume.choose_checkpoint import newest_checkpoint
from ..runner.runner import FlexibleRunner
from .report import RayReportHook, RayRun, ray_train

_WHERE = "flextrain.ray.train_loop"

Build = Callable[[dict[str, Any]], FlexibleRunner | Mapping[str, Any]]


def train_loop(build: Build) -> Callable[[dict[str, Any]], None]:
    """Return the function that ``ray.train.torch.TorchTrainer`` runs in every worker: it trains, and reports to Ray.

    A run goes on after failures as Ray's ``FailureConfig`` says, and with fewer or more workers as its ``ScalingConfig``
    says. Every start of the workers continues from the newest checkpoint of the run, in the middle of an epoch too;
    ``resume`` and ``load_from`` hold for the first start. If the run has no checkpoint in ``work_dir`` or an older one,
    it continues from the one that Ray keeps in its storage.

    A RayReportHook is added unless there is one. A process group "nccl", which Ray makes for GPUs, is made anew with
    gloo for CPU tensors; give ``TorchConfig(backend="cpu:gloo,cuda:nccl")`` to have Ray make it so, with your
    ``timeout_s``.

    Args:
        build: gets the ``train_loop_config`` of the trainer, in every worker, and returns a FlexibleRunner or a dict of
            its arguments. In the dict ``work_dir`` may be left out: it is then the run's folder in Ray's storage.

    Raises:
        ConfigError: Ray is not installed, ``build`` does not take one argument; in the workers: ``work_dir`` is in a
            folder of one worker's machine, or must be given because the storage is remote.
        LaunchError: in the workers: Ray's process group was made without MASTER_ADDR.
    """
    ray_train(_WHERE)
    try:
        inspect.signature(build).bind({})
    except TypeError:
        raise ConfigError(
            f"{_WHERE}: {build!r} is not allowed, give a function of one argument, the trainer's train_loop_config"
        ) from None
    return functools.partial(_train, build)


def _train(build: Build, config: dict[str, Any]) -> None:
    ray = RayRun(_WHERE)
    if dist.is_initialized() and not dist.is_alone():
        if not os.environ.get("MASTER_ADDR"):
            raise LaunchError(
                f'{_WHERE}: TorchConfig(init_method="tcp") leaves MASTER_ADDR unset, give init_method="env", Ray\'s default'
            )
        dist.carry_cpu_tensors_too()
    runner = _built(build(config), ray)
    if not any(isinstance(hook, RayReportHook) for hook in runner.hooks):
        runner.register_hook(RayReportHook())
    _continue(runner, ray)
    runner.train()


def _built(given: Any, ray: RayRun) -> FlexibleRunner:
    """Return the runner that ``build`` gave, or described."""
    if isinstance(given, FlexibleRunner):
        _check_work_dir(given.work_dir, ray)
        return given
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"{_WHERE}: the function returned {type(given).__name__}, return a FlexibleRunner or a dict of its arguments"
        )
    arguments = dict(given)
    if arguments.get("work_dir") is None:
        if ray.folder is None:
            raise ConfigError(
                f"work_dir: must be given, Ray's storage is no folder ({ray.storage}); give one that all machines see, "
                "from which finished checkpoints are copied to the storage"
            )
        arguments["work_dir"] = ray.folder
    _check_work_dir(arguments["work_dir"], ray)
    return FlexibleRunner(**arguments)


def _check_work_dir(work_dir: str | Path, ray: RayRun) -> None:
    """Raise ConfigError if ``work_dir`` is relative to, or in, Ray's folder of this machine."""
    own = ray.own_folder
    if own is not None and Path(os.path.abspath(work_dir)).is_relative_to(os.path.abspath(own)):  # noqa: PTH100
        raise ConfigError(
            f'work_dir: "{work_dir}" is in Ray\'s folder {own} of this machine, which new workers may not see; give an '
            "absolute path that all machines see, or leave it out in the dict of arguments"
        )


def _continue(runner: FlexibleRunner, ray: RayRun) -> None:
    """Have the runner continue the run; ``resume`` and ``load_from`` are kept if there is nothing to continue."""
    options = runner.options
    own = newest_checkpoint(runner)
    if own is not None:
        if options.resume is not True or options.load_from is not None:
            runner.logger.info(f"The run goes on from {own}; resume and load_from hold for its first start")
        runner.options = options.model_copy(update={"resume": True, "load_from": None})
    elif options.load_from is None and options.resume_options is None:
        runner.options = options.model_copy(update={"resume": True})
    is_newer = dist.broadcast_object(
        runner.rank == 0 and ray.reported_iteration() > (-1 if own is None else _iteration(own))
    )
    if not is_newer:
        return
    runner.logger.info(
        f"The run goes on from Ray's checkpoint {ray.checkpoint.path}, {runner.work_dir} has none as new"
    )
    runner.options = options.model_copy(update={"resume": True, "load_from": None})
    with ray.checkpoint.as_directory() as folder:
        runner.resume(folder)


def _iteration(path: Path) -> int:
    """Return the updates that a checkpoint was saved after; -1 if it cannot be read, so that another one is taken."""
    try:
        return int(Checkpoint.open(path).values["loop"]["iter"])
    except (CheckpointError, KeyError, TypeError, ValueError):
        return -1
