"""Activation checkpointing and compilation of a model's parts."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..core.base.errors import ConfigError, suggest
from ..core.device.precision import running_statistics
from ..core.hugging_face.transformers_private import train_without_cache
from ..core.model.module_state import buffers_of, leaving_buffers
from ..core.torch_compat.torch_private import in_backward, version_of
from .config import ActivationCheckpointing

# Activation checkpointing and compilation of a module in place: parameter names do not change.


_LISTED = 12  # so many classes of a model are listed in a message


def checkpoint_activations(
    module: nn.Module,
    check_fn: Callable[[nn.Module], bool],
    every: int = 1,
    around: Callable[[Callable[..., Any], nn.Module], Callable[..., Any]] | None = None,
    **options: Any,
) -> list[str]:
    """Apply activation checkpointing to the outermost submodules that ``check_fn`` accepts; return their names.

    It replaces the submodule's ``forward`` instead of wrapping the submodule, so that no name changes. Buffers that forward writes
    to, such as running statistics, are written once, and backward computes with those that forward began with.

    Args:
        every: the first of each so many accepted submodules is taken.
        around: returns the new forward of a submodule, from the old one; None: ``torch.utils.checkpoint.checkpoint`` of it.
        options: of ``torch.utils.checkpoint.checkpoint``.

    Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016.
    """
    chosen: dict[str, nn.Module] = {}
    for name, submodule in module.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in chosen)
        if name and not inside and check_fn(submodule):
            chosen[name] = submodule
    names = [*chosen][::every]
    for submodule in map(chosen.__getitem__, names):
        forward, buffers = submodule.forward, _BuffersOfCalls(submodule)
        has_any = any(True for _ in submodule.buffers())
        keeping = functools.partial(_keeping_buffers, forward, submodule) if has_any else forward
        usual = submodule.forward = _repeatable(keeping, submodule, around, options)
        if buffers.names:
            submodule.forward = functools.partial(_with_buffers, usual, forward, buffers, submodule, around, options)
    return names


def _repeatable(
    forward: Callable[..., Any],
    module: nn.Module,
    around: Callable[..., Callable[..., Any]] | None,
    options: dict[str, Any],
) -> Callable[..., Any]:
    if around is not None:
        return around(forward, module)
    return functools.partial(checkpoint, forward, use_reentrant=False, **options)


def _with_buffers(
    usual: Callable[..., Any],
    forward: Callable[..., Any],
    buffers: _BuffersOfCalls,
    module: nn.Module,
    around: Callable[..., Any] | None,
    options: dict[str, Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call ``forward`` so that backward may repeat it with the buffers of this call; what is compiled repeats no writing."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return usual(*args, **kwargs)
    return _repeatable(functools.partial(buffers.run, forward, []), module, around, options)(*args, **kwargs)


class _BuffersOfCalls:
    """The buffers of a module that its forward may compute with: all but running statistics, which training only writes to.

    Attributes:
        names: of these buffers.
    """

    def __init__(self, module: nn.Module) -> None:
        statistics = running_statistics(module)
        self._module = module
        self._changes: dict[bool, bool] = {}  # in training mode or not, as far as it was called so
        self.names = [name for name, _ in module.named_buffers() if name not in statistics]

    def run(self, forward: Callable[..., Any], begin: list[Callable[[], None]], *args: Any, **kwargs: Any) -> Any:
        """Call ``forward``; when backward repeats it, with the buffers of the first time, which are put back afterwards.

        Args:
            begin: empty at the first time, which adds what sets the buffers to those that it begins with.
        """
        if in_backward():
            with leaving_buffers(self._module):
                for restore in begin:
                    restore()
                return forward(*args, **kwargs)
        mode = self._module.training
        is_copied = self._changes.get(mode, True)  # a forward that changes nothing needs no memory
        begin += [buffers_of(self._module)] if is_copied else []
        before = self._versions()
        result = forward(*args, **kwargs)
        if self._versions() != before:
            if not is_copied:
                _logger.warning(
                    f"{_WHERE}: {type(self._module).__name__} changes buffers in forward, and has not done so before; backward of this one "
                    "computes with the changed ones, later ones with those that forward began with"
                )
            self._changes[mode] = True
        elif mode not in self._changes:
            self._changes[mode] = False
            begin.clear()
        return result

    def _versions(self) -> list[tuple[int, int]]:
        return [(id(buffer), version_of(buffer)) for buffer in map(self._module.get_buffer, self.names)]


def _keeping_buffers(forward: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call ``forward``; when backward repeats it, running statistics and counts stay as the first call has left them."""
    if torch.compiler.is_compiling() or not in_backward():  # what is compiled repeats no writing
        return forward(*args, **kwargs)
    with leaving_buffers(module):
        return forward(*args, **kwargs)


def module_filter(
    classes: Iterable[str] | Callable[[nn.Module], bool], module: nn.Module, where: str
) -> Callable[..., bool]:
    """Return a ``check_fn`` for class names such as ``["Bottleneck"]``; a callable is returned as it is.

    Raises:
        ConfigError: no submodule has a class of this name.
    """
    if callable(classes):
        return classes
    names = set(classes)
    known = {type(submodule).__name__ for submodule in module.modules()}
    for name in sorted(names - known):
        more = ", ..." if len(known) > _LISTED else ""
        there = f"the model has {', '.join(sorted(known)[:_LISTED])}{more}"
        hint = suggest(name, known)
        raise ConfigError(f'{where}: no submodule is a "{name}"{f"{hint} T{there[1:]}" if hint else f"; {there}"}')
    return lambda submodule: type(submodule).__name__ in names


