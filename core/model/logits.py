"""Logits that are not computed before something is done with them, and then some rows at a time: no tensor has all of them.

A head's output is rows of one number for each word of the vocabulary. What follows until the loss treats each row by itself, so
the loss of some rows can be computed, its logits freed, and both made again in backward. The gradient of the head's weight is
added up in float32.

Source of the method: Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models", 2024, which fuses it into a kernel.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from ..base.errors import StrategyError, one_line
from ..random.generators import kept_random_state, load_rng_state, rng_state
from ..torch_compat.torch_private import apart, has_values, version_of, wrapper_subclass

logger = logging.getLogger("flextrain")
Rows = Callable[[Tensor], Tensor]
"""Computes with rows of logits, each by itself."""
RowsOf = Callable[[Tensor, int], Tensor]
"""Computes a value for each row of a chunk; the second argument is the chunk's number."""


@dataclass(eq=False)
class ZLoss:
    """What is added to each cross entropy of training: ``weight`` times the square of the logits' logsumexp.

    Attributes:
        weight: of a token's square, beside its cross entropy.
        is_added: whether a cross entropy of these logits has it.

    Source: Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", 2022, section 5.
    """

    weight: float
    is_added: bool = False


@dataclass(frozen=True, eq=False)
class OutputHead:
    """How logits are made of hidden states.

    Attributes:
        layer: whose parameters are used.
        forward: of the layer, without its hooks: hidden states of shape (rows, features) to logits of shape (rows, words).
        chunk: rows that are computed at a time.
        steps: what is done with the logits afterwards.
        operands: tensors that the steps use, which must not change before backward.
        uses: how many rows were computed at each use; of all logits that were made of the same.
        weights: the parameters when the layer was called.
        is_detached: whether no gradient goes through it.
        z_loss: what cross entropies have beside; None: nothing.
        is_matrix: forward is that of a Linear, which draws nothing and computes each row by itself.
        tell: called with the rows of hidden states at each use.
    """

    layer: nn.Module
    forward: Rows
    chunk: int
    steps: tuple[Rows, ...] = ()
    operands: tuple[Tensor, ...] = ()
    uses: list[int] = field(default_factory=list)
    weights: tuple[Tensor, ...] = ()
    is_detached: bool = False
    z_loss: ZLoss | None = None
    is_matrix: bool = False
    tell: Callable[[Tensor], None] = field(default=lambda rows: None)

    def check(self) -> None:
        """Raise StrategyError if the strategy has taken the weights away."""
        now = tuple(self.layer.parameters())
        is_same = len(now) == len(self.weights) and all(
            one is other for one, other in zip(now, self.weights, strict=True)
        )
        if not is_same or any(each.numel() and not each.untyped_storage().nbytes() for each in now):
            raise StrategyError(
                f"ChunkedLoss: the weights of {type(self.layer).__name__}, which makes the logits, are not gathered where the loss is "
                "computed; compute the loss in the model's forward"
            )

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the logits of some rows."""
        found = self.forward(hidden)
        for step in self.steps:
            found = step(found)
        return found


class Logits(Tensor):
    """Logits by their hidden states. Has shape, dtype and device of the tensor that any other operation makes it into.

    A gradient that arrives at it, and not at what was computed of it, would be lost: StrategyError.
    """

    _head: OutputHead
    _hidden: Tensor
    _versions: list[int]
    _sample: Tensor
    _moved: bool
    _whole: Tensor | None
    _has_views: bool

    @staticmethod
    def of(head: OutputHead, hidden: Tensor, sample: Tensor | None = None, *, moved: bool = False) -> Logits:
        """Make logits.

        Args:
            head: that computes them.
            hidden: of shape (..., features).
            sample: logits of no rows, which tell their number and dtype; None: computed.
            moved: whether the words are dimension 1, as ``cross_entropy`` takes them, and not the last.
        """
        if sample is None:
            with torch.no_grad():
                sample = head(hidden.new_empty(0, hidden.shape[-1]))
        shape = [*hidden.shape[:-1], sample.shape[-1]]
        if moved:
            shape.insert(1, shape.pop())
        made: Logits = wrapper_subclass(Logits, shape, sample)
        made._head, made._hidden, made._sample, made._moved = head, hidden, sample, moved
        made._versions = made._count_changes()
        made._whole, made._has_views = None, False
        if (
            torch.is_grad_enabled()
            and not head.is_detached
            and any(each.requires_grad for each in (hidden, *head.weights))
        ):
            made.requires_grad_().register_hook(_refuse)  # type: ignore[no-untyped-call]
        return made

    @property
    def _is_detached(self) -> bool:
        """Whether what is made of these logits now gives them no gradient."""
        return self._head.is_detached or not torch.is_grad_enabled()

    @property
    def layer(self) -> nn.Module:
        """The head that makes them."""
        return self._head.layer

    @property
    def is_used(self) -> bool:
        """Whether a loss, or something else, was computed by rows."""
        return bool(self._head.uses)

    def whole(self) -> Tensor:
        """Return all logits as an ordinary tensor, which is made once."""
        if self._whole is None:
            self._check_current()
            # Those with gradients are made with them also where none are recorded now, as under no_grad: a loss comes later.
            records = self.requires_grad
            with torch.inference_mode(False) if records else nullcontext(), torch.set_grad_enabled(records):
                found = self._head(self._hidden)
            self._whole = found.movedim(-1, 1) if self._moved else found
        return self._whole

    def with_step(self, step: Rows, operands: Sequence[Tensor] = ()) -> Logits:
        """Return the logits after an operation on each row, and on the operands."""
        self._check_current()
        step = _as_now(step, self.device)
        head = replace(
            self._head,
            steps=(*self._head.steps, step),
            operands=(*self._head.operands, *operands),
            is_detached=self._is_detached,
        )
        with torch.no_grad():
            sample = step(self._sample)
        return Logits.of(head, self._hidden, sample, moved=self._moved)

    def with_hidden(self, hidden: Tensor, *, moved: bool = False) -> Logits:
        """Return logits of other hidden states: of some of the rows, or of all in another order."""
        self._check_current()
        self._has_views = True
        found = Logits.of(replace(self._head, is_detached=self._is_detached), hidden, self._sample, moved=moved)
        found._has_views = True
        return found

    def rows(self, of: RowsOf, dtype: torch.dtype | None = None, operands: Sequence[Tensor] = ()) -> Tensor:
        """Compute a value, or several, for each row; by rows, so that at most ``head.chunk`` of them have logits at a time.

        Args:
            of: computes them.
            dtype: of the logits that it gets; default: theirs.
            operands: tensors that ``of`` uses; backward raises torch's RuntimeError if one was changed in place.

        Returns:
            Of shape (..., values per row), as the hidden states have rows.
        """
        head = self._head if dtype in (None, self.dtype) else replace(self._head, steps=(*self._head.steps, _to(dtype)))
        hidden = self._hidden.reshape(-1, self._hidden.shape[-1])
        names = [name for name, _ in head.layer.named_parameters()]
        self._check_current()
        head.uses.append(len(hidden))
        head.tell(hidden)
        with torch.no_grad() if head.is_detached else nullcontext():
            work = _Work(head, of, names, (*head.operands, *operands))
            found = cast(Tensor, _ByRows.apply(work, hidden, *head.layer.parameters()))
        return found.reshape(*self._hidden.shape[:-1], *found.shape[1:])

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do what a function does on whole logits, if possible without them."""
        kwargs = kwargs or {}
        if function in LOOKS:
            return super().__torch_function__(function, types, args, kwargs)  # type: ignore[no-untyped-call]
        name = getattr(function, "__name__", "")
        first = args[0] if args else kwargs.get("input")
        if isinstance(first, Logits):
            first._check(name)
            own = _LAZILY.get(function) or _BY_NAME.get(name)
            if first._whole is None and own is not None:
                rest = {key: value for key, value in kwargs.items() if key != "input"}
                found = own(first, name, function, args[1:], rest)
                if found is not NotImplemented:
                    return found
        return function(*_made_whole(args, name), **_made_whole(kwargs, name))

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Compute with whole logits; only what does not ask ``__torch_function__`` comes here."""
        return function(*_made_whole(args, str(function)), **_made_whole(kwargs or {}, str(function)))

    def _count_changes(self) -> list[int]:
        computes = (self._hidden, *self._head.operands, *self._head.weights)
        return [0 if each.is_inference() else version_of(each) for each in computes]

    def _check_current(self) -> None:
        """Raise StrategyError if the logits would not be what they were when the head was called."""
        self._head.check()
        if self._count_changes() != self._versions:
            raise StrategyError(
                "ChunkedLoss: the hidden states, the head's weights or another operand of the logits were changed in place before the "
                "loss; change a copy, or leave the transform out"
            )

    def _check(self, name: str) -> None:
        if self.grad_fn is not None:
            raise StrategyError(_LOST)
        if self._has_views and self._whole is None and (name == "__setitem__" or _IN_PLACE.fullmatch(name)):
            raise StrategyError(
                f"ChunkedLoss: {name} changes logits that were taken apart before, call another function"
            )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Return the shape and dtype; the values are not computed for it."""
        return f"Logits(shape={tuple(self.shape)}, dtype={self.dtype})"


