"""ExpertBiasHook: keeps the experts of mixtures equally busy by a bias of their routers, without an auxiliary loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ...core.base.errors import ConfigError, StrategyError, nearest, suggest
from ...core.base.registry import HOOKS
from ...core.comm.agreement import gather_differing, raising_together
from ...core.comm.collectives import all_reduce
from ...core.hugging_face.transformers_private import biased_routers, pretrained_models
from ...core.model.module_state import tensor_names
from ...core.torch_compat.torch_private import has_values, in_backward
from ...strategies.parts import averaged_over, computed_with, left_out, take_written
from .ema import Follows

if TYPE_CHECKING:
    from ..run import Run

# ExpertLoads: how often each expert is chosen in an update, counted on the device.


class ExpertLoads:
    """The choices of several routers, as integers, which add up to the same in any order.

    Args:
        sizes: number of experts of each router.
        device: where they are counted.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self._sizes = torch.tensor(sizes, device=device).unsqueeze(1)
        self._widest = max(sizes)
        # One row for each router; the last column counts choices that were dropped.
        self._counts = torch.zeros(len(sizes), self._widest + 1, dtype=torch.int64, device=device)

    def add(self, row: int, ids: Tensor, counted: Tensor | None) -> None:
        """Add the choices of a router.

        Args:
            row: number of the router.
            ids: integers of shape (..., k): for each token k experts. One that is no expert's number is a dropped choice.
            counted: of as many elements as there are tokens, 0 where one does not count; None: all count.
        """
        choices = ids.shape[-1] if ids.dim() > 1 else 1
        ids = ids.reshape(-1).to(torch.int64)
        is_dropped = (ids < 0) | (ids >= self._sizes[row])
        weights = torch.ones_like(ids)
        if counted is not None:
            weights = (counted.reshape(-1) != 0).to(torch.int64).repeat_interleave(choices)
        self._counts[row].scatter_add_(0, torch.where(is_dropped, self._widest, ids), weights)

    def clear(self) -> None:
        """Begin a new update."""
        self._counts.zero_()

    def take(self) -> Tensor:
        """Return the counts, of shape (routers, experts + 1), and begin a new update."""
        counts = self._counts.clone()
        self.clear()
        return counts

    def directions(self, counts: Tensor) -> Tensor:
        """Return for each expert 1 if it has less than the mean of its router, -1 if it has more, else 0."""
        loads = counts[:, :-1]
        return torch.sign(loads.sum(1, keepdim=True) - self._sizes * loads)

    def imbalance(self, counts: Tensor) -> Tensor:
        """Return the largest load over the mean load, of the router where this is largest; 1 is perfect balance."""
        loads = counts[:, :-1]
        mean = loads.sum(1).clamp(min=1) / self._sizes[:, 0]
        return (loads.amax(1) / mean).max()

    def dropped(self, counts: Tensor) -> Tensor:
        """Return the share of all choices that were dropped."""
        return counts[:, -1].sum() / counts.sum().clamp(min=1)


# Find the routers, and read what they choose.


