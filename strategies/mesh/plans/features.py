"""Features: which dimensions of tensors are the same features, whatever views and operations are between them.

The dimension of a tensor is a product of axes, outermost first: ``heads * width`` of a projection becomes two dimensions
in a view. Two dimensions that an operation combines element by element are the same axes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class Features:
    """Features along a dimension, or the product of several such axes; see ``leaves``.

    Attributes:
        size: number of features.
        whole: an operation needs all features at once, such as a norm.
        classes: a cross entropy compares them: they are a vocabulary.
    """

    __slots__ = ("classes", "factors", "same", "size", "whole")

    def __init__(self, size: int, whole: bool = False) -> None:
        self.size, self.whole, self.classes = size, whole, False
        self.same: Features | None = None
        self.factors: tuple[Features, Features] | None = None

    def root(self) -> Features:
        """Return the axis that stands for all that were found to be the same."""
        found = self
        while found.same is not None:
            found = found.same
        return found

    def divide(self, outer: int) -> tuple[Features, Features]:
        """Find that this axis, a root without factors, is a product whose first factor has size ``outer``."""
        factors = (Features(outer, self.whole), Features(self.size // outer, self.whole))
        for factor in factors:
            factor.classes = self.classes
        self.factors = factors
        return factors


Label = tuple[Features, ...]
"""The axes of one dimension of a tensor, outermost first."""


def leaves(label: Iterable[Features]) -> Label:
    """Return the axes without factors; without those of size 1, if there are others."""
    found: list[Features] = []
    for axis in label:
        root = axis.root()
        found += [root] if root.factors is None else leaves(root.factors)
    return tuple(axis for axis in found if axis.size != 1)


def keep_whole(label: Iterable[Features]) -> None:
    """Note that an operation needs all of a dimension at once."""
    for axis in leaves(label):
        axis.whole = True


def join(first: Label, second: Label) -> None:
    """Note that two dimensions of one size are the same features."""
    left, right = leaves(first), leaves(second)
    while left and right:
        one, other = left[0], right[0]
        if one is not other and one.size != other.size:
            big, small = (one, other) if one.size > other.size else (other, one)
            if big.size % small.size:
                keep_whole(left)
                keep_whole(right)
                return
            one, other = big.divide(small.size)[0], small
        if one is not other:
            other.same = one
            one.whole |= other.whole
            one.classes |= other.classes
        left, right = _after(leaves(left), one), _after(leaves(right), one)


def _after(label: Label, first: Features) -> Label:
    return label[1:] if label and label[0] is first.root() else label


def cut(label: Label, sizes: Sequence[int]) -> list[Label] | None:
    """Divide a dimension as a view does, into dimensions of ``sizes``; None, and it stays whole, if axes do not fit."""
    rest = list(leaves(label))
    found: list[Label] = []
    for size in sizes:
        own: list[Features] = []
        while size > 1:
            if not rest:
                keep_whole(label)
                return None
            axis = rest.pop(0).root()
            if axis.factors is not None:  # it occurs twice, and the first one was divided
                rest = [*axis.factors, *rest]
                continue
            if size % axis.size == 0:
                own.append(axis)
                size //= axis.size
            elif axis.size % size == 0:
                outer, inner = axis.divide(size)
                own.append(outer)
                rest.insert(0, inner)
                size = 1
            else:
                keep_whole(label)
                return None
        found.append(tuple(own))
    return found
