"""Count the tokens that the loss of a model is a mean of, so that each counts the same in an update."""

from __future__ import annotations

import ast
import functools
import inspect
import logging
import math
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..base.errors import ConfigError
from ..torch_compat.torch_private import with_values

# Find out which labels of a batch the loss of a model of transformers is a mean over.
#
# Its forward is read for where labels go: into ``self.loss_function``, which is then tried, or into torch's cross
# entropy.


IGNORED = -100
"""The label of positions that do not count in a loss, as in transformers and by default in torch."""
Labels = Literal["all", "all but the first"]
_Value = Literal["all", "all but the first", "none", "where they count"]
_POSITIONS = 4
_KEEPING = {"view", "reshape", "flatten", "to", "contiguous", "long"}
_LONGER_LABELS = {"PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING"}
"""Kinds of adapters that put virtual tokens before a text and, in a causal model, ignored labels before its labels."""
_SAME_LABELS = {"PREFIX_TUNING", "CARTRIDGE"}
"""Kinds whose virtual tokens are keys and values, beside the labels."""


def labels_in_loss(model: nn.Module) -> Labels | None:
    """Return the labels that count, of those that are not -100; None: the loss is no mean over labels, as far as is known.

    Args:
        model: of transformers, or one in peft's wrapper. Others give None.
    """
    config, base = None, model
    if _is_of_peft(model) and callable(found := getattr(model, "get_base_model", None)):
        config, base = getattr(model, "active_peft_config", None), found()
    kinds = {f"{kind.__module__}.{kind.__name__}" for kind in type(base).__mro__}
    if "transformers.modeling_utils.PreTrainedModel" not in kinds:
        return None
    labels = _of_loss_function(base) or _of_cross_entropy(base)
    if not getattr(config, "is_prompt_learning", False):
        return labels
    kind = str(getattr(config.peft_type, "value", config.peft_type))  # type: ignore[union-attr]
    if kind in _LONGER_LABELS and labels is not None:
        return "all"  # the last virtual token predicts the first label
    return labels if kind in _SAME_LABELS else None


def _is_of_peft(model: nn.Module) -> bool:
    return any(kind.__module__.partition(".")[0] == "peft" for kind in type(model).__mro__)


def _of_loss_function(model: Any) -> Labels | None:
    """The labels of a model that gives them to its ``loss_function``, once the function is found to be a mean."""
    calls = _losses(inspect.unwrap(type(model).forward)).of_function
    if len(calls) != 1:
        return None
    labels, shifted = calls[0]
    if labels == "all" and shifted == "none":
        return _counted(model, "labels")
    if shifted in ("all", "all but the first") and _counted(model, "shift_labels") == "all":
        return shifted
    return None


def _of_cross_entropy(model: nn.Module) -> Labels | None:
    """The labels of a model that gives all of them to a ``CrossEntropyLoss``, and has no other loss beside it."""
    losses = _losses(inspect.unwrap(type(model).forward))
    if losses.has_others or losses.of_function or not losses.of_criterion:
        return None
    for attribute, labels in losses.of_criterion:
        if labels != "all" or (attribute is not None and not _is_mean(getattr(model, attribute, None))):
            return None
    return "all"


def _is_mean(criterion: Any) -> bool:
    return (
        type(criterion) is nn.CrossEntropyLoss
        and criterion.weight is None
        and criterion.reduction == "mean"
        and criterion.ignore_index == IGNORED
    )


def _counted(model: Any, name: str) -> Labels | None:
    """The labels that count in ``model.loss_function``, by trying; None: it is no mean over them, or cannot be called so.

    Args:
        model: of transformers.
        name: the argument that has the labels.
    """
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    for size, kwargs in (
        (getattr(config, "vocab_size", None), {}),
        (getattr(model.config, "num_labels", None), {"config": model.config}),  # classes of tokens
    ):
        if not isinstance(size, int) or size < 2:
            continue
        try:
            return _tried(functools.partial(model.loss_function, vocab_size=size, **kwargs), size, name)
        except (TypeError, ValueError, RuntimeError, IndexError, AttributeError):
            continue
    return None


