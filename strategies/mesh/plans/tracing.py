"""Run a model on tensors without memory, to see which features its operations combine."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ....core.base.errors import ConfigError
from ....core.base.trees import tree_map_only
from ....core.model.base_model import overrides, own_run_forward, run_forward, takes_mode
from ....core.model.batch_keys import taken_keys
from ....core.random.generators import kept_random_state
from ....core.torch_compat.torch_private import TorchDispatchMode, arguments_of, fake_mode_of, is_compiled, tree_flatten

# Features: which dimensions of tensors are the same features, whatever views and operations are between them.
#
# The dimension of a tensor is a product of axes, outermost first: ``heads * width`` of a projection becomes two
# dimensions in a view. Two dimensions that an operation combines element by element are the same axes.


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


# Recorder: follows feature axes through the operations of a model, and notes which matrices they meet.


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

    def is_known(self, tensor: Tensor) -> bool:
        """Whether a rule has given a tensor its axes, or asked for them."""
        return id(tensor) in self._labels

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


# What torch's operations do with feature axes: which dimensions they keep, combine, divide, or need as a whole.


Rule = Callable[[Recorder, Given, Any], None]
RULES: dict[str, Rule] = {}
"""Rules by the name of an operation in ``torch.ops.aten``."""


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def _dims(given: Any, ndim: int) -> list[int]:
    """Return the ``dim`` of an operation as a list of positive numbers; all if none is given."""
    if given is None or given == []:
        return list(range(ndim))
    return [dim % ndim for dim in (given if isinstance(given, (list, tuple)) else [given])] if ndim else []


@_rule("clone", "_to_copy", "detach", "alias", "lift_fresh", "contiguous", "to", "view_as_real_copy", "copy")
def _same(recorder: Recorder, given: Given, out: Tensor) -> None:
    source = given.get("src", given.get("self"))
    assert isinstance(source, Tensor)
    if source.shape == out.shape:
        recorder.view(source, out, recorder.labels(source))
    else:  # copied into a larger tensor
        recorder.elementwise([source], [out])


@_rule("view", "_unsafe_view", "reshape", "_reshape_alias", "view_copy")
def _view(recorder: Recorder, given: Given, out: Tensor) -> None:
    source = given["self"]
    before, labels = recorder.labels(source), [fresh(size) for size in out.shape]
    i = j = 0
    while i < source.ndim and j < out.ndim:
        first, last, others, end = i, i + 1, j, j + 1
        sizes = [source.shape[i], out.shape[j]]
        while sizes[0] != sizes[1] and (last < source.ndim or end < out.ndim):
            if (sizes[0] < sizes[1] or end == out.ndim) and last < source.ndim:
                sizes[0] *= source.shape[last]
                last += 1
            else:
                sizes[1] *= out.shape[end]
                end += 1
        merged = tuple(axis for label in before[first:last] for axis in label)
        found = cut(merged, out.shape[others:end])
        if found is not None:
            labels[others:end] = found
        i, j = last, end
    recorder.view(source, out, labels)


@_rule("permute", "transpose", "t", "swapaxes", "movedim", "permute_copy", "transpose_copy", "t_copy")
def _permute(recorder: Recorder, given: Given, out: Tensor) -> None:
    source = given["self"]
    order = list(range(source.ndim))
    if "dims" in given:
        order = [dim % source.ndim for dim in given["dims"]]
    elif source.ndim > 1:
        one, other = (given.get("dim0", 0) % source.ndim, given.get("dim1", 1) % source.ndim)
        order[one], order[other] = order[other], order[one]
    labels = recorder.labels(source)
    recorder.view(source, out, [labels[dim] for dim in order])


@_rule("expand", "expand_copy", "broadcast_to")
def _expand(recorder: Recorder, given: Given, out: Tensor) -> None:
    source = given["self"]
    labels = [fresh(size) for size in out.shape[: out.ndim - source.ndim]]
    for label, before, after in zip(
        recorder.labels(source), source.shape, out.shape[out.ndim - source.ndim :], strict=True
    ):
        labels.append(label if before == after else fresh(after))
    recorder.view(source, out, labels)


@_rule("unsqueeze")
def _unsqueeze(recorder: Recorder, given: Given, out: Tensor) -> None:
    labels = [*recorder.labels(given["self"])]
    labels.insert(given["dim"] % out.ndim, ())
    recorder.view(given["self"], out, labels)


@_rule("squeeze")
def _squeeze(recorder: Recorder, given: Given, out: Tensor) -> None:
    source = given["self"]
    gone = {dim for dim in _dims(given.get("dim"), source.ndim) if source.shape[dim] == 1}
    recorder.view(source, out, [label for dim, label in enumerate(recorder.labels(source)) if dim not in gone])


@_rule("select", "unbind")
def _select(recorder: Recorder, given: Given, out: Any) -> None:
    source = given["self"]
    dim = given["dim"] % source.ndim
    recorder.whole(source, [dim])
    rest = [label for at, label in enumerate(recorder.labels(source)) if at != dim]
    for output in out if isinstance(out, (list, tuple)) else [out]:
        recorder.view(source, output, rest)


@_rule("slice", "split", "split_with_sizes", "chunk", "narrow")
def _split(recorder: Recorder, given: Given, out: Any) -> None:
    source = given["self"]
    outputs = list(out) if isinstance(out, (list, tuple)) else [out]
    dim = given["dim"] % source.ndim
    labels = [*recorder.labels(source)]
    size, length = source.shape[dim], outputs[0].shape[dim]
    begin = given.get("start") or 0
    if all(output.shape[dim] == size for output in outputs):
        inner: Label | None = labels[dim]
    elif (
        length
        and size % length == 0
        and begin % length == 0
        and given.get("step", 1) == 1
        and all(output.shape[dim] == length for output in outputs)
    ):
        found = cut(labels[dim], [size // length, length])  # several matrices in one
        if found is not None:
            keep_whole(found[0])
        inner = None if found is None else found[1]
    else:
        recorder.whole(source, [dim])
        inner = None
    for output in outputs:
        labels[dim] = fresh(output.shape[dim], whole=True) if inner is None else inner
        recorder.view(source, output, [*labels])


@_rule("cat")
def _cat(recorder: Recorder, given: Given, out: Tensor) -> None:
    tensors = [tensor for tensor in given["tensors"] if tensor.ndim == out.ndim]
    dim = given["dim"] % out.ndim
    labels = _joined_but(recorder, tensors, dim)
    if len({tensor.shape[dim] for tensor in tensors}) == 1:
        own = [recorder.labels(tensor)[dim] for tensor in tensors]
        for other in own[1:]:
            join(own[0], other)
        labels[dim] = (*fresh(len(tensors), whole=True), *own[0])
    else:
        for tensor in tensors:
            recorder.whole(tensor, [dim])
        labels[dim] = fresh(out.shape[dim], whole=True)
    recorder.set(out, labels)


@_rule("stack")
def _stack(recorder: Recorder, given: Given, out: Tensor) -> None:
    labels = _joined_but(recorder, given["tensors"], None)
    labels.insert(given["dim"] % out.ndim, fresh(len(given["tensors"])))
    recorder.set(out, labels)


def _joined_but(recorder: Recorder, tensors: Sequence[Tensor], but: int | None) -> Labels:
    first = [*recorder.labels(tensors[0])]
    for tensor in tensors[1:]:
        for dim, label in enumerate(recorder.labels(tensor)):
            if dim != but:
                join(first[dim], label)
    return first


@_rule("mm", "bmm")
def _multiply(recorder: Recorder, given: Given, out: Tensor) -> None:
    recorder.set(out, recorder.multiply(given["self"], given["mat2"]))


@_rule("addmm", "baddbmm")
def _add_product(recorder: Recorder, given: Given, out: Tensor) -> None:
    left, right = ("mat1", "mat2") if "mat1" in given else ("batch1", "batch2")
    recorder.set(out, recorder.multiply(given[left], given[right]))
    recorder.elementwise([given["self"], out], [out])


@_rule("embedding")
def _embedding(recorder: Recorder, given: Given, out: Tensor) -> None:
    recorder.set(out, recorder.choose(given["weight"], given["indices"]))


@_rule("native_layer_norm", "_fused_rms_norm", "rms_norm", "native_layer_norm_fused")
def _layer_norm(recorder: Recorder, given: Given, out: Any) -> None:
    source = given["input"]
    recorder.whole(source, range(source.ndim - len(given["normalized_shape"]), source.ndim))
    recorder.set(out[0] if isinstance(out, (list, tuple)) else out, recorder.labels(source))


@_rule("_softmax", "cumsum", "cumprod", "flip", "roll", "sort")
def _along(recorder: Recorder, given: Given, out: Any) -> None:
    source = given["self"]
    recorder.whole(source, _dims(given.get("dim", given.get("dims")), source.ndim))
    for output in out if isinstance(out, (list, tuple)) else [out]:
        recorder.set(output, recorder.labels(source))


@_rule("_log_softmax")
def _log_softmax(recorder: Recorder, given: Given, out: Tensor) -> None:
    labels = recorder.labels(given["self"])
    for axis in leaves(labels[given["dim"]]):
        axis.classes = True
    recorder.set(out, labels)


@_rule("mean", "sum", "amax", "amin", "var", "std", "var_mean", "std_mean", "argmax", "argmin", "logsumexp", "prod",
       "linalg_vector_norm", "any", "all", "max", "min")  # fmt: skip
def _reduce(recorder: Recorder, given: Given, out: Any) -> None:
    source = given["self"]
    dims = _dims(given.get("dim"), source.ndim)
    labels = recorder.labels(source)
    for dim in dims:
        if not all(axis.classes for axis in leaves(labels[dim])):  # label smoothing sums over the classes
            keep_whole(labels[dim])
    kept = [label for dim, label in enumerate(labels) if dim not in dims]
    with_ones = [() if dim in dims else label for dim, label in enumerate(labels)]
    for output in out if isinstance(out, (list, tuple)) else [out]:
        recorder.set(output, with_ones if output.ndim == source.ndim else kept)


@_rule("constant_pad_nd")
def _pad(recorder: Recorder, given: Given, out: Tensor) -> None:
    source = given["self"]
    labels = [*recorder.labels(source)]
    for dim in range(source.ndim):
        if source.shape[dim] != out.shape[dim]:
            recorder.whole(source, [dim])
            labels[dim] = fresh(out.shape[dim], whole=True)
    recorder.set(out, labels)


@_rule("native_dropout", "dropout", "masked_fill", "where", "tril", "triu", "bernoulli", "alpha_dropout")
def _elementwise(recorder: Recorder, given: Given, out: Any) -> None:
    inputs = [value for value in given.values() if isinstance(value, Tensor)]
    recorder.elementwise(inputs, list(out) if isinstance(out, (list, tuple)) else [out])


@_rule(
    "empty_like",
    "zeros_like",
    "ones_like",
    "full_like",
    "rand_like",
    "randn_like",
    "nll_loss_forward",
    "nll_loss2d_forward",
)
def _of_others(recorder: Recorder, given: Given, out: Any) -> None:
    pass  # of the same shape, but of other values: what is combined with it decides; or of classes that _log_softmax has marked


@_rule("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
       "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
       "_scaled_dot_product_fused_attention_overrideable", "_scaled_dot_product_attention_math")  # fmt: skip
def _attention(recorder: Recorder, given: Given, out: Any) -> None:
    query, key, value = (recorder.labels(given[name]) for name in ("query", "key", "value"))
    for label in (query[-1], key[-1], query[-2], key[-2]):
        keep_whole(label)
    for dim in range(len(query) - 2):  # samples and heads; with fewer heads of keys, each serves several of queries
        sizes = [math.prod(axis.size for axis in label) for label in (query[dim], key[dim])]
        shared = query[dim]
        if sizes[0] != sizes[1]:
            found = cut(query[dim], [sizes[1], sizes[0] // sizes[1]])
            if found is None:
                keep_whole(key[dim])
                continue
            shared = found[0]
        join(shared, key[dim])
        join(shared, value[dim])
    recorder.set(out[0] if isinstance(out, (list, tuple)) else out, [*query[:-1], value[-1]])


class Traced:
    """What was seen in one forward of a model.

    Attributes:
        products: the uses of parameters as matrices, in order.
        outputs: the axes of the last dimension of every tensor that forward has returned.
    """

    def __init__(self, products: list[Product], outputs: list[Label], recorder: Recorder) -> None:
        self.products, self.outputs = products, outputs
        self._recorder = recorder

    def label(self, name: str, dim: int) -> Label:
        """Return the axes of a dimension of a parameter."""
        return self._recorder.label_of_parameter(name, dim)


def trace(model: nn.Module, batch: Any) -> Traced:
    """Return what a forward of the model does with the shapes of a batch; nothing is computed, and nothing changes.

    Args:
        model: parameters may be on the meta device.
        batch: as the dataloader gives it.

    Raises:
        ConfigError: the model cannot run without values, or in one call.
    """
    name = type(model).__name__
    if why := why_not_traced(model):
        raise ConfigError(f"strategy.plan: {name} {why}{GIVE}")
    with without_memory(model, batch) as (parameters, run):
        recorder = Recorder(parameters, RULES)
        try:
            with recorder:
                result = run()
        except Exception as error:
            text = " ".join(str(error).split())[:200]
            raise ConfigError(
                f"strategy.plan: {name} could not be traced with the example batch ({type(error).__name__}: {text}); {GIVE}"
            ) from error
        found = [value for value in tree_flatten(_as_dict(result))[0] if isinstance(value, Tensor) and value.ndim]
        return Traced(recorder.products, [recorder.labels(value)[-1] for value in found], recorder)


def why_not_traced(model: nn.Module) -> str:
    """Return what keeps a model from being traced, in words for a message; empty if nothing is known."""
    if overrides(model, "train_step"):
        return "defines its own train_step, which cannot be traced; "
    if is_compiled(model):
        return "is compiled already and cannot be traced; give strategy.compile, or "
    return ""


@contextlib.contextmanager
def without_memory(model: nn.Module, batch: Any) -> Iterator[tuple[dict[str, Tensor], Callable[[], Any]]]:
    """A context in which the model and a batch have tensors without memory; after it, the model is as before.

    Yields:
        The tensors in place of its parameters, by name, and a function that calls the model as an update does.
    """
    with (
        kept_random_state(torch.device("cpu")),
        torch.no_grad(),
        fake_mode_of((*model.parameters(), *model.buffers())),
        _without_values(model) as parameters,
    ):
        yield parameters, partial(_forward, model, tree_map_only(Tensor, _without_value, batch))


GIVE = 'give a plan, such as {"layers.*.up": "colwise", "layers.*.down": "rowwise"}'


def _forward(model: nn.Module, batch: Any) -> Any:
    """Call the model as an update does."""
    preprocess = getattr(model, "data_preprocessor", None)
    data = preprocess(batch, True) if callable(preprocess) else batch
    if (own := own_run_forward(model)) is not None:
        return own(data, "loss")
    if takes_mode(model):
        return run_forward(model, data, mode="loss")
    return run_forward(model, taken_keys(model, says=False)(data))


def _as_dict(result: Any) -> Any:
    return dict(result) if isinstance(result, Mapping) else result


def _without_value(tensor: Tensor) -> Tensor:
    """Return a tensor of the same form on the CPU; without memory inside of a mode of fake tensors."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")


