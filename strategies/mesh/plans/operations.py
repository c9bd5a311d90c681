"""What torch's operations do with feature axes: which dimensions they keep, combine, divide, or need as a whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from .features import Label, cut, join, keep_whole, leaves
from .recorder import Given, Labels, Recorder, fresh

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


@_rule("nll_loss_forward", "nll_loss2d_forward")
def _nll_loss(recorder: Recorder, given: Given, out: Any) -> None:
    pass  # of the classes, which ``_log_softmax`` has marked


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


@_rule("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like")
def _like(recorder: Recorder, given: Given, out: Tensor) -> None:
    pass  # of the same shape, but of other values: whatever is combined with it decides


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
