"""Trials: a forward and backward of the first batch, to compare two ways of computing it in training mode."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ...core.base.trees import tree_map_only
from ...core.device.precision import exact_float32
from ...core.random.generators import kept_random_state
from ...core.torch_compat.torch_private import TorchDispatchMode, arguments_of, without_compiling
from ...optim.gradients import settled

_SMALL = 1e-3
"""Parameters whose elements are all smaller are larger in a trial: gates, scales and last layers are often initialised so."""
_INTERNAL = frozenset(vars(nn.Module())) - {"training"}
# Relative to a gradient's own size, and to that of all: sums in another order, and gradients that are rounding errors alone.
_EXACT, _HALF = (1e-3, 1e-6), (0.1, 1e-2)


@contextmanager
def trying(model: nn.Module, changed: Collection[torch.Size] = ()) -> Iterator[list[torch.Size]]:
    """Context of a forward, and backward, of which nothing remains: no gradient, no state of a module, no random number.

    In it, small parameters are not: what they multiply would show in no result. Random numbers are constants, so that two
    runs have the same whatever the shapes in which they draw; the context gives the list of these shapes, see ``drawn_once``. Float32
    has all its digits.

    Args:
        changed: shapes of which what is drawn is another constant.
    """
    device = next(model.parameters()).device
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    kept = [_Kept(module) for module in model.modules()]
    try:
        constants = _Constants(device, changed)
        with kept_random_state(device), without_compiling(), exact_float32(), _lifted(model), constants:
            yield constants.shapes
    finally:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # what it has gathered was lifted
        for each in kept:
            each.restore()
        for parameter, gradient in gradients:
            parameter.grad = gradient


@contextmanager
def computing_only(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Context of forwards of a module, within one of its model, of which nothing remains; nothing is dropped in them."""
    kept = [_Kept(each) for each in module.modules()]
    try:
        with kept_random_state(device), _Constants(device):
            yield
    finally:
        for each in kept:
            each.restore()


def differentiated(model: nn.Module, loss: Tensor, group: Any = None) -> dict[str, Tensor]:
    """Run backward; return what this process has of each gradient, by name, and zeros where nothing has arrived.

    Args:
        group: over which gradients of parameters are averaged that FSDP leaves whole; None: they are as they are.
    """
    if loss.requires_grad:
        # Numbers in float16 end at 6e-8.
        scale = 4096.0 if any(p.dtype == torch.float16 for p in model.parameters()) else 1.0
        (loss * scale).backward()  # type: ignore[no-untyped-call]
    settled(model.parameters())
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            own = parameter if parameter.grad is None else parameter.grad
            local = (own.to_local() if isinstance(own, DTensor) else own).detach()
            found[name] = torch.zeros_like(local) if parameter.grad is None else local.clone()
            if group is not None and not isinstance(parameter, DTensor):
                torch.distributed.all_reduce(found[name], group=group)
                found[name] /= group.size()
            parameter.grad = None
    return found


def differing(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device
) -> tuple[str, float] | None:
    """Return the parameter whose gradient differs most from the expected, and by how much of its size; a collective.

    Args:
        found, expected: see ``differentiated``.
        dtype: in which the model computes.
        device: on which it computes.

    Returns:
        None if no gradient differs by more than rounding.
    """
    if not expected:
        return None
    squares = torch.stack(
        [
            torch.stack([(found[name].double() - wanted.double()).norm() ** 2, wanted.double().norm() ** 2]).to(device)
            for name, wanted in expected.items()
        ]
    )
    torch.distributed.all_reduce(squares)
    difference, size = squares.sqrt().unbind(1)
    own, of_all = _HALF if dtype.itemsize < 4 else _EXACT
    excess = difference / (own * size + of_all * squares[:, 1].sum().sqrt())
    excess = torch.where(difference == 0, 0.0, excess)
    worst = int(excess.nan_to_num(nan=torch.inf).argmax())
    if excess[worst] <= 1:
        return None
    return [*expected][worst], float(difference[worst] / size[worst])


def drawn_once(whole: Sequence[torch.Size], cut: Sequence[Sequence[torch.Size]], samples: int) -> list[torch.Size]:
    """Return the shapes of draws that are no smaller where every process has some positions: for a sample, not for each position.

    Args:
        whole: what a forward draws for all positions.
        cut: by process, what one draws for those of the process.
        samples: of the batch; if not all draw equally often, draws with more numbers are not compared.
    """
    if all(len(own) == len(whole) for own in cut):
        return [shape for shape, *others in zip(whole, *cut, strict=True) if {shape} == {*others}]
    shared = {*whole}.intersection(*cut)
    return [shape for shape in whole if shape in shared and shape.numel() <= samples]


