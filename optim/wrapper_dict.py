"""OptimWrapperDict: several optimizers for the parts of one model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ..core.errors import CheckpointError, ConfigError, StrategyError, suggest
from ..core.precision import Precision
from ..core.registry import OPTIM_WRAPPERS
from .wrapper import OptimWrapper, StepInfo


@OPTIM_WRAPPERS.register_module()
class OptimWrapperDict(Mapping[str, OptimWrapper]):
    """OptimWrappers by name; the model's own ``train_step(data, optim_wrapper)`` decides which is updated when.

    An optimizer given as configuration gets the parameters of the submodule of the same name.

    Args:
        wrappers: at least one; accumulation and precision must be equal, because all share one window and one autocast
            context.
    """

    def __init__(self, **wrappers: OptimWrapper) -> None:
        if not wrappers:
            raise ConfigError("optim_wrapper: an OptimWrapperDict needs at least one optimizer")
        for name, wrapper in wrappers.items():
            if not isinstance(wrapper, OptimWrapper):
                raise ConfigError(
                    f"optim_wrapper.{name}: {type(wrapper).__name__} is not allowed, give an OptimWrapper"
                )
        first_name, first = next(iter(wrappers.items()))
        for name, wrapper in wrappers.items():
            for what in ("accumulate", "precision"):
                if getattr(wrapper, what) != getattr(first, what):
                    key = {"accumulate": "accumulative_counts"}.get(what, "type")
                    raise ConfigError(
                        f"optim_wrapper.{name}.{key}: differs from that of optim_wrapper.{first_name}, one window and "
                        "one precision are shared"
                    )
        self._wrappers = wrappers

    def __getitem__(self, name: str) -> OptimWrapper:
        if name not in self._wrappers:
            raise KeyError(f"no optimizer is called {name!r}{suggest(name, self._wrappers)}")
        return self._wrappers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._wrappers)

    def __len__(self) -> int:
        return len(self._wrappers)

    @property
    def _first(self) -> OptimWrapper:
        return next(iter(self._wrappers.values()))

    @property
    def wrappers(self) -> dict[str, OptimWrapper]:
        """The wrappers by name."""
        return self._wrappers

    @property
    def optim_wrappers(self) -> dict[str, OptimWrapper]:
        """MMEngine's name of ``wrappers``."""
        return self._wrappers

    @property
    def precision(self) -> Precision:
        """The precision, equal for all wrappers."""
        return self._first.precision

    @property
    def accumulate(self) -> int:
        """Micro-batches per update, equal for all wrappers."""
        return self._first.accumulate

    @property
    def last_step(self) -> StepInfo:
        """The outcome of the window's updates; skipped if every optimizer that had an update skipped it."""
        steps = [wrapper.last_step for wrapper in self._wrappers.values() if wrapper.has_stepped]
        return StepInfo(None, bool(steps) and all(step.skipped for step in steps))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all optimizers."""
        return [group for wrapper in self._wrappers.values() for group in wrapper.param_groups]

    def attach(self, device: torch.device, autocast: Callable[[], AbstractContextManager[None]]) -> None:
        """See OptimWrapper."""
        for wrapper in self._wrappers.values():
            wrapper.attach(device, autocast)

    def build(self, model: nn.Module) -> None:
        """Build each optimizer from the submodule of its name.

        Raises:
            StrategyError: the model has no such submodule.
        """
        parts = dict(model.named_children())
        for name, wrapper in self._wrappers.items():
            if wrapper.is_built:
                wrapper.build(model)
            elif name in parts:
                wrapper.build(parts[name])
            else:
                raise StrategyError(
                    f"optim_wrapper.{name}: the model has no submodule of this name{suggest(name, parts)}"
                )

    def master(self, parameter: Tensor) -> Tensor:
        """See OptimWrapper."""
        for wrapper in self._wrappers.values():
            if (master := wrapper.master(parameter)) is not parameter:
                return master
        return parameter

    def begin(self, index: int, size: int) -> None:
        """See OptimWrapper."""
        for wrapper in self._wrappers.values():
            wrapper.begin(index, size)

    def initialize_count_status(self, model: nn.Module, init_counts: int, max_counts: int) -> None:
        """See OptimWrapper."""
        for wrapper in self._wrappers.values():
            wrapper.initialize_count_status(model, init_counts, max_counts)

    def optim_context(self, model: nn.Module) -> AbstractContextManager[None]:
        """See OptimWrapper."""
        return self._first.optim_context(model)

    def zero_grad(self) -> None:
        """Drop the gradients of all optimizers."""
        for wrapper in self._wrappers.values():
            wrapper.zero_grad()

    def update_params(self, *_: Any) -> NoReturn:
        """Raise StrategyError: choose an optimizer, as in ``optim_wrapper["generator"].update_params(loss)``."""
        raise StrategyError(
            f"optim_wrapper: has {len(self)} optimizers, update one: optim_wrapper[name].update_params(loss)"
        )

    backward = step = update_params

    def get_lr(self) -> dict[str, list[float]]:
        """Return the learning rates as ``{"<name>.lr": [...]}``."""
        return {f"{name}.lr": wrapper.get_lr()["lr"] for name, wrapper in self._wrappers.items()}

    def get_momentum(self) -> dict[str, list[float]]:
        """Return the momenta as ``{"<name>.momentum": [...]}``."""
        return {f"{name}.momentum": wrapper.get_momentum()["momentum"] for name, wrapper in self._wrappers.items()}

    def plain_values(self) -> dict[str, Any]:
        """Return the ``plain_values`` of each wrapper, by name."""
        return {name: wrapper.plain_values() for name, wrapper in self._wrappers.items()}

    def load_plain_values(self, state: dict[str, Any]) -> None:
        """Continue from ``plain_values``.

        Raises:
            CheckpointError: the optimizers have other names.
        """
        self._check_names(state)
        for name, wrapper in self._wrappers.items():
            wrapper.load_plain_values(state[name])

    def state_dict(self) -> dict[str, Any]:
        """Return the ``state_dict`` of each wrapper, by name, see OptimWrapper."""
        return {name: wrapper.state_dict() for name, wrapper in self._wrappers.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict``, see OptimWrapper.

        Raises:
            CheckpointError: the optimizers have other names.
        """
        self._check_names(state)
        for name, wrapper in self._wrappers.items():
            wrapper.load_state_dict(state[name])

    def _check_names(self, state: dict[str, Any]) -> None:
        if state.keys() != self._wrappers.keys():
            found, own = ", ".join(state) or "none", ", ".join(self._wrappers)
            raise CheckpointError(f"optim_wrapper: the checkpoint's optimizers are {found}, the configuration's {own}")

    def __repr__(self) -> str:
        return f"OptimWrapperDict({', '.join(f'{name}={wrapper!r}' for name, wrapper in self._wrappers.items())})"
