"""Sizes in bytes, as people write them and as messages show them."""

from __future__ import annotations

import re

from .errors import ConfigError

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def bytes_of(given: int | float | str, where: str) -> int:
    """The number of bytes in 2000000, "2GiB" or "500 MB".

    Args:
        where: the option, for messages.

    Raises:
        ConfigError: it is no size, or less than one byte.
    """
    match = (
        None if isinstance(given, bool) else re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?B)?\s*", str(given).upper())
    )
    size = int(float(match[1]) * _UNITS.get(match[2] or "B", 0)) if match else 0
    if size < 1:
        raise ConfigError(f'{where}: "{given}" is not allowed, give bytes, or a number with a unit, such as "2GiB"')
    return size


def size_text(size: int) -> str:
    """A size in the largest unit of which there is at least one: "1.5 MiB"."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}" if size < 1000 * factor else f"{size / factor:.0f} {unit}"
    return f"{size} bytes"