class Deferred:
    """The forward of a head that computes nothing yet. Its layer's weights have to be there until the model's forward ends.

    Args:
        layer: the head.
        chunk: rows whose logits exist at a time.
        z_loss: weight of the z-loss; 0: none.
        name: of the layer, for the log.

    Attributes:
        z_losses: those of the logits of training since ``begin``, one of each call.
        is_called: whether it was since then.
        is_idle: whether the log has said that a forward of training does not call it.
    """

    def __init__(self, layer: nn.Module, chunk: int, z_loss: float = 0.0, name: str = "") -> None:
        self._layer, self._chunk, self.z_loss, self._name = layer, chunk, z_loss, name
        self._own: Rows | None = vars(layer).get("forward")  # of the object, in place of its class's
        self._is_last, self.is_idle = True, False
        self._checked: set[bool] = set()
        self.begin()

    def begin(self) -> None:
        """The model's forward begins."""
        self.z_losses: list[ZLoss] = []
        self.is_called = False

    def __call__(self, hidden: Tensor, *more: Any, **named: Any) -> Any:
        """Return logits of shape (..., words) for hidden states of shape (..., features)."""
        if more or named:
            raise StrategyError(
                f"ChunkedLoss: {type(self._layer).__name__}, which makes the logits, is called with more than hidden states, rows of "
                "which could not be computed by themselves; leave the transform out"
            )
        layer = self._layer
        forward = _as_now(self._own or partial(type(layer).forward, layer), hidden.device)
        is_matrix = (
            self._own is None
            and type(layer).forward is nn.Linear.forward
            and "weight" in dict(layer.named_parameters())
        )
        self.is_called, z_loss = True, None
        if self.z_loss and torch.is_grad_enabled():
            z_loss = ZLoss(self.z_loss)
            self.z_losses.append(z_loss)
        weights = tuple(layer.parameters())
        head = OutputHead(
            layer, forward, self._chunk, weights=weights, z_loss=z_loss, is_matrix=is_matrix, tell=self._tell
        )
        if not is_matrix and torch.is_grad_enabled() not in self._checked and hidden.numel() and has_values(hidden):
            if type(hidden) in (Tensor, nn.Parameter):
                with apart(), kept_random_state(hidden.device):
                    _check_rows(head, hidden.detach())
            self._checked.add(torch.is_grad_enabled())
        return Logits.of(head, hidden) if self._is_last else _Later(head=head, hidden=hidden)

    def _tell(self, rows: Tensor) -> None:
        """Say once, at the first rows with values, that there are chunks."""
        if self._name and has_values(rows) and len(rows):
            count = "all" if self._chunk >= len(rows) else f"{self._chunk:,}"
            nothing = ", which is one chunk and saves no memory; give a smaller chunk" if count == "all" else ""
            logger.info(
                f"ChunkedLoss: the logits of {self._name} are computed for {count} tokens at a time, of {len(rows):,} in the first batch"
                f"{nothing}"
            )
            self._name = ""

    def come_last(self) -> None:
        """Make logits after the forward hooks that the layer has by now: an engine's make ordinary tensors of all that they get."""
        self._is_last = False
        self._layer.register_forward_hook(lambda layer, args, later: Logits.of(**vars(later)))


