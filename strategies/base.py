"""Strategy, the base class: places and wraps the model, runs its windows, gives its state. It trains on one device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from ..core.base.errors import ConfigError, StrategyError, one_of, suggest
from ..core.base.overriding import overridden
from ..core.base.registry import MODELS
from ..core.comm import collectives as dist
from ..core.comm.agreement import description, first_difference
from ..core.comm.collectives import share_weights
from ..core.comm.replica_check import ReplicaCheck
from ..core.comm.topology import DataShard, Topology
from ..core.device.precision import Precision, PrecisionReport, cast_parameters, dtypes, require
from ..core.model.base_model import BaseModel, overrides
from ..core.model.module_state import check_savable, check_sizes, check_trainable, tensor_names
from ..core.random.generators import drawing_apart
from ..optim.gradients import ModelGroup
from ..optim.schedulers import build_param_schedulers
from ..optim.wrapper import OptimWrapper
from ..optim.wrapper_dict import OptimWrapperDict, build_optim_wrapper
from ..optim.wrapper_dict import description as recipe_of
from .as_at_setup import Arranged, AsAtSetup, ParametersAsMade
from .config import Needs, StrategyConfig
from .gradient_hooks import Hooked, HooksAfterBackward, Removable
from .names import Names
from .parts.footprint import StateMemory, size_of, state_of_optimizer
from .parts.whole_weights import WholeWeights
from .recomputation import compile_in_place, recompute
from .state import Optim

# TrainStep and EvalStep: the interfaces by which a strategy calls the model, for an update or an evaluation batch.


class TrainStep(Protocol):
    """One update, for ``Strategy.run_window``.

    For every micro-batch call ``begin`` first, then either ``run``, or ``forward`` and ``backward``. A schedule may
    order the forwards and backwards of all micro-batches freely, unless the model's wrapper depends on the order:
    DistributedDataParallel needs each backward right after its forward.
    """

    shares: Sequence[float | None]
    """Factor of each micro-batch's loss, so that the sum of the gradients is that of the update; None: 1."""

    def begin(self, index: int) -> bool:
        """Announce micro-batch ``index``; return whether its backward must reduce gradients."""

    def run(self, batch: Any, index: int) -> dict[str, Tensor]:
        """Run forward and backward of a micro-batch; return its values to log, 0-dim and without a graph."""

    def prepare(self, batch: Any) -> Any:
        """Return the model's input for a micro-batch, on the device."""

    def forward(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of a micro-batch, 0-dim with its graph, computed under ``autocast``, and its values to log.

        Raises:
            StrategyError: the model defines its own ``train_step``, which combines forward and backward.
        """

    def backward(self, loss: Tensor, index: int) -> None:
        """Run backward of a loss, multiplied by its share, and by the loss scale if there is one."""

    def mean(self, parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return the window's values to log, from those that ``run`` or ``forward`` returned for its micro-batches."""


class EvalStep(Protocol):
    """One batch of evaluation, for ``Strategy.evaluate``."""

    def prepare(self, batch: Any) -> Any:
        """Return the model's input for a batch, on the device."""

    def predict(self, batch: Any) -> Any:
        """Return the predictions for a batch, by ``val_step``, ``test_step`` or ``forward``, under ``autocast``."""


# Preparation of a model, its optimizer and its schedules for a training loop of the user's own.


_LENGTHS = ("epoch_length", "max_epochs", "max_iters")


class SetsUp(Protocol):
    """The methods of a strategy that are called."""

    def setup_environment(self) -> None:
        """See ProcessEnvironment."""

    def construct(self, make: Callable[[], nn.Module]) -> nn.Module:
        """See Strategy."""

    def check(self, model: Any, optim: Any) -> None:
        """See Strategy."""

    def setup(self, model: nn.Module, optim: Any = None) -> tuple[nn.Module, Any]:
        """See Strategy."""

    def check_unchanged(self) -> None:
        """See Strategy."""


def prepare(
    strategy: SetsUp, model: Any, optim_wrapper: Any, param_scheduler: Any, dispatch_kwargs: Mapping[str, Any] | None
) -> Any:
    """See ``Strategy.prepare``."""
    lengths = dict(dispatch_kwargs or {})
    for name in lengths:
        if name not in _LENGTHS:
            hint = suggest(name, _LENGTHS) or f", choose {one_of(_LENGTHS)}"
            raise ConfigError(f"dispatch_kwargs.{name}: unknown key{hint}")
    optim = None if optim_wrapper is None else build_optim_wrapper(optim_wrapper)
    if optim is None and param_scheduler is not None:
        raise ConfigError("param_scheduler: has no meaning without optim_wrapper")
    strategy.check(model if isinstance(model, nn.Module) else None, optim)
    strategy.setup_environment()
    if not isinstance(model, nn.Module):
        given = model
        model = strategy.construct(lambda: MODELS.build(given, "model"))
    prepared, optim = strategy.setup(model, optim)
    if optim is None:
        return prepared
    for wrapper in optim.wrappers.values():  # the runner's loop checks before forward
        wrapper.register_step_pre_hook(lambda _: strategy.check_unchanged())
    if param_scheduler is None:
        return prepared, optim
    lengths = {"epoch_length": None, **lengths}
    schedulers = {
        name: build_param_schedulers(param_scheduler, wrapper, **lengths) for name, wrapper in optim.wrappers.items()
    }
    return prepared, optim, schedulers if isinstance(optim, OptimWrapperDict) else schedulers[""]


# Gradient norms and overflows of optimizers on processes that hold different parameters of one replica of a model.


def spread_updates(
    optim: OptimWrapper | OptimWrapperDict,
    parameters: Iterable[tuple[str, nn.Parameter]],
    topology: Topology,
    device: torch.device,
) -> None:
    """Combine norms, clipping and overflows over ``topology.model``; a collective of this group.

    A parameter that several processes hold, under one name or tied in the whole model, counts once. Each of them must
    have its full gradient.

    Args:
        parameters: this process's parameters, by their names in the whole model; a tied one by its first name.
    """
    names = {id(parameter): name for name, parameter in parameters}
    for wrapper in optim.wrappers.values():
        own = {
            names[id(wrapper.model_parameter(parameter))]: parameter
            for group in wrapper.param_groups
            for parameter in group["params"]
        }
        kinds = {parameter.dtype for parameter in own.values()}
        index = topology.index_in_model
        everyones = dist.all_gather_object((index, set(own), kinds), topology.model)
        before = set().union(*(names for other, names, _ in everyones if other < index))
        dtype = functools.reduce(torch.promote_types, set().union(*(kinds for *_, kinds in everyones)), torch.float32)
        elsewhere = [parameter for name, parameter in own.items() if name in before]
        wrapper.spread(ModelGroup(topology.model, elsewhere, dtype, device))


def kept_gradients(engine: str) -> StrategyError:
    """Return the error of ``drop_gradients`` for an ``engine`` whose gradients cannot be dropped from outside."""
    return StrategyError(
        f"train(): the last call ended in the middle of an update, and {engine} still has its gradients; make a new "
        "runner with resume=True, or with load_from"
    )


@contextmanager
def _within(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


NOTHING: AbstractContextManager[None] = nullcontext()
"""A context that does nothing; a single object, because every micro-batch enters two."""


class Strategy(WholeWeights):
    """Trains a model on one or many devices and gives its state in canonical form; the base class uses one device.

    Most subclasses override ``_wrap``; some also ``grad_sync``, ``autocast``, ``module`` and the three methods of
    state. If several processes train on the same data, or hold different parameters, override ``_arrange``.
    ``setup`` is called once; a strategy serves one model.

    Args:
        options: the fields of this class's ``Config``.

    Raises:
        ConfigError: an unknown or wrongly typed option.
    """

    Config: ClassVar[type[StrategyConfig]] = StrategyConfig
    needs: ClassVar[Needs] = Needs()
    short_names: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Short names for ``strategy=`` and the command line, each with its options; not inherited."""
    not_promised: ClassVar[Mapping[str, str]] = {}
    """Checks of ``check_strategy`` in which it may differ from one device, each with the reason."""
    tolerance: ClassVar[float | None] = None
    """Relative difference from one device that ``check_strategy`` counts as rounding; None: the kit's own."""
    example: Callable[[], Any] | None = None
    """Returns a batch of the data, for the shapes in it, or None; a runner sets it before ``setup``."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.precision = Precision()
        self._replica_check = ReplicaCheck()
        self._parameters: AsAtSetup | None = None
        self._gradient_hooks: list[Removable] = []  # on the user's parameters; teardown removes them
        self._puts_off_sync = True  # whether grad_sync is overridden, see setup

    # Setup and teardown

    def check(self, model: nn.Module | type[nn.Module] | None, optim: Optim) -> None:
        """Raise if this strategy cannot train this model, or with this wrapper; called when a runner is made.

        Args:
            model: the module or its class; None if only a function can build it. It is not set up yet.
            optim: the wrapper, whose torch optimizer is not built yet.
        """

    def init_context(self) -> AbstractContextManager[Any]:
        """Return the context in which the runner builds a model; parameters may be on the meta device after it."""
        return nullcontext()

    def construct(
        self, make: Callable[[], nn.Module], initialise: Callable[[nn.Module], None] | None = None
    ) -> nn.Module:
        """Return the model that ``make`` builds in ``init_context``; before ``setup``.

        Args:
            initialise: called with the model, outside of the context.
        """
        with self.init_context():
            model = make()
        if initialise is not None:
            initialise(model)
        return model

    def init_weights(self, model: BaseModel) -> None:
        """Call ``model.init_weights()`` for a model built in ``init_context``; before ``setup``."""
        model.init_weights()

    def expect_values(self, names: Collection[str]) -> None:
        """Take note of parameters that nothing has initialised, because their values are read after ``setup``.

        Called between ``init_context`` and ``setup``. By default nothing: only who keeps parameters without memory has to know.

        Args:
            names: of parameters and buffers, in the user's model.
        """

    def change_context(self, model: nn.Module, state: Tensor) -> AbstractContextManager[Any]:
        """Return the context in which a transform changes a model that ``init_context`` or the user gave; before ``setup``.

        Args:
            model: the module as it is so far.
            state: that of torch's generator on the CPU from which it draws, so that it draws the same under every strategy.
        """
        return _within(drawing_apart(state), self._context_like(model))

    def _context_like(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return the context in which parameters are made like those of a model that was not set up yet."""
        return NOTHING

    def setup(self, model: nn.Module, optim: Optim | None = None) -> tuple[nn.Module, Optim | None]:
        """Give every process rank 0's weights, place and wrap the model, and build the optimizer; a collective.

        Args:
            model: the user's module; it is changed in place and stays ``self.module``.
            optim: the wrapper to train with; None for evaluation only.

        Returns:
            The module to call instead of ``model``, and the wrapper to train with, which may be another object than
            ``optim``.

        Raises:
            StrategyError, ConfigError: a setting is not possible; all such errors are raised here, none later.
        """
        if self._model is not None:
            raise StrategyError(f"{type(self).__name__}: setup was called before, a strategy serves one model")
        self.setup_environment()
        check_sizes(model)
        if found := first_difference(description(model, self.shape_of)):
            raise StrategyError(f"model: {found}; every process has to build the same model")
        if optim is not None:
            optim.attach(self.device, self.autocast)
            self.precision = optim.precision
        if optim is not None and self.topology.model is None:  # otherwise another process may have what is trained
            check_trainable(model)
        self._check_request(model, optim)
        self._note_blueprint(model, self.shape_of)
        as_made = ParametersAsMade(model, self.shape_of)
        cast_parameters(model, self.precision)
        if self.config.activation_checkpointing is not None:
            recompute(model, self.config.activation_checkpointing, trains=optim is not None)
        self._place(model)
        self._names = Names(model)
        self._module = model
        self._model = self._wrap(model)
        hooked = as_made.give(self.module, type(self).__name__, self.topology)
        if self._blueprint is not None:
            self._blueprint.follow()
        if self.config.compile:
            self._compile(self._model)
        if optim is not None:
            optim.build(self.module)
            if found := first_difference(recipe_of(optim), kind=f"part {self.topology.index_in_model} of the model"):
                raise StrategyError(f"{found}; every process has to be configured alike")
            if self.topology.model is not None:
                spread_updates(optim, self.named_parameters(), self.topology, self.device)
            if hooked and self._averaged_over().count > 1:
                self._call_hooks(hooked, optim)
        self.optim = optim
        self._puts_off_sync = type(self).grad_sync is not Strategy.grad_sync or bool(overridden(self, "grad_sync"))
        self._check_precision()
        if optim is not None:
            self._parameters = AsAtSetup(lambda: self.module, self._arranged())
            check_savable(self.module, self.left_out())
            self._at_setup = tensor_names(self.module)
        self._names.gather(self.module)
        return self._model, optim

    def prepare(
        self,
        model: nn.Module | Mapping[str, Any] | type[nn.Module],
        *,
        optim_wrapper: Any = None,
        param_scheduler: Any = None,
        dispatch_kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Set up a model for a loop of one's own, without a runner, as MMEngine's method of this name; a collective.

        The runner calls ``setup``. In the loop, ``update_params(loss)`` of the wrapper counts micro-batches itself.

        Args:
            model: a module, ``dict(type=...)`` or a class.
            optim_wrapper: the wrapper to train with, or its configuration.
            param_scheduler: one or a list, for every optimizer.
            dispatch_kwargs: ``dict(epoch_length=..., max_epochs=..., max_iters=...)``, for schedulers without an end.

        Returns:
            The module to call; with ``optim_wrapper`` a tuple of it and the wrapper; with ``param_scheduler`` also the
            list of schedulers, by name for several optimizers.

        Raises:
            StrategyError, ConfigError: a setting is not possible.
        """
        return prepare(self, model, optim_wrapper, param_scheduler, dispatch_kwargs)

    def shape_of(self, tensor: Tensor) -> Sequence[int]:
        """Return the whole shape of a parameter or buffer of the model, which may be sharded since ``init_context``."""
        return tensor.shape

    def _check_request(self, model: nn.Module, optim: Optim | None) -> None:
        """Raise if this strategy does not support the model, or the settings of the wrapper."""

    def _arranged(self) -> Arranged:
        """Return which changes of parameters after set-up training would miss, and why; called when the model is wrapped."""
        return Arranged()

    def _place(self, model: nn.Module) -> None:
        """Move the model to the device, and give every process rank 0's weights."""
        model.to(self.device)
        share_weights(model)

    def _wrap(self, model: nn.Module) -> nn.Module:
        """Return the module to call instead of ``model``, which is on the device and equal on all processes."""
        return model

    def _averaged_over(self) -> DataShard:
        """Return the processes over which gradients are averaged, also those of parameters that the strategy leaves whole."""
        return self.topology.data

    def _call_hooks(self, hooked: Mapping[str, Hooked], optim: Optim) -> None:
        """See to it that gradient hooks of users get means over the processes; with several of them."""
        hooks = HooksAfterBackward(hooked, self._averaged_over())
        for wrapper in optim.wrappers.values():
            hooks.register(wrapper)
        self._gradient_hooks.append(hooks)

    def _compile(self, model: nn.Module) -> None:
        """Compile the wrapped model in place."""
        options = self.config.compile if isinstance(self.config.compile, dict) else {}
        # A model with its own train_step calls its submodules; forward of the whole model is never called.
        parts = list(self.module.children()) if overrides(self.module, "train_step") else [model]
        compile_in_place(parts, options)

    def teardown(self) -> None:
        """Leave the process group, if this strategy joined it, and drop the model; may be called again."""
        for handle in self._gradient_hooks:
            handle.remove()
        self._gradient_hooks.clear()
        self._model = self._module = self.optim = self._blueprint = self._parameters = None
        self._leave_environment()

    # Around a micro-batch

    def autocast(self) -> AbstractContextManager[None]:
        """Return the context for forward, in training and evaluation: autocast if the precision needs it."""
        if not self.precision.autocast:
            return NOTHING
        return torch.autocast(self.device.type, self.precision.compute)  # type: ignore[no-any-return,unused-ignore]

    def grad_sync(self, enabled: bool) -> AbstractContextManager[None]:
        """Return the context for forward and backward of a micro-batch; it reduces gradients only if ``enabled``."""
        return NOTHING

    def check_window(self, window: Sequence[Any], step: TrainStep) -> None:
        """Raise StrategyError for a model that this strategy would train wrongly; once, for the window of the first update.

        Called before the hooks of that update. Nothing of it remains: no gradient, no state, no random number.
        """

    def run_window(self, window: Sequence[Any], step: TrainStep) -> dict[str, Tensor]:
        """Run forward and backward of the micro-batches of one update, but not the update itself.

        By default one micro-batch after the other, each within ``grad_sync``.

        Args:
            window: the micro-batches, as returned by ``split``.
            step: the interface to call the model.

        Returns:
            Values to log: 0-dim tensors by name, means over the window. On every process, also those without loss.
        """
        parts = []
        for i, batch in enumerate(window):
            reduces = step.begin(i)
            if self._puts_off_sync:
                with self.grad_sync(reduces):
                    parts.append(step.run(batch, i))
            else:  # entering an empty context takes as long as the rest of this loop
                parts.append(step.run(batch, i))
        return step.mean(parts)

    def evaluate(self, batch: Any, step: EvalStep) -> Any:
        """Return the predictions for an evaluation batch that ``split`` returned; None on processes without outputs.

        Processes without outputs do not report metrics, see ``Topology``. By default one forward.
        """
        return step.predict(batch)

    def split(self, batch: Any) -> Any:
        """Return this process's shard of a batch, if several processes share one; by default the whole batch.

        The ``loss_weight`` of the shards is summed over all processes.
        """
        return batch

    def for_rehearsal(self) -> Strategy | None:
        """Return the strategy that a plan executes in place of this one; None if a plan is not possible.

        By default itself, or None if ``needs.processes`` says that its ranks must be real processes. Such a strategy can
        return one with the same options that makes the tensors and calls the collectives of a rank by formula, as plain
        operations of torch, and that has a method ``tell(listen)``: ``listen(kind, tensors)`` is to be called with what the memory of
        tensors is for. Plans say that it is so.
        """
        return None if self.needs.processes else self

    def explain(self, error: BaseException) -> str | None:
        """Return what to do about an error that follows from how the model is spread; None if it does not."""
        try:
            self.check_unchanged()
        except StrategyError as changed:
            return str(changed)
        return None

    def check_unchanged(self) -> None:
        """Raise StrategyError if parameters were changed since ``setup`` in a way that training would miss; before every update."""
        if self._parameters is not None:
            self._parameters.check()

    def drop_gradients(self) -> None:
        """Drop the gradients of an update that an exception has ended: all of its micro-batches will be repeated.

        Raises:
            StrategyError: the gradients cannot be dropped.
        """
        if self.optim is not None:
            self.optim.zero_grad()

    def check_replicas(self) -> dict[str, Tensor]:
        """Compare what several processes hold replicas of, bit for bit; a collective. Every save does it first.

        Compared are ``replicas()`` with those of all processes that hold the same, and buffers that nothing has written
        since the last check: others, such as running statistics, are each process's own. The host waits once for the
        device.

        Returns:
            The tensors that were compared, by name.

        Raises:
            DivergenceError: on every process, if replicas differ; it names a tensor and the ranks.
        """
        if self.topology.is_alone:
            return {}
        return self._replica_check.check(self.replicas(), dict(self.module.named_buffers()))

    # Memory and precision

    def state_memory(self) -> StateMemory:
        """Return the bytes of the parameters, gradients and optimizer state that this process keeps; after ``setup``.

        They follow from shapes and dtypes: nothing is computed on the device, and no process waits for another.
        """
        kept = {id(tensor): tensor for tensor in (*self.module.parameters(), *self.module.buffers())}
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        wrappers = self.optim.wrappers.values() if self.optim is not None else ()
        states = [state_of_optimizer(wrapper.optimizer) for wrapper in wrappers]
        masters = [master for p in trained if self.optim is not None and (master := self.optim.master(p)) is not p]
        elsewhere = {p.device.type for p in trained} - {self.device.type}
        return StateMemory(
            parameters=sum(map(size_of, kept.values())),
            gradients=sum(map(size_of, trained)) if self.optim is not None else 0,
            optimizer_state=None
            if None in states
            else sum(state or 0 for state in states) + sum(map(size_of, masters)),
            note="kept in host memory" if elsewhere == {"cpu"} else "",
        )

    def precision_report(self) -> PrecisionReport:
        """Return the dtypes in use, read from the tensors."""
        trainable = [p for p in self.module.parameters() if p.requires_grad]
        stored = dtypes(trainable)
        compute = self.precision.compute
        states = [
            value
            for _, wrapper, parameter, _ in self._optimized()
            for value in wrapper.optimizer.state.get(parameter, {}).values()
            if isinstance(value, Tensor) and value.dim() > 0
        ]
        return PrecisionReport(
            compute=(compute,) if self.precision.autocast and compute is not None else stored,
            parameters=stored,
            masters=dtypes([m for p in trainable if self.optim is not None and (m := self.optim.master(p)) is not p]),
            gradients=(self.precision.reduce,) if self.precision.reduce else stored,
            optimizer_state=dtypes(states),
        )

    def _check_precision(self) -> None:
        """Raise StrategyError if the tensors do not have the dtypes of ``precision``."""
        asked, report = self.precision, self.precision_report()
        if asked.param is not None and asked.param not in report.parameters:
            require(asked.param, report.parameters, "parameters")
        if asked.autocast:
            # Autocast casts for computation only; stored parameters must stay in float32 for accurate updates.
            require(torch.float32, report.masters or report.parameters, "parameters under autocast")
