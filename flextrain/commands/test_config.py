"""`flextrain test`: evaluate a checkpoint with the test part of a configuration file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .output import FoldedHelp
from .train_config import add_config_options

DESCRIPTION = """\
Load CHECKPOINT into the model that CONFIG describes, run its test loop, and print the metrics. CONFIG is a file as
`flextrain train` takes it; CHECKPOINT is a directory that a run saved, or whatever load_from takes.

  flextrain test config.py work_dirs/config/best_accuracy_epoch_4
  torchrun --nproc-per-node 8 -m flextrain test config.py runs/a/epoch_4 --val

Exit status: 0 tested, 2 the configuration or the checkpoint is wrong."""


def add(commands: Any) -> None:
    """Add the command to argparse's."""
    command = commands.add_parser(
        "test",
        help="evaluate a checkpoint with a configuration file",
        formatter_class=FoldedHelp,
        description=DESCRIPTION,
    )
    command.add_argument("config", metavar="CONFIG", help="a file, see above")
    command.add_argument("checkpoint", metavar="CHECKPOINT", help="the weights to evaluate")
    command.add_argument("--val", action="store_true", help="run the validation loop in place of the test loop")
    add_config_options(command)
    command.add_argument("--launcher", metavar="NAME", help="the launcher, if it shall not be detected")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Evaluate; see `test`."""
    from ..core.base.errors import ConfigError
    from ..core.checkpoint import Checkpoint, is_checkpoint
    from ..user_script import (
        load,
        runner_class,  # imports torch, which other commands do not need
    )

    config = load(arguments.config, arguments.cfg_options, work_dir=arguments.work_dir, launcher=arguments.launcher)
    phase, other = ("val", "test") if arguments.val else ("test", "val")
    if config.get(f"{phase}_dataloader") is None:
        hint = "leave out --val" if arguments.val else "give --val"
        hint = f", {other}_dataloader has: {hint}" if config.get(f"{other}_dataloader") else ""
        raise ConfigError(f"{arguments.config}: {phase}_dataloader has no value{hint}")
    path = Path(arguments.checkpoint)
    if is_checkpoint(path) and Checkpoint.open(path).values.get("left_out"):
        if not config.get("load_from"):
            raise ConfigError(
                f"{path}: was saved without its frozen parameters, give the weights that the run began with: "
                "--cfg-options load_from=PATH, or load_from in the configuration"
            )
        config.merge_from_dict(
            {"resume": arguments.checkpoint}
        )  # the runner loads what is left out from load_from, first
    else:
        config.merge_from_dict({"resume": False, "load_from": arguments.checkpoint})
    with runner_class(config).from_cfg(config) as runner:
        getattr(runner, phase)()
    return 0