class _Later(dict[str, Any]):
    """A result without tensors, for the hooks of an engine."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        vars(self).update(attributes)


_APART = 0.2
"""The largest difference of a row's logits beside other rows from those alone, in float8 too."""


def _check_rows(head: OutputHead, hidden: Tensor) -> None:
    """Raise StrategyError if the logits of a row depend on other rows, or on tensors whose gradients would be lost.

    Args:
        head: that computes them.
        hidden: of shape (..., features); the first two of every dimension are tried.
    """
    name, leave = type(head.layer).__name__, "which makes the logits; leave the transform out"
    some = hidden[(slice(2),) * (hidden.ndim - 1)]
    rows = some.reshape(-1, some.shape[-1])[-1:]
    try:
        with torch.no_grad():
            together, again, alone = head(some), head(some), head(rows)
            is_so = together.shape == (*some.shape[:-1], alone.shape[-1]) and alone.ndim == 2
            last = together.reshape(-1, together.shape[-1])[-1:]
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
        raise StrategyError(
            f"ChunkedLoss: rows of hidden states of shape {tuple(hidden.shape)} cannot be given to {name} by themselves "
            f"({one_line(error)[:200]}), {leave}"
        ) from error
    # What draws random numbers is not compared.
    if not is_so or (torch.equal(together, again) and (last - alone).norm() > _APART * alone.norm()):
        raise StrategyError(f"ChunkedLoss: rows of hidden states are not computed each by itself in {name}, {leave}")
    if torch.is_grad_enabled():
        _check_leaves(head, rows)