@dataclass(frozen=True)
class _Router:
    """A router of this process.

    Attributes:
        name, module: what chooses.
        bias_name: the name of what is added to its scores.
        bias: that tensor, as the model computes with it.
        choice: reads the choice from an output.
        is_parameter: the bias is a frozen parameter, and no buffer.
    """

    name: str
    module: nn.Module
    bias_name: str
    bias: Tensor
    choice: Callable[[Any], Any]
    is_parameter: bool

    def chosen(self, output: Any, args: Any, *, is_first: bool) -> Tensor:
        """Return the choice in an output.

        Args:
            output: of the router.
            args: of its forward.
            is_first: of the run; what a function of the user's gives may be looked at then.

        Raises:
            ConfigError: there is none.
        """
        found = self.choice(output)
        if not _is_integer(found) or not found.dim():
            given = (
                f"a {found.dtype} of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            )
            raise ConfigError(f"choice gave {given}, return a tensor of integers with the chosen experts of each token")
        if self.choice is _of_transformers or not self._has_a_column_for_each_expert(found, args):
            return found  # type: ignore[no-any-return]
        given = (
            f"integers of shape {tuple(found.shape)} for {self.bias.numel()} experts, which look like a mask or counts"
        )
        if self.choice is choice_in:
            raise ConfigError(
                f"its output has {given}; return the numbers of the chosen experts, or give choice=function of the output"
            )
        if is_first and has_values(found) and not _are_all_numbers(found):
            raise ConfigError(f"choice gave {given}; return the numbers of the chosen experts")
        return found  # type: ignore[no-any-return]

    def _has_a_column_for_each_expert(self, found: Tensor, args: Any) -> bool:
        experts = self.bias.numel()
        if experts == 1 or not found.dim() or found.shape[-1] != experts:
            return False
        given = args[0] if args and isinstance(args[0], Tensor) else None
        # A vector is right if there are so many tokens.
        return found.dim() > 1 or (given is not None and given.dim() > 1 and given.shape[:-1].numel() != experts)


def choice_in(output: Any) -> Tensor:
    """Return the only tensor of integers in the output of a router.

    Raises:
        ConfigError: there is none, or there are several.
    """
    parts: Iterable[Any] = output if isinstance(output, (tuple, list)) else [output]
    found = [part for part in (output.values() if isinstance(output, Mapping) else parts) if _is_integer(part)]
    if len(found) != 1:
        raise ConfigError(
            f"its output has {len(found) or 'no'} {'tensors' if len(found) > 1 else 'tensor'} of integers; return the chosen "
            "experts as one, or give choice=function of the output"
        )
    return found[0]  # type: ignore[no-any-return]


def _are_all_numbers(ids: Tensor) -> bool:
    """Whether each token has chosen every expert, once."""
    return torch.equal(
        ids.sort(-1).values, torch.arange(ids.shape[-1], device=ids.device).to(ids.dtype).expand(ids.shape)
    )


def _of_transformers(output: Any) -> Tensor:
    if isinstance(output, Tensor) and output.is_floating_point():
        raise ConfigError("this version of transformers chooses experts outside of its router; update transformers")
    return choice_in(output)


def _is_integer(value: Any) -> bool:
    whole = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)
    return isinstance(value, Tensor) and value.dtype in whole


