"""Models of transformers: their attention interface, their masks and their loss, for sequences that are cut."""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ....core.base.errors import StrategyError
from ....core.comm.rendezvous import each_process_has
from ....core.hugging_face.transformers_private import (
    attention_implementation,
    bloom_layers,
    bloom_slopes,
    called_by_keywords,
    encoder_and_decoder,
    position_embeddings,
    relative_attention,
)
from ....core.torch_compat.torch_private import Both, repeating_in, with_values
from ..axis import replace_forward
from .attention import SequenceAttention
from .masks import CAUSAL, FULL, BatchMasks, Mask, Rule
from .scores import USUAL, Scores

NAME = "flextrain_context"
"""The name of this attention in transformers' registries."""
_HARMLESS = {"position_ids", "sliding_window", "use_cache", "cache_position", "num_items_in_batch", "return_dict",
             "output_router_logits", "output_hidden_states"}  # fmt: skip
_attention_of: weakref.WeakKeyDictionary[nn.Module, SequenceAttention] = weakref.WeakKeyDictionary()
_encoding: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
"""Whether a module is in the encoder, for those of an encoder and of a decoder beside it."""
_running: list[SequenceAttention] = []
"""The attention of the forward that is running, from which masks are made."""
each_process_has(sys.modules[__name__], "_running")


