"""Rehearsal: the forward of a whole model without memory, to see whether its layers can be computed by several processes."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ....core.errors import FlexTrainError, StrategyError
from ....core.random_state import kept_random_state
from ....core.rehearsing import aside, mode_without_values
from ....core.torch_private import tree_flatten, version_of
from ....core.trees import tree_map_only
from .chain import Chain
from .following import Following, Plan, note, right_on


def kind_of(values: Any, *others: Hashable) -> Hashable:
    """Return what a rehearsal depends on: everything of the arguments but sizes and contents of tensors."""
    leaves, shape = tree_flatten(values)
    return tuple(_described(leaf, False) for leaf in leaves), str(shape), others


def signature_of(values: Any, *others: Hashable) -> Hashable | None:
    """Return what shapes depend on: everything of the arguments but contents of tensors; None if it cannot be told."""
    leaves, shape = tree_flatten(values)
    if any(not isinstance(leaf, (Tensor, bool, int, float, str, type(None))) for leaf in leaves):
        return None
    return tuple(_described(leaf, True) for leaf in leaves), str(shape), others


def _described(leaf: Any, sizes: bool) -> Hashable:
    if isinstance(leaf, Tensor):
        return (leaf.dtype, tuple(leaf.shape) if sizes else leaf.ndim)
    found: Any = leaf if isinstance(leaf, (bool, int, float, str, type(None))) else type(leaf)
    return found  # type: ignore[no-any-return]


class Rehearsal:
    """Runs a copy of the whole model without memory, once for each kind of arguments, the same on every process.

    Every tensor is followed to the parameters from which it was computed. It is right on the stages that have all of these,
    and on the stage that it is sent to. What a layer or the result needs has to be right where it is computed.

    Args:
        model: the whole model, before it is cut.
        chain: its layers.
        spans: first layer, and first layer after it, of every stage.
        device: on which the model computes.
        dtype: in which FSDP computes; None: that of the parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        chain: Chain,
        spans: Sequence[tuple[int, int]],
        device: torch.device,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._chain, self._spans, self._device = chain, spans, device
        self._mode = mode_without_values()
        self._name = type(model).__name__
        self._common: list[tuple[nn.Module, str, str]] = []  # saved buffers of every stage: module, key, name
        self._whole = self._without_memory(model, dtype)
        self._layers = [self._whole.get_submodule(name) for name in chain.layers]
        self._plans: dict[Hashable, Plan] = {}
        self._plan = Plan()
        self._stand_ins: dict[Hashable, Any] = {}
        self._passed_over: set[type[nn.Module]] = set()

    @aside()
    def _without_memory(self, model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
        memo: dict[int, Any] = {}
        for tensor in (*model.parameters(), *model.buffers()):
            memo[id(tensor)] = torch.empty_like(tensor, device="meta")
            if isinstance(tensor, nn.Parameter):
                memo[id(tensor)] = nn.Parameter(memo[id(tensor)], tensor.requires_grad)
        try:
            whole = copy.deepcopy(model, memo)
        except Exception as error:  # a model may hold anything
            reason = " ".join(str(error).split())
            raise StrategyError(
                f"strategy.pp: {self._name} cannot be copied, which cutting it needs ({reason})"
            ) from error
        saved = whole.state_dict().keys()
        made: dict[int, nn.Parameter] = {}
        stages = range(len(self._spans))
        for path, module in whole.named_modules():
            every = frozenset(self._stages_of(path, stages))
            tensors = [*module.named_parameters(recurse=False, remove_duplicate=False)]
            for key, parameter in tensors:
                name = f"{path}.{key}".lstrip(".")
                if id(parameter) not in made:
                    floating = dtype is not None and parameter.is_floating_point()
                    fake = self._fake(parameter, dtype if floating else None)
                    made[id(parameter)] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
                found = made[id(parameter)]
                held = (
                    every if every != frozenset(stages) or name not in self._chain.own else frozenset({0, max(stages)})
                )
                note(found, (right_on(found) or frozenset()) | held, name)
                setattr(module, key, found)
            for key, buffer in [*module.named_buffers(recurse=False, remove_duplicate=False)]:
                fake = self._fake(buffer, None)
                name = f"{path}.{key}".lstrip(".")
                note(fake, every, name)
                if every == frozenset(stages) and name in saved:
                    self._common.append((module, key, name))
                setattr(module, key, fake)
        return whole

    def _stages_of(self, path: str, stages: range) -> Sequence[int]:
        for names, stage in ((self._chain.before, 0), (self._chain.after, stages[-1])):
            if any(path == name or path.startswith(f"{name}.") for name in names):
                return [stage]
        for number, name in enumerate(self._chain.layers):
            if path == name or path.startswith(f"{name}."):
                return [self._stage_of(number)]
        return stages

    def _stage_of(self, layer: int) -> int:
        return next(stage for stage, (start, end) in enumerate(self._spans) if start <= layer < end)

    def _fake(self, like: Tensor, dtype: torch.dtype | None) -> Tensor:
        with self._mode:
            return torch.empty(like.shape, dtype=dtype or like.dtype, device=self._device)

    # One rehearsal

    def plan(self, args: Any, kwargs: Any, training: bool) -> Plan:
        """Return what is known of calls with such arguments; the first time, run the whole model.

        Raises:
            StrategyError: the model's forward cannot be cut between its layers.
        """
        kind = kind_of((args, kwargs), training, torch.is_grad_enabled(), torch.is_autocast_enabled(self._device.type))
        if kind not in self._plans:
            self._plan = self._rehearse(args, kwargs, training)
            self._plans[kind] = self._plan
        self._plan = self._plans[kind]
        return self._plan

    @aside()
    def _rehearse(self, args: Any, kwargs: Any, training: bool) -> Plan:
        self._whole.train(training)
        before = [(getattr(module, key), version_of(getattr(module, key))) for module, key, _ in self._common]
        args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), (args, kwargs))
        learns = torch.is_grad_enabled()
        while True:
            following = Following(self._chain, self._spans)
            try:
                with (
                    torch.set_grad_enabled(learns),
                    kept_random_state(self._device),
                    self._watched(following),
                    following,
                ):
                    result = self._whole(*args, **kwargs)
                break
            except FlexTrainError:
                raise
            except Exception as error:  # the model's own code
                if self._pass_over(following.path):
                    continue
                if learns:  # it may read values in updates only, to count samples in a buffer
                    learns = False
                    continue
                reason = " ".join(str(error).split())
                raise StrategyError(
                    f"strategy.pp: the forward of {self._name} cannot be followed through its layers, {type(error).__name__}: "
                    f"{reason}"
                ) from error
        following.check_result(result, self._name)
        for (module, key, name), (buffer, version) in zip(self._common, before, strict=True):
            if getattr(module, key) is not buffer or version_of(buffer) != version:
                raise StrategyError(
                    f"strategy.pp: the forward of {self._name} changes the buffer {name}, which every stage has a copy of and would "
                    "change as often as it runs; keep it in a submodule that forward calls, or change it in a hook"
                )
        return following.plan

    def _pass_over(self, path: Sequence[nn.Module]) -> bool:
        """Take the innermost module that fails, and all of its class, for one that gives what looks like its first argument.

        Shapes inside of some, such as experts, depend on values. Return False if there is none inside of a layer.
        """
        inside = [module for module in path[1:] if type(module) not in self._passed_over]
        if not inside:
            return False
        self._passed_over.add(type(inside[-1]))
        return True

    @contextmanager
    def _watched(self, following: Following) -> Iterator[None]:
        handles: list[Any] = []
        for number, layer in enumerate(self._layers):

            def enter(module: nn.Module, args: Any, kwargs: Any, number: int = number) -> None:
                following.enter(number, args, kwargs)

            def leave(module: nn.Module, args: Any, output: Any, number: int = number) -> None:
                following.leave(number, output)

            handles += [
                layer.register_forward_pre_hook(enter, with_kwargs=True),
                layer.register_forward_hook(leave),
            ]
            for part in layer.modules():
                handles += [
                    part.register_forward_pre_hook(lambda module, _: following.path.append(module)),
                    part.register_forward_hook(lambda *_: following.path.__delitem__(-1)),
                ]
                if type(part) in self._passed_over:
                    part.forward = partial(following.pass_over, part)
        for name in (*self._chain.before, *self._chain.after):
            part = self._whole.get_submodule(name)
            handles += [
                part.register_forward_pre_hook(partial(following.enter_part, name)),
                part.register_forward_hook(following.leave_part),
            ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for part in self._whole.modules():
                if type(part) in self._passed_over:
                    vars(part).pop("forward", None)

    # Stand-ins

    def changes_shape(self, layer: int) -> bool:
        """Return whether a layer gives another shape or dtype than it gets."""
        return layer in self._plan.changes

    def as_given(self, layer: int, value: Tensor) -> Any:
        """Return a tensor in the form in which a layer returns it; what else it returned is None."""
        length = self._plan.forms.get(layer, 0)
        return (value, *[None] * (length - 1)) if length else value

    def stand_in(self, name: str, args: Any, kwargs: Any) -> Any:
        """Return what a submodule would give for arguments of these shapes, with NaN in it, which takes no memory if it is contiguous."""
        key = signature_of((name, args, kwargs), torch.is_autocast_enabled(self._device.type))
        if key is None or key not in self._stand_ins:
            with aside(), kept_random_state(self._device), torch.no_grad():
                fake = self._whole.get_submodule(name)(*args, **kwargs)
            self._stand_ins[key] = tree_map_only(Tensor, self._form, fake)
        return tree_map_only(_Form, lambda form: form.unknown(self._device), self._stand_ins[key])

    def attribute(self, name: str, key: str) -> Any:
        """Return an attribute of a submodule that another process has; for a tensor NaN, as ``stand_in`` gives it.

        A rehearsal has seen where the values of such tensors are needed, and that is not here: a branch that a later batch
        takes, and that needs them, gives NaN and no wrong number.

        Returns:
            NotImplemented for a submodule, which has attributes itself.

        Raises:
            AttributeError: there is none, or it is something to call.
        """
        found = getattr(self._whole.get_submodule(name), key)
        if isinstance(found, nn.Module):
            return NotImplemented
        if callable(found):
            raise AttributeError(self.elsewhere(f"{name}.{key}", name))
        return tree_map_only(Tensor, lambda tensor: self._form(tensor).unknown(self._device), found)

    def elsewhere(self, used: str, name: str) -> str:
        """Return what to say of a call that the stage under way cannot make."""
        return (
            f"strategy.pp: {self._name} uses {used} where another stage has {name}; let its forward do this, or call it where that "
            "stage computes"
        )

    @staticmethod
    def _form(tensor: Tensor) -> _Form:
        return _Form(tuple(tensor.shape), tensor.dtype, None if tensor.is_contiguous() else tuple(tensor.stride()))


@dataclass(frozen=True)
class _Form:
    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...] | None

    def unknown(self, device: torch.device) -> Tensor:
        value = torch.nan if self.dtype.is_floating_point or self.dtype.is_complex else 0
        if self.strides is not None:  # numbers are drawn in the order of memory
            return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device).fill_(value)
        return torch.full((), value, dtype=self.dtype, device=device).expand(self.shape)
