"""The optimizer's part of a checkpoint: keys of its state, and conversion of hyper-parameters from and to groups."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..core.base.errors import CheckpointError, counted
from ..core.base.tensors import DTYPES
from ..core.checkpoint import Checkpoint
from ..core.checkpoint.foreign.weights_file import MODEL
from ..core.checkpoint.load import TensorReader
from .adapters import OptimizerAdapter

STATE = "optim.state."
"""``optim.state.<parameter>.<key>``: the optimizer state of a parameter."""
GROUP = "optim.group."
"""``optim.group.<parameter>.<key>``: the current hyper-parameters of a parameter."""
OWN = "optim.own."
"""``optim.own.<name>``: what a strategy has of its own, such as the rest of gradients that it has not sent yet."""
KIND = "optimizer"
"""``optim.group.<parameter>.optimizer``: the class of its optimizer."""
FROZEN = "frozen"
"""Key of a checkpoint: the names of the parameters that were frozen, in the optimizer's groups for when they are thawed."""

# These choose an implementation for the machine; they do not change the result, so checkpoints leave them out.
_IMPLEMENTATION_KEYS = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})


def split_key(key: str) -> tuple[str, str, str]:
    """Split a checkpoint's key into (``STATE`` or ``GROUP``, parameter, key); three empty strings for any other key."""
    for prefix in (STATE, GROUP):
        if key.startswith(prefix):
            parameter, _, item = key.removeprefix(prefix).rpartition(".")
            return prefix, parameter, item
    return "", "", ""


def hyper_parameters(adapter: OptimizerAdapter, group: Mapping[str, Any], parameter: str) -> dict[str, Any]:
    """Return a parameter's entries in a checkpoint: hyper-parameters of its group and class of its optimizer."""
    values = {
        key: value for key, value in adapter.hyper_parameters_of(group).items() if key not in _IMPLEMENTATION_KEYS
    }
    # torch accepts a 0-dim tensor as learning rate; the next run may use a number.
    plain_values = {key: value.item() if isinstance(value, Tensor) else value for key, value in values.items()}
    return {
        f"{GROUP}{parameter}.{key}": value for key, value in ({KIND: adapter.name_of(group)} | plain_values).items()
    }


def restored_hyper_parameters(
    adapter: OptimizerAdapter, group: Mapping[str, Any], saved: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a parameter's hyper-parameters from a checkpoint, in the form of its group.

    Args:
        adapter: of the optimizer.
        group: the parameter's group, which is not changed.
        saved: the values, by the last part of their keys.

    Raises:
        CheckpointError: they belong to another class of optimizer.
    """
    kind = saved.get(KIND, name := adapter.name_of(group))
    if kind != name:
        own_kind = type(adapter.optimizer_of(group)).__name__
        raise CheckpointError(
            f"optimizer: the checkpoint's is {kind}, the configuration's is {own_kind}; resume with "
            "the same one, or start from the weights alone with load_from"
        )
    own = adapter.own_hyper_parameters({key: value for key, value in saved.items() if key != KIND})
    return {key: _like(group.get(key), value) for key, value in own.items()}


def _like(current: Any, value: Any) -> Any:
    """Convert a hyper-parameter read from JSON to the optimizer's type: tuple, tensor or plain value."""
    if isinstance(current, tuple):
        return tuple(value)
    return torch.full_like(current, value) if isinstance(current, Tensor) else value


# The state of a checkpoint's optimizer under the names of plain torch, for an export.


_logger = logging.getLogger("flextrain")

Items = dict[tuple[str | int, ...], Callable[[TensorReader], Any]]
Settings = dict[str, Any]
# These choose an implementation for the machine; checkpoints have no value of them, and torch's state has them.
_LEFT_OUT = ("foreach", "fused", "capturable", "differentiable")
# Zeros are what these begin with, and torch writes such a state for a parameter that had no gradient yet.
_BEGIN_WITH_ZEROS = ("Adam", "AdamW", "RAdam", "Adamax", "Adadelta", "RMSprop", "SGD")


def torch_items(source: Checkpoint) -> Items:
    """Return the paths of the optimizer's state and settings in torch's state, with functions that read them.

    ``("state.<parameter>.exp_avg",)`` and ``("param_groups.<parameter>.lr",)`` are as torch's ``get_optimizer_state_dict`` with
    ``StateDictOptions(flatten_optimizer_state_dict=True)`` names them. ``("param_groups", 0, "lr")`` is for scripts without that
    option: parameters with equal settings are a group, in the order of the checkpoint.

    A frozen parameter has settings and no state, as in torch. Scripts may give it to their optimizer or leave it out.

    Raises:
        CheckpointError: the checkpoint has no optimizer, one without any state yet, or one whose names in torch are not known.
    """
    found: Items = {}
    states: dict[str, list[str]] = {}
    settings: dict[str, Settings] = {}
    for key in source.entries:
        prefix, parameter, name = split_key(key)
        if prefix == STATE:
            states.setdefault(parameter, []).append(name)
            found[(f"state.{parameter}.{name}",)] = lambda reader, key=key: reader.read(key)  # type: ignore[misc]
    for key, value in source.values.items():
        prefix, parameter, name = split_key(key)
        if prefix == STATE:
            states.setdefault(parameter, []).append(name)
            found[(f"state.{parameter}.{name}",)] = _constant(value)
        elif prefix == GROUP:
            settings.setdefault(parameter, {})[name] = value
    if not settings:
        raise CheckpointError(f"{source.path}: holds no state of an optimizer, leave out --optimizer")
    frozen = _frozen(source, settings)
    kinds = {parameter: str(values.pop(KIND, "")) for parameter, values in settings.items()}
    defaults = {kind: _defaults(source, kind) for kind in {*kinds.values()}}
    settings = {parameter: _as_in_torch(defaults[kinds[parameter]], values) for parameter, values in settings.items()}
    trained = [parameter for parameter in settings if parameter not in frozen]
    found |= _first_states(source, states, {name: (kinds[name], settings[name]) for name in trained})
    groups = _groups({parameter: settings[parameter] for parameter in trained} or settings)
    for parameter in frozen:
        if parameter not in settings:
            settings[parameter] = settings[_most_alike(parameter, trained or settings, source)]
    for parameter, values in settings.items():
        found |= {(f"param_groups.{parameter}.{name}",): _constant(value) for name, value in values.items()}
    if not any(parameter.isdecimal() for parameter in settings):  # both would have the same names
        for number, (names, values) in enumerate(groups):
            found |= {("param_groups", number, name): _constant(value) for name, value in values.items()}
            found["param_groups", number, "params"] = _constant(names)
    return found


def _constant(value: Any) -> Callable[[TensorReader], Any]:
    return lambda _: value


def _frozen(source: Checkpoint, settings: Mapping[str, Any]) -> list[str]:
    """Names of the frozen parameters; of an older checkpoint those of all tensors that are not optimized."""
    known = source.values.get(FROZEN)
    if isinstance(known, list):
        return [str(name) for name in known]
    return [
        name for key in source.entries if key.startswith(MODEL) and (name := key.removeprefix(MODEL)) not in settings
    ]


def _as_in_torch(defaults: Settings, values: Settings) -> Settings:
    def own(name: str, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) and isinstance(defaults.get(name), tuple) else value

    return {name: own(name, value) for name, value in {**defaults, **values}.items()}


def _groups(settings: Mapping[str, Settings]) -> list[tuple[list[str], Settings]]:
    groups: list[tuple[list[str], Settings]] = []
    for parameter, values in settings.items():
        names = next((names for names, own in groups if own == values), None)
        if names is None:
            groups.append(([parameter], values))
        else:
            names.append(parameter)
    return groups


def _most_alike(frozen: str, others: Iterable[str], source: Checkpoint) -> str:
    """The parameter whose settings a frozen one gets: of as many dimensions if possible, and with the most alike name."""

    def alike(name: str) -> tuple[bool, int, int]:
        own, other = frozen.split("."), name.split(".")
        return (
            len(_shape(source, name)) == len(_shape(source, frozen)),
            _shared(own[::-1], other[::-1]),
            _shared(own, other),
        )

    return max(others, key=alike)


def _shared(one: list[str], other: list[str]) -> int:
    """How many items both have at the beginning."""
    pairs = list(zip(one, other, strict=False))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))


