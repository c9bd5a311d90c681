"""TensorParallel: the axis of MeshStrategy along which each process has a part of every matrix."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.experimental import implicit_replication

from ....core.base.errors import ConfigError, StrategyError, one_of, suggest, unchecked
from ....core.comm.agreement import gather_differing
from ....core.model.base_model import overrides, own_run_forward, takes_mode
from ....core.torch_compat.torch_private import repeating_in
from ....optim.wrapper import OptimWrapper
from ...base import EvalStep, Optim, TrainStep
from ...divided import register_divided
from ...fsdp import choose_roots
from ...sharding import check_divided
from ..axis import Axis, CheckWindow, Evaluate, Layout, RunWindow, check_torch
from ..config import MeshConfig
from ..plans import (
    check_heads_given,
    check_styles_given,
    choose_plan,
    described,
    example_of,
    nearest_rule,
    why_not_traced,
    with_globs,
)
from .local_tensors import LOCAL_ADVICE, LocalTensors, OwnPlanShards, why_not_local
from .operations import (
    DTensorFunctions,
    as_replicated,
    register_attention,
    register_cpu_attention,
    register_gathering,
    register_whole_operations,
)
from .ordinary import needs_dtensors
from .styles import (
    STYLES,
    DividedLogits,
    Style,
    as_local,
    check_float8,
    check_styles,
    distribute_model,
    of_some_dtensors,
    style_of,
)

_logger = logging.getLogger("flextrain")

# Rules of a plan: globs over module names, each with a style.


def match_rules(plan: Mapping[str, str], names: Collection[str], styles: Collection[str]) -> dict[str, str]:
    """Return the style of every module that a rule names.

    Args:
        plan: styles by glob, such as ``{"layers.*.up": "colwise"}``; a name without ``*`` is a glob too.
        names: the names of the modules.
        styles: the styles there are; a rule may add an argument, as in "packed_colwise:3".

    Raises:
        ConfigError: an unknown style, a rule that names no module, or two rules of different styles for one module.
    """
    found: dict[str, str] = {}
    by_rule: dict[str, str] = {}
    for rule, style in plan.items():
        where = f'strategy.plan["{rule}"]'
        if not isinstance(style, str):
            raise ConfigError(f"{where}: {style!r} is not allowed, give the name of a style: {one_of(styles)}")
        if style.partition(":")[0] not in styles:
            raise ConfigError(f'{where}: "{style}" is not allowed, choose {one_of(styles)}{suggest(style, styles)}')
        matching = [name for name in names if fnmatchcase(name, rule)]
        if not matching:
            raise ConfigError(f"{where}: names no module of the model{nearest_rule(rule, names)}")
        for name in matching:
            if found.setdefault(name, style) != style:
                raise ConfigError(
                    f'{where}: "{style}" for {name}, for which "{by_rule[name]}" says "{found[name]}"; give one of them'
                )
            by_rule.setdefault(name, rule)
    return found


class TensorParallel(Axis):
    """Every matrix of the plan is divided over the processes, by its rows or columns; the rest is replicated.

    Source: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", 2019.
    """

    name = "tp"
    fast = True
    _local: LocalTensors | None = None
    _own: OwnPlanShards | None = None
    _but: Mapping[str, str] = MappingProxyType({})  # modules that give others DTensors, and why
    _is_running = _is_updating = _has_logits = False

    def __init__(self, config: MeshConfig, layout: Layout) -> None:
        super().__init__(config, layout)
        self._of_call = ExitStack()  # the context of a call of the model by the user,
        self._of_backward = ExitStack()  # and of the backward that may follow it
        self._is_local = config.tp_kind == "local"
        self._verified: set[str] = set()

    @classmethod
    def check_config(cls, config: MeshConfig) -> None:
        """See Axis."""
        # A plan may stay: it says how to divide, and one process divides nothing.
        for key in ("tp_kind", "sequence_parallel", "plan_example") if config.tp == 1 else ():
            if getattr(config, key) != type(config).model_fields[key].default:
                raise ConfigError(f"strategy.{key}: has no effect with strategy.tp=1; give tp, or leave it out")
        if config.pp != 1 and config.tp_kind == "local":
            raise ConfigError(
                f'strategy.tp_kind: "local" is not possible with strategy.pp={config.pp}; choose "dtensor"'
            )
        if config.sequence_parallel and config.tp_kind == "local":
            raise ConfigError('strategy.sequence_parallel: True needs strategy.tp_kind="dtensor"')

    def check(self, model: nn.Module, optim: Optim | None) -> None:
        """See Axis."""
        self._plan = choose_plan(self.config, model, self.size, self.example)
        # Of such a model's result an update reads the loss and what else has no dimension, see Stepper.
        self._gives_loss = not (
            takes_mode(model)
            or own_run_forward(model)
            or any(overrides(model, name) for name in ("train_step", "parse_losses"))
        )
        if self._plan.own is not None:
            for key, value in (("tp_kind", "dtensor"), ("plan_example", self.config.plan_example)):
                if key in self.config.model_fields_set and getattr(self.config, key) == value is not None:
                    raise ConfigError(
                        f"strategy.{key}: has no effect on the plan of {self._plan.own.authors}, which is applied as it is; give "
                        "strategy.plan, or leave it out"
                    )
            return
        names = [name for name, _ in model.named_modules() if name]
        self._found = match_rules(self._plan.rules, names, list(STYLES))
        self._styles = {name: style_of(style, f"strategy.plan, for {name}") for name, style in self._found.items()}
        check_styles(model, self._styles, self.size)
        if self._plan.is_given:
            check_styles_given(self._found, model)
            check_heads_given(self.config, model, self._found, self.size, self.example)
        if self.config.tp_kind == "local":
            if why := why_not_local(model, self._styles, self.size):
                raise StrategyError(f"{LOCAL_ADVICE} {why}")
            if overrides(model, "train_step"):
                raise StrategyError(
                    'strategy.tp_kind: "local" is not possible with a train_step of one\'s own, choose "dtensor"'
                )
        elif self.config.tp_kind == "auto":
            self._choose_kind(model)

    def _choose_kind(self, model: nn.Module) -> None:
        """Choose what layers give each other; a collective."""
        but: dict[str, str] = {}
        batch = None
        why = self._why_dtensors(model)
        try:
            batch = None if why else example_of(self.config, model, self.example)
        except ConfigError:
            why = "there is no batch to trace the model with, strategy.plan_example"
        try:
            with repeating_in(lambda: (nullcontext(), nullcontext())):  # a model that repeats in another way raises
                but = {} if why else needs_dtensors(model, batch, self._styles, self.size)
        except Exception as error:  # a model raises anything
            why = f"the model could not be traced ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
        own: tuple[str, dict[str, str]] = (why, but)
        why, but = gather_differing(own)[0]  # samples, and so shapes, may differ
        self._is_local, self._but = not why, but
        if why:
            _logger.info(f"strategy.tp_kind: layers give each other DTensors, {why}")
        elif but:
            reasons = with_globs(but, [name for name, _ in model.named_modules()])
            says = ", ".join(f"{name} ({why})" for name, why in reasons.items())
            _logger.info(f"strategy.tp_kind: layers give each other ordinary tensors, but not these: {says}")

    def _why_dtensors(self, model: nn.Module) -> str:
        """Return why all layers have to give each other DTensors, in words; empty if that is not known yet."""
        if self.config.pp > 1:
            return "the first batch of stages cannot be compared"
        if self.config.sequence_parallel:
            return "sequence_parallel divides positions"
        if any(type(style).__module__ != Style.__module__ for style in self._styles.values()):
            return "the plan has a style of somebody else's"
        if why := why_not_traced(model):
            return f"the model {why.partition(';')[0]}"
        return why_not_local(model, self._styles, self.size)

    def apply(self, model: nn.Module) -> nn.Module:
        """See Axis."""
        check_torch(self.name)
        register_divided()
        register_attention()
        model = self._divided(model)
        check_float8(model, self.size)
        return model

    def _divided(self, model: nn.Module) -> nn.Module:
        if self._plan.own is not None:
            self._plan.own.apply(model, self.mesh)
            self._own = OwnPlanShards(model, self.mesh, self._plan.own.styles)
            self._text = described(model, self._plan.own.styles, self._plan.origin)
            self._divide_logits(model, self._plan.own.heads)
            return model
        register_gathering()
        register_whole_operations()
        if self.mesh.device_type == "cpu":
            register_cpu_attention()
        if self._is_local:
            self._local = LocalTensors(model, self.mesh, self._styles, self._but)
        else:
            distribute_model(model, self.mesh, self._styles, sequence=self.config.sequence_parallel)
        self._text = described(model, self._found, self._plan.origin)
        self._watch(model)
        return model

    def _divide_logits(self, model: nn.Module, heads: Mapping[str, str]) -> None:
        modules = dict(model.named_modules())
        for name, owner in heads.items():
            if isinstance(head := modules.get(name), nn.Linear):  # not where another stage has it
                DividedLogits(modules[owner], head, self.mesh)
                self._has_logits = True
                self._text += f"; the loss of {type(modules[owner]).__name__} takes logits divided by the vocabulary"
        if self._has_logits:
            register_gathering()
            register_whole_operations()
            self._watch(model)

    def _watch(self, model: nn.Module) -> None:
        for root in choose_roots(model):
            root.register_forward_pre_hook(self._enter, with_kwargs=True)
            root.register_forward_hook(self._leave, always_call=True)

    def described(self) -> str:
        """See Axis."""
        return self._text

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not self._is_running:  # a call by the user, outside of an update and an evaluation
            if torch.is_grad_enabled():
                self._of_call.callback(self._await_backward)
            self._of_call.enter_context(self._running())
        if self._own is not None or (self._local is not None and not self._local.is_exact):
            return None
        return as_replicated(self.mesh, args), as_replicated(self.mesh, kwargs)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        self._of_call.close()
        if self._is_updating and self._gives_loss and isinstance(output, Mapping) and "loss" in output:
            return as_local(output, but_shards=True)
        return as_local(output)

    def _await_backward(self) -> None:
        self._of_backward.close()
        self._of_backward.enter_context(implicit_replication())

    def release(self) -> None:
        """See Axis."""
        self._of_backward.close()

    def check_optimizer(self, wrapper: OptimWrapper) -> None:
        """See Axis; FSDP may give an optimizer whole rows, tensor parallelism gives it any elements of a matrix."""
        check_divided(wrapper, f"tp={self.size} divides matrices", "tp=1")

    def check_window(self, window: Sequence[Any], step: TrainStep, inner: CheckWindow) -> None:
        """See Axis."""
        if self._local is not None:
            if self._local.have_values:
                self._verify(self._local, lambda: step.forward(window[0]))
            elif self.config.tp_kind == "local":
                unchecked.warning(
                    'strategy.tp_kind: "local" was not compared with DTensors; a real run compares its first batch, and refuses a '
                    "model that reads whole widths"
                )
        with self._running():
            inner(window, step)

    def run_window(self, window: Sequence[Any], step: TrainStep, inner: RunWindow) -> dict[str, Tensor]:
        """See Axis."""
        self._is_updating = True
        try:
            with self._running():
                return inner(window, step)
        finally:
            self._is_updating = False

    def evaluate(self, batch: Any, step: EvalStep, inner: Evaluate) -> Any:
        """See Axis."""
        # A model may test by another method than it validates.
        if self._local is not None and step.mode not in self._verified:
            with torch.no_grad():
                self._verify(self._local, lambda: step.predict(batch))
            self._verified.add(step.mode)
        with self._running():
            return as_local(inner(batch, step))  # a val_step may have called parts of the model

    def _verify(self, local: LocalTensors, compute: Callable[[], Any]) -> None:
        self._is_running = True  # in contexts of its own
        try:
            local.verify(compute)
        finally:
            self._is_running = False

    @contextmanager
    def _running(self) -> Iterator[None]:
        if self._own is not None:  # its authors say where DTensors are
            context = self._own.running()
        else:
            sequence = self.config.sequence_parallel
            context = _of_dtensors(sequence=sequence) if self._local is None else self._local.running()
        self._is_running = True
        try:
            with context, of_some_dtensors() if self._has_logits else nullcontext():
                yield
        finally:
            self._is_running = False


@contextmanager
def _of_dtensors(*, sequence: bool = False) -> Iterator[None]:
    """Context in which ordinary tensors that a model makes itself, such as masks, are taken as equal on all processes."""
    with implicit_replication(), DTensorFunctions(sequence=sequence):
        yield
