"""Extra state of modules (``get_extra_state``), checks that a checkpoint can hold all state of a model, modes and buffers put back.

A checkpoint has the extra state of the module ``name`` under ``extra_state.<name>``. In its value ``{"tensor": 0}``
stands for the tensor ``extra_state.<name>/0``. Tuples and the keys of dicts keep their types.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from ..base.errors import CheckpointError, StrategyError
from ..base.json_values import add_to, pack, taken_from, unpack
from ..base.tensors import check_tensor
from ..torch_compat.torch_private import LOADING_METHODS, call_loaded_hooks, has_loading_hooks

EXTRA = "extra_state."
_TORCH = "_extra_state"


def torch_key(name: str) -> str:
    """torch's key for the extra state of the module ``name`` in a ``state_dict``."""
    return f"{name}.{_TORCH}" if name else _TORCH


def module_of(key: str) -> str | None:
    """Name of the module whose extra state has this key in torch; None if the key is not for extra state."""
    if key == _TORCH:
        return ""
    return key.removesuffix(f".{_TORCH}") if key.endswith(f".{_TORCH}") else None


def keepers(model: nn.Module, *, every_name: bool = False) -> Iterator[tuple[str, nn.Module]]:
    """The modules that define ``get_extra_state``, with the first of their names, or with each of their names."""
    for name, module in model.named_modules(remove_duplicate=not every_name):
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield name, module


def extra_aliases(model: nn.Module) -> dict[str, str]:
    """Further names of modules with extra state to their first names, both as torch's keys."""
    first = {id(module): name for name, module in keepers(model)}
    every = keepers(model, every_name=True)
    return {torch_key(name): torch_key(first[id(module)]) for name, module in every if first[id(module)] != name}


def extra_state(model: nn.Module) -> dict[str, Any]:
    """The extra state of all modules as the flat dict of a checkpoint.

    Raises:
        CheckpointError: it contains anything but tensors, plain values, and dicts, lists and tuples of them.
    """
    found: dict[str, Any] = {}
    for name, module in keepers(model):
        tensors: list[Tensor] = []
        found[EXTRA + name] = pack(module.get_extra_state(), f"model.{torch_key(name)}", add_to(tensors, _is_whole))
        found |= {f"{EXTRA}{name}/{i}": tensor.detach() for i, tensor in enumerate(tensors)}
    return found


def keeper_of(key: str) -> str:
    """Name of the module whose extra state, or a tensor of it, has this key in a checkpoint."""
    return key.removeprefix(EXTRA).partition("/")[0]


def _is_whole(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, DTensor)