def _first_states(
    source: Checkpoint, states: Mapping[str, list[str]], trained: Mapping[str, tuple[str, Settings]]
) -> Items:
    """The states of trained parameters that had no gradient yet: zeros, as torch's ``get_optimizer_state_dict`` expects some.

    Raises:
        CheckpointError: no parameter has a state yet, although this optimizer has some after the first update.
    """
    found: Items = {}
    unknown: list[str] = []
    for parameter, (kind, settings) in trained.items():
        if parameter in states or (kind == "SGD" and not settings.get("momentum")):
            continue
        others = [other for other in states if other in trained and trained[other][0] == kind]
        model = max(others, key=lambda other: len(_shape(source, other)), default=None)
        if model is None:
            raise CheckpointError(
                f"{source.path}: its {kind} has no state before the first update, leave out --optimizer"
            )
        items = dict(_zeros_like(source, parameter, model, states[model]))
        if kind in _BEGIN_WITH_ZEROS and len(items) == len(states[model]):
            found |= items
        else:
            unknown.append(parameter)
    if unknown:
        more = f" and {counted(len(unknown) - 1, 'other')}" if len(unknown) > 1 else ""
        _logger.warning(
            f"{source.path}: {unknown[0]}{more} had no gradient yet, so the optimizer has no state of it; a script whose "
            "optimizer expects one cannot load it"
        )
    return found


def _zeros_like(
    source: Checkpoint, parameter: str, model: str, names: list[str]
) -> Iterator[tuple[tuple[str | int, ...], Callable[[TensorReader], Any]]]:
    """State of zeros for a parameter in the form of another one's."""
    own, other = _shape(source, parameter), _shape(source, model)
    if own and not other:
        return
    for name in names:
        entry = source.entries.get(f"{STATE}{model}.{name}")
        shape = None if entry is None else {(): (), other: own}.get(tuple(entry.shape))
        if entry is not None and shape is not None:
            yield (f"state.{parameter}.{name}",), _zeros(shape, DTYPES[entry.dtype])


def _shape(source: Checkpoint, parameter: str) -> tuple[int, ...]:
    entry = source.entries.get(MODEL + parameter)
    return () if entry is None else tuple(entry.shape)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Callable[[TensorReader], Any]:
    return lambda _: torch.zeros(shape, dtype=dtype)


def _defaults(source: Checkpoint, kind: str) -> Settings:
    """What torch's state of an optimizer has beside a checkpoint's values, and its pairs, which JSON has as lists."""
    made = getattr(torch.optim, kind, None)
    if not (inspect.isclass(made) and issubclass(made, torch.optim.Optimizer)):
        raise CheckpointError(
            f"{source.path}: its optimizer is {kind or 'unknown'}, and only the state of torch.optim's can be written for "
            "plain torch; leave out --optimizer"
        )
    parameters = inspect.signature(made).parameters.items()
    return {
        name: each.default
        for name, each in parameters
        if each.default is not inspect.Parameter.empty and (name in _LEFT_OUT or isinstance(each.default, tuple))
    }
