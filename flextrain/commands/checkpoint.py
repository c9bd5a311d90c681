"""`flextrain checkpoint`: list, show, verify, compare and export checkpoints."""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.base.errors import CheckpointError, ConfigError, suggest
from .export import add_options, export
from .output import (
    as_text,
    both,
    console,
    finite_json,
    fitted_table,
    human_size,
    number,
    print_json,
    red,
    shape_text,
    shortened,
)

if TYPE_CHECKING:
    from rich.console import Console

    from ..core.checkpoint import Checkpoint
    from ..core.checkpoint.compare import Comparison

_PARTS = {"model": "model.", "optimizer": "optim."}


def add(commands: Any) -> None:
    """Add the command to argparse's."""
    command = commands.add_parser(
        "checkpoint",
        help="list, show, verify, export and compare checkpoints",
        description="List, show, verify, export and compare checkpoints. A path may be a URL such as s3://bucket/run/epoch_3.",
    )
    actions = command.add_subparsers(title="actions", required=True, metavar="ACTION")
    listing = _action(actions, "ls", _list, "list the checkpoints in a directory")
    listing.add_argument("folder", metavar="DIR", help="a work directory, or a URL that fsspec knows")
    show = _action(actions, "show", _show, "show tensors and values of a checkpoint, or of a file of weights")
    show.add_argument("checkpoint", metavar="CHECKPOINT", help="a checkpoint's folder, or weights that load_from takes")
    show.add_argument("pattern", nargs="?", metavar="PATTERN", help="only keys like this: '*.bias', or a part of them")
    verify = _action(
        actions, "verify", _verify, "check that a checkpoint is complete and finite; exit status 1: it is damaged"
    )
    verify.add_argument("checkpoint", metavar="CHECKPOINT", help="a checkpoint's folder")
    about = "write weights to .safetensors, .pth or .pt, or to a folder in Hugging Face's layout"
    add_options(_action(actions, "export", _export, about))
    diff = _action(actions, "diff", _diff, "compare two checkpoints; exit status 1: they differ")
    diff.add_argument("a", metavar="A", help="a checkpoint's folder, or weights that load_from takes")
    diff.add_argument("b", metavar="B", help="the other one")
    diff.add_argument("pattern", nargs="?", metavar="PATTERN", help="only keys like this: '*.bias', or a part of them")
    diff.add_argument("--part", choices=_PARTS, help="only the tensors of this part; `show` lists the parts")
    diff.add_argument("--all", action="store_true", help="also when, where and how fast the runs were")


def _action(actions: Any, name: str, run: Any, text: str) -> argparse.ArgumentParser:
    action: argparse.ArgumentParser = actions.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    action.add_argument("--json", action="store_true", help="print JSON")
    action.set_defaults(run=run)
    return action


def _as_path(path: str) -> Path:
    """A path, or a URL that fsspec knows."""
    from ..core.checkpoint import as_path

    return as_path(path)


def _check_directory(path: Path) -> None:
    if not path.is_dir():
        raise CheckpointError(f"{path}: {'is a file' if path.exists() else 'does not exist'}, give a work directory")


# ls


def _list(arguments: argparse.Namespace) -> int:
    from rich.text import Text

    from ..core.checkpoint import is_checkpoint
    from ..core.checkpoint.folders import reaching

    folder = _as_path(arguments.folder)
    with reaching(folder):
        _check_directory(folder)
        if is_checkpoint(folder):
            raise ConfigError(f"{folder}: is a checkpoint itself, use flextrain checkpoint show")
        rows = list_checkpoints(folder)
    if arguments.json:
        print_json(rows)
        return 0
    table = fitted_table(
        "checkpoint", "epoch", "iter", "size", "written", "strategy", "processes", "", title=str(folder)
    )
    for row in rows:
        notes = [Text(mark) for mark in ("latest", "best") if row[mark]]
        notes += [red("NaN or infinity")] if row["nonfinite"] else []
        notes += [red(row["damage"])] if row["damage"] else []
        numbers = (as_text(row[key]) for key in ("epoch", "iter"))
        about = (as_text(row[key]).replace("T", " ", key == "time") for key in ("time", "strategy", "processes"))
        table.add_row(row["name"], *numbers, human_size(row["bytes"]), *about, Text(", ").join(notes))
    console().print(table if rows else f"{folder}: has no checkpoints")
    return 0