class _Kept:
    """The attributes of a module and the contents of its buffers and containers, which a forward in training may change."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._own = {key: value for key, value in vars(module).items() if key not in _INTERNAL}
        self._buffers = dict(module.named_buffers(recurse=False, remove_duplicate=False))
        # Parameters without dimension, which FSDP leaves whole, may count too.
        counters = [parameter for parameter in module.parameters(recurse=False) if not parameter.ndim]
        tensors = [
            value for value in (*self._own.values(), *self._buffers.values(), *counters) if isinstance(value, Tensor)
        ]
        self._tensors = [(tensor, tensor.detach().clone()) for tensor in tensors]
        self._containers = [
            (value, value.copy()) for value in self._own.values() if isinstance(value, (dict, list, set))
        ]

    @torch.no_grad()
    def restore(self) -> None:
        for key in [key for key in vars(self._module) if key not in _INTERNAL and key not in self._own]:
            del vars(self._module)[key]
        vars(self._module).update(self._own)
        for key, buffer in self._buffers.items():
            setattr(self._module, key, buffer)
        for tensor, before in self._tensors:
            tensor.copy_(before)
        for container, content in self._containers:
            container.clear()
            if isinstance(container, list):
                container.extend(content)
            else:
                container.update(content)


@contextmanager
def _lifted(model: nn.Module) -> Iterator[None]:
    """Context in which parameters that are 0, or almost, are not. Replicas of a shard get the same values."""
    own = (parameter.to_local() if isinstance(parameter, DTensor) else parameter for parameter in model.parameters())
    small = [p.detach() for p in own if p.is_floating_point() and p.numel() and float(p.detach().abs().max()) < _SMALL]
    before = [local.clone() for local in small]
    for local in small:
        local.copy_(torch.arange(local.numel(), device=local.device).cos().view(local.shape) / 16)
    try:
        yield
    finally:
        for local, values in zip(small, before, strict=True):
            local.copy_(values)


class _Constants(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context in which whatever is drawn is the same number: nothing is dropped, and noise is a constant.

    Attributes:
        shapes: of what was drawn on the device from its own generator, which differs between processes of one sequence.
    """

    def __init__(self, device: torch.device, changed: Collection[torch.Size] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device, self._changed = device, changed
        self.shapes: list[torch.Size] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given: dict[str, Any] = dict(kwargs or {})
        name = func.name().partition("::")[2].partition(".")[0]
        if "dropout_p" in (values := arguments_of(func, args, given)) and values["dropout_p"]:
            values["dropout_p"] = 0.0
            return func(**values)
        if (draw := _DRAWN.get(name)) is None:
            return func(*args, **given)
        out = draw(values)
        found = tree_map_only(Tensor, _half, func(*args, **given)) if out is None else out
        drawn = found[0] if isinstance(found, tuple) else found
        if drawn.numel() and drawn.device.type == self._device.type and values.get("generator") is None:
            self.shapes.append(drawn.shape)
            if drawn.shape in self._changed:
                drawn.copy_(drawn == 0)
        return found


def _half(drawn: Tensor) -> Tensor:
    return drawn.fill_(0.5) if drawn.is_floating_point() else drawn.zero_()


def _kept_all(values: dict[str, Any]) -> Any:
    """Dropout that drops nothing."""
    given = values["input"]
    return given.clone(), torch.ones_like(given, dtype=torch.bool)


def _bernoulli_(values: dict[str, Any]) -> Any:
    return values["self"].fill_(1.0)


def _bernoulli(values: dict[str, Any]) -> Any:
    return (
        torch.ones_like(values["self"])
        if values.get("p") is not None
        else (values["self"] >= 0.5).to(values["self"].dtype)
    )


def _largest(values: dict[str, Any]) -> Any:
    """``multinomial``: the most probable."""
    probabilities, count = values["self"], values["num_samples"]
    if values.get("replacement"):
        return probabilities.argmax(-1, keepdim=True).expand(*probabilities.shape[:-1], count).contiguous()
    return probabilities.topk(count).indices


def _in_order(values: dict[str, Any]) -> Any:
    return torch.arange(values["n"], dtype=values.get("dtype") or torch.int64, device=values.get("device"))


_DRAWN: Mapping[str, Callable[[dict[str, Any]], Any]] = {
    **dict.fromkeys(
        ("uniform_", "normal_", "exponential_", "log_normal_", "cauchy_", "geometric_", "random_", "rand", "randn", "randint",
         "rand_like", "randn_like", "randint_like", "normal"),
        lambda values: None,
    ),
    "native_dropout": _kept_all, "bernoulli_": _bernoulli_, "bernoulli": _bernoulli, "multinomial": _largest,
    "randperm": _in_order,
}  # fmt: skip
"""By name of an operation: what it gives in place of what it draws; None: 1/2, or 0 for whole numbers."""
