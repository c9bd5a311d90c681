"""`flextrain checkpoint export --hf`: a folder that from_pretrained of transformers loads."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


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
