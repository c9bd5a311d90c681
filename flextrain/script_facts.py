"""script_facts: what has to be known of a training script to write a job file for it, without training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .core.base.errors import ConfigError
from .runner.config import check_everything
from .runner.hooks.checkpoint import CheckpointHook
from .strategies.base import Strategy
from .user_script import is_config_file, runner_arguments


@dataclass(frozen=True)
class ScriptFacts:
    """What a script gives to its first FlexibleRunner, as far as a launcher has to know it.

    Attributes:
        is_config: the script is a configuration, which `flextrain train` trains.
        work_dir: the work directory as given; a relative one is relative to the directory in which the script is started.
        checkpoint_dir: the folder or URL that checkpoints are saved below: CheckpointHook.out_dir, or the work directory.
        resumes: whether another start continues from the newest checkpoint.
        device: type of the device that the strategy asks for, such as "cpu"; empty: the one that the machine has.
        preemption_status: exit status after a signal; None: signals are left alone.
        max_time: the run ends by itself after a time; "slurm": before the end of Slurm's job.
        requeues: the run hands Slurm's job in again.
        stall_s: seconds after which the watchdog ends a run that stands still, in its longest phase; None: it does not.
    """

    is_config: bool
    work_dir: str
    checkpoint_dir: str
    resumes: bool
    device: str
    preemption_status: int | None
    max_time: str | float | None
    requeues: bool
    stall_s: float | None
    _strategy: Strategy | None = field(repr=False)

    def check_processes(self, count: int) -> None:
        """Check that the strategy can run on so many processes, as far as it says so before there is a model.

        Raises:
            StrategyError: it cannot; the message says which numbers are possible.
        """
        if self._strategy is not None:  # without one, the runner chooses by the number of processes
            self._strategy._check_world(count)


def script_facts(script: str, arguments: Sequence[str] = ()) -> ScriptFacts:
    """Run ``python SCRIPT ARGUMENTS`` up to the construction of its FlexibleRunner, check its arguments, and tell of them.

    A configuration file stands for ``flextrain train SCRIPT ARGUMENTS``.

    Raises:
        ConfigError: there is no such file, it makes no runner, or an argument of the runner is wrong.
    """
    with runner_arguments(script, arguments) as given:
        checked = check_everything(given, takes_mmengines_models=True)  # the run looks at its model itself
    if not checked.trains:
        raise ConfigError(f"script: {script} does not train, give train_dataloader, train_cfg and optim_wrapper")
    options = checked.options
    out_dirs = [hook._out_dir for hook, _ in checked.hooks if isinstance(hook, CheckpointHook)]
    preemption, watchdog = options.env_cfg.preemption_options, options.env_cfg.watchdog_options
    return ScriptFacts(
        is_config=is_config_file(Path(script)),
        work_dir=str(options.work_dir),
        checkpoint_dir=str(next(filter(None, out_dirs), options.work_dir)),
        resumes=options.resume_options is not None,
        device=(checked.strategy.config.device or "").partition(":")[0],
        preemption_status=None if preemption is None else preemption.status,
        max_time=None if preemption is None else preemption.max_time,
        requeues=preemption is not None and preemption.requeue,
        stall_s=None if watchdog is None else watchdog.long_s,
        _strategy=None if given["strategy"] is None else checked.strategy,
    )
