"""Advice for errors of torch whose cause is in the configuration: torch's message names an operator, not the key."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


def advice_for(error: BaseException, given: Mapping[str, Any]) -> str:
    """One sentence on what to change in the runner's arguments ``given``; empty if the error says too little.

    Only the error's text is read: nothing is run again, and the advice may be wrong where a model raises a like error.
    """
    text = " ".join(str(error).split())
    return next((said for rule in _RULES if (said := rule(error, text, given))), "")


def _lists_instead_of_tensors(error: BaseException, text: str, given: Mapping[str, Any]) -> str:
    about_lists = re.search(
        r"not (a )?(list|tuple)\b|'list' object|got list|but got .{0,30}\blist\b|tuple of Tensors", text
    )
    if not isinstance(error, (TypeError, AttributeError)) or not about_lists:
        return ""
    loaders = (f"{mode}_dataloader" for mode in ("train", "val", "test"))
    uncollated = [key for key in loaders if isinstance(given.get(key), Mapping) and "collate_fn" not in given[key]]
    if not uncollated:
        return ""
    return f'{uncollated[0]}.collate_fn: missing, so that a batch holds lists; give collate_fn="default_collate" for tensors'


def _label_out_of_range(error: BaseException, text: str, given: Mapping[str, Any]) -> str:
    if isinstance(error, IndexError) and (found := re.search(r"Target (-?\d+) is out of bounds", text)):
        return (
            f"a target of the loss is {found[1]}, and the model's output has no such class: classes count from 0; "
            "compare the labels with the size of the last layer, or give ignore_index"
        )
    if isinstance(error, IndexError) and "index out of range in self" in text:
        return "an index is as large as an embedding's num_embeddings or larger; compare the data with the vocabulary"
    return ""


_BY_TEXT = (
    (
        r"element 0 of tensors does not require grad",
        "the loss depends on no parameter that requires a gradient; look for detach(), item(), argmax() or no_grad() on its way",
    ),
    (
        r"grad can be implicitly created only for scalar outputs",
        'the loss is no scalar; give its mean or sum, and no reduction="none"',
    ),
    (
        r"modified by an inplace operation",
        "an operation in place (+=, relu_(), inplace=True) has changed a value that backward needs; torch.autograd.set_detect_anomaly(True) "
        "names it",
    ),
    (
        r"backward through the graph a second time",
        "a tensor of an earlier iteration is part of the loss; keep values between iterations with detach()",
    ),
    (
        r"target dtype to be Long|expected scalar type Long",
        "class labels have to be integers (int64), convert them in the dataset",
    ),
    (
        r"0D or 1D target tensor expected|multi-target not supported",
        "labels of cross_entropy are one integer for each sample, without a last dimension of 1; squeeze(-1) removes it",
    ),
    (
        r"must have the same dtype|expected scalar type|to have the same dtype|dtype.* should be the same",
        "the batch and the weights have different dtypes (NumPy's default is float64); convert in the dataset, or give "
        'optim_wrapper=dict(type="AmpOptimWrapper") to compute in half precision',
    ),
    (
        r"shapes cannot be multiplied|size mismatch|expected input\[.*\] to have \d+ channels|must match the size of tensor",
        "sizes of a layer and of its input differ; compare a sample's shape, after a batch dimension is added, with the layer",
    ),
    (
        r"forward\(\) (got an unexpected|got multiple values|missing|takes)",
        "a dict batch becomes keyword arguments of forward, a list or tuple positional ones; name the dataset's fields like the "
        "parameters",
    ),
    (
        r"stack expects each tensor to be equal size",
        "samples of one batch differ in size, and default_collate cannot stack them; crop or pad them, or give "
        'collate_fn="pseudo_collate" for lists',
    ),
    (
        r"default_collate: batch must contain|each element in list of batch should be of equal size",
        "a sample holds something that default_collate cannot stack, such as None; leave it out in __getitem__, or give another "
        "collate_fn",
    ),
)


def _by_text(error: BaseException, text: str, given: Mapping[str, Any]) -> str:
    return next((advice for pattern, advice in _BY_TEXT if re.search(pattern, text)), "")


_RULES = (_lists_instead_of_tensors, _label_out_of_range, _by_text)