@contextlib.contextmanager
def _without_values(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """A context in which the model has tensors without memory; after it, all its attributes are as before.

    A forward may keep tensors in its module, such as positions of the longest sequence that it has seen.
    """
    kept = [_Kept(module) for module in model.modules()]
    named: dict[str, Tensor] = {}
    made: dict[int, Tensor] = {}
    try:
        for prefix, module in [*model.named_modules()]:
            for key, parameter in [*module.named_parameters(recurse=False, remove_duplicate=False)]:
                if id(parameter) not in made:
                    found = nn.Parameter(_without_value(parameter), requires_grad=False)
                    made[id(parameter)] = named[f"{prefix}.{key}" if prefix else key] = found
                setattr(module, key, made[id(parameter)])
            for key, buffer in [*module.named_buffers(recurse=False, remove_duplicate=False)]:
                setattr(module, key, _without_value(buffer))
        model.train()
        yield named
    finally:
        for each in kept:
            each.restore()


class _Kept:
    """The attributes of a module, and what its containers held."""

    def __init__(self, module: nn.Module) -> None:
        self._attributes = vars(module)
        self._containers = [(value, value.copy()) for value in (self._attributes, *self._attributes.values())
                            if isinstance(value, (dict, list, set))]  # fmt: skip

    def restore(self) -> None:
        for container, before in self._containers:
            container.clear()
            if isinstance(container, list):
                container.extend(before)
            else:
                container.update(before)