@HOOKS.register_module()
class ExpertBiasHook(Follows):
    """Keeps the experts of mixtures equally busy by a bias, which their routers add to the scores when they choose.

    After every update that was made the bias of an expert that was chosen less often than the mean of its mixture grows by
    ``update_speed``, and that of one that was chosen more often falls. Choices are counted over all micro-batches of the update
    and all processes with other tokens, once where backward computes a forward again, and only in training. Nothing waits for
    the device. The bias is part of the model, and so of checkpoints; the hook has no state.

    Routers are found in models of transformers, such as DeepSeek-V3, GLM-4-MoE, Ernie 4.5 and LFM2. In a model of one's own, a
    router is a module that has the bias, a buffer or frozen parameter with an element for each expert called ``bias``, and whose
    forward returns the choice: one tensor of integers of shape (tokens..., k), or (tokens,) for one expert each, alone or among
    other outputs. The number of no expert, such as -1, is a choice that was dropped because an expert had no room.

    The log has ``load_max_over_mean``, the largest load of an expert over the mean of its mixture, for the mixture where it is
    largest, and for models of one's own ``dropped_tokens``, the share of choices that were dropped.

    Args:
        update_speed: the step of the bias. The papers give 0.001, and for the end of training 0.
        bias: name of the bias in routers of one's own.
        choice: function of a router's output that returns the choice, for routers of one's own; default: see above.
        mask: the argument of the model's forward that is 0 for tokens which do not count, of shape (batch, length), if a batch has
            it; None: all tokens count.

    Raises:
        ConfigError: an argument is not allowed, or has no effect; before training, if the model has no such router, the optimizer trains a
            bias, two routers have the same one, or two hooks the same router; at the first batch, if a router's output has no choice, or a
            mask or counts in its place, or the mask has not an element for each of its tokens; after it, if no router was called.
        StrategyError: the strategy keeps a bias in half precision, in which steps are lost, or does not let it be written.

    Source: Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", 2024; DeepSeek-AI, "DeepSeek-V3
    Technical Report", 2024.
    """

    priority = "ABOVE_NORMAL"  # before the logger and checkpoints

    def __init__(
        self,
        update_speed: float = 1e-3,
        bias: str = "expert_bias",
        choice: Callable[[Any], Tensor] | None = None,
        mask: str | None = "attention_mask",
    ) -> None:
        speed: Any = update_speed
        if isinstance(speed, bool) or not isinstance(speed, (int, float)) or not 0 <= speed < 1:
            raise ConfigError(
                f"ExpertBiasHook.update_speed: {update_speed!r} is not allowed, give a number from 0 to below 1"
            )
        for key, value in (("bias", bias), *((("mask", mask),) if mask is not None else ())):
            given: object = value
            if not isinstance(given, str) or not given.isidentifier():
                raise ConfigError(f"ExpertBiasHook.{key}: {value!r} is not allowed, give a name")
        if choice is not None and not callable(choice):
            raise ConfigError(
                f"ExpertBiasHook.choice: {choice!r} is not allowed, give a function of the router's output"
            )
        self.update_speed, self.bias, self.choice, self.mask = float(update_speed), bias, choice, mask
        self._routers: list[_Router] = []
        self._loads: ExpertLoads | None = None
        self._last: Tensor | None = None
        self._left: Tensor | None = None  # counts since the last update, if windows without one came after it
        self._handles: list[Any] = []
        self._run: Run | None = None  # while an update is under way
        self._counted: Any = None  # the mask of the micro-batch under way
        self._repetitions = 0
        self._called: set[int] | None = set()  # rows of routers whose forward ran; None once there was an update

    @property
    def loads(self) -> dict[str, Tensor]:
        """How often each expert was chosen in the last update, by the router's name; on the device, int64."""
        if self._last is None:
            return {}
        return {router.name: row[: router.bias.numel()] for router, row in zip(self._routers, self._last, strict=True)}

    def before_run(self, runner: Run) -> None:
        """Find the routers.

        Raises:
            ConfigError, StrategyError: see the class.
        """
        with raising_together():
            self._routers = self._find(runner)
        if not any(gather_differing(bool(self._routers))):
            names = {name.rpartition(".")[2] for name, _ in runner.strategy.module.named_buffers()}
            raise ConfigError(
                f'ExpertBiasHook.bias: no router of transformers has a bias, and no module of the model a "{self.bias}"'
                f"{suggest(self.bias, names)}"
            )
        self._check_effects()
        self._writes_parameters = any(gather_differing(any(router.is_parameter for router in self._routers)))
        self._tokens = averaged_over(runner.strategy)

    def _check_effects(self) -> None:
        """Raise ConfigError if all routers are those of transformers, and an argument is for others."""
        self._may_drop = any(gather_differing(any(router.choice is not _of_transformers for router in self._routers)))
        if self._may_drop:
            return
        names = {"expert_bias", *(router.bias_name.rpartition(".")[2] for router in self._routers)}
        is_known = any(gather_differing(self.bias in names))  # of a router on another stage, maybe
        if self.choice is not None or not is_known:
            key = "bias" if self.choice is None else "choice"
            raise ConfigError(
                f"ExpertBiasHook.{key}: has no effect, all routers with a bias are those of transformers; leave it out"
            )

    def before_train(self, runner: Run) -> None:
        """Begin to watch the routers."""
        self._leave()
        self._called = set()
        device = runner.strategy.device
        self._loads = ExpertLoads([router.bias.numel() for router in self._routers] or [1], device)
        self._imbalances = runner.message_hub.history("train/load_max_over_mean")
        self._shares = runner.message_hub.history("train/dropped_tokens") if self._may_drop else None
        for row, router in enumerate(self._routers):
            self._handles.append(router.module.register_forward_hook(partial(self._count, row)))
        if self.mask is not None:
            for outer, parameters in _forwards(runner.strategy.module):
                names = [*parameters]
                self._handles.append(outer.register_forward_pre_hook(partial(self._note_mask, names), with_kwargs=True))

    def before_train_iter(self, runner: Run, batch_idx: int, data_batch: Any = None) -> None:
        """Begin to count."""
        super().before_train_iter(runner, batch_idx, data_batch)
        self._run = runner

    def _follow(self, runner: Run) -> None:
        """Move the biases, if an update was made; a window without one counts in the next, as its gradients do."""
        assert self._loads is not None, "before_train makes it"
        self._run = self._counted = None
        if self._called is not None:
            with raising_together():
                if self._routers and not self._called:
                    raise ConfigError(
                        f"ExpertBiasHook: {self._routers[0].name} was not called in an update, so that what it chooses is not known; call "
                        "it, or give the bias to the module whose forward returns the choice"
                    )
            self._called = None
        optim = runner.optim_wrapper
        counts = self._tokens.sum(self._loads.take())
        self._last = counts = counts if self._left is None else counts + self._left
        self._left = None if optim is None or optim.has_stepped or optim.has_updated else counts
        if optim is not None and optim.has_updated:
            self._move(runner, self._loads.directions(counts))
        imbalance, dropped = self._loads.imbalance(counts), self._loads.dropped(counts)
        if (stages := runner.strategy.topology.model) is not None:
            imbalance, dropped = all_reduce(torch.stack([imbalance, dropped]), "max", stages).unbind()
        self._imbalances.put(imbalance)
        if self._shares is not None:
            self._shares.put(dropped)

    def after_train(self, runner: Run) -> None:
        """Leave the model as it was built."""
        self._leave()

    def on_exception(self, runner: Run, exception: BaseException) -> None:
        """Leave the model as it was built."""
        self._leave()

    def _leave(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._run, self._counted, self._left = [], None, None, None

    @torch.no_grad()
    def _move(self, runner: Run, directions: Tensor) -> None:
        if not self.update_speed:
            return
        for router, row in zip(self._routers, directions, strict=False):
            step = row[: router.bias.numel()].view(router.bias.shape).to(router.bias.dtype)
            if isinstance(router.bias, DTensor):  # every process has the whole step
                mesh, placements = router.bias.device_mesh, router.bias.placements
                step = distribute_tensor(step, mesh, placements, src_data_rank=None)
            router.bias.add_(step, alpha=self.update_speed)
        if self._writes_parameters:
            take_written(runner.strategy, [router.bias_name for router in self._routers if router.is_parameter])

    # What the model does while an update is under way

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _note_mask(self, names: Sequence[str], module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        if self._run is None or in_backward():
            return
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        self._counted = None if self.mask is None else given.get(self.mask)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _count(self, row: int, module: nn.Module, args: Any, output: Any) -> None:
        run = self._run
        if run is None or in_backward():
            return
        is_first = self._called is not None and row not in self._called
        if self._called is not None:
            self._called.add(row)
        if run.stepper.is_filler(run.stepper.micro_batch):
            return
        try:
            ids = self._routers[row].chosen(output, args, is_first=is_first)
        except ConfigError as error:
            raise ConfigError(f"ExpertBiasHook.choice: {self._routers[row].name}, {error}") from None
        if isinstance(ids, DTensor):
            ids = ids.full_tensor()
        if not has_values(ids):
            return
        tokens, mask = ids.shape[:-1].numel() if ids.dim() > 1 else ids.numel(), self._counted
        if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2 and mask.numel() == tokens):
            given = f"has shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else f"is {type(mask).__name__}"
            raise ConfigError(
                f"ExpertBiasHook.mask: {self.mask} {given}, and {self._routers[row].name} chooses for {tokens} tokens, so that it does "
                "not say which of them count; give mask=None to count all"
            )
        assert self._loads is not None
        if run.stepper.repetitions != self._repetitions:  # the window is run again, see ReplayHook
            self._repetitions = run.stepper.repetitions
            self._loads.clear()
        self._loads.add(row, ids.detach(), mask)

    # Before training

    def _find(self, runner: Run) -> list[_Router]:
        strategy, module = runner.strategy, runner.strategy.module
        modules, biases = dict(module.named_modules()), biased_routers(module)
        choices: dict[str, Callable[[Any], Any]] = dict.fromkeys(biases, _of_transformers)
        known = set(biases.values())
        for name, part in modules.items():
            own = f"{name}.{self.bias}" if name else self.bias
            if isinstance(getattr(part, self.bias, None), Tensor) and own not in known:
                biases[name], choices[name] = own, self.choice or choice_in
        self._check_mask(module)
        _check_shared(module, biases.values())
        buffers, parameters = dict(module.named_buffers()), computed_with(strategy)
        trained = {name for name, parameter in strategy.parameters() if parameter.requires_grad}
        found, saved = [], tensor_names(module)
        for name, bias_name in biases.items():
            if bias_name in trained:
                raise ConfigError(
                    f"ExpertBiasHook.bias: {bias_name} is trained by the optimizer; make it a buffer, or freeze it: requires_grad_(False)"
                )
            if bias_name in left_out(strategy):
                raise ConfigError(
                    f"strategy.exclude_frozen_parameters: leaves {bias_name} out of checkpoints, but it changes in training, see "
                    "ExpertBiasHook; give False"
                )
            if bias_name not in saved:
                raise ConfigError(
                    f"ExpertBiasHook.bias: {bias_name} is in no checkpoint, register it with persistent=True"
                )
            is_parameter = bias_name not in buffers
            bias = parameters[bias_name] if is_parameter else buffers[bias_name]
            found.append(_Router(name, modules[name], bias_name, bias, choices[name], is_parameter))
            self._check(found[-1])
        others = (hook for hook in runner.hooks if isinstance(hook, ExpertBiasHook) and hook is not self)
        if twice := {router.bias_name for hook in others for router in hook._routers} & {*biases.values()}:
            raise ConfigError(f"ExpertBiasHook: {min(twice)} is moved by another ExpertBiasHook already, leave one out")
        return found

    def _check_mask(self, module: nn.Module) -> None:
        """Raise ConfigError if no forward of the model has the argument; the usual one may be absent."""
        if self.mask in (None, "attention_mask"):
            return
        names, takes_any = set[str](), False
        for _, parameters in _forwards(module):
            names |= parameters.keys()
            takes_any |= any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        if self.mask not in names and (not takes_any or nearest(str(self.mask), names, 0.8)):
            raise ConfigError(
                f'ExpertBiasHook.mask: {type(module).__name__}.forward has no argument "{self.mask}"{suggest(str(self.mask), names)}'
            )

    def _check(self, router: _Router) -> None:
        bias = router.bias
        if bias.numel() < 2:
            raise ConfigError(
                f"ExpertBiasHook.bias: {router.bias_name} is of shape {tuple(bias.shape)}, give it one element for each expert"
            )
        if type(bias) not in (Tensor, nn.Parameter, DTensor):
            raise StrategyError(
                f"ExpertBiasHook.bias: the strategy has {router.bias_name} as {type(bias).__name__}, which cannot be moved; make it "
                "a buffer, or choose another strategy"
            )
        if bias.dtype not in (torch.float32, torch.float64):
            raise StrategyError(
                f"ExpertBiasHook.bias: {router.bias_name} is {str(bias.dtype).removeprefix('torch.')}, in which steps of "
                f"{self.update_speed} are lost; keep it in float32"
            )


def _forwards(module: nn.Module) -> list[tuple[nn.Module, Mapping[str, inspect.Parameter]]]:
    """The modules that may be given a mask, with the arguments of their forward: the model, and those of transformers in it."""
    return [
        (outer, inspect.signature(outer.forward).parameters) for outer in {module, *pretrained_models(module).values()}
    ]


def _check_shared(module: nn.Module, biases: Iterable[str]) -> None:
    """Raise ConfigError if two of the biases are one tensor."""
    tensors = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    seen: dict[int, str] = {}
    for name in biases:
        if name in tensors and (other := seen.setdefault(id(tensors[name]), name)) != name:
            raise ConfigError(f"ExpertBiasHook.bias: {name} is {other} too; give each router a bias of its own")


__all__ = ["ExpertBiasHook"]