def _check_leaves(head: OutputHead, rows: Tensor) -> None:
    """Raise StrategyError if logits have gradients for other parameters than the layer's, as it has them when it is called."""
    layer = head.layer
    given = {name: each.detach().requires_grad_(each.requires_grad) for name, each in layer.named_parameters()}
    logits = _Work(head, lambda found, _: found, [*given], ()).compute(rows, [*given.values()], 0)
    own, seen, nodes = {*map(id, given.values())}, set[Any](), [logits.grad_fn]
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [following for following, _ in node.next_functions]
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in own:
            what = next(
                (name for name, each in layer.named_parameters() if each is leaf), f"one of shape {tuple(leaf.shape)}"
            )
            raise StrategyError(
                f"ChunkedLoss: the gradient of a parameter ({what}) would be lost, with which {type(layer).__name__} makes the logits, "
                "but not in its forward, of parameters of its own; let the head have it (head.weight = table.weight, or "
                "torch.nn.utils.parametrizations), or leave the transform out"
            )


_LOST = "ChunkedLoss: a torch.autograd.Function got the logits, which are not computed yet; leave the transform out"


def _refuse(gradient: Tensor) -> None:
    raise StrategyError(_LOST)


def defer(layer: nn.Module, chunk: int, z_loss: float = 0.0, name: str = "") -> Deferred:
    """Let a layer make its logits later, and return what has become its forward; strategies may wrap that."""
    deferred = Deferred(layer, chunk, z_loss, name)
    vars(layer).update(forward=deferred, _flextrain_deferred=deferred)
    return deferred


def deferred_of(module: nn.Module) -> Deferred | None:
    """What ``defer`` has returned for a module, whose parameters are used after its forward."""
    found: Deferred | None = vars(module).get("_flextrain_deferred")
    return found


