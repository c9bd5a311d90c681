"""Strategy: where a model lives and who talks to whom. The base class behaves as one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..core.comm.agreement import description, first_difference
from ..core.comm.model_sync import floating_buffers, share_weights
from ..core.errors import ConfigError, StrategyError
from ..core.model import BaseModel, overrides
from ..core.module_state import check_savable, check_sizes, tensor_names
from ..core.overriding import overridden
from ..core.precision import Precision, PrecisionReport, cast_parameters, dtypes, require
from ..core.transforms import checkpoint_activations, compile_in_place, module_filter
from ..optim.description import description as recipe_of
from .config import StrategyConfig
from .model_parts import spread_updates
from .names import Names
from .requirements import Needs
from .state import CanonicalState, Optim
from .steps import EvalStep, TrainStep


def kept_gradients(engine: str) -> StrategyError:
    """What ``drop_gradients`` raises where ``engine`` keeps gradients that nobody else can reach."""
    return StrategyError(
        f"train(): the last one ended in the middle of an update, of which {engine} keeps gradients; make a new runner with "
        "resume=True, or with load_from"
    )


NOTHING: AbstractContextManager[None] = nullcontext()
"""A context that changes nothing; one for all, since every micro-batch enters two."""


class Strategy(CanonicalState):
    """Spreads a model over devices and keeps its state canonical; runs alone as one device.

    Subclasses override ``_wrap``, mostly; further ``grad_sync``, ``autocast``, ``module`` and the three methods of state.
    One whose processes do not all train on data of their own says so in ``_arrange``.
    ``setup`` is called once; a strategy serves one model.

    Args:
        options: the fields of this class's ``Config``.

    Raises:
        ConfigError: an unknown or wrongly typed option.
    """

    Config: ClassVar[type[StrategyConfig]] = StrategyConfig
    needs: ClassVar[Needs] = Needs()
    short_names: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Short names for ``strategy=`` and `flextrain verify`, each with the options that it stands for; not inherited."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.precision = Precision()
        self._puts_off_sync = True  # whether grad_sync does anything, which setup finds out

    # Life

    def check(self, model: nn.Module | type[nn.Module] | None, optim: Optim) -> None:
        """Raise if this strategy cannot train such a model, or with such a wrapper; asked when a runner is made.

        Args:
            model: the module or its class; None where only a function knows it. It is not built or placed yet.
            optim: its torch optimizer is not built yet.
        """

    def init_context(self) -> AbstractContextManager[Any]:
        """Context in which the runner builds a model from a configuration; may place parameters on the meta device."""
        return nullcontext()

    def init_weights(self, model: BaseModel) -> None:
        """Have a model, as ``init_context`` left it, initialise itself; before ``setup``."""
        model.init_weights()

    def setup(self, model: nn.Module, optim: Optim | None = None) -> tuple[nn.Module, Optim | None]:
        """Give every process rank 0's weights, place and wrap the model, and build the optimizer at the right moment.

        Args:
            model: the user's module; it is changed in place and stays ``self.module``.
            optim: what an update is; None for evaluation only.

        Returns:
            What to call in place of ``model``, and the wrapper to train with (possibly another object than ``optim``).

        Raises:
            StrategyError, ConfigError: something asked for cannot be honoured; nothing is found out later.
        """
        if self._model is not None:
            raise StrategyError(f"{type(self).__name__}: setup was called before, a strategy serves one model")
        self.setup_environment()
        check_sizes(model)
        if found := first_difference(description(model, self._shape_of)):
            raise StrategyError(f"model: {found}; every process has to build the same model")
        if optim is not None:
            optim.attach(self.device, self.autocast)
            self.precision = optim.precision
        self._check_request(model, optim)
        cast_parameters(model, self.precision)
        if (recompute := self.config.activation_checkpointing) is not None:
            chooser = recompute.check_fn or recompute.classes or ()
            where = "strategy.activation_checkpointing.classes"
            if not checkpoint_activations(model, module_filter(chooser, model, where)):
                raise ConfigError("strategy.activation_checkpointing.check_fn: accepts no submodule of the model")
        self._place(model)
        self._names = Names(model)
        self._module = model
        self._model = self._wrap(model)
        if self.config.compile:
            self._compile(self._model)
        if optim is not None:
            optim.build(self.module)
            if found := first_difference(recipe_of(optim), kind=f"part {self.topology.index_in_model} of the model"):
                raise StrategyError(f"{found}; every process has to be configured alike")
            if self.topology.model is not None:
                spread_updates(optim, self.named_parameters(), self.topology, self.device)
        self.optim = optim
        self._puts_off_sync = type(self).grad_sync is not Strategy.grad_sync or bool(overridden(self, "grad_sync"))
        self._check_precision()
        if optim is not None:
            check_savable(self.module)
            self._at_setup = tensor_names(self.module)
        self._names.gather(self.module)
        return self._model, optim

    def _shape_of(self, tensor: Tensor) -> Sequence[int]:
        """The shape of a whole parameter or buffer of a model that ``init_context`` may have left in parts."""
        return tensor.shape

    def _check_request(self, model: nn.Module, optim: Optim | None) -> None:
        """Raise if this strategy cannot do what the model or the wrapper asks for."""

    def _place(self, model: nn.Module) -> None:
        """Bring the model to the device and every process to rank 0's weights."""
        model.to(self.device)
        share_weights(model)

    def _wrap(self, model: nn.Module) -> nn.Module:
        """What to call in place of ``model``, which is on the device and equal on all processes; called once."""
        return model

    def _compile(self, model: nn.Module) -> None:
        """Compile the wrapped model in place."""
        options = self.config.compile if isinstance(self.config.compile, dict) else {}
        # A model with its own train_step calls its parts; the whole is never called.
        parts = list(self.module.children()) if overrides(self.module, "train_step") else [model]
        compile_in_place(parts, options)

    def teardown(self) -> None:
        """Leave the process group, if this strategy joined it, and let go of the model; may be called again."""
        self._model = self._module = self.optim = None
        self._leave_environment()

    # Around a micro-batch

    def autocast(self) -> AbstractContextManager[None]:
        """Context for forward, in training and evaluation: autocast where the precision asks for it."""
        if not self.precision.autocast:
            return NOTHING
        return torch.autocast(self.device.type, self.precision.compute)  # type: ignore[no-any-return,unused-ignore]

    def grad_sync(self, enabled: bool) -> AbstractContextManager[None]:
        """Context for forward and backward of one micro-batch; with False, reducing gradients is put off."""
        return NOTHING

    def run_window(self, window: Sequence[Any], step: TrainStep) -> dict[str, Tensor]:
        """Forward and backward of the micro-batches of one update; the update itself comes after.

        By default one micro-batch after the other, each within ``grad_sync``.

        Args:
            window: the micro-batches, as ``split`` gave them.
            step: calls the model the way it wants to be called.

        Returns:
            What to log: 0-dim tensors by name, means over the window. On every process, also those that see no loss.
        """
        parts = []
        for i, batch in enumerate(window):
            reduces = step.begin(i)
            if self._puts_off_sync:
                with self.grad_sync(reduces):
                    parts.append(step.run(batch, i))
            else:  # entering a context that does nothing takes as long as the rest of this loop
                parts.append(step.run(batch, i))
        return step.mean(parts)

    def evaluate(self, batch: Any, step: EvalStep) -> Any:
        """What the model predicts for a batch of evaluation, as ``split`` gave it; None on processes that have no outputs.

        Those are no processes that report, see ``Topology``. By default one forward.
        """
        return step.predict(batch)

    def split(self, batch: Any) -> Any:
        """The part of a batch that this process computes with, where several share one; by default all of it.

        What ``loss_weight`` counts in the parts is added up over all processes.
        """
        return batch

    def drop_gradients(self) -> None:
        """Forget the gradients of an update that an exception has ended, because all of its micro-batches come again.

        Raises:
            StrategyError: they cannot be forgotten.
        """
        if self.optim is not None:
            self.optim.zero_grad()

    def share_buffers(self) -> None:
        """Give every process the floating-point buffers of the first part of the data; all come here before evaluation.

        Running statistics follow what a process trains on. Evaluation with those of each would depend on which process
        has which sample; DistributedDataParallel sends rank 0's before every forward for the same reason.
        """
        self.topology.data.share(floating_buffers(self.module))

    def average_buffers(self) -> None:
        """Give every process the means of the floating-point buffers over the parts of the data; all come here."""
        self.topology.data.average(floating_buffers(self.module))

    # Precision

    def precision_report(self) -> PrecisionReport:
        """The dtypes in force, read off the tensors."""
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
            masters=dtypes([m for p in trainable if self.optim and (m := self.optim.master(p)) is not p]),
            gradients=(self.precision.reduce,) if self.precision.reduce else stored,
            optimizer_state=dtypes(states),
        )

    def _check_precision(self) -> None:
        """Raise StrategyError if the tensors are not what was asked for."""
        asked, report = self.precision, self.precision_report()
        if asked.param is not None and asked.param not in report.parameters:
            require(asked.param, report.parameters, "parameters")
        if asked.autocast:
            # Autocast casts what it computes with; what is stored, and updated, has to keep its digits.
            require(torch.float32, report.masters or report.parameters, "parameters under autocast")
