"""`flextrain checkpoint export --hf`: a folder that from_pretrained of transformers loads."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..core.errors import ConfigError


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this kind of export."""
    parser.add_argument(
        "--hf", action="store_true", help="write a folder that from_pretrained of transformers loads, with config.json"
    )
    parser.add_argument(
        "--tokenizer", metavar="DIR", help="with --hf: the folder of its files; default: that the model was built from"
    )
    parser.add_argument(
        "--config", metavar="DIR", help="with --hf: a folder with config.json; default: what the checkpoint says"
    )


def is_asked(arguments: argparse.Namespace) -> bool:
    """Whether this kind of export was asked for.

    Raises:
        ConfigError: options of it were given without it, or others with it.
    """
    for name in ("tokenizer", "config"):
        if getattr(arguments, name) is not None and not arguments.hf:
            raise ConfigError(f"checkpoint export: --{name} has no effect without --hf")
    for name in ("force", "tied_once"):
        if arguments.hf and getattr(arguments, name):
            raise ConfigError(f"checkpoint export: --{name.replace('_', '-')} has no effect with --hf, leave it out")
    return bool(arguments.hf)


def export(arguments: argparse.Namespace, dtype: Any) -> list[Path]:
    """Write the folder; return its files."""
    from ..core.checkpoint import export_hugging_face

    return export_hugging_face(
        arguments.checkpoint,
        arguments.out,
        tokenizer=arguments.tokenizer,
        config=arguments.config,
        averaged=arguments.averaged,
        dtype=dtype,
        max_shard_size=arguments.max_shard_size or "5GB",
    )