def _tried(function: Callable[..., Any], size: int, name: str) -> Labels | None:
    with with_values(), torch.no_grad():
        # As different as the losses of positions should be; no random numbers are drawn.
        logits = torch.zeros(1, _POSITIONS, size, dtype=torch.float32, device="cpu")
        logits[0, :, 0] = torch.arange(1.0, _POSITIONS + 1, device="cpu")

        def loss(positions: list[int]) -> float:
            labels = torch.full((1, _POSITIONS), IGNORED, device="cpu")
            labels[0, positions] = 1
            return float(function(logits=logits.clone(), **{"labels": labels, name: labels}))

        each = [loss([position]) for position in range(_POSITIONS)]
        together = loss(list(range(_POSITIONS)))
    counted = [value for value in each if math.isfinite(value)]
    is_mean = bool(counted) and math.isclose(together, math.fsum(counted) / len(counted), rel_tol=1e-5)
    if not is_mean or len(set(counted)) != len(counted):
        return None
    if len(counted) == _POSITIONS:
        return "all"
    return "all but the first" if counted == each[1:] else None


# Reading a forward


class _Losses:
    """Where the labels go in a forward.

    Attributes:
        of_function: labels and shifted labels of each call of ``self.loss_function``.
        of_criterion: labels of each call of a ``CrossEntropyLoss``, with the model's attribute that is one, or None.
        has_others: another class of losses is used.
    """

    def __init__(self, forward: ast.AST) -> None:
        self.of_function: list[tuple[_Value | None, _Value | None]] = []
        self.of_criterion: list[tuple[str | None, _Value | None]] = []
        self.has_others = False
        self._known: dict[str, _Value | None] = {"labels": "all"}
        self._criteria: set[str] = set()
        nodes = [
            node for node in ast.walk(forward) if isinstance(node, (ast.Assign, ast.Call, ast.Name, ast.Attribute))
        ]
        # A value is read before its name is assigned anew.
        for node in sorted(nodes, key=lambda node: (node.end_lineno, isinstance(node, ast.Assign))):
            if isinstance(node, ast.Assign):
                self._assign(node)
            elif isinstance(node, ast.Call):
                self._call(node)
            else:
                name = node.id if isinstance(node, ast.Name) else node.attr
                self.has_others |= name.endswith("Loss") and name != "CrossEntropyLoss"

    def _assign(self, node: ast.Assign) -> None:
        for name in (target.id for target in node.targets if isinstance(target, ast.Name)):
            if isinstance(node.value, ast.Call) and _last_name(node.value.func) == "CrossEntropyLoss":
                if all(given.arg == "ignore_index" and _is_ignored(given.value) for given in node.value.keywords):
                    self._criteria |= {name} if not node.value.args else set()
            else:
                self._known[name] = self._value(node.value)

    def _call(self, node: ast.Call) -> None:
        function, given = node.func, {keyword.arg: keyword.value for keyword in node.keywords}
        second = node.args[1] if len(node.args) > 1 else None
        of_self = isinstance(function, ast.Attribute) and _last_name(function.value) == "self"
        if of_self and function.attr == "loss_function":  # type: ignore[attr-defined]
            labels, shifted = given.get("labels", second), given.get("shift_labels")
            self.of_function.append((self._value(labels), "none" if shifted is None else self._value(shifted)))
        elif isinstance(function, ast.Name) and function.id in self._criteria:
            self.of_criterion.append((None, self._value(given.get("target", second))))
        elif of_self and function.attr.endswith(("loss_fct", "loss_fn")):  # type: ignore[attr-defined]
            self.of_criterion.append((function.attr, self._value(given.get("target", second))))  # type: ignore[attr-defined]

    def _value(self, node: ast.expr | None) -> _Value | None:
        """What an expression has of the labels; None: not known."""
        match node:
            case ast.Constant(value=None):
                return "none"
            case ast.Name(id=name):
                return self._known.get(name)
            case ast.IfExp(body=body, orelse=orelse):  # shift_labels if shift_labels is not None else labels
                first = self._value(body)
                return self._value(orelse) if first == "none" else first
            case ast.Call(func=ast.Attribute(value=ast.Name(id="kwargs"), attr="pop" | "get"), args=[_, default]):
                return self._value(default)
            case ast.Call(func=ast.Attribute(value=value, attr=method)) if method in _KEEPING:
                return self._value(value)
            case ast.Compare(left=left, ops=[ast.NotEq()]) if self._value(left) == "all":
                return "where they count"
            case ast.Subscript(value=value, slice=index) if (found := self._value(value)) == "all":
                if self._value(index) == "where they count":
                    return found
                return "all but the first" if _is_rest(index) else None
        return None


