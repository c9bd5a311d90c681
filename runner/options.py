"""The runner's arguments that are plain values: types, defaults and checks."""

from __future__ import annotations

import multiprocessing
import os
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pydantic
import torch

from ..core.base.config import Config, PositiveInt, validate
from ..core.base.errors import CheckpointError, ConfigError, suggest
from ..core.checkpoint import as_path
from ..core.checkpoint.directory import replaced
from ..core.checkpoint.folders import reaching
from ..core.checkpoint.foreign.download import check_download, is_download, shown
from ..core.config_files import Config as ConfigFile

# The options of the watchdog.


class WatchdogOptions(Config):
    """``env_cfg.watchdog``."""

    stall_s: float = pydantic.Field(default=600.0, ge=1.0)
    """Seconds without an iteration, a validation batch or a part of a checkpoint on any process after which the run ends."""
    first_s: float = pydantic.Field(default=1800.0, ge=1.0)
    """The same before the first update, and while a model is compiled; never less than ``stall_s``."""
    stragglers: bool = True
    """Warn of a process that takes far more time than the others in loading data or in hooks, see Stragglers."""

    @property
    def long_s(self) -> float:
        """Seconds in a phase that may take longer."""
        return max(self.first_s, self.stall_s)


class AutoScaleLR(Config):
    """``auto_scale_lr``: multiplies learning rates by the actual samples per update over ``base_batch_size``."""

    base_batch_size: PositiveInt
    """Samples per update, over all processes, for which the learning rate was chosen."""
    enable: bool = True
    """False: do not scale."""


class Randomness(Config):
    """``randomness``."""

    seed: int | None = None
    """Seed of Python, NumPy and torch; None draws a seed, which is logged."""
    diff_rank_seed: bool = False
    """Add the rank to the seed."""
    deterministic: bool = False
    """Use only deterministic kernels."""


class MultiProcessing(Config):
    """``env_cfg.mp_cfg``."""

    mp_start_method: Literal["fork", "spawn", "forkserver"] | None = None
    """Start method of dataloader workers; None: Python's default."""
    opencv_num_threads: int | None = pydantic.Field(default=None, ge=0)
    """Number of OpenCV threads in each process."""


class Group(Config):
    """``env_cfg.dist_cfg``."""

    backend: str | None = None
    """Back end of the process group; None: the device's default."""
    timeout: float | int | None = pydantic.Field(default=None, gt=0)
    """Seconds that a process waits for others; None: the strategy's default."""


SIGNALS = ("TERM", "USR1", "USR2", "HUP", "XCPU")
"""Signals that may end a run."""


