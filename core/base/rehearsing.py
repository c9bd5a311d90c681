"""Rehearsal: training as one process of many, on tensors without values and without the other processes.

Everything that runs has the shapes, the memory and the collectives of the real run. The few functions that read values, or
what other processes have, ask ``rehearsing()``; then all processes are taken to have what this one has.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from packaging.version import Version
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..model.initializers import initializing_with
from ..torch_compat.rehearsing_private import (
    CHECKED,
    indexing_with_values,
    is_fake,
    join_fake_group,
    moving_what_moves,
    outside_fake_mode,
    quick_fake_mode,
)
from ..torch_compat.torch_private import fake_mode
from .errors import StrategyError, one_of
from .trees import tree_map_only


def rehearsing() -> bool:
    """Whether this process is in a rehearsal."""
    return bool(_current)


def with_values() -> AbstractContextManager[Any]:
    """Context in which new tensors have values, also in a rehearsal: for those that only say who is who."""
    return outside_fake_mode() if _current else nullcontext()


@contextmanager
def aside() -> Iterator[None]:
    """Context of computations that only find something out, and that a plan does not count as the update's."""
    _asides.append(True)
    try:
        yield
    finally:
        _asides.pop()


def is_aside() -> bool:
    """Whether such a computation is under way."""
    return bool(_asides)


def not_checked(what: str) -> None:
    """Say in a rehearsal what a real run checks by values, and a rehearsal cannot: one line, which the plan has as a note."""
    for found in _current:
        found.not_checked[what] = None


def announce(kind: str, tensors: Iterable[Tensor]) -> None:
    """Say what the memory of tensors is for, one of the kinds of a plan, to those who keep books on it."""
    for listen in listeners:
        listen(kind, tensors)


def mode_without_values() -> Any:
    """See ``fake_mode``; in a rehearsal it is that of the rehearsal, because tensors of two modes do not mix."""
    return _current[0].without_values() if _current else fake_mode()


@contextmanager
def rehearsal(rank: int, world_size: int) -> Iterator[WithoutValues]:
    """Context in which this process is rank ``rank`` of ``world_size``, of which the others do not exist.

    Raises:
        StrategyError: this version of torch was not checked, this process has a process group, or is in a rehearsal.
    """
    version = Version(torch.__version__)
    if f"{version.major}.{version.minor}" not in CHECKED:
        raise StrategyError(
            f"plan: torch {torch.__version__} was not checked, figures might be wrong; plan with torch {one_of(CHECKED)}"
        )
    if _current or dist.is_initialized():
        raise StrategyError("plan: this process has joined a process group, which planning replaces by one of its own")
    join_fake_group(rank, world_size)
    _current.append(found := WithoutValues())
    try:
        with indexing_with_values(), moving_what_moves():
            yield found
    finally:
        _current.clear()
        if dist.is_initialized():
            dist.destroy_process_group()


class WithoutValues:
    """Makes tensors without values; made by ``rehearsal``.

    Attributes:
        not_checked: what a real run would have checked, as keys.
    """

    def __init__(self) -> None:
        self.not_checked: dict[str, None] = {}
        self._mode = quick_fake_mode()

    def without_values(self) -> AbstractContextManager[Any]:
        """Context in which new tensors have no values."""
        found: AbstractContextManager[Any] = self._mode
        return found

    def copy_of(self, values: Any) -> Any:
        """Return a structure of values with tensors without values in place of its tensors."""
        return tree_map_only(Tensor, self._copy, values)

    def strip(self, model: nn.Module) -> None:
        """Take the values of a model's parameters and buffers; those on the meta device are on the CPU afterwards."""
        made: dict[int, Tensor] = {}
        for module in model.modules():
            own = [
                *module.named_parameters(recurse=False, remove_duplicate=False),
                *module.named_buffers(recurse=False, remove_duplicate=False),
            ]
            for name, tensor in own:
                if is_lazy(tensor) or (is_fake(tensor) and not tensor.is_meta):
                    continue
                if id(tensor) not in made:
                    made[id(tensor)] = self._copy(tensor)
                setattr(module, name, made[id(tensor)])

    @contextmanager
    def building(self) -> Iterator[None]:
        """Context in which parameters lose their values when they are registered, so that a model takes no memory."""
        register: Any = nn.Module.register_parameter

        def register_parameter(module: nn.Module, name: str, param: Any) -> None:
            register(module, name, param)  # checks it
            if param is None or param.is_meta or is_lazy(param) or is_fake(param):
                return
            known = vars(param).get(_STRIPPED)
            if known is None:
                known = self._copy(param)
                setattr(param, _STRIPPED, known)
            register(module, name, known)

        nn.Module.register_parameter = register_parameter  # type: ignore[method-assign, assignment]
        try:
            with initializing_with(_leaving_fakes_alone):
                yield
        finally:
            nn.Module.register_parameter = register  # type: ignore[method-assign]

    def _copy(self, tensor: Tensor) -> Tensor:
        device = "cpu" if tensor.is_meta else tensor.device
        with self._mode:
            empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        if not isinstance(tensor, nn.Parameter):
            return empty
        parameter = nn.Parameter(empty, tensor.requires_grad)
        parameter.__dict__.update(tensor.__dict__)
        return parameter


def _leaving_fakes_alone(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(function)
    def initialize(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return tensor if is_fake(tensor) else function(tensor, *args, **kwargs)

    return initialize


listeners: list[Callable[[str, Iterable[Tensor]], object]] = []
"""Called by ``announce``."""
_current: list[WithoutValues] = []
_asides: list[bool] = []
_STRIPPED = "_flextrain_stripped"
"""Attribute of a parameter that was registered: the one without values that replaces it, also where it is tied."""