def is_deferred(module: nn.Module) -> bool:
    """Whether a module's parameters are used after its forward."""
    return deferred_of(module) is not None


def _made_whole(given: Any, name: str) -> Any:
    """Arguments with whole logits in the place of those that are not."""
    if isinstance(given, Logits):
        if given._whole is None and given.numel() and given.requires_grad and name not in _told:
            _told.add(name)
            logger.warning("ChunkedLoss: logits are computed whole, because %s is called on them", name)
        return given.whole()
    if isinstance(given, Mapping):
        return {key: _made_whole(value, name) for key, value in given.items()}
    if isinstance(given, (list, tuple)) and not hasattr(given, "_fields"):
        return type(given)(_made_whole(value, name) for value in given)
    return given


_told: set[str] = set()
_IN_PLACE = re.compile(r"__i[a-z]+__|[a-z]\w*[a-z]_")


# What is computed by rows, forward and backward.


@dataclass
class _Work:
    head: OutputHead
    of: RowsOf
    names: Sequence[str]
    operands: Sequence[Tensor]

    def __post_init__(self) -> None:
        self._body = _Body(self.head)

    def compute(self, hidden: Tensor, tensors: Sequence[Tensor], number: int) -> Tensor:
        """The values of some rows, with these tensors as the parameters."""
        given = {f"layer.{name}": tensor for name, tensor in zip(self.names, tensors, strict=True)}
        return self.of(functional_call(self._body, given, (hidden,)), number)


class _Body(nn.Module):
    """The layer without its hooks, in the way in which a module is called with other parameters."""

    def __init__(self, head: OutputHead) -> None:
        super().__init__()
        self.layer, self.head = head.layer, head

    def forward(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)


