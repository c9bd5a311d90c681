"""Find a machine by its name, or in a file; and the nodes that a job needs of it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import pydantic

from ...core.config import Config, PositiveInt, validate
from ...core.errors import ConfigError, one_of, suggest
from .machine_kind import DTYPES, Link, MachineKind
from .machine_table import TABLE

MACHINES: dict[str, MachineKind] = {machine.name: machine for machine in TABLE}
"""The machines that are known by name."""
_ALIASES = {"h100-sxm": "h100", "h200-sxm": "h200", "a100-80gb": "a100", "ascend-910b": "910b", "ascend910b": "910b"}

_Rate = Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)]


class _LinkConfig(Config):
    name: str
    bytes_per_s: _Rate
    to_one: _Rate | None = None
    source: str = ""


class _PeakConfig(Config):
    float64: _Rate | None = None
    float32: _Rate | None = None
    tfloat32: _Rate | None = None
    bfloat16: _Rate | None = None
    float16: _Rate | None = None
    float8: _Rate | None = None


class _MachineConfig(Config):
    """A machine in a file; with ``like``, what is left out is as that machine has it."""

    like: str | None = None
    name: str | None = None
    device: str | None = None
    peak: _PeakConfig | None = None
    memory: PositiveInt | None = None
    bandwidth: _Rate | None = None
    devices: PositiveInt | None = None
    inside: _LinkConfig | None = None
    between: _LinkConfig | None = None
    sources: dict[str, str] | None = None


def machine_named(given: str, where: str = "plan.machine") -> MachineKind:
    """Return the machine of a name, whatever its case, or the one that a JSON file describes.

    Raises:
        ConfigError: there is none, or the file has a wrong key or value.
    """
    name = given.strip().lower().replace("_", "-").replace(" ", "-")
    if name in MACHINES or name in _ALIASES:
        return MACHINES[_ALIASES.get(name, name)]
    if name.endswith(".json"):
        return _in_file(Path(given), where)
    hint = suggest(name, (*MACHINES, *_ALIASES))
    raise ConfigError(f'{where}: "{given}" is not known, choose {one_of(MACHINES)}, or give a file .json{hint}')


def _in_file(path: Path, where: str) -> MachineKind:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{where}: {path} cannot be read, {error.strerror}") from None
    except ValueError as error:  # no JSON, or no text
        raise ConfigError(f"{where}: {path} is no JSON, {error}") from None
    return machine_of(found, path.stem, f"{where} {path}")


def machine_of(values: Mapping[str, Any], name: str, where: str) -> MachineKind:
    """Return the machine with these values, the fields of ``MachineKind``, or with ``like`` those that differ from another one's.

    Args:
        name: its name, unless the values have one.

    Raises:
        ConfigError: a value is missing or wrong.
    """
    config = validate(_MachineConfig, values, where)
    given = {key: value for key, value in config.model_dump(exclude_none=True).items() if key != "like"}
    for link in ("inside", "between"):
        if link in given:
            given[link] = Link(**given[link])
    if config.like is None:
        known = {"name": name, "device": name, "sources": {}}
    else:
        other = machine_named(config.like, f"{where}.like")
        known = {each.name: getattr(other, each.name) for each in dataclasses.fields(other)} | {"name": name}
        kept = {key: source for key, source in other.sources.items() if key not in given}
        given["sources"] = kept | given.get("sources", {})
    missing = [each.name for each in dataclasses.fields(MachineKind) if each.name not in {**known, **given}]
    if missing:
        raise ConfigError(f'{where}.{missing[0]}: missing, give it, or "like" with the name of a machine')
    if not given.get("peak", {"": 0}):
        raise ConfigError(f"{where}.peak: is empty, give operations per second for {one_of(DTYPES)}")
    return MachineKind(**{**known, **given})


def nodes_for(machine: MachineKind, world_size: int) -> int:
    """Return how many nodes have this number of devices.

    Raises:
        ConfigError: the last one would not be full.
    """
    if world_size <= machine.devices:
        return 1
    if world_size % machine.devices:
        raise ConfigError(
            f"plan.nodes: missing, {world_size} processes do not fill nodes of {machine.devices} devices ({machine.name}); "
            "give --nodes"
        )
    return world_size // machine.devices


def check_devices(machine: MachineKind, world_size: int, nodes: int) -> None:
    """Raise if a node would have more processes than devices.

    Raises:
        ConfigError: it would.
    """
    each = world_size // nodes
    if each > machine.devices:
        least = -(-world_size // machine.devices)
        raise ConfigError(
            f"plan.nodes: {nodes} with {each} processes each is not allowed, a node of {machine.name} has {machine.devices} "
            f"devices; give {least} or more"
        )