class PreemptionOptions(Config):
    """``env_cfg.preemption``: what a signal, or the end of the allowed time, does to a run; see Preemption."""

    signals: tuple[str, ...] = ("TERM", "USR1")
    """Signals that end the run; a handler that the program has set before stays. Empty: none does, only ``max_time`` and
    ``request_stop`` end it."""
    save: bool = True
    """Save what was trained, in the folder of the CheckpointHook."""
    status: int = pydantic.Field(default=143, ge=0, le=255)
    """Exit status of the processes."""
    requeue: bool = False
    """Let Slurm start the job again after the end, if this start has made an update."""
    max_time: str | float | int | None = None
    """Time after which the run ends by itself, from the making of the runner on: seconds, "HH:MM:SS", "D-HH:MM:SS", or
    "slurm": ``margin_s`` before the end of Slurm's job."""
    margin_s: float | int = pydantic.Field(default=120, ge=0)
    """Seconds before the end of Slurm's job at which the run ends."""

    @pydantic.field_validator("signals")
    @classmethod
    def _known(cls, signals: tuple[str, ...]) -> tuple[str, ...]:
        for name in signals:
            if name not in SIGNALS:
                hint = "; Ctrl-C always ends a run at once" if name in ("INT", "SIGINT") else suggest(name, SIGNALS)
                raise ValueError(f'"{name}" is not allowed, choose {", ".join(SIGNALS)}{hint}')
        return signals

    @pydantic.model_validator(mode="before")
    @classmethod
    def _as_tuple(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and isinstance(data.get("signals"), list):  # from a file, which has no tuples
            return {**data, "signals": tuple(data["signals"])}
        return data


class Environment(Config):
    """``env_cfg``."""

    cudnn_benchmark: bool = False
    """Let cuDNN benchmark its algorithms for every new shape."""
    mp_cfg: MultiProcessing = MultiProcessing()
    """Worker processes."""
    dist_cfg: Group = Group()
    """The process group."""
    resource_limit: PositiveInt = 4096
    """Smallest limit of open files of the process."""
    nonfinite: Literal["warn", "raise", "skip", "ignore"] = "warn"
    """Reaction to a loss or gradient norm that is NaN or infinite; see NonFiniteHook."""
    dry_run: bool | PositiveInt = True
    """Number of validation batches of the dry pass before training, see DryPass; True: 2, False: no dry pass."""
    preemption: bool | PreemptionOptions | None = True
    """What SIGTERM and SIGUSR1 do; True: the defaults, False or None: what they do without flextrain."""

    watchdog: bool | WatchdogOptions | None = True
    """What ends a run of several processes that stands still; True: the defaults of WatchdogOptions, False: nothing."""
    plan: str | Path | dict[str, Any] | None = None
    """A plan of this run: a file that `flextrain plan --json` has written, what is in it, or a TrainingPlan. The log has the
    peak of the third to the fifth update beside the planned one, and warns if they differ by more than 10 %."""

    @pydantic.field_validator("plan", mode="before")
    @classmethod
    def _as_values(cls, given: Any) -> Any:
        return given.as_json() if hasattr(given, "as_json") else given

    @property
    def preemption_options(self) -> PreemptionOptions | None:
        """``preemption`` as PreemptionOptions; None: signals are left alone."""
        if isinstance(self.preemption, PreemptionOptions):
            return self.preemption
        return PreemptionOptions() if self.preemption else None

    @property
    def watchdog_options(self) -> WatchdogOptions | None:
        """``watchdog`` as WatchdogOptions; None: no stall is looked for."""
        if isinstance(self.watchdog, WatchdogOptions):
            return self.watchdog
        return WatchdogOptions() if self.watchdog else None

    @property
    def dry_batches(self) -> int:
        """Number of batches of the dry pass; 0: none."""
        return 2 * self.dry_run if isinstance(self.dry_run, bool) else self.dry_run


def apply_environment(env: Environment) -> None:
    """Apply the process-wide settings of ``env_cfg``."""
    if env.mp_cfg.mp_start_method is not None:
        multiprocessing.set_start_method(env.mp_cfg.mp_start_method, force=True)
    if env.mp_cfg.opencv_num_threads is not None:
        _limit_opencv(env.mp_cfg.opencv_num_threads)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(env.resource_limit, soft), hard), hard))
    torch.backends.cudnn.benchmark = env.cudnn_benchmark


def _limit_opencv(threads: int) -> None:
    try:
        import cv2
    except ModuleNotFoundError:  # OpenCV is optional, but every MMEngine configuration has this key
        return
    cv2.setNumThreads(threads)


def early_preemption(env_cfg: Any) -> PreemptionOptions | None:
    """Return ``env_cfg.preemption`` before anything is checked; None if it is invalid, which the checks then say."""
    try:
        given = env_cfg if isinstance(env_cfg, Environment) else validate(Environment, env_cfg or {}, "env_cfg")
    except ConfigError:
        return None
    return given.preemption_options


class Resume(Config):
    """``resume`` as a dict: the checkpoint, and which pieces to restore. The model and the counters always are."""

    path: str | Path | None = None
    """The checkpoint; None: the newest in the work directory, if there is one."""
    optimizer: bool = True
    """The optimizer's state of each parameter, its settings (with learning rates) and the loss scale."""
    param_scheduler: bool = True
    """The state of the parameter schedulers."""
    random: bool = True
    """The RNG states of the processes."""
    hooks: bool = True
    """The state of hooks: averaged weights, best scores, patience of early stopping."""
    logs: bool = True
    """The history of the scalars in log lines."""
    data: bool = True
    """The position in the epoch and the seed of its order; without it the current epoch starts again."""
    verify: bool = True
    """Compare all files with their checksums before tensors are loaded; False: the log says what is not compared."""


