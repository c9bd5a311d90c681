"""Interception: calls of ``scaled_dot_product_attention`` in a model become attention over all processes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ....core.errors import StrategyError
from ....core.process_variables import each_process_has
from ....core.torch_private import repeating_in
from .masks import CAUSAL, FULL
from .sequence_attention import SequenceAttention

_NAME = "model: scaled_dot_product_attention"
_CALL = inspect.Signature(
    [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)
        for name, default in (
            ("query", inspect.Parameter.empty), ("key", inspect.Parameter.empty), ("value", inspect.Parameter.empty),
            ("attn_mask", None), ("dropout_p", 0.0), ("is_causal", False), ("scale", None), ("enable_gqa", False),
        )
    ]
)  # fmt: skip
_SDPA: Any = functional.scaled_dot_product_attention


class Interception(TorchFunctionMode):
    """Context in which attention goes over all processes, in forward, and in backward where forward is repeated.

    Args:
        attention: what to call.

    Attributes:
        calls: number of calls of ``scaled_dot_product_attention``.
        losses: the arguments of ``cross_entropy`` and ``nll_loss``, with their names, while a check watches; None: they are not kept.
    """

    def __init__(self, attention: SequenceAttention) -> None:
        super().__init__()
        self._attention = attention
        self.calls = 0
        self.losses: list[tuple[str, dict[str, Any]]] | None = None

    @contextmanager
    def everywhere(self) -> Iterator[None]:
        """Context with this mode, also where backward repeats forward for activation checkpointing."""
        with repeating_in(lambda: (nullcontext(), self)), self:
            yield

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _SDPA and not self._attention.is_local:
            return self._attend(*args, **kwargs)
        if func is functional.multi_head_attention_forward:
            return self._multi_head(func, args, kwargs)
        if func in (functional.cross_entropy, functional.nll_loss) and self.losses is not None:
            self.losses.append((func.__name__, inspect.signature(func).bind(*args, **kwargs).arguments))
        return func(*args, **kwargs)

    def _attend(self, *args: Any, **kwargs: Any) -> Tensor:
        self.calls += 1
        call = _CALL.bind(*args, **kwargs)
        call.apply_defaults()
        given = call.arguments
        query = given["query"]
        if given["attn_mask"] is not None:
            raise StrategyError(
                f"{_NAME}: has a mask of shape {tuple(given['attn_mask'].shape)} for this process's positions only; with cp give "
                "is_causal=True or no mask"
            )
        tensors = [query, given["key"], given["value"]]
        if query.ndim == 3:  # (samples, positions, width)
            tensors = [tensor.unsqueeze(1) for tensor in tensors]
        elif query.ndim != 4:
            raise StrategyError(
                f"{_NAME}: queries of shape {tuple(query.shape)}, cp needs (samples, heads, positions, width)"
            )
        mask = self._attention.mask(CAUSAL if given["is_causal"] else FULL)
        query, key, value = tensors
        found = self._attention(query, key, value, mask, given["scale"], given["dropout_p"], _NAME)
        return found.squeeze(1) if given["query"].ndim == 3 else found

    def _multi_head(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """``nn.MultiheadAttention``: the calls inside of such a function are not intercepted by themselves."""
        if kwargs.get("need_weights", True):
            raise StrategyError(
                "model: MultiheadAttention computes its weights by hand with need_weights=True; with cp give need_weights=False"
            )
        with _replaced(self._attend):
            return func(*args, **kwargs)


each_process_has(functional, "scaled_dot_product_attention")


@contextmanager
def _replaced(attend: Callable[..., Tensor]) -> Iterator[None]:
    setattr(functional, "scaled_dot_product_attention", attend)  # noqa: B010 - mypy knows it as a function
    try:
        yield
    finally:
        setattr(functional, "scaled_dot_product_attention", _SDPA)  # noqa: B010