def compile_in_place(modules: Iterable[nn.Module], options: dict[str, Any]) -> None:
    """Compile the call of each module, with options of ``torch.compile``; names do not change.

    Raises:
        ConfigError: a module makes logits that are not computed before the loss.
    """
    from ..core.model.logits import is_deferred  # a run that compiles nothing does without

    for module in modules:
        if any(map(is_deferred, module.modules())):
            raise ConfigError(
                f"strategy.compile: {type(module).__name__} has a ChunkedLoss, which cannot be compiled with the model; leave one out, "
                'or let FSDP compile the blocks alone, by strategy.wrap="blocks"'
            )
        module.compile(**options)
        if any(True for _ in module.buffers()):
            from ..core.torch_compat.backward_private import call_first_by
            from .lost_writes import tell_of_buffers

            call_first_by(module, functools.partial(tell_of_buffers, module))


_logger = logging.getLogger("flextrain")
_WHERE = "strategy.activation_checkpointing"
_SWITCHES = ("activation_checkpointing_enable", "gradient_checkpointing_enable", "set_grad_checkpointing")
"""Of transformers from 5.2x on, of transformers and diffusers before, and of timm."""


def recompute(
    model: nn.Module, how: ActivationCheckpointing | Literal["model"], *, trains: bool, device: torch.device
) -> None:
    """Let backward compute activations again, in place.

    Args:
        model: before it is wrapped.
        how: the option of the strategy.
        device: where the model computes.
        trains: whether the model is trained; a model of transformers then has no cache of keys and values.

    Raises:
        ConfigError: nothing is chosen, or the model has no switch of its own.
    """
    if how == "model":
        _by_own_switch(model)
    else:
        options: dict[str, Any] = {}
        pack = around = None
        # What most runs do without is imported where it is needed.
        if how.offload:
            from .offloading import Offloading

            offloading = Offloading(device)
            pack = offloading.pack
        if how.policy is not None:
            from .selective import contexts_for

            options["context_fn"] = contexts_for(how.policy, pack)
        if how.offload:
            run = functools.partial(checkpoint, use_reentrant=False, **options) if how.recompute else _called

            def around(forward: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
                return functools.partial(offloading.call, forward, module, run)

        if not checkpoint_activations(model, _chooser(how, model), how.every, around, **options):
            raise ConfigError(f"{_WHERE}.check_fn: accepts no submodule of the model")
    if trains and (names := train_without_cache(model)):
        _logger.info(
            f"{_WHERE}: {' and '.join(names)} trains with use_cache=False, because layers that are computed again would add to the "
            "cache of keys and values a second time"
        )


def _called(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)


def _chooser(how: ActivationCheckpointing, model: nn.Module) -> Callable[[nn.Module], bool]:
    if how.check_fn is not None or how.classes is not None:
        return module_filter(how.check_fn or how.classes or (), model, f"{_WHERE}.classes")
    blocks = set(repeated_blocks(model))
    if not blocks:
        raise ConfigError(f"{_WHERE}.classes: missing, {type(model).__name__} has no repeated blocks to take without")
    return blocks.__contains__


def _by_own_switch(model: nn.Module) -> None:
    switched: list[str] = []
    for name, module in model.named_modules():
        inside = any(not outer or name.startswith(f"{outer}.") for outer in switched)
        switch = next((one for one in _SWITCHES if callable(getattr(module, one, None))), None)
        if switch is not None and not inside:
            _switch_on(module, switch)
            _keep_buffers(module)
            switched.append(name)
    if not switched:
        raise ConfigError(
            f'{_WHERE}: "model" needs a model with gradient_checkpointing_enable, which {type(model).__name__} does not have; '
            "give dict(classes=[...])"
        )


def _keep_buffers(model: nn.Module) -> None:
    """Let each module with buffers leave them in backward as they are: what a model's own switch computes again is not known."""
    for part in model.modules():
        if any(True for _ in part.buffers(recurse=False)) and not isinstance(part, torch.jit.ScriptModule):
            part.forward = functools.partial(_keeping_buffers, part.forward, part)


def _switch_on(module: Any, switch: str) -> None:
    try:
        if switch == "set_grad_checkpointing":
            module.set_grad_checkpointing(True)
        elif switch == "activation_checkpointing_enable":
            module.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
        else:
            module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    except (ValueError, TypeError, AssertionError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f'{_WHERE}: "model" is refused by {type(module).__name__}, {reason}') from error
    # Without re-entrance, inputs need no gradients; with frozen embeddings they would only cost time.
    if hasattr(module, "disable_input_require_grads") and getattr(module, "_require_grads_hook", None) is not None:
        module.disable_input_require_grads()


# The repeated blocks of a model: its layers, as they are gathered, divided or counted one by one.


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the outermost submodules, with children, that a ModuleList or Sequential has several of, by class."""
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for container in model.modules():
        if isinstance(container, (nn.ModuleList, nn.Sequential)) and container not in inside:
            kinds = [type(child) for child in container]
            blocks = [c for c in container if kinds.count(type(c)) > 1 and any(True for _ in c.children())]
            found += blocks
            inside.update(part for block in blocks for part in block.modules())
    return [block for block in found if any(True for _ in block.parameters())]
