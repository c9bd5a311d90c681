"""Rehearsal: training as one process of many, on tensors without values and without the other processes.

Everything that runs has the shapes, the memory and the collectives of the real run. All processes are taken to have what this one
has: the process group and the store answer so. What would look at values asks ``has_values``.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from packaging.version import Version
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..core.base.errors import StrategyError, one_of
from ..core.base.initializers import initializing_with
from ..core.base.trees import tree_map_only
from ..core.comm.topology import Topology
from ..core.torch_compat.torch_private import fake_mode, is_fake
from .rehearsing_private import (
    CHECKED,
    data_parallel_without_values,
    indexing_with_values,
    join_group_of_one_kind,
    moving_what_moves,
    replaced,
)


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
    if dist.is_initialized():
        raise StrategyError("plan: this process has joined a process group, which planning replaces by one of its own")
    found = WithoutValues()
    with ExitStack() as stack:
        stack.enter_context(join_group_of_one_kind(rank, world_size, _StoreOfOneKind(world_size)))
        for context in (indexing_with_values, moving_what_moves, data_parallel_without_values):
            stack.enter_context(context())
        # Who reports is compared with others, and those with this one's shard of the data would be too many.
        stack.enter_context(replaced(Topology, "check", lambda topology: None))
        stack.enter_context(replaced(_unchecked, "handlers", [_Noting(found)]))
        stack.enter_context(replaced(_unchecked, "propagate", False))
        yield found


class _StoreOfOneKind(dist.Store):  # type: ignore[misc,name-defined,unused-ignore]
    """The store of a job whose other processes do what this one does."""

    def __init__(self, world_size: int) -> None:
        super().__init__()
        self._world_size, self._values = world_size, dict[str, bytes]()

    def set(self, key: str, value: Any) -> None:
        self._values[key] = _as_bytes(value)

    def get(self, key: str) -> bytes:
        return self._values[key]

    def add(self, key: str, number: int) -> int:
        """Add what all processes add."""
        total = int(self._values.get(key, b"0")) + number * self._world_size
        self._values[key] = str(total).encode()
        return total

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return self._values.setdefault(key, _as_bytes(desired))

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def wait(self, keys: Sequence[str], timeout: Any = None) -> None:
        """Nobody else would set a key."""


def _as_bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


class _Noting(logging.Handler):
    """Notes what could not be checked for want of values."""

    def __init__(self, found: WithoutValues) -> None:
        super().__init__()
        self._found = found

    def emit(self, record: logging.LogRecord) -> None:
        self._found.not_checked[record.getMessage()] = None


class WithoutValues:
    """Makes tensors without values; made by ``rehearsal``.

    Attributes:
        not_checked: what a real run would have checked, as keys.
    """

    def __init__(self) -> None:
        self.not_checked: dict[str, None] = {}
        self._mode = fake_mode()

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

        with replaced(nn.Module, "register_parameter", register_parameter), initializing_with(_leaving_fakes_alone):
            yield

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


_unchecked = logging.getLogger("flextrain.unchecked")
_STRIPPED = "_flextrain_stripped"
"""Attribute of a parameter that was registered: the one without values that replaces it, also where it is tied."""
