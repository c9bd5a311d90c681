"""`flextrain checkpoint export --peft` and `--merge`: adapters alone, or merged into the weights of their base."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for adapters."""
    parser.add_argument("--peft", action="store_true", help="write the adapter alone, to a folder that peft loads")
    parser.add_argument(
        "--merge", action="store_true", help="merge the adapter into the weights before they are written"
    )
    parser.add_argument(
        "--base", metavar="PATH", help="with --merge: weights for what the checkpoint leaves out, as for load_from"
    )
    parser.add_argument(
        "--adapter", metavar="NAME", help="with --peft or --merge: the adapter, if the model has several"
    )


def export(arguments: argparse.Namespace, dtype: Any) -> list[Path]:
    """Write an adapter alone; return its files."""
    from ..core.checkpoint.export.peft_adapters import export_adapter

    return export_adapter(
        arguments.checkpoint, arguments.out, adapter=arguments.adapter, averaged=arguments.averaged, dtype=dtype
    )


@contextmanager
def merging(arguments: argparse.Namespace) -> Iterator[None]:
    """Context in which ``arguments.checkpoint`` is the merged one, if that was asked for."""
    if not arguments.merge:
        yield
        return
    from ..core.checkpoint.export.peft_adapters import merged

    kwargs = dict(base=arguments.base, adapter=arguments.adapter, averaged=arguments.averaged)
    with merged(arguments.checkpoint, **kwargs) as arguments.checkpoint:
        arguments.averaged = False
        yield
