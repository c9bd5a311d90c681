"""Sizes of a mesh: how many processes each axis has; their product is the number of processes."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping

from ...core.errors import ConfigError, StrategyError, one_of, suggest

REST = -1
"""The size of an axis that takes all the processes that the others leave."""


def check_sizes(sizes: Mapping[str, int]) -> None:
    """Check sizes before the number of processes is known.

    Args:
        sizes: by axis, a positive number or ``REST``.

    Raises:
        ConfigError: a size is neither, or several are ``REST``.
    """
    for axis, size in sizes.items():
        if size < 1 and size != REST:
            raise ConfigError(
                f"strategy.{axis}: {size} is not allowed, give a positive number, or -1 for the processes that are left"
            )
    rests = [axis for axis, size in sizes.items() if size == REST]
    if len(rests) > 1:
        others = ", ".join(f"strategy.{axis}" for axis in rests[1:])
        raise ConfigError(
            f"strategy.{rests[0]}: -1 is given for {others} too, one axis takes what is left; give the others"
        )


def resolved(sizes: Mapping[str, int], world_size: int) -> dict[str, int]:
    """Return the sizes with a number in place of ``REST``.

    Args:
        sizes: by axis, as ``check_sizes`` accepts them.
        world_size: number of processes.

    Raises:
        StrategyError: their product cannot be the number of processes.
    """
    given = math.prod(size for size in sizes.values() if size != REST)
    rest = next((axis for axis, size in sizes.items() if size == REST), None)
    product = " * ".join(f"{axis}={size}" for axis, size in sizes.items() if size not in (1, REST)) or "1"
    if rest is None:
        if given != world_size:
            free = next((axis for axis in ("dp_shard", *sizes) if sizes[axis] == 1), next(iter(sizes)))
            raise StrategyError(
                f"strategy: {product} is {given}, but there are {world_size} processes; start {given}, or give {free}=-1"
            )
        return dict(sizes)
    if world_size % given:
        raise StrategyError(
            f"strategy.{rest}: nothing whole is left for it, {product} is {given} and does not divide the {world_size} processes"
        )
    return {**sizes, rest: world_size // given}


def check_overlay(axis: str, size: int, divided: Mapping[str, int]) -> None:
    """Check the size of an axis that takes processes of other axes.

    Args:
        axis, size: its name, and its number of processes.
        divided: sizes of those other axes; ``REST`` where it is not known yet.

    Raises:
        ConfigError: it does not divide their product.
    """
    names = " * ".join(divided)
    if size < 1:
        raise ConfigError(f"strategy.{axis}: {size} is not allowed, give a positive number that divides {names}")
    total = math.prod(divided.values())
    if REST not in divided.values() and total % size:
        product = " * ".join(f"{name}={number}" for name, number in divided.items() if number != 1) or "1"
        raise ConfigError(
            f"strategy.{axis}: {size} does not divide the {total} processes of {names}, which are {product}"
        )


def sizes_in(text: str, axes: Collection[str], where: str) -> dict[str, int]:
    """Return the sizes that a text such as "tp2xpp2" or "tp=2,pp=2" gives; "dp" is short for "dp_shard".

    Raises:
        ConfigError: the text is written otherwise, or an axis is not one of ``axes``, or given twice.
    """
    sizes: dict[str, int] = {}
    pattern, between = (r"([a-z_]+)=(-1|[0-9]+)", ",") if "=" in text else (r"([a-z_]+)([0-9]+)", "x")
    for part in text.split(between):
        found = re.fullmatch(pattern, part)
        if found is None:
            raise ConfigError(
                f'{where}: "mesh:{text}" is not allowed, write axes with their sizes, such as "mesh:dp2xtp2" or "mesh:dp=2,tp=2"'
            )
        axis = "dp_shard" if found[1] == "dp" else found[1]
        if axis not in axes:
            raise ConfigError(
                f'{where}: "mesh:{text}" has "{found[1]}", choose {one_of(["dp", *axes])}{suggest(found[1], ["dp", *axes])}'
            )
        if axis in sizes:
            raise ConfigError(f'{where}: "mesh:{text}" has {axis} twice, give one size')
        sizes[axis] = int(found[2])
    return sizes
