"""Recorder: follows feature axes through the operations of a model, and notes which matrices they meet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ....core.torch_private import TorchDispatchMode, arguments_of, tree_flatten
from .features import Features, Label, join, keep_whole

Labels = list[Label]
"""The axes of every dimension of a tensor."""
Given = Mapping[str, Any]
"""The arguments of an operation, by name."""


@dataclass(frozen=True)
class Product:
    """A use of a parameter as a matrix: a product with it, or a choice of its rows.

    Attributes:
        name: of the parameter.
        inputs, outputs: the dimension that the product sums over, or that indices choose from; the other one.
        chooses: it is a table of an embedding.
    """

    name: str
    inputs: Label
    outputs: Label
    chooses: bool = False


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which operations are recorded. What is not known needs all of its inputs' features at once.

    Attributes:
        products: the uses of parameters, in order.

    Args:
        parameters: the tensors that the model computes with in place of its parameters, by name.
        rules: what operations do with features, by name without "_" at its end; called with this recorder, the arguments
            and the result.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], rules: Mapping[str, Callable[[Recorder, Given, Any], None]]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rules = rules
        self.products: list[Product] = []
        self._labels: dict[int, tuple[Tensor, Labels]] = {}
        self._names: dict[int, str] = {}
        for name, tensor in parameters.items():
            self._labels_of(tensor)
            self._names[id(tensor)] = name

    def labels(self, tensor: Tensor) -> Labels:
        """Return the axes of a tensor; new ones for one that was never seen."""
        return self._labels_of(tensor)

    def label_of_parameter(self, name: str, dim: int) -> Label:
        """Return the axes of a dimension of a parameter."""
        found = next(key for key, known in self._names.items() if known == name)
        return self._labels[found][1][dim]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func.name().partition("::")[2].partition(".")[0]
        given = arguments_of(func, args, kwargs)
        inputs = [value for value in tree_flatten(list(given.values()))[0] if isinstance(value, Tensor)]
        outputs = [value for value in tree_flatten(out)[0] if isinstance(value, Tensor)]
        if not outputs:
            return out
        rule = self._rules.get(name) or self._rules.get(name.removesuffix("_"))
        if rule is not None:
            rule(self, given, out)
        elif torch.Tag.pointwise in func.tags:
            self.elementwise(inputs, outputs)
        elif any(output is tensor for output in outputs for tensor in inputs) and len(inputs) == 1:
            pass  # fills a tensor, as random numbers do
        else:
            for tensor in inputs:
                self.whole(tensor)
        return out

    # What rules use

    def set(self, tensor: Tensor, labels: Labels) -> None:
        """Give a new tensor its axes; those of one that is changed in place are joined."""
        known = self._labels.get(id(tensor))
        if known is None:
            self._labels[id(tensor)] = (tensor, labels)  # kept, so that no other object gets its id
            return
        for one, other in zip(known[1], labels, strict=True):
            join(one, other)

    def whole(self, tensor: Tensor, dims: Sequence[int] | None = None) -> None:
        """Note that an operation needs all features of some dimensions at once; None: of all."""
        labels = self._labels_of(tensor)
        for dim in range(tensor.ndim) if dims is None else dims:
            keep_whole(labels[dim])

    def view(self, source: Tensor, tensor: Tensor, labels: Labels) -> None:
        """As ``set``, for a tensor that holds the values of ``source``, which may be a parameter."""
        self.set(tensor, labels)
        if id(source) in self._names:
            self._names[id(tensor)] = self._names[id(source)]

    def elementwise(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Note that dimensions, counted from the last, are the same features where no tensor is broadcast."""
        for output in outputs:
            labels: Labels = []
            for dim, size in enumerate(output.shape):
                back = output.ndim - dim
                same = [
                    self._labels_of(tensor)[-back]
                    for tensor in inputs
                    if tensor.ndim >= back and tensor.shape[-back] == size
                ]
                for other in same[1:]:
                    join(same[0], other)
                labels.append(same[0] if same and size > 1 else fresh(size))
            self.set(output, labels)

    def multiply(self, left: Tensor, right: Tensor) -> Labels:
        """Note a product of matrices, the last two dimensions; return the axes of its result."""
        own, other = self._labels_of(left), self._labels_of(right)
        join(own[-1], other[-2])
        names = [self._names.get(id(tensor)) for tensor in (left, right)]
        if names[1] is not None:
            self.products.append(Product(names[1], other[-2], other[-1]))
        elif names[0] is not None:
            self.products.append(Product(names[0], own[-1], own[-2]))
        else:
            keep_whole(own[-1])
        for one, two in zip(own[:-2], other[:-2], strict=True):
            join(one, two)
        return [*own[:-1], other[-1]]

    def choose(self, weight: Tensor, indices: Tensor) -> Labels:
        """Note a choice of rows of a table; return the axes of the result."""
        rows, columns = self._labels_of(weight)
        if (name := self._names.get(id(weight))) is not None:
            self.products.append(Product(name, rows, columns, chooses=True))
        return [*self._labels_of(indices), columns]

    def _labels_of(self, tensor: Tensor) -> Labels:
        known = self._labels.get(id(tensor))
        if known is None:
            known = self._labels[id(tensor)] = (tensor, [fresh(size) for size in tensor.shape])
        return known[1]


def fresh(size: int, whole: bool = False) -> Label:
    """Return the label of a new dimension."""
    return (Features(size, whole),) if size > 1 else ()
