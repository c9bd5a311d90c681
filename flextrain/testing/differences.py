"""Comparisons that report which entry differs, where, by how much and, if known, why."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..core.base.errors import FlexTrainError, listed

# Float32 has 24 bits, a relative rounding error of 6e-8. Sums in another order (per process, then over processes) round
# differently at each of a few tens of additions and updates. A difference well above 1e-6 is not rounding.
FLOAT32_TOLERANCE = 1e-6


compared: list[float] = []
"""The relative differences of what this process has compared within rounding; who reads them empties it first."""


class CheckFailedError(FlexTrainError, AssertionError):
    """A check found a difference from what it requires."""


def require(condition: bool, message: str) -> None:
    """Raise CheckFailedError unless ``condition`` holds."""
    if not condition:
        raise CheckFailedError(message)


# A tensor whose elements are all below this fraction of the largest tensor of its kind is compared on that scale: its values
# are differences of larger numbers, and have their rounding error.
SMALL = 0.01


def relative_difference(found: Tensor, expected: Tensor, scale: float = 0.0) -> float:
    """The largest difference of two tensors, divided by the largest magnitude in ``expected`` or by ``scale`` if larger.

    Infinite if they differ and one of them is not finite.
    """
    found, expected = found.detach().double().cpu(), expected.detach().double().cpu()
    if torch.equal(found, expected) or not expected.numel():
        return 0.0
    difference = (found - expected).abs().max().item()
    return difference / max(_magnitude(expected), scale, 1e-30) if difference < float("inf") else float("inf")


def _magnitude(value: Any) -> float:
    is_number = isinstance(value, Tensor) and value.numel() and value.dtype is not torch.bool
    return float(value.detach().double().abs().max()) if is_number else 0.0


def multiple(found: Tensor, expected: Tensor) -> str:
    """The words ``, it is 0.5 times what it should be`` if the tensors differ by a factor; otherwise empty."""
    a, b = found.detach().double().flatten().cpu(), expected.detach().double().flatten().cpu()
    if not b.norm() > 0:
        return ""
    factor = (a @ b / (b @ b)).item()
    if not (a - factor * b).norm() <= 1e-3 * a.norm() or abs(factor - 1) < 1e-4:
        return ""
    return f", it is {factor:.4g} times what it should be"


def _exact(number: float) -> Tensor:
    return torch.tensor(number, dtype=torch.float64)


def same_numbers(
    found: Iterable[float | None],
    expected: Iterable[float | None],
    what: str,
    tolerance: float,
    other: str = "single-device",
) -> None:
    """Raise CheckFailedError at the first update whose number differs by more than the relative ``tolerance``.

    Args:
        other: what has the expected numbers.
    """
    found, expected = list(found), list(expected)
    require(len(found) == len(expected), f"{len(found)} updates were made, {other} makes {len(expected)}")
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        if ours is None or theirs is None:
            require(ours is theirs, f"{what} of update {number} is {ours}, {other} has {theirs}")
            continue
        difference = relative_difference(_exact(ours), _exact(theirs))
        compared.append(difference)
        hint = multiple(_exact(ours), _exact(theirs)) if difference > 0.01 else ""
        require(
            difference <= tolerance,
            f"{what} of update {number} is {ours:.8g}, {other} has {theirs:.8g} "
            f"(relative difference {difference:.1e}, allowed {tolerance:.0e}){hint}",
        )


def same_tensors(found: Mapping[str, Any], expected: Mapping[str, Any], what: str, tolerance: float = 0.0) -> None:
    """Raise CheckFailedError for the entry with the largest difference, if that exceeds the relative ``tolerance``.

    Entries that only one side has are ignored (see ``same_keys``); at least one entry must be on both sides.
    """
    keys = [key for key in expected if key in found]
    require(
        bool(keys),
        f"{what}: nothing to compare, the keys are {listed(sorted(found), 3)} and not {listed(sorted(expected), 3)}",
    )
    scales = small_scales(expected)
    worst, where = 0.0, ""
    for key in keys:
        value = expected[key]
        if isinstance(value, Tensor):
            require(
                isinstance(found[key], Tensor) and found[key].shape == value.shape,
                f"{what}: {key} has shape {tuple(getattr(found[key], 'shape', ()))}, expected {tuple(value.shape)}",
            )
            difference = relative_difference(found[key], value, scales[key])
            if difference > worst:
                worst, where = difference, key
        else:
            require(found[key] == value, f"{what}: {key} is {found[key]!r}, expected {value!r}")
    compared.append(worst)
    allowed = f"allowed {tolerance:.0e}" if tolerance else "must be equal"
    require(worst <= tolerance, f"{what}: {where} differs by {worst:.1e} relative, {allowed}")


def small_scales(expected: Mapping[str, Any]) -> dict[str, float]:
    """For every entry of a canonical state, the magnitude below which values of its kind count as small."""
    kinds = {key: "model" if key.startswith("model.") else key.rpartition(".")[2] for key in expected}
    largest: dict[str, float] = {}
    for key, value in expected.items():
        largest[kinds[key]] = max(largest.get(kinds[key], 0.0), _magnitude(value))
    return {key: SMALL * largest[kind] for key, kind in kinds.items()}


def same_keys(found: Iterable[str], expected: Iterable[str], what: str) -> None:
    """Raise CheckFailedError naming the missing and the unexpected keys."""
    missing, extra = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    parts = []
    if missing:
        near = difflib.get_close_matches(missing[0], extra, n=1)
        parts.append(f"{len(missing)} missing, {listed(missing, 3)}" + (f' (renamed to "{near[0]}"?)' if near else ""))
    if extra:
        parts.append(f"{len(extra)} unexpected, {listed(extra, 3)}")
    require(not parts, f"{what}: keys differ from single-device's: {'; '.join(parts)}")