class FixedOptions(Config):
    """The arguments of a runner that are plain values."""

    work_dir: str | Path
    experiment_name: str | None = None
    load_from: str | Path | None = None
    resume: bool | str | Path | Resume = False
    launcher: str | None = None
    auto_scale_lr: AutoScaleLR | None = None
    randomness: Randomness
    env_cfg: Environment
    compile: bool | dict[str, Any] | None = None
    cfg: dict[str, Any] | None = None

    @property
    def resume_options(self) -> Resume | None:
        """``resume`` as a Resume; None: do not resume."""
        if isinstance(self.resume, Resume):
            return self.resume
        if isinstance(self.resume, bool):
            return Resume() if self.resume else None
        return Resume(path=self.resume)


def check_options(given: Mapping[str, Any]) -> FixedOptions:
    """Check the plain arguments, and return them.

    Raises:
        ConfigError: an invalid argument; the message names it.
    """
    data = {**given, "randomness": given["randomness"] or {}, "env_cfg": given["env_cfg"] or {}}
    if isinstance(data["cfg"], ConfigFile):
        data["cfg"] = data["cfg"].to_dict()
    if isinstance(data["env_cfg"], Mapping):
        nested: dict[str, type[Config]] = {"preemption": PreemptionOptions, "watchdog": WatchdogOptions}
        # With messages of their own: after that of a dict, pydantic would give that of True or False.
        data["env_cfg"] = {
            key: validate(nested[key], value, f"env_cfg.{key}")
            if key in nested and isinstance(value, Mapping)
            else value
            for key, value in data["env_cfg"].items()
        }
    parts: dict[str, type[Config]] = {
        "auto_scale_lr": AutoScaleLR,
        "randomness": Randomness,
        "env_cfg": Environment,
        "resume": Resume,
    }
    for key, model in parts.items():
        if isinstance(data[key], Mapping):
            data[key] = validate(model, data[key], key)
    try:
        options = validate(FixedOptions, data, "runner")
    except ConfigError as error:
        raise ConfigError(str(error).removeprefix("runner.")) from None
    resumed = options.resume_options
    for key, path in (("load_from", options.load_from), ("resume", resumed.path if resumed else None)):
        # A checkpoint may be missing because its replacement was killed between two renames; opening it undoes that.
        if path is not None and is_download(path):
            if resumed is not None:
                raise ConfigError(
                    f'{key}: "{shown(path)}" has weights only, from which no run resumes; leave out resume'
                )
            check_download(path, key)
        elif path is not None and not _is_there(path):
            raise ConfigError(f'{key}: "{path}" does not exist')
    if "://" in str(options.work_dir):
        raise ConfigError(
            f'work_dir: "{options.work_dir}" is not allowed, logs need a local folder; CheckpointHook.out_dir may be a URL'
        )
    folder = Path(options.work_dir).absolute()
    # Path.is_file raises before Python 3.14 if a folder must not be entered.
    if file := next((path for path in (folder, *folder.parents) if os.path.isfile(path)), None):  # noqa: PTH113
        raise ConfigError(f'work_dir: "{file}" is a file, give a folder')
    return options


def check_start(options: FixedOptions) -> None:
    """Raise ConfigError if ``resume`` names a checkpoint beside ``load_from``, where checkpoints have all parameters."""
    resumed = options.resume_options
    if resumed is not None and resumed.path is not None:
        raise ConfigError("resume: names a checkpoint and load_from another, give one of them")


def _is_there(path: str | Path) -> bool:
    try:
        found = as_path(path)
        with reaching(found):
            return found.exists() or replaced(found).exists()
    except CheckpointError as error:
        raise ConfigError(str(error)) from None
