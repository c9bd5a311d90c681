"""Parameter groups of a constructor: merged where they are equal, and held against the model's parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from ..core.errors import ConfigError


class NotedReads(dict[str, Any]):
    """A dict that knows which of its keys nobody has read; whoever goes through all of it has read them all."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__(given)
        self._unread = set(given)

    @property
    def unread(self) -> list[str]:
        """The keys that nobody has read, sorted."""
        return sorted(self._unread)

    def unnoted(self) -> dict[str, Any]:
        """A copy, which counts as no reading."""
        return {key: super(NotedReads, self).__getitem__(key) for key in super().__iter__()}

    def __getitem__(self, key: str) -> Any:
        self._unread.discard(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self._unread.discard(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """See dict."""
        self._unread.discard(key)
        return super().get(key, default)

    def pop(self, key: str, *default: Any) -> Any:
        """See dict."""
        self._unread.discard(key)
        return super().pop(key, *default)

    def __iter__(self) -> Iterator[str]:
        self._unread.clear()
        return super().__iter__()

    def keys(self) -> Any:
        """See dict."""
        self._unread.clear()
        return super().keys()

    def values(self) -> Any:
        """See dict."""
        self._unread.clear()
        return super().values()

    def items(self) -> Any:
        """See dict."""
        self._unread.clear()
        return super().items()

    def copy(self) -> dict[str, Any]:
        """See dict."""
        self._unread.clear()
        return super().copy()


def merged(groups: Any, where: str, kind: str) -> list[dict[str, Any]]:
    """Return the groups with those of one parameter and equal settings in one, in the order of their first parameters.

    An optimizer that updates many parameters at once does so group by group, and is slow with a group per parameter.
    """
    found: list[dict[str, Any]] = []
    shared: dict[str, dict[str, Any]] = {}
    for group in as_lists(groups, where, kind):
        if len(group["params"]) == 1:
            first = shared.setdefault(settings_of(group), group)
            if first is not group:
                first["params"] += group["params"]
                continue
        found.append(group)
    return found


def settings_of(group: Mapping[str, Any]) -> str:
    """Return the settings of a group as text, to compare them."""
    return repr(sorted((key, repr(value)) for key, value in group.items() if key != "params"))


def checked_groups(
    groups: Any, parameters: Mapping[str, nn.Parameter], model: nn.Module, where: str, kind: str, bypass: bool
) -> list[dict[str, Any]]:
    """Return groups in which every trainable parameter of the model is once.

    Args:
        groups: from a constructor.
        parameters: the model's parameters by name before the constructor saw it, each under all of its names.
        model: the module that the constructor saw.
        where: the configuration key of the wrapper.
        kind: the constructor's class, for messages.
        bypass: use the settings of the first name, if those of a tied parameter's names differ.

    Raises:
        ConfigError: a parameter is left out, is in several groups, or is no parameter of the model.
    """
    where, names = f"{where}.constructor", _names(parameters)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameters.get(name) is not parameter:
            raise ConfigError(f"{where}: {kind} replaces the model's parameter {name}, which others hold already")
    result: list[dict[str, Any]] = []
    seen: dict[int, tuple[int, str]] = {}
    for group in as_lists(groups, where, kind):
        settings = settings_of(group)
        kept: list[Any] = []
        for parameter in group["params"]:
            own = names.get(id(parameter))
            if own is None:
                shape = list(parameter.shape) if isinstance(parameter, Tensor) else type(parameter).__name__
                raise ConfigError(f"{where}: {kind} gives {shape}, which is no parameter of the model")
            times, before = seen.get(id(parameter), (0, settings))
            seen[id(parameter)] = times + 1, before
            if not times:
                kept.append(parameter)
            elif len(own) == 1:
                raise ConfigError(f"{where}: {kind} gives {own[0]} twice, a parameter belongs to one group")
            elif before != settings and not bypass:
                other = own[min(times, len(own) - 1)]
                raise ConfigError(
                    f"{where.removesuffix('constructor')}paramwise_cfg: {own[0]} and {other} are one parameter with two "
                    f"settings, give bypass_duplicate=True to use those of {own[0]}"
                )
        if kept:
            result.append({**group, "params": kept})
    left_out = [own[0] for key, own in names.items() if key not in seen and parameters[own[0]].requires_grad]
    if left_out:
        more = f" and {len(left_out) - 1} more" if len(left_out) > 1 else ""
        raise ConfigError(
            f"{where}: {kind} leaves out {left_out[0]}{more}, which would never be trained; put it into a group, or freeze it "
            "with requires_grad_(False)"
        )
    return result


def _names(parameters: Mapping[str, nn.Parameter]) -> dict[int, list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in parameters.items():
        names.setdefault(id(parameter), []).append(name)
    return names


def as_lists(groups: Any, where: str, kind: str) -> list[dict[str, Any]]:
    """Return the groups with lists of tensors; torch also takes one tensor, and pairs of a name and a tensor."""
    found = []
    for group in groups:
        if not isinstance(group, Mapping) or "params" not in group:
            raise ConfigError(f"{where}: {kind} gives a group without params, give dict(params=[...], ...)")
        given = group["params"]
        members = [given] if isinstance(given, Tensor) else list(given)
        found.append({**group, "params": [member[1] if isinstance(member, tuple) else member for member in members]})
    return found
