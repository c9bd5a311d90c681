"""MMEngine's optimizer wrappers and their constructors, for flextrain's optimizer wrappers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from mmengine.optim import OptimWrapper as Theirs
from mmengine.optim import OptimWrapperDict as TheirDict
from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS, OPTIM_WRAPPERS, OPTIMIZERS, DefaultScope
from torch import Tensor, nn
from torch.optim import Optimizer

from ..core.errors import ConfigError
from ..core.registry import OPTIM_WRAPPER_CONSTRUCTORS as OUR_CONSTRUCTORS
from ..core.registry import OPTIM_WRAPPERS as OUR_WRAPPERS
from .registries import find, found_in_scope, is_mmengines, translated, without


def adapted_optim_wrapper(cfg: Any, where: str, scope: str | None) -> Any:
    """``optim_wrapper`` for flextrain, from MMEngine's configuration of one or several.

    Raises:
        ConfigError: a wrapper that works with MMEngine's runner only.
    """
    if isinstance(cfg, (Theirs, TheirDict)):
        raise ConfigError(
            f"{where}: MMEngine's {type(cfg).__name__} is built already, give dict(type=..., optimizer=dict(...)) or the torch "
            "optimizer"
        )
    if not isinstance(cfg, Mapping):
        return cfg
    if "optimizer" not in cfg and "type" not in cfg:
        return _several(cfg, where, scope)
    found = without(cfg)
    if "type" in found:
        kind = found_in_scope(cfg, OPTIM_WRAPPERS)
        if isinstance(kind, type) and issubclass(kind, Theirs):
            if not is_mmengines(kind) or kind.__name__ not in OUR_WRAPPERS:
                raise ConfigError(
                    f"{where}.type: {kind.__name__} is a wrapper of MMEngine, which works with MMEngine's runner only, subclass "
                    "flextrain.OptimWrapper"
                )
            found["type"] = kind.__name__
    if "optimizer" in found:
        found["optimizer"] = translated(found["optimizer"], OPTIMIZERS, f"{where}.optimizer")
    if "constructor" in found:
        found["constructor"] = _constructor(found["constructor"], found.get("optimizer"), f"{where}.constructor", scope)
    return found


def _several(cfg: Mapping[str, Any], where: str, scope: str | None) -> dict[str, Any]:
    found = dict(cfg)
    constructor = found.pop("constructor", None)
    if constructor is not None:
        kind = find(OPTIM_WRAPPER_CONSTRUCTORS, constructor) or constructor
        raise ConfigError(
            f"{where}.constructor: {getattr(kind, '__name__', kind)} makes several optimizers, which flextrain does without one: "
            f"each of {', '.join(found)} optimizes the part of the model that has its name; leave it out"
        )
    return {
        name: adapted_optim_wrapper(value, f"{where}.{name}", scope) if isinstance(value, (Mapping, Theirs)) else value
        for name, value in found.items()
    }


def _constructor(given: Any, optimizer: Any, where: str, scope: str | None) -> Any:
    kind = find(OPTIM_WRAPPER_CONSTRUCTORS, given)
    if kind is None or (is_mmengines(kind) and kind.__name__ in OUR_CONSTRUCTORS):
        return kind.__name__ if kind is not None else given
    if callable(getattr(kind, "param_groups", None)):  # one of flextrain
        return kind
    if not isinstance(optimizer, Mapping):
        raise ConfigError(
            f"{where}: {kind.__name__} makes the optimizer, which is built already; give its dict(type=...)"
        )
    return type(kind.__name__, (AdaptedConstructor,), {"kind": kind, "scope": scope})


class AdaptedConstructor:
    """Makes the parameter groups that an optimizer wrapper constructor of MMEngine makes.

    The constructor runs as it is, with an optimizer that keeps the groups; the strategy makes the real one from them. A
    subclass says which constructor, and in which default scope it looks for names.

    Args:
        optim_wrapper_cfg: holds the optimizer's configuration under "optimizer".
        paramwise_cfg: the constructor's own settings.
        where: the configuration key, for messages.
    """

    kind: ClassVar[Any]
    scope: ClassVar[str | None]

    def __init__(
        self,
        optim_wrapper_cfg: Mapping[str, Any],
        paramwise_cfg: Mapping[str, Any] | None = None,
        *,
        where: str = "optim_wrapper",
    ) -> None:
        optimizer = {**optim_wrapper_cfg["optimizer"], "type": _Groups}
        self._where = where
        self._constructor = self.kind({"type": Theirs, "optimizer": optimizer}, paramwise_cfg)

    def param_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Return the groups for a torch optimizer.

        Raises:
            ConfigError: the constructor builds an optimizer of its own.
        """
        with DefaultScope.overwrite_default_scope(self.scope):
            wrapper = self._constructor(model)
        made = getattr(wrapper, "optimizer", None)
        if not isinstance(made, _Groups):
            name = type(self._constructor).__name__
            raise ConfigError(
                f"{self._where}.constructor: {name} gave {type(made).__name__}, it must build the optimizer that the "
                "configuration names, with OPTIMIZERS.build"
            )
        return made.given


class _Groups(Optimizer):
    """Keeps the parameter groups that it is given, without the defaults of an optimizer."""

    def __init__(self, params: Iterable[Any], **settings: Any) -> None:
        given = list(params)
        if given and isinstance(given[0], Tensor):
            given = [{"params": given}]
        self.given = [{**group, "params": _listed(group["params"])} for group in given]
        super().__init__([dict(group) for group in self.given], {})


def _listed(params: Any) -> list[Any]:
    return [params] if isinstance(params, Tensor) else list(params)
