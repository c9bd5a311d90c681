"""Pipeline: the axis of MeshStrategy along which each process has some of the layers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from ....core.base.errors import ConfigError, StrategyError, counted, one_of, suggest
from ....core.base.overriding import overridden
from ....core.comm.collectives import all_gather_object, group_with_this_process
from ....core.device.device import DEVICES
from ....core.model.base_model import overrides
from ....core.torch_compat.graphs_private import may_have_graphs
from ....core.torch_compat.torch_private import has_step_hooks
from ....optim.gradients import settled
from ....optim.wrapper import OptimWrapper
from ...base import EvalStep, Optim, TrainStep
from ...fsdp import choose_units
from ...lost_writes import settings_of
from ...noted import tied
from ..axis import Axis, CheckWindow, Evaluate, Layout, RunWindow
from ..config import MeshConfig
from .chain import Chain, chain_of, put_in_order, split_of, stages_of
from .orders import SCHEDULES, Schedule
from .pipeline_engine import CollectedBatch, CollectedWindow, PipelineEngine, Transfers
from .stages import StageRun

# Ties: parameters that several stages have, such as an embedding that is the output projection too.


class Ties:
    """Adds the gradients that a parameter gets on several stages, so that its copies stay equal.

    Args:
        model: the whole model, before it is cut.
        holders: returns the processes along the axis that keep a parameter, by its name.
    """

    def __init__(self, model: nn.Module, holders: Callable[[str], Iterable[int]]) -> None:
        self._first = tied(model)
        self._holders: dict[str, set[int]] = {}
        for name, _ in model.named_parameters(remove_duplicate=False):
            self._holders.setdefault(self._first.get(name, name), set()).update(holders(name))
        self._shared: list[tuple[nn.Parameter, Any]] = []

    def gather(self, model: nn.Module, layout: Layout, axis: str) -> None:
        """Make groups for the parameters that several processes of the axis have; a collective."""
        own = {self._first.get(name, name): p for name, p in model.named_parameters(remove_duplicate=False)}
        several: dict[tuple[int, ...], list[str]] = {}
        for name, holders in sorted(self._holders.items()):
            if len(holders) > 1:
                several.setdefault(tuple(sorted(holders)), []).append(name)
        for having, names in sorted(several.items()):
            group = group_with_this_process([line[i] for i in having] for line in layout.lines(axis))
            if group is not None:
                self._shared += [(own[name], group) for name in names]

    def add(self, optim: Any) -> None:
        """Replace the gradients of shared parameters by their sums over the processes that have them; a collective."""
        shared = [*self._of(optim)]
        # Summands of one stage are nothing to add to another stage's whole.
        settled(parameter for parameter, _ in shared)
        for parameter, group in shared:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            grad: Tensor = parameter.grad
            dist.all_reduce(grad.to_local() if isinstance(grad, DTensor) else grad, group=group)

    def _of(self, optim: Any) -> Iterator[tuple[nn.Parameter, Any]]:
        trained = {id(p) for group in optim.param_groups for p in group["params"]}
        return ((p, group) for p, group in self._shared if id(p) in trained and p.requires_grad)


# Settings of parameters, which a constructor gives by a stage alone.


def check_settings(optim: Optim, model: nn.Module, whole: Mapping[str, Mapping[str, str]]) -> None:
    """Compare the settings of a stage's parameters with those in the whole model, from ``settings_of``; a collective.

    Raises:
        ConfigError: on every process, if a constructor gives a parameter others, because the stage lacks the rest.
    """
    found = [
        f"{optim.wrappers[wrapper].where}.paramwise_cfg: {name} has"
        for wrapper, settings in settings_of(optim.wrappers, model).items()
        for name, text in settings.items()
        if whole[wrapper].get(name, text) != text
    ]
    if first := next(filter(None, all_gather_object(found[:1])), None):
        raise ConfigError(
            f"{first[0]} other settings in the whole model than on a process with a part of it; decide by each parameter's own name and "
            "module, and give all names of a tied one the same settings"
        )


_logger = logging.getLogger("flextrain")
_OPTIONS = ("pp_schedule", "pp_stages_per_process", "pp_layers", "pp_split")
_UPDATES = ("update_params", "scale_loss", "should_update", "should_sync", "backward")


class Pipeline(Axis):
    """The layers of a model are divided into stages; micro-batches of a window pass through them one after the other.

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021.
    """

    name = "pp"
    outer = True
    divides = True
    pairs = True

    def __init__(self, config: MeshConfig, layout: Layout) -> None:
        super().__init__(config, layout)
        self._schedule, self._each = SCHEDULES[config.pp_schedule], stages_per_process(config)
        self._chain, self._split = Chain([]), [0]
        self._engine: PipelineEngine | None = None
        self._ties: Ties | None = None
        self._settings: dict[str, dict[str, str]] = {}  # of the whole model
        self._has_warned = False

    @property
    def reports_last(self) -> bool:  # type: ignore[override]
        """Whether the last stage is on the last process."""
        return not self._schedule.is_v

    @classmethod
    def check_config(cls, config: MeshConfig) -> None:
        """See Axis."""
        given = [name for name in _OPTIONS if name in config.model_fields_set]
        if config.pp == 1:
            if given:
                raise ConfigError(f"strategy.{given[0]}: has no meaning with pp=1, give pp, or leave it out")
            return
        if config.pp_schedule not in SCHEDULES:
            raise ConfigError(
                f'strategy.pp_schedule: "{config.pp_schedule}" is not allowed, choose {one_of(SCHEDULES)}'
                f"{suggest(config.pp_schedule, SCHEDULES)}"
            )
        if SCHEDULES[config.pp_schedule].splits_backward and not hasattr(FSDPModule, "finalize_backward"):
            raise ConfigError(
                f'strategy.pp_schedule: "{config.pp_schedule}" needs FSDPModule.finalize_backward, which torch {torch.__version__} '
                f"lacks; choose {one_of(name for name, kind in SCHEDULES.items() if not kind.splits_backward)}, or a newer torch"
            )
        if SCHEDULES[config.pp_schedule].splits_backward and config.reshards:
            raise ConfigError(
                f'strategy.reshard_after_forward: is not possible with pp_schedule="{config.pp_schedule}", which computes gradients of '
                "weights later from gathered parameters; leave it out"
            )
        if config.compile and may_have_graphs(config.compile):
            raise ConfigError(
                "strategy.compile: CUDA graphs hold the activations of one micro-batch, and a pipeline runs several before their backward; "
                'give mode="default" or "max-autotune-no-cudagraphs"'
            )
        stages_per_process(config)
        for number in config.pp_split or ():
            if number < 1:
                raise ConfigError(f"strategy.pp_split: {number} is not allowed, every stage has 1 layer or more")
        if config.pp_layers is not None and not config.pp_layers:
            raise ConfigError("strategy.pp_layers: is empty, name the layers, or leave it out")

    def check(self, model: nn.Module, optim: Optim | None) -> None:
        """See Axis."""
        if overrides(model, "train_step"):
            raise StrategyError(
                f"strategy.pp: {type(model).__name__} defines its own train_step, but no process of a pipeline can run it; "
                "remove it, or give pp=1"
            )
        for wrapper in optim.wrappers.values() if optim is not None else ():
            if found := overridden(wrapper, *_UPDATES):
                raise StrategyError(
                    f"optim_wrapper: {type(wrapper).__name__}.{found[0]} would be called on the last stage of a pipeline only, if at all; "
                    "override step, or give strategy.pp=1"
                )
        if self._schedule.splits_backward and self.layout.sizes.get("tp", 1) > 1:
            raise ConfigError(
                f'strategy.pp_schedule: "{self.config.pp_schedule}" computes gradients of weights apart, which torch cannot with '
                "strategy.tp; choose gpipe, 1f1b or interleaved_1f1b"
            )
        self._settings = {} if optim is None else settings_of(optim.wrappers, model)
        self._chain = chain_of(model, self.config.pp_layers)
        if self.example is not None:
            put_in_order(self._chain, model, self.example)
        self._split = split_of(model, self._chain, self.size * self._each, self.config.pp_split)
        units = choose_units(model, self.config)
        if self.config.compile and not units:
            raise ConfigError(
                "strategy.compile: a pipeline leaves the forward of the whole model in its middle, which cannot be compiled; give "
                'strategy.wrap="blocks" to compile each'
            )
        for unit in units:
            names = [name for name in self._chain.layers if model.get_submodule(name) in unit.modules()]
            if len(names) > 1:
                raise ConfigError(
                    f"strategy.wrap: {type(unit).__name__} contains {names[0]} and {names[1]}, which may be on two stages of the "
                    "pipeline; choose modules inside of one layer"
                )
        window = min((wrapper.accumulate for wrapper in optim.wrappers.values()), default=0) if optim is not None else 0
        if 0 < window < self.size * self._each:
            _logger.warning(
                f"strategy.pp: an update has {counted(window, 'micro-batch', 'micro-batches')} for {self.size * self._each} stages, "
                "most processes wait most of the time; give accumulative_counts of several times that"
            )

    def apply(self, model: nn.Module) -> nn.Module:
        """See Axis."""
        kind = self.layout.device_type
        device = torch.device(kind) if kind == "cpu" else torch.device(kind, DEVICES[kind].module.current_device())
        own = self._schedule.stages_of(self.index, self.size, self._each)
        mixed = self.config.mixed_precision
        dtype = None if mixed is None else mixed.dtype("param_dtype")
        for name, module in model.named_modules():
            names = [layer for layer in self._chain.layers if layer.startswith(f"{name}.")]
            if len(names) > 1 and getattr(vars(module).get("forward"), "func", None) is checkpoint:
                raise StrategyError(
                    f"strategy.activation_checkpointing: {type(module).__name__} contains {names[0]} and {names[1]}, which may be on "
                    "two stages of the pipeline; choose modules inside of one layer"
                )
        run = StageRun(model, self._chain, self._split, own, device, dtype)
        self._ties = Ties(
            model,
            lambda name: (
                self._schedule.process_of(stage, self.size) for stage in stages_of(name, self._chain, run.spans)
            ),
        )
        run.cut()
        transfers = Transfers(self.layout, self.name, device)
        self._engine = PipelineEngine(
            run, self.config.pp_schedule, transfers, self.size, self._each,
            reduces_always=self.config.reduces_always,
            tensor_mesh=self.layout.over("tp") if self.layout.sizes.get("tp", 1) > 1 else None,
        )  # fmt: skip
        return model

    def finish(self, model: nn.Module, optim: Optim | None) -> None:
        """See Axis."""
        assert self._engine is not None
        assert self._ties is not None
        self._engine.finish(model)
        self._ties.gather(model, self.layout, self.name)
        if optim is not None:
            check_settings(optim, model, self._settings)
        for wrapper in optim.wrappers.values() if optim is not None else ():
            wrapper.register_step_pre_hook(self._ties.add)
            wrapper.register_step_pre_hook(self._warn_of_parts)

    def _warn_of_parts(self, optim: OptimWrapper) -> None:
        """Say once that code of the user's has the gradients of some stages, where it may take them for all."""
        own = overridden(optim, "step", "zero_grad")
        if not self._has_warned and (own or has_step_hooks(optim.optimizer)):
            self._has_warned = True
            what = (
                f"{type(optim).__name__}.{own[0]} has"
                if own
                else f"hooks of {type(optim.optimizer).__name__}.step have"
            )
            _logger.warning(
                f"{optim.where}: {what} the parameters and gradients of this process's stages only, and a norm of them is not the "
                "model's; clip_grad=dict(max_norm=...) clips by the norm of all"
            )

    def stage(self) -> int | None:
        """See Axis."""
        return None if self._engine is None else self._engine.stage

    def check_window(self, window: Sequence[Any], step: TrainStep, inner: CheckWindow) -> None:
        """See Axis."""
        assert self._engine is not None
        inner(window, step)
        self._engine.rehearse(window[0], step)

    def run_window(self, window: Sequence[Any], step: TrainStep, inner: RunWindow) -> dict[str, Tensor]:
        """See Axis."""
        assert self._engine is not None
        return inner(window, CollectedWindow(step, len(window), self._engine.run_window))

    def evaluate(self, batch: Any, step: EvalStep, inner: Evaluate) -> Any:
        """See Axis."""
        assert self._engine is not None
        return inner(batch, CollectedBatch(step, self._engine.evaluate))

    def described(self) -> str:
        """See Axis."""
        names, parts, start = self._chain.layers, [], 0
        for stage, layers in enumerate(self._split):
            process = self._schedule.process_of(stage, self.size)
            last = f" to {names[start + layers - 1]}" if layers > 1 else ""
            parts.append(f"{names[start]}{last} on {process}")
            start += layers
        return f"{self.config.pp_schedule}, {', '.join(parts)}"


def stages_per_process(config: MeshConfig) -> int:
    """Return the number of stages of each process.

    Raises:
        ConfigError: the schedule does not allow the given one.
    """
    allowed = SCHEDULES[config.pp_schedule].stages_per_process
    given = config.pp_stages_per_process
    if given is None:
        return allowed[0]
    if given in allowed[: None if allowed[-1] else -1] or (not allowed[-1] and given >= allowed[0]):
        return given
    wanted = f"{allowed[0]} or more" if not allowed[-1] else f"{allowed[0]}"
    fitting = [name for name, schedule in SCHEDULES.items() if _allows(schedule, given)]
    hint = f', or pp_schedule="{fitting[0]}"' if fitting else ""
    raise ConfigError(
        f'strategy.pp_stages_per_process: {given} is not allowed, "{config.pp_schedule}" has {wanted}; give {allowed[0]}{hint}'
    )


def _allows(schedule: Schedule, given: int) -> bool:
    allowed = schedule.stages_per_process
    return given in allowed[:1] or (not allowed[-1] and given > allowed[0])