@functools.cache
def _losses(forward: Callable[..., Any]) -> _Losses:
    """Where the labels go in a function; nowhere, if its source is not there."""
    try:
        source = textwrap.dedent(inspect.getsource(forward))
    except (OSError, TypeError):
        source = ""
    return _Losses(ast.parse(source))


def _last_name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _is_ignored(node: ast.expr) -> bool:
    return ast.unparse(node) == str(IGNORED)


def _is_rest(index: ast.expr) -> bool:
    return ast.unparse(index).strip("()") in ("..., 1:", ":, 1:")


NUMBER = "num_items_in_batch"
"""The argument in which transformers gives a model the number of labels that count in the whole update."""
logger = logging.getLogger("flextrain")
_WAY_OUT = "or set model.loss_weight = None, and each batch counts the same"


class TokenCount:
    """A model's ``loss_weight``: the number of labels in a batch that are not -100, of tokens or of whole samples.

    If the first batch has none to count, the loss is taken to be a mean over something else: each batch counts the same.

    Args:
        shifts: the first label of each sequence does not count.

    Attributes:
        is_known: whether the labels of the first batch could be counted; None: there was no batch yet.
    """

    def __init__(self, shifts: bool) -> None:
        self.shifts = shifts
        self.is_known: bool | None = None

    def __call__(self, data: Any) -> Tensor | int:
        """Return the number, as a 0-dim tensor where the labels are; 1 if there is nothing to count.

        Raises:
            ConfigError: the batch has a number of its own, or no labels where others had some.
        """
        count = self._count(data)
        if self.is_known is None:
            self.is_known = count is not None
            if count is None:
                logger.warning(
                    "model: what its loss is a mean of is not known from the first batch, which has no labels of tokens or "
                    "samples; each batch counts the same, unless the model defines loss_weight(data)"
                )
        if not self.is_known:
            return 1
        if count is None:
            raise ConfigError(
                f"batch: has no labels to count, and others had some; give all of them labels, {_WAY_OUT}"
            )
        return count

    def _count(self, data: Any) -> Tensor | None:
        if not isinstance(data, Mapping):
            return None
        if data.get("num_items_in_batch") is not None:
            raise ConfigError(
                "batch: has num_items_in_batch, but the tokens of an update are counted over all of its batches and "
                f"processes; leave it out, {_WAY_OUT}"
            )
        if isinstance(shifted := data.get("shift_labels"), Tensor):
            return (shifted != IGNORED).sum()
        labels = data.get("labels")
        if not isinstance(labels, Tensor) or labels.dim() < (2 if self.shifts else 1):
            return None
        return ((labels[..., 1:] if self.shifts else labels) != IGNORED).sum()


def count_tokens(model: nn.Module) -> bool:
    """Give a model the ``loss_weight`` that its loss calls for; return whether it was given one.

    These are models of transformers whose loss is a mean over labels, also in peft's wrapper, and models whose forward
    has an argument ``num_items_in_batch``. A model with an attribute ``loss_weight``, also None, keeps it. So do models
    with a ``train_step``, and models of transformers with a ``data_preprocessor``.
    """
    if hasattr(model, "loss_weight") or hasattr(model, "train_step"):
        return False
    takes_number = takes_number_of_items(model)
    if hasattr(model, "data_preprocessor") and not takes_number:
        return False
    labels = labels_in_loss(model)
    if labels is None and not takes_number:
        return False
    model.loss_weight = TokenCount(labels == "all but the first")  # type: ignore[assignment]
    return True


def takes_number_of_items(model: nn.Module) -> bool:
    """Whether forward has an argument ``num_items_in_batch``, by which it divides the sum of a batch's losses."""
    return NUMBER in inspect.signature(type(model).forward).parameters
