"""The model card of an export: what the checkpoint and its work directory know of how the weights came to be."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...base.errors import counted
from ...hugging_face.pretrained import META_KEY
from ..directory import is_checkpoint, read_manifest
from ..foreign.weights_file import MODEL
from ..load import Checkpoint
from ..manifest import MANIFEST

MARK = "<!-- Written by flextrain, and again by its next push; without this line a push leaves the file alone. -->"
_RECIPE = ("optim_wrapper", "param_scheduler", "train_cfg", "auto_scale_lr", "strategy", "transforms")
"""What the card says of the runner's arguments. Others may hold what is nobody's business, such as keys of trackers."""
_HUB_CACHE = re.compile(r"models--([\w.-]+?)--([\w.-]+)")
_WINDOW = 10
"""Updates that a training metric is the mean of, as in the log."""


def model_card(checkpoint: Checkpoint, name: str, *, license: str, datasets: Sequence[str] = ()) -> str:
    """Return the text of README.md, with the metadata that the hub reads.

    Paths of this machine are not in it, but for the last part of their names.

    Args:
        checkpoint: of whose weights it tells.
        name: of the model.
        license: its identifier on the hub, such as "apache-2.0".
        datasets: names of data sets on the hub.
    """
    values = checkpoint.values
    meta = _mapping(values.get("meta"))
    described = _mapping(meta.get(META_KEY))
    base = _base(described)
    metadata: dict[str, Any] = {"license": license, "library_name": "transformers", "tags": ["flextrain"]}
    metadata |= {"base_model": base} if base and "/" in base else {}
    metadata |= {"datasets": list(datasets)} if datasets else {}
    config = _config_beside(checkpoint)
    rows = dict(_rows(checkpoint, meta, described, base, config))
    parts = [f"---\n{_yaml(metadata)}---\n", f"# {name}\n", _table(rows, "", "")]
    if metrics := dict(_metrics(_mapping(values.get("message_hub")))):
        parts.append(
            "## Metrics\n\nAs they were when the checkpoint was saved.\n\n" + _table(metrics, "metric", "value")
        )
    if recipe := {key: _public(config[key]) for key in _RECIPE if config.get(key) is not None}:
        parts.append(f"## Recipe\n\n```yaml\n{_yaml(recipe)}```\n")
    return "\n".join([*parts, MARK, ""])


def _rows(
    checkpoint: Checkpoint,
    meta: Mapping[str, Any],
    described: Mapping[str, Any],
    base: str,
    config: Mapping[str, Any],
) -> Iterator[tuple[str, str]]:
    sizes = (math.prod(info.shape) for key, info in checkpoint.tensors.items() if key.startswith(MODEL))
    yield "model", f"{described.get('architecture', 'unknown')}, {sum(sizes):,} numbers"
    if base:
        yield "began from", base
    if data := ", ".join(_data(_mapping(checkpoint.values.get("data")), config)):
        yield "data", data
    if "iter" in meta:
        yield "trained", f"{counted(meta['iter'], 'update')}, {counted(meta.get('epoch', 0), 'whole epoch')}"
    by: Mapping[str, Any] = read_manifest(checkpoint.path).written_by if is_checkpoint(checkpoint.path) else {}
    if "strategy" in by:
        yield "strategy", f"{by['strategy']} on {counted(int(by.get('world_size', 1)), 'process', 'processes')}"
    if meta.get("seed") is not None:
        yield "seed", str(meta["seed"])
    found = {name: by[name] for name in ("flextrain", "torch") if name in by}
    if version := _mapping(described.get("config")).get("transformers_version"):
        found["transformers"] = version
    if found:
        yield "versions", ", ".join(f"{name} {version}" for name, version in found.items())
    if "time" in meta:
        yield "saved", str(meta["time"])


def _data(facts: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[str]:
    dataset = _mapping(_mapping(config.get("train_dataloader")).get("dataset"))
    if isinstance(kind := dataset.get("type"), str):
        yield kind.rpartition(":")[2]
    if facts.get("num_samples") is not None:
        yield counted(facts["num_samples"], "sample")
    if facts.get("batch_size") is not None:
        factors = {
            "a batch": facts["batch_size"],
            "batches": facts["accumulate"],
            "shards of the data": facts["shards"],
        }
        said = " x ".join(f"{number} ({what})" for what, number in factors.items() if number != 1)
        yield f"{math.prod(factors.values())} for each update" + (f" = {said}" if " x " in said else "")
    if facts.get("shuffle"):
        yield "shuffled"


def _metrics(hub: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Validation first; times and rates are no metrics."""
    scalars = _mapping(hub.get("scalars"))
    for key in sorted(scalars, key=lambda key: (not key.startswith("val/"), key)):
        values = _mapping(scalars[key]).get("values")
        is_metric = key.startswith("val/") or "loss" in key
        if is_metric and key.rpartition("/")[2] not in ("time", "data_time") and values:
            shown = values[-1:] if key.startswith("val/") else values[-_WINDOW:]
            yield key, f"{sum(shown) / len(shown):.4g}"


def _base(described: Mapping[str, Any]) -> str:
    """The model that training began from: its name on the hub if it came from there, else its folder's own name."""
    given = described.get("folder") or _mapping(described.get("config")).get("_name_or_path") or ""
    if (cached := _HUB_CACHE.search(str(given))) is not None:
        return f"{cached[1]}/{cached[2]}"
    return Path(str(given)).name


def _config_beside(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """The arguments of the run that has saved the checkpoint, from its work directory; empty if they are not there."""
    if not is_checkpoint(checkpoint.path):
        return {}
    written = (checkpoint.path / MANIFEST).stat().st_mtime
    found = [path for path in checkpoint.path.parent.glob("*/vis_data/config.json") if path.stat().st_mtime <= written]
    for path in sorted(found, key=lambda path: path.stat().st_mtime, reverse=True):
        try:
            return _mapping(json.loads(path.read_text(encoding="utf-8")))
        except ValueError:  # the disk was full, an earlier start has the same
            continue
    return {}


def _public(value: Any) -> Any:
    """A value without the folders of this machine."""
    if isinstance(value, Mapping):
        return {key: _public(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_public(one) for one in value]
    if isinstance(value, str) and value.startswith(("/", "~", "./", "../", "file:")):
        return Path(value).name
    return value


def _table(rows: Mapping[str, str], first: str, second: str) -> str:
    cells = [(first, second), ("---", "---"), *rows.items()]
    return "".join(f"| {name} | {_cell(value)} |\n" for name, value in cells)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _yaml(values: Mapping[str, Any]) -> str:
    import yaml

    return str(yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
