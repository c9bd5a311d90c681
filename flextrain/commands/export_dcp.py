"""`flextrain checkpoint export --dcp`: a folder for torch.distributed.checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def add_options(export: argparse.ArgumentParser) -> None:
    """Add the options to those of `export`."""
    group = export.add_argument_group("a folder for torch.distributed.checkpoint")
    group.add_argument(
        "--dcp", action="store_true", help="write OUT as a folder that torch.distributed.checkpoint.load reads"
    )
    group.add_argument(
        "--key", metavar="KEY", help="with --dcp: the script's key of the model; default: none, or model"
    )
    group.add_argument("--optimizer", action="store_true", help="with --dcp: write the optimizer's state too")


def export(arguments: argparse.Namespace, dtype: torch.dtype | None) -> list[Path]:
    """Write the folder; return its files."""
    from ..core.checkpoint import export_dcp
    from ..optim.canonical import torch_items

    return export_dcp(
        arguments.checkpoint,
        arguments.out,
        key=arguments.key,
        optimizer=torch_items if arguments.optimizer else None,
        averaged=arguments.averaged,
        dtype=dtype,
        tied=not arguments.tied_once,
    )