class _ByRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, work: _Work, hidden: Tensor, *parameters: Tensor) -> Tensor:
        kind = hidden.device.type
        ctx.work, ctx.autocast = work, (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        # Dropout of an adapter in the head; a matrix alone draws nothing.
        ctx.drawn = None if work.head.is_matrix else rng_state(hidden.device)
        ctx.save_for_backward(hidden, *parameters, *work.operands)  # these too, because torch then notices a change
        return torch.cat(
            [work.compute(rows, parameters, i) for i, rows in enumerate(torch.split(hidden, work.head.chunk))]
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise StrategyError(
                "ChunkedLoss: a gradient with create_graph=True goes through the logits, which have first derivatives only; leave the "
                "transform out"
            )
        kind, dtype, enabled = ctx.autocast
        _, of_hidden, *wanted = ctx.needs_input_grad
        (gradient,), (hidden, *saved) = gradients, ctx.saved_tensors
        parameters, chunk = saved[: len(wanted)], ctx.work.head.chunk
        found = torch.zeros_like(hidden) if of_hidden else None
        sums = [
            torch.zeros_like(each, dtype=torch.promote_types(each.dtype, torch.float32)) if wants else None
            for each, wants in zip(parameters, wanted, strict=True)
        ]
        # For all chunks, because autocast keeps what it has cast of each leaf.
        own = [each.detach().requires_grad_(wants) for each, wants in zip(parameters, wanted, strict=True)]
        with torch.autocast(kind, dtype=dtype, enabled=enabled), _drawing_again(ctx.drawn, hidden.device):
            for i, (rows, of_rows) in enumerate(
                zip(torch.split(hidden, chunk), torch.split(gradient, chunk), strict=True)
            ):
                totals = [None if found is None else found[i * chunk : (i + 1) * chunk], *sums]
                _add_gradients(totals, ctx.work, rows.detach().requires_grad_(of_hidden), own, of_rows, i)
        given = [
            None if each is None else each.to(parameter.dtype) for each, parameter in zip(sums, parameters, strict=True)
        ]
        return None, found, *given


def _add_gradients(
    totals: Sequence[Tensor | None], work: _Work, rows: Tensor, own: Sequence[Tensor], of_rows: Tensor, number: int
) -> None:
    """Add the gradients of a chunk, which are gone before the next one has logits.

    Args:
        totals: what they are added to, of the rows and of each parameter; None: it gets none.
        work: what is computed of the rows.
        rows: of hidden states.
        own: the parameters.
        of_rows: the gradient of what is computed.
        number: of the chunk.
    """
    with torch.enable_grad():
        value = work.compute(rows, own, number)
    asked = [each for each in (rows, *own) if each.requires_grad]
    # That of forward is in force here, and backward is not under it.
    with torch.autocast(rows.device.type, enabled=False):
        found = torch.autograd.grad(value, asked, of_rows, allow_unused=True)
    for total, one in zip((each for each in totals if each is not None), found, strict=True):
        if one is not None:
            total += one


def _as_now(rows: Rows, device: torch.device) -> Rows:
    """The same under the autocast that is in force now, whatever is in force when it is called."""
    kind = device.type
    dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)

    def found(given: Tensor) -> Tensor:
        with torch.autocast(kind, dtype=dtype, enabled=enabled):
            return rows(given)

    return found


@contextmanager
def _drawing_again(state: dict[str, Any] | None, device: torch.device) -> Iterator[None]:
    """Context in which random numbers come from a state, and go on afterwards as if it had not been."""
    if state is None:
        yield
        return
    before = rng_state(device)
    load_rng_state(state, device)
    try:
        yield
    finally:
        load_rng_state(before, device)


# Functions that need no whole logits: each gets the logits, the function and its other arguments; NotImplemented: it does.


def _to(dtype: torch.dtype | None) -> Rows:
    return lambda rows: rows.to(dtype)


def _on_rows(logits: Logits, name: str, function: Any, args: Any, kwargs: Any) -> Any:
    """An operation that treats each number by itself, with numbers, or with a tensor of a value for all or for each word."""
    rest = [*args, *kwargs.values()]
    tensors = [each for each in rest if isinstance(each, Tensor)]
    if logits._moved or "out" in kwargs or any(isinstance(each, Logits) or each.requires_grad for each in tensors):
        return NotImplemented
    if any(each.ndim > logits.ndim or math.prod(each.shape[:-1]) != 1 for each in tensors):
        return NotImplemented
    flat: dict[int, Tensor] = {id(each): each.reshape(each.shape[-1:]) for each in tensors}
    args = tuple(flat.get(id(each), each) for each in args)
    kwargs = {key: flat.get(id(each), each) for key, each in kwargs.items()}
    return logits.with_step(lambda rows: function(rows, *args, **kwargs), tensors)


def _over_words(logits: Logits, name: str, function: Any, args: Any, kwargs: Any) -> Any:
    """softmax and log_softmax over the words."""
    given = dict(
        zip(
            ("dim", "_stacklevel" if function in (functional.softmax, functional.log_softmax) else "dtype", "dtype"),
            args,
            strict=False,
        )
    )
    given = {**given, **kwargs}
    given.pop("_stacklevel", None)
    if logits._moved or given.pop("dim", None) not in (-1, logits.ndim - 1):
        return NotImplemented
    function = torch.log_softmax if name == "log_softmax" else torch.softmax
    return logits.with_step(lambda rows: function(rows, -1, **given))


def _reduced(logits: Logits, name: str, function: Any, args: Any, kwargs: Any) -> Any:
    """logsumexp and argmax over the words."""
    given = {**dict(zip(("dim", "keepdim"), args, strict=False)), **kwargs}
    keeps = given.pop("keepdim", False)
    if logits._moved or given.pop("dim", None) not in (-1, logits.ndim - 1, (-1,), [-1]) or given:
        return NotImplemented
    if name == "argmax":
        with torch.no_grad():
            found = logits.rows(lambda rows, _: rows.argmax(-1))
    else:
        wide, dtype = torch.promote_types(logits.dtype, torch.float32), logits._sample.logsumexp(-1).dtype
        found = logits.rows(lambda rows, _: rows.logsumexp(-1), wide).to(dtype)
    return found.unsqueeze(-1) if keeps else found


def _gathered(logits: Logits, name: str, function: Any, args: Any, kwargs: Any) -> Any:
    given = {**dict(zip(("dim", "index"), args, strict=False)), **kwargs}
    dim, index = given.pop("dim", None), given.pop("index", None)
    if logits._moved or given or dim not in (-1, logits.ndim - 1) or index.shape[:-1] != logits.shape[:-1]:
        return NotImplemented
    parts = index.reshape(-1, index.shape[-1]).split(logits._head.chunk)
    return logits.rows(lambda rows, i: rows.gather(-1, parts[i]), operands=parts[:1])


def _same(logits: Logits, name: str, function: Any, args: Any, kwargs: Any) -> Any:
    return logits


def _detached(logits: Logits, name: str, function: Any, args: Any, kwargs: Any) -> Any:
    with torch.no_grad():
        return logits.with_hidden(logits._hidden, moved=logits._moved)


def _taken(logits: Logits, name: str, function: Any, args: Any, kwargs: Any) -> Any:
    """An index of rows."""
    (index,) = args
    items = index if isinstance(index, tuple) else (index,)
    if logits._moved or any(isinstance(each, Logits) for each in items):
        return NotImplemented
    used = sum(_dims_of(each) for each in items)
    if any(each is Ellipsis for each in items):
        last_is_all = items[-1] is Ellipsis or (isinstance(items[-1], slice) and items[-1] == slice(None))
        if not last_is_all or used > logits.ndim or (items[-1] is Ellipsis and used >= logits.ndim):
            return NotImplemented
    elif used >= logits.ndim and not (isinstance(items[-1], slice) and items[-1] == slice(None)):
        return NotImplemented
    return logits.with_hidden(logits._hidden[index])


def _dims_of(item: Any) -> int:
    if item is None or item is Ellipsis or isinstance(item, bool):
        return 0
    return item.ndim if isinstance(item, Tensor) and item.dtype == torch.bool else 1


def _viewed(logits: Logits, name: str, function: Any, args: Any, kwargs: Any) -> Any:
    """view and reshape of rows."""
    shape = kwargs.get("shape", kwargs.get("size", args[0] if len(args) == 1 else args))
    if isinstance(shape, int):
        shape = (shape,)
    if logits._moved or not isinstance(shape, (tuple, list)) or not all(isinstance(each, int) for each in shape):
        return NotImplemented  # a dtype
    *leading, last = shape
    words, rows = logits.shape[-1], math.prod(logits.shape[:-1])
    if last == -1 and -1 not in leading:
        last = words if math.prod(leading) == rows else 0
    if last != words or not leading:
        return NotImplemented
    return logits.with_hidden(logits._hidden.reshape(*leading, logits._hidden.shape[-1]))


def _flattened(logits: Logits, name: str, function: Any, args: Any, kwargs: Any) -> Any:
    given = {**dict(zip(("start_dim", "end_dim"), args, strict=False)), **kwargs}
    start, end = given.get("start_dim", 0) % logits.ndim, given.get("end_dim", -1) % logits.ndim
    if logits._moved or end == logits.ndim - 1:
        return NotImplemented
    return logits.with_hidden(logits._hidden.flatten(start, end))


_MATRICES = cast(Any, Tensor.mT).__get__


def _moved(logits: Logits, name: str, function: Any, args: Any, kwargs: Any) -> Any:
    """The words to dimension 1 of logits of shape (samples, positions, words)."""
    if logits._moved or logits.ndim != 3 or kwargs:
        return NotImplemented
    given = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
    given = tuple(each % 3 if isinstance(each, int) else each for each in given)
    is_so = {"transpose": {1, 2} == {*given}, "permute": given == (0, 2, 1), "movedim": given == (2, 1)}
    return logits.with_hidden(logits._hidden, moved=True) if is_so.get(name, function == _MATRICES) else NotImplemented


def _cross_entropy(logits: Logits, name: str, function: Any, args: Any, kwargs: Any) -> Any:
    """cross_entropy and nll_loss of indices of words."""
    names = ("target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    given = {"ignore_index": -100, "reduction": "mean", **dict(zip(names, args, strict=False)), **kwargs}
    target, weight, reduction = given.pop("target"), given.get("weight"), given.pop("reduction")
    is_old = given.pop("size_average", None) is not None or given.pop("reduce", None) is not None
    at_words = logits._moved or logits.ndim <= 2
    is_known = not is_old and reduction in ("mean", "sum", "none")
    if not is_known or target.is_floating_point() or not at_words or target.shape != logits._hidden.shape[:-1]:
        return NotImplemented
    if weight is not None and weight.requires_grad:
        return NotImplemented
    flat, wide = target.reshape(-1), torch.promote_types(logits.dtype, torch.float32)
    parts = flat.split(logits._head.chunk)  # a whole: under cp no process may take some positions
    if weight is not None:
        given["weight"] = weight.to(wide)
    operands = [flat] if weight is None else [flat, given["weight"]]
    z_loss = None if name != "cross_entropy" or logits._is_detached else logits._head.z_loss

    def losses_of(rows: Tensor, i: int) -> Tensor:
        found: Tensor = function(rows, parts[i], reduction="none", **given)
        if z_loss is None:
            return found
        squares = z_loss.weight * _log_sum(rows).square()
        if weight is not None:
            squares = squares * given["weight"][parts[i].clamp(0, rows.shape[-1] - 1)]
        # Not times 0: where no token counts, a mean's gradient is infinite, and that of whole logits 0.
        regularised: Tensor = found + squares.masked_fill(parts[i] == given["ignore_index"], 0.0)
        return regularised

    if z_loss is not None:
        z_loss.is_added = True
    losses = logits.rows(losses_of, wide, operands).reshape(target.shape)
    dtype = wide if torch.is_autocast_enabled(logits.device.type) else logits.dtype
    if reduction == "none":
        return losses.to(dtype)
    if reduction == "sum":
        return losses.sum().to(dtype)
    counted = flat != given["ignore_index"]
    shares = counted if weight is None else given["weight"][flat.clamp(0, logits._sample.shape[-1] - 1)] * counted
    return (losses.sum() / shares.sum()).to(dtype)


def _log_sum(rows: Tensor) -> Tensor:
    """``logsumexp`` in steps that DTensors keep divided by words, where torch's would gather them."""
    largest = rows.detach().amax(-1, keepdim=True)
    return (rows - largest).exp().sum(-1).log() + largest.squeeze(-1)


_POINTWISE = ("mul", "__mul__", "__rmul__", "div", "__truediv__", "true_divide", "divide", "multiply", "add", "__add__", "__radd__", "sub", "__sub__",
              "neg", "__neg__", "tanh", "clamp", "float", "double", "half", "bfloat16", "to", "type")  # fmt: skip
_BY_NAME: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(_POINTWISE, _on_rows),
    **dict.fromkeys(("view", "reshape"), _viewed),
    **dict.fromkeys(("log_softmax", "softmax"), _over_words),
    **dict.fromkeys(("logsumexp", "argmax"), _reduced),
    **dict.fromkeys(("transpose", "permute", "movedim"), _moved),
    **dict.fromkeys(("cross_entropy", "nll_loss"), _cross_entropy),
    "contiguous": _same, "detach": _detached, "flatten": _flattened, "gather": _gathered, "__getitem__": _taken,
}  # fmt: skip
_LAZILY: dict[Any, Callable[..., Any]] = {_MATRICES: _moved}
LOOKS = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_leaf", "grad", "grad_fn", "layout",
        "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested")),
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.is_floating_point, Tensor.is_complex, Tensor.__len__, Tensor.element_size,
    Tensor.get_device, Tensor.requires_grad_, Tensor.register_hook, Tensor.__hash__,
}  # fmt: skip