def list_checkpoints(folder: Path) -> list[dict[str, Any]]:
    """The checkpoints in a directory, oldest first, a dict each."""
    from ..core.checkpoint import find_latest, is_checkpoint

    try:
        latest = find_latest(folder)
    except CheckpointError:
        latest = None
    found = [path for path in sorted(folder.iterdir()) if not path.name.startswith(".") and is_checkpoint(path)]
    rows = [_describe(path, latest is not None and latest.name == path.name) for path in found]
    return sorted(rows, key=lambda row: (row["time"] or "", row["iter"] or 0, row["name"]))


def _describe(path: Path, is_latest: bool) -> dict[str, Any]:
    from ..core.checkpoint import Checkpoint
    from ..core.checkpoint.compare import size_of
    from ..core.checkpoint.directory import read_manifest

    row: dict[str, Any] = dict.fromkeys(("epoch", "iter", "time", "strategy", "processes", "torch", "damage"))
    row = {"name": path.name, "bytes": size_of(path), **row, "latest": is_latest, "best": path.name.startswith("best_")}
    row["nonfinite"] = []
    try:
        manifest, values = read_manifest(path), Checkpoint.open(path).values
    except CheckpointError as error:
        return {**row, "damage": str(error)}
    written_by, row["nonfinite"] = manifest.written_by, list(manifest.nonfinite)
    loop, meta = _mapping(values.get("loop")), _mapping(values.get("meta"))
    row |= {"epoch": loop.get("epoch"), "iter": loop.get("iter"), "time": meta.get("time")}
    row |= {"strategy": written_by.get("strategy"), "processes": written_by.get("world_size")}
    row["torch"] = written_by.get("torch")
    row["time"] = row["time"] or _time(path)
    return row


def _time(path: Path) -> str:
    from ..core.checkpoint.manifest import MANIFEST

    return datetime.datetime.fromtimestamp((path / MANIFEST).stat().st_mtime).isoformat(timespec="seconds")


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


# show


def _show(arguments: argparse.Namespace) -> int:
    from ..core.checkpoint import open_weights, what_is_not_finite

    checkpoint = open_weights(arguments.checkpoint)
    found = describe(checkpoint, arguments.pattern)
    if arguments.json:
        print_json(finite_json(found))
        return 0
    if arguments.pattern and not found["tensors"] and not found["values"]:
        raise _unlike("show", arguments.pattern, checkpoint)
    out = console()
    table = fitted_table("tensor", "shape", "dtype", "size", "chunks", title=str(checkpoint.path))
    for key, info in found["tensors"].items():
        table.add_row(key, shape_text(info["shape"]), info["dtype"], human_size(info["bytes"]), str(info["chunks"]))
    if found["tensors"]:
        out.print(table)
    totals = fitted_table("", "tensors", "elements", "size", title="totals")
    for part, total in found["totals"].items():
        totals.add_row(part, str(total["tensors"]), f"{total['elements']:,}", human_size(total["bytes"]))
    out.print(totals)
    if found["nonfinite"]:
        out.print(red("NaN or infinity"), "in", what_is_not_finite(found["nonfinite"]), soft_wrap=True)
    if found["values"]:
        values = fitted_table("value", "", title="values")
        for key, value in found["values"].items():
            values.add_row(key, shortened(value))
        out.print(values)
    return 0


def describe(checkpoint: Checkpoint, pattern: str | None = None) -> dict[str, Any]:
    """Tensors, totals by part, and values of the keys that match a pattern.

    Args:
        checkpoint: an open one.
        pattern: a shell pattern, or a part of a key; None: all keys.
    """
    tensors: dict[str, dict[str, Any]] = {
        key: {
            "shape": list(info.shape),
            "dtype": str(info.dtype).removeprefix("torch."),
            "bytes": math.prod(info.shape) * info.dtype.itemsize,
            "chunks": checkpoint.entries[key].chunk_count,
        }
        for key, info in checkpoint.tensors.items()
        if _matches(key, pattern)
    }
    totals: dict[str, dict[str, int]] = {}
    for key, shape_and_size in tensors.items():
        part = next((name for name, prefix in _PARTS.items() if key.startswith(prefix)), "other")
        total = totals.setdefault(part, {"tensors": 0, "elements": 0, "bytes": 0})
        total["tensors"] += 1
        total["elements"] += math.prod(shape_and_size["shape"])
        total["bytes"] += shape_and_size["bytes"]
    values = {
        key: list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
        for key, value in checkpoint.values.items()
        if _matches(key, pattern)
    }
    nonfinite = [key for key in checkpoint.nonfinite if _matches(key, pattern)]
    return {
        "path": str(checkpoint.path),
        "nonfinite": nonfinite,
        "tensors": tensors,
        "totals": totals,
        "values": values,
    }


