"""`flextrain checkpoint export`: weights for other programs, whole, sharded, of adapters, or for training to go on."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..core.base.errors import ConfigError, one_of

_DTYPES = ("float32", "float16", "bfloat16", "float64")
_NEEDS = {
    "key": ("dcp",),
    "optimizer": ("dcp",),
    "tokenizer": ("hf",),
    "config": ("hf",),
    "push": ("hf",),
    "license": ("push",),
    "dataset": ("push",),
    "private": ("push",),
    "base": ("merge",),
    "adapter": ("peft", "merge"),
}
"""Options to those of which they need one."""
_EXCLUDES = {
    "dcp": ("max_shard_size", "force", "hf", "peft"),
    "hf": ("force", "tied_once"),
    "peft": ("force", "tied_once", "max_shard_size", "hf"),
}
"""Options to those that have no effect with them."""


def add_options(export: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    export.add_argument("checkpoint", metavar="CHECKPOINT", help="a checkpoint, or weights that load_from takes")
    export.add_argument(
        "out", metavar="OUT", help="x.safetensors; x.pth, x.pt or x.bin; or a folder: a name without extension, or dir/"
    )
    export.add_argument("--dtype", choices=_DTYPES, help="dtype of floating-point tensors; default: unchanged")
    export.add_argument(
        "--max-shard-size", metavar="SIZE", help="largest size of a file in a folder, such as 5GB; default: one file"
    )
    export.add_argument(
        "--averaged",
        nargs="?",
        const=True,
        default=False,
        metavar="HOOK",
        help="export the averages of EMAHook instead",
    )
    export.add_argument("--tied-once", action="store_true", help="write tied tensors only once, under their first name")
    _add_adapters(export)
    export.add_argument("--force", action="store_true", help="replace OUT if it is a file that exists; default: refuse")
    export.add_argument(
        "--hf", action="store_true", help="write a folder that from_pretrained of transformers loads, with config.json"
    )
    export.add_argument(
        "--tokenizer", metavar="DIR", help="with --hf: the folder of its files; default: that the model was built from"
    )
    export.add_argument(
        "--config", metavar="DIR", help="with --hf: a folder with config.json; default: what the checkpoint says"
    )
    _add_hub(export)
    group = export.add_argument_group("a folder for torch.distributed.checkpoint")
    group.add_argument(
        "--dcp", action="store_true", help="write OUT as a folder that torch.distributed.checkpoint.load reads"
    )
    group.add_argument(
        "--key", metavar="KEY", help="with --dcp: the script's key of the model; default: none, or model"
    )
    group.add_argument("--optimizer", action="store_true", help="with --dcp: write the optimizer's state too")


def _add_hub(export: argparse.ArgumentParser) -> None:
    group = export.add_argument_group("the hub")
    group.add_argument(
        "--push",
        metavar="REPO",
        help="with --hf: push OUT to this repository, with a card of how the model was trained",
    )
    group.add_argument(
        "--license", metavar="ID", help="with --push, which needs it: of the weights, such as apache-2.0"
    )
    group.add_argument(
        "--dataset",
        action="append",
        metavar="NAME",
        help="with --push: a data set on the hub, for the card; may be repeated",
    )
    group.add_argument("--private", action="store_true", help="with --push: the repository is private, also a new one")


def _add_adapters(export: argparse.ArgumentParser) -> None:
    export.add_argument("--peft", action="store_true", help="write the adapter alone, to a folder that peft loads")
    export.add_argument(
        "--merge", action="store_true", help="merge the adapter into the weights before they are written"
    )
    export.add_argument(
        "--base", metavar="PATH", help="with --merge: weights for what the checkpoint leaves out, as for load_from"
    )
    export.add_argument(
        "--adapter", metavar="NAME", help="with --peft or --merge: the adapter, if the model has several"
    )


def export(arguments: argparse.Namespace) -> tuple[list[Path], str]:
    """Write what was asked for; return its files, and the address of what was pushed or an empty text."""
    _check_options(arguments)
    with _merging(arguments):
        return _exported(arguments)


def _check_options(arguments: argparse.Namespace) -> None:
    """Check that the options fit together, before anything is read."""
    where, given = "checkpoint export", {name for name, value in vars(arguments).items() if value not in (None, False)}
    if {"peft", "merge"} <= given:
        raise ConfigError(
            f"{where}: --peft writes the adapter alone and --merge has none in the result, give one of them"
        )
    if {"merge", "optimizer"} <= given:
        raise ConfigError(
            f"{where}: --optimizer has no effect with --merge, the optimizer has no state of merged weights; leave it out"
        )
    for name, needed in _NEEDS.items():
        if name in given and not given.intersection(needed):
            raise ConfigError(f"{where}: {_flag(name)} has no effect without {one_of(map(_flag, needed))}")
    if "push" in given and "license" not in given:
        raise ConfigError(
            f"{where}: --push needs --license, which says what others may do with the weights, such as apache-2.0"
        )
    for kind, excluded in _EXCLUDES.items():
        for name in excluded if kind in given else ():
            if name in given:
                raise ConfigError(f"{where}: {_flag(name)} has no effect with {_flag(kind)}, leave it out")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


@contextmanager
def _merging(arguments: argparse.Namespace) -> Iterator[None]:
    """Context in which ``arguments.checkpoint`` is the merged one, if that was asked for."""
    if not arguments.merge:
        yield
        return
    from ..core.checkpoint.export.peft_adapters import merged

    kwargs = dict(base=arguments.base, adapter=arguments.adapter, averaged=arguments.averaged)
    with merged(arguments.checkpoint, **kwargs) as arguments.checkpoint:
        arguments.averaged = False
        yield


def _exported(arguments: argparse.Namespace) -> tuple[list[Path], str]:
    import torch

    from ..core.checkpoint import export_dcp, export_hugging_face, export_weights, push_to_hub
    from ..core.checkpoint.export.peft_adapters import export_adapter
    from ..optim.canonical import torch_items

    dtype = getattr(torch, arguments.dtype) if arguments.dtype else None
    common: dict[str, Any] = dict(averaged=arguments.averaged, dtype=dtype)
    paths = (arguments.checkpoint, arguments.out)
    if arguments.peft:
        return export_adapter(*paths, adapter=arguments.adapter, **common), ""
    if arguments.dcp:
        optimizer = torch_items if arguments.optimizer else None
        files = export_dcp(*paths, key=arguments.key, optimizer=optimizer, tied=not arguments.tied_once, **common)
        return files, ""
    if arguments.hf:
        common |= dict(tokenizer=arguments.tokenizer, config=arguments.config)
        common["max_shard_size"] = arguments.max_shard_size or "5GB"
        if arguments.push is None:
            return export_hugging_face(*paths, **common), ""
        pushed = push_to_hub(
            arguments.checkpoint,
            arguments.push,
            license=arguments.license,
            folder=arguments.out,
            datasets=arguments.dataset or (),
            private=True if arguments.private else None,
            **common,
        )
        return pushed.files, pushed.url
    files = export_weights(
        *paths,
        max_shard_size=arguments.max_shard_size,
        tied=not arguments.tied_once,
        replace=arguments.force,
        **common,
    )
    return files, ""
