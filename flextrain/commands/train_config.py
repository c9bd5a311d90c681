"""`flextrain train`: train what a configuration file describes."""

from __future__ import annotations

import argparse
from typing import Any

from .output import FoldedHelp

DESCRIPTION = """\
Train what CONFIG describes: Python, YAML, JSON or TOML with the arguments of FlexibleRunner, as docs/configuration.md
explains; MMEngine's files are read without MMEngine. A Python file is executed.

The launchers that start scripts start it too:
  flextrain train config.py --cfg-options strategy=fsdp train_cfg.max_epochs=5
  torchrun --nproc-per-node 8 -m flextrain train config.py
  flextrain run --nproc-per-node 8 --module flextrain train config.py

The resolved configuration is written to config.py in the work directory, and is part of every checkpoint. A
configuration whose default_scope is a scope of MMEngine's registries trains with flextrain.mmengine's runner.

Exit status: 0 trained, 2 the configuration is wrong, 143 ended by a signal after a save."""


def add_config_options(command: argparse.ArgumentParser) -> None:
    """Add the options that change a configuration."""
    command.add_argument(
        "--cfg-options",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="values to set, such as optim_wrapper.optimizer.lr=3e-4 strategy=fsdp custom_hooks.0.interval=5",
    )
    command.add_argument("--work-dir", metavar="DIR", help="default: the file's, or work_dirs/ and the file's name")


def add(commands: Any) -> None:
    """Add the command to argparse's."""
    command = commands.add_parser(
        "train",
        help="train what a configuration file describes",
        formatter_class=FoldedHelp,
        description=DESCRIPTION,
    )
    command.add_argument("config", metavar="CONFIG", help="a file, see above")
    add_config_options(command)
    command.add_argument(
        "--resume",
        nargs="?",
        const=True,
        metavar="CHECKPOINT",
        help="continue from the newest checkpoint in the work directory if there is one, or from this one",
    )
    command.add_argument("--load-from", metavar="CHECKPOINT", help="weights to start from")
    command.add_argument("--launcher", metavar="NAME", help="the launcher, if it shall not be detected")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Train; see `train`."""
    from ..user_script import (
        load,
        runner_class,  # imports torch, which other commands do not need
    )

    config = load(
        arguments.config,
        arguments.cfg_options,
        work_dir=arguments.work_dir,
        resume=arguments.resume,
        load_from=arguments.load_from,
        launcher=arguments.launcher,
    )
    runner_class(config).from_cfg(config).train()
    return 0