def _matches(key: str, pattern: str | None) -> bool:
    return pattern is None or pattern in key or fnmatch.fnmatchcase(key, pattern)


def _unlike(action: str, pattern: str, *checkpoints: Checkpoint) -> ConfigError:
    """The error for a pattern that matches no key."""
    keys = {key for checkpoint in checkpoints for key in (*checkpoint.tensors, *checkpoint.values)}
    paths = " or ".join(str(checkpoint.path) for checkpoint in checkpoints)
    return ConfigError(f'checkpoint {action}: "{pattern}" matches no key of {paths}{suggest(pattern, sorted(keys))}')


# verify


def _verify(arguments: argparse.Namespace) -> int:
    from rich.text import Text

    from ..core.checkpoint import what_is_not_finite
    from ..core.checkpoint.compare import damages
    from ..core.checkpoint.directory import check_present, read_manifest

    path = _as_path(arguments.checkpoint)
    check_present(path)
    found = list(damages(path))
    nonfinite = [] if found else read_manifest(path).nonfinite
    if arguments.json:
        print_json({"path": str(path), "ok": not found, "damages": found, "nonfinite": list(nonfinite)})
    else:
        for damage in found:
            console().print(damage, soft_wrap=True)
        verdict = Text(f"{path}: ").append_text(red("is damaged") if found else Text("is complete"))
        if nonfinite:
            verdict.append(", ").append_text(red("with NaN or infinity")).append(f" in {what_is_not_finite(nonfinite)}")
        console().print(verdict, soft_wrap=True)
    return 1 if found else 0


# export


def _export(arguments: argparse.Namespace) -> int:
    files, url = export(arguments)
    written = {str(file): file.stat().st_size for file in files}
    if arguments.json:
        files_as_json: list[dict[str, Any]] = [{"path": path, "bytes": size} for path, size in written.items()]
        print_json([*files_as_json, {"pushed": url}] if url else files_as_json)
        return 0
    for path, size in written.items():
        console().print(f"{path}  {human_size(size)}", soft_wrap=True)
    if url:
        console().print(f"pushed: {url}", soft_wrap=True)
    return 0


# diff


def _diff(arguments: argparse.Namespace) -> int:
    from ..core.checkpoint import open_weights
    from ..core.checkpoint.compare import compare, is_of_the_run

    pattern, prefix = arguments.pattern, _PARTS.get(arguments.part, "")
    left_out: list[str] = []

    def counts(key: str) -> bool:
        if not (arguments.all or pattern) and is_of_the_run(key):
            left_out.append(key)
            return False
        return key.startswith(prefix) and _matches(key, pattern)

    a, b = open_weights(arguments.a), open_weights(arguments.b)
    found = compare(a, b, counts)
    if pattern and not found and not found.equal:
        raise _unlike("diff", pattern, a, b)
    if arguments.json:
        print_json(finite_json(_as_json(found)))
    else:
        _print_comparison(found, console())
        if left_out and not prefix:
            console().print("not compared: when, where and how fast the runs were (--all compares it)")
    return 1 if found else 0


def _as_json(found: Comparison) -> dict[str, Any]:
    tensors = {
        difference.key: {
            "shapes": difference.shapes,
            "dtypes": difference.dtypes,
            "absolute": difference.absolute,
            "relative": difference.relative,
            "count": difference.count,
        }
        for difference in found.tensors
    }
    only = {"only_a": found.only_a, "only_b": found.only_b}
    return {"equal": found.equal, **only, "tensors": tensors, "values": dict(found.values)}


def _print_comparison(found: Comparison, out: Console) -> None:
    for title, keys in (("only in A", found.only_a), ("only in B", found.only_b)):
        if keys:
            table = fitted_table(title)
            for key in keys:
                table.add_row(key)
            out.print(table)
    if found.tensors:
        table = fitted_table("tensor", "shape", "dtype", "elements that differ", "largest difference", "relative")
        for d in found.tensors:
            differing = "" if d.count is None else f"{d.count:,} of {d.numel:,}"
            sizes = (number(d.absolute), number(d.relative))
            table.add_row(d.key, both(*map(shape_text, d.shapes)), both(*d.dtypes), differing, *sizes)
        out.print(table)
    if found.values:
        table = fitted_table("value", "A", "B")
        for key, (a, b) in found.values.items():
            table.add_row(key, shortened(a), shortened(b))
        out.print(table)
    count = len(found.only_a) + len(found.only_b) + len(found.tensors) + len(found.values)
    out.print(f"{count} differ, {found.equal} are equal" if found else f"all {found.equal} are equal")