def set_extra_state(model: nn.Module, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Load the extra state of every module that has one, from the ``values`` and ``tensors`` of a checkpoint.

    Raises:
        CheckpointError: a value is damaged, or the module's ``set_extra_state`` raises.
    """
    for name, module in keepers(model):
        if (key := EXTRA + name) not in values:
            continue
        try:
            module.set_extra_state(unpack(values[key], taken_from(lambda i, key=key: tensors[f"{key}/{i}"])))  # type: ignore[misc]
        except Exception as error:  # foreign code or a damaged value may raise anything
            reason = " ".join(str(error).split())
            raise CheckpointError(
                f"model.{torch_key(name)}: its module cannot load it, {type(error).__name__}: {reason}"
            ) from error


def tell_loaded(model: nn.Module) -> None:
    """Call the load_state_dict post-hooks of all modules, because flextrain loads without ``load_state_dict``."""
    for module in model.modules():
        call_loaded_hooks(module)


def own_loading(model: nn.Module) -> list[str]:
    """Names of the model's own methods and hooks for loading a state dict, which flextrain does not call."""
    found = set()
    for module in model.modules():
        for method in LOADING_METHODS:
            home = next(kind for kind in type(module).__mro__ if method in vars(kind))
            if not home.__module__.startswith("torch."):
                found.add(f"{home.__name__}.{method}")
        if has_loading_hooks(module):
            found.add(f"a load_state_dict hook of {type(module).__name__}")
    return sorted(found)


# Checks during set-up


def check_sizes(model: nn.Module) -> None:
    """Raise StrategyError if a parameter or buffer is lazy: it gets its shape only from the first batch."""
    for prefix, module in model.named_modules():
        for name, tensor in (*module.named_parameters(prefix, False), *module.named_buffers(prefix, False)):
            if is_lazy(tensor):
                raise StrategyError(
                    f"model.{name}: has no shape before the first batch, {type(module).__name__} waits for it; pass a batch "
                    "through the model before the runner gets it, or give the sizes"
                )


def check_trainable(model: nn.Module) -> None:
    """Raise StrategyError if no parameter requires a gradient."""
    parameters = list(model.parameters())
    if not any(parameter.requires_grad for parameter in parameters):
        what = (
            f"all {len(parameters)} parameters are frozen (requires_grad=False)"
            if parameters
            else "it has no parameter"
        )
        raise StrategyError(
            f"model: {type(model).__name__} has nothing to train, {what}; leave optim_wrapper, train_cfg and train_dataloader "
            "out to evaluate it only"
        )


def check_savable(model: nn.Module, left_out: Collection[str] = ()) -> None:
    """Check that a checkpoint can hold everything that torch's ``state_dict`` has.

    Args:
        left_out: names of parameters that no checkpoint has.

    Raises:
        StrategyError: a tensor or extra state cannot be saved or loaded, or the model's own ``state_dict`` adds values.
    """
    for name, module in keepers(model):
        if type(module).set_extra_state is nn.Module.set_extra_state:
            raise StrategyError(
                f"model.{torch_key(name)}: its module defines get_extra_state but no set_extra_state to load it"
            )
    try:
        for key, tensor in extra_state(model).items():
            if isinstance(tensor, Tensor):
                check_tensor(f"model.{torch_key(keeper_of(key))}", tensor)
    except CheckpointError as error:
        raise StrategyError(str(error)) from error
    held = {*(name for name, _ in keepers(model, every_name=True))}
    known = {torch_key(name) for name in held}
    known |= {name for name, _ in model.named_parameters(remove_duplicate=False)}
    known |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    for key, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and key not in left_out:
            try:
                check_tensor(f"model.{key}", value)
            except CheckpointError as error:
                raise StrategyError(str(error)) from None
        if key not in known and id(value) not in own:  # state_dict may rename a parameter or buffer
            raise StrategyError(
                f"model.{key}: is added by the model's own state_dict and is no parameter, buffer or extra state, so that "
                "no checkpoint has it; return it from the get_extra_state() of its module"
            )


def tensor_names(model: nn.Module) -> frozenset[str]:
    """Names of the parameters and persistent buffers."""
    return frozenset(model.state_dict(keep_vars=True)) - {
        torch_key(name) for name, _ in keepers(model, every_name=True)
    }


def make_buffers(
    model: nn.Module, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]], device: torch.device
) -> None:
    """Register the buffers that the model would register only later; existing ones are not changed."""
    for name, (shape, dtype) in shapes.items():
        path, _, leaf = name.rpartition(".")
        try:
            owner = model.get_submodule(path)
        except AttributeError:
            continue
        if getattr(owner, leaf, None) is None:
            with suppress(KeyError):  # the name belongs to an attribute that is not a buffer
                owner.register_buffer(leaf, torch.zeros(shape, dtype=dtype, device=device))


# Training modes, put back.


def modes_of(module: nn.Module) -> Callable[[], None]:
    """Return a function that gives each module the training mode that it has now.

    It calls ``train`` of those that have another one: a class may do more there, such as take an adapter off its weight.
    """
    before = [(part, part.training) for part in module.modules()]

    def restore() -> None:
        for part, training in before:  # a module comes before those in it, whose modes it sets too
            if part.training is not training:
                part.train(training)

    return restore


# Buffers that forward writes to.


def buffers_of(module: nn.Module) -> Callable[[], None]:
    """Return a function that makes the buffers, such as running statistics, what they are now."""
    before = [
        (part, name, buffer, buffer.clone())
        for part in module.modules()
        for name, buffer in part.named_buffers(recurse=False)
    ]

    def restore() -> None:
        for part, name, buffer, value in before:
            # Without a trace: torch's batch normalisation leaves none either, and a buffer that seems written would no
            # longer be compared with its replicas.
            buffer.data.copy_(value)
            if part.get_buffer(name) is not buffer:
                setattr(part, name, buffer)

    return restore


@contextmanager
def leaving_buffers(module: nn.Module) -> Iterator[None]:
    """Context after which the buffers are what they were."""
    restore = buffers_of(module)
    try:
        yield
    finally:
        restore()