class TransformersModel:
    """One model of transformers whose attention, masks and loss are replaced until ``release``.

    Args:
        model: the model, before it is sharded.
        attention: what its attention layers call.

    Attributes:
        shifts: its loss compares each position with the label of the next one.
        divides: its loss divides a sum by ``num_items_in_batch``, if it is given.
        losses: number of calls of its loss.
        is_in_loss: a loss is running that shifts labels, which were shifted before.
    """

    def __init__(self, model: Any, attention: SequenceAttention) -> None:
        _register()
        self.model, self._attention = model, attention
        self._before = attention_implementation(model)
        self._bloom = bloom_layers(model)
        for layer in self._bloom:
            replace_forward(layer, functools.partial(_BloomForward, layer))
        self._stacks = encoder_and_decoder(model)
        self._loss = model.loss_function
        self.losses, self.is_in_loss = 0, False
        self.shifts = self.divides = False
        if (
            self._stacks is None
        ):  # a decoder beside an encoder is given the labels before, and each label is that of its position
            with with_values():
                self.shifts = shifts_labels(self._loss, model)
                self.divides = divides_by_number(self._loss, model)
        self._has_own_loss = "_loss_function" in vars(model)
        for module in model.modules():
            _attention_of[module] = attention
        self._hooks = [
            model.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True),
            model.register_forward_hook(self._leave, always_call=True),
        ]
        self._biased = [layer for stack in self._stacks or () for layer in relative_attention(stack)]
        for layer in self._biased:
            layer.compute_bias = functools.partial(_bias_by_distance, layer)
        for at, stack in enumerate(self._stacks or ()):
            for module in stack.modules():
                _encoding[module] = at == 0
            embeddings = position_embeddings(stack)
            self._hooks += [each.register_forward_pre_hook(_give_positions, with_kwargs=True) for each in embeddings]
        self.is_cut = self._is_called_by_user = False
        self.cut(True)

    def cut(self, is_cut: bool) -> None:
        """Choose whether the model is called with sequences that are cut, or as on one device."""
        if is_cut == self.is_cut:
            return
        self.is_cut = is_cut
        name = NAME if is_cut else self._before
        if self._bloom:  # masks are all that it has of the interface
            self.model.config._attn_implementation = name
        else:
            self.model.set_attn_implementation(name)
        if is_cut and attention_implementation(self.model) != NAME:
            raise StrategyError(
                f"model: {type(self.model).__name__} does not use transformers' attention interface, which cp needs; use dp_shard "
                "or tp instead"
            )
        self.model.loss_function = self._shifted_loss if is_cut else self._loss

    def restore_in(self, copied: Any) -> None:
        """Give a copy of the model the attention that the model had, in configurations of its own."""
        known: dict[int, Any] = {}
        for module in copied.modules():
            if (config := vars(module).get("config")) is not None:
                module.config = copy.deepcopy(config, known)
        _restore_bloom(bloom_layers(copied))
        for module in copied.modules() if self._biased else ():
            vars(module).pop("compute_bias", None)
        if self._bloom:
            copied.config._attn_implementation = self._before
        else:
            copied.set_attn_implementation(self._before)

    def release(self) -> None:
        """Give the model back what was replaced."""
        self.cut(False)
        _restore_bloom(self._bloom)
        if not self._has_own_loss:
            vars(self.model).pop("_loss_function", None)
        for hook in self._hooks:
            hook.remove()
        for layer in self._biased:
            vars(layer).pop("compute_bias", None)
        for module in self.model.modules():
            _attention_of.pop(module, None)
            _encoding.pop(module, None)

    def _enter(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if not self.is_cut:
            return None
        if self._attention.length is None:  # no update and no evaluation: every process has all positions
            self._is_called_by_user = True
            self.cut(False)
            return None
        if args:
            kwargs = called_by_keywords(self.model, args, kwargs)
        attention, mask = self._attention, kwargs.get("attention_mask")
        cache = {"use_cache": False} if "use_cache" in _parameters(type(self.model).forward) else {}
        if self._stacks is not None:
            return (), {**kwargs, **self._masks_of_both(kwargs), **cache}
        given = kwargs["input_ids"] if kwargs.get("input_ids") is not None else kwargs["inputs_embeds"]
        keys, documents = self._keys(mask, attention.length), None
        if mask is None and attention.documents is not None and kwargs.get("position_ids") is not None:
            attention.separate_documents()
            documents = attention.documents.to(given.device, non_blocking=True).expand(given.shape[0], -1)
        attention.masks = BatchMasks(keys, documents, self._before == "eager", attention.length)
        # Without a mask transformers takes positions that do not follow each other for several documents.
        ones = torch.ones(given.shape[:2], dtype=torch.bool, device=given.device)
        _running.append(attention)
        if "position_ids" not in _parameters(type(self.model).forward):
            kwargs.pop("position_ids", None)
        elif kwargs.get("position_ids") is None:  # a module around it gives none
            assert attention.length is not None
            positions = torch.arange(attention.length, device=given.device)[None]
            kwargs["position_ids"] = attention.own(positions)
        return (), {**kwargs, "attention_mask": ones, **cache}

    def _keys(self, mask: Any, length: int | None) -> Tensor | None:
        """The positions that are no padding, by the mask that a forward is given for whole sequences; None: all."""
        if mask is None or self._attention.is_full:
            return None
        if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape[1] != length:
            shape = f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else f"type {type(mask).__name__}"
            raise StrategyError(
                f"model: {type(self.model).__name__} is given a mask of {shape}, with cp it has to be that of the batch, of (samples, "
                f"{length}) for whole sequences"
            )
        return (mask.full_tensor() if isinstance(mask, DTensor) else mask).bool()

    def _masks_of_both(self, kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
        """Take the masks of an encoder and of a decoder; return what they are given in place of them."""
        attention = self._attention
        of_encoder, of_decoder = attention.encoder_length, attention.length
        keys = self._keys(kwargs.get("attention_mask"), of_encoder)
        # Torch's attention has the least number in place of a bias where it is masked, as models' own adds it.
        averages = self._before == "eager" or (bool(self._biased) and self._before == "sdpa")
        masks = BatchMasks(self._keys(kwargs.get("decoder_attention_mask"), of_decoder), None, averages, of_decoder)
        masks.encoder = BatchMasks(keys, None, averages, of_encoder)
        masks.across = BatchMasks(keys, None, averages, of_encoder, of_decoder)
        masks.encoder.positions, masks.positions = attention.positions
        masks.is_by_hand = self._before == "eager"
        attention.masks = masks
        _running.append(attention)
        ones: dict[str, Tensor] = {}
        for prefix in ("", "decoder_"):
            given = [kwargs.get(f"{prefix}{name}") for name in ("input_ids", "inputs_embeds")]
            for each in given:
                if each is not None:
                    ones[f"{prefix}attention_mask"] = torch.ones(each.shape[:2], dtype=torch.bool, device=each.device)
        return ones

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._is_called_by_user:
            self._is_called_by_user = False
            self.cut(True)
        elif self.is_cut and _running:
            _running.pop()

    def _shifted_loss(self, logits: Tensor, labels: Any, *args: Any, **kwargs: Any) -> Any:
        """The model's loss for labels that were shifted before the sequence was cut."""
        if self._attention.length is None:  # outside of updates and evaluations labels are as they are
            return self._loss(logits, labels, *args, **kwargs)
        self.losses += 1
        if not self.shifts or labels is None or kwargs.get("shift_labels") is not None:
            return self._loss(logits, labels, *args, **kwargs)
        if "shift_labels" in _parameters(self._loss):
            return self._loss(logits, labels, *args, **kwargs, shift_labels=labels)
        # It compares position i with label i + 1: a position and an ignored label more at either end.
        self.is_in_loss = True
        try:
            logits = torch.cat([logits, torch.zeros_like(logits[:, :1])], 1)
            labels = torch.cat([torch.full_like(labels[:, :1], -100), labels], 1)
            return self._loss(logits, labels, *args, **kwargs)
        finally:
            self.is_in_loss = False


class Repetition(AbstractContextManager[None]):
    """Context in which backward repeats a forward that ran when this was made: with its masks, which another may have replaced."""

    def __init__(self, attention: SequenceAttention) -> None:
        self._attention, self._masks = attention, attention.masks
        self._outside: list[BatchMasks] = []

    def __enter__(self) -> None:
        self._outside.append(self._attention.masks)
        self._attention.masks = self._masks
        _running.append(self._attention)

    def __exit__(self, *_: object) -> None:
        _running.pop()
        self._attention.masks = self._outside.pop()


def shifts_labels(loss: Callable[..., Any], model: Any) -> bool:
    """Return whether a loss of transformers compares each position with the next label, by trying.

    Raises:
        StrategyError: it does neither this nor compare each position with its own label.
    """
    size = getattr(model.config.get_text_config(), "vocab_size", None) or 2
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 4, size, generator=generator, dtype=torch.float32)
    values = []
    for labels in ([0, 1, 0, 1], [1, 1, 0, 1], [0, 0, 0, 1]):
        try:
            value = loss(logits=logits.clone(), labels=torch.tensor([labels]), vocab_size=size)
        except (TypeError, ValueError, RuntimeError, IndexError, AttributeError) as error:
            raise StrategyError(
                f"model: {type(model).__name__}.loss_function cannot be called with logits and labels of each position "
                f"({error}), which cp needs"
            ) from error
        values.append(float(value))
    if values[1] == values[0] and values[2] != values[0]:
        return True
    if values[1] != values[0] and values[2] != values[0]:
        return False
    raise StrategyError(
        f"model: {type(model).__name__}.loss_function does not depend on the label of each position, which cp needs"
    )


def divides_by_number(loss: Callable[..., Any], model: Any) -> bool:
    """Return whether a loss of transformers divides by ``num_items_in_batch``, by trying."""
    size = getattr(model.config.get_text_config(), "vocab_size", None) or 2
    logits, labels = torch.zeros(1, 4, size, dtype=torch.float32), torch.tensor([[0, 1, 0, 1]])
    try:
        values = [
            float(loss(logits=logits.clone(), labels=labels, vocab_size=size, num_items_in_batch=torch.tensor(number)))
            for number in (1, 2)
        ]
    except TypeError:  # it does not know the number
        return False
    return values[0] != values[1]


def rule_of(function: Callable[..., Tensor], window: int | None) -> Rule:
    """Return the rule that a mask function of transformers has, by trying.

    Args:
        function: gives whether position ``query`` attends to ``key``, from numbers of sample, head, query and key.
        window: the size of a sliding window, if there is one.

    Raises:
        StrategyError: it has none of those that there are.
    """
    with with_values():
        points = list(range(12)) + ([] if window is None else [window + i for i in range(-3, 16)])
        at = torch.tensor(sorted({point for point in points if point >= 0}), device="cpu")
        zero = torch.zeros(1, 1, dtype=torch.long, device="cpu")
        try:
            found = function(zero, zero, at[:, None], at[None]).expand(len(at), len(at))
        except (RuntimeError, IndexError):  # it looks up what belongs to these positions of the batch
            found = torch.empty(0)
        rules = [CAUSAL, FULL, *([] if window is None else [Rule(True, window), Rule(False, window)])]
        known = next((rule for rule in rules if torch.equal(found, rule.allows(at[:, None], at[None]))), None)
    if known is None:
        raise StrategyError(
            "model: has a mask of its own, cp has causal and full attention, with sliding windows, padding and documents; use "
            "dp_shard or tp instead"
        )
    return known


def _mask(*args: Any, mask_function: Any = None, local_size: int | None = None, **kwargs: Any) -> Mask:
    """What transformers asks for in place of a mask tensor; attention layers get it as it is."""
    return _running[-1].masks.of(rule_of(mask_function, local_size))


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    scores: Scores = USUAL,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers' interface has it, with soft caps, sinks and biases; gives (samples, positions, heads, width).

    ``scores`` is given by layers that have no such interface.
    """
    name = f"model: {type(module).__name__}"
    unknown = [
        key for key, value in kwargs.items() if value is not None and value is not False and key not in _HARMLESS
    ]
    if unknown:
        raise StrategyError(
            f"{name}: calls attention with {unknown[0]}, which cp does not have; use dp_shard or tp instead"
        )
    attention = _attention_of[module]
    mask = attention_mask
    if mask is None:
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        mask = attention.masks.of(CAUSAL if causal else FULL)
    elif not isinstance(mask, Mask):
        raise StrategyError(f"{name}: has a mask of its own, of type {type(mask).__name__}, which cp does not have")
    mask = _masks_of(module, attention.masks, mask.rule.causal).of(mask.rule) if module in _encoding else mask
    if softcap is not None or s_aux is not None:
        scores = Scores(softcap, s_aux)
    if position_bias is not None and mask.queries is None:
        scores = replace(scores, biases=_biases(position_bias, mask, name), biases_of_all=attention.masks.is_by_hand)
    found = attention(query, key, value, mask, scaling, dropout, name, scores)
    return found.transpose(1, 2).contiguous(), None


# An encoder and a decoder: their positions, the masks of their attention, and biases by distance.


def _masks_of(module: nn.Module, masks: BatchMasks, is_causal: bool) -> BatchMasks:
    """The masks of an attention layer: a decoder's is causal among its own positions, and attends to all of its encoder's."""
    found = masks.encoder if _encoding[module] else masks if is_causal else masks.across
    assert found is not None
    return found


def _give_positions(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Give a module that embeds positions those of this process, in place of numbers from 0."""
    attention = _attention_of.get(module)
    if attention is None or attention not in _running:
        return None
    positions = _masks_of(module, attention.masks, True).positions
    given = [*inspect.signature(type(module).forward).parameters].index("position_ids") - 1
    return args[:given], {**kwargs, "position_ids": positions}


def _bias_by_distance(layer: Any, *args: Any, **kwargs: Any) -> Tensor:
    """In place of a layer's biases by pairs of positions: (1, heads, 1, 2 * length - 1), those by distance, see Scores."""
    attention, own = _attention_of.get(layer), functools.partial(type(layer).compute_bias, layer)
    if attention is None or attention_implementation(layer) != NAME:
        return own(*args, **kwargs)  # type: ignore[no-any-return]
    length = _masks_of(layer, attention.masks, True).length
    before, after = own(length, 1).mT, own(1, length)
    return torch.cat([before.flip(-1)[..., :-1], after], -1)


def _biases(given: Tensor, mask: Mask, name: str) -> Tensor:
    """Biases by distance, (heads, 2 * length - 1), from what an attention layer is given."""
    if mask.length is None or given.shape[0] != 1 or given.shape[2:] != (1, 2 * mask.length - 1):
        raise StrategyError(
            f"{name}: calls attention with position_bias, which cp has by distance in an encoder and a decoder only; use dp_shard or "
            "tp instead"
        )
    return given[0, :, 0]


class _BloomForward:
    """The forward of an attention layer of BLOOM, which has linear biases (ALiBi) and computes them by hand.

    Args:
        layer: the layer.
        before: its forward, for sequences that are not cut.
    """

    def __init__(self, layer: Any, before: Callable[..., Any]) -> None:
        self._layer, self.before = layer, before

    def __call__(self, hidden_states: Tensor, residual: Tensor, *args: Any, **kwargs: Any) -> Any:
        layer, mask = self._layer, kwargs.get("attention_mask")
        if not isinstance(mask, Mask):
            return self.before(hidden_states, residual, *args, **kwargs)
        fused = layer.query_key_value(hidden_states).unflatten(-1, (-1, 3, layer.head_dim))
        query, key, value = (each.transpose(1, 2) for each in fused.unbind(-2))
        # Its positions do not count padding; the biases that it is called with are those of one process's positions.
        scores = Scores(slopes=bloom_slopes(layer), positions=mask.key_positions(query.device))
        dropout = layer.attention_dropout.p if layer.training else 0.0
        found, _ = _attend(layer, query, key, value, mask, dropout, layer.inv_norm_factor, scores=scores)
        mixed = layer.dense(found.flatten(2))
        return residual + functional.dropout(mixed, layer.hidden_dropout, layer.training), None


def _restore_bloom(layers: Sequence[nn.Module]) -> None:
    for layer in layers:
        own = vars(layer).get("forward")
        if isinstance(own, _BloomForward):
            del layer.forward
        elif isinstance(own, functools.partial):  # activation checkpointing
            replace_forward(layer, lambda forward: forward.before if isinstance(forward, _BloomForward) else forward)


@functools.cache
def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _mask)


@functools.lru_cache(maxsize=16)
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


# Interception: calls of ``scaled_dot_product_attention`` in a model become attention over all processes.


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
        with repeating_in(lambda: (nullcontext(), Both(Repetition(self._attention), self))), self:
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
        mask = Mask(CAUSAL if given["is_causal"] else FULL)  # what a batch adds is for a transformers model only
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
