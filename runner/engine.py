"""Engine: forward, backward and updates of a model under a strategy, for programs that own their loop."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..core.base.errors import ConfigError, StrategyError
from ..core.checkpoint import as_path
from ..core.checkpoint.foreign.download import local_copy
from ..core.device.host_copies import HostCopies
from ..core.hugging_face.pretrained import describe, pretrained_in
from ..core.model.base_model import module_to_set_up, run_forward
from ..core.model.batch_keys import input_keys
from ..core.model.module_state import modes_of
from ..core.random.generators import draw_seed, set_seed
from ..optim.schedulers.replay import set_value, value_of
from ..optim.wrapper import OptimWrapper
from ..optim.wrapper_dict import OptimWrapperDict, build_optim_wrapper
from ..strategies.base import Strategy
from ..strategies.build import build_strategy
from ..strategies.parts import cannot_switch, check_initialised, expect_values, kept_tensors, meet
from .config import model_class
from .hooks import HookDispatcher
from .loops.losses import Weighing
from .loops.step import Stepper
from .options import Resume
from .parts import build_model
from .reporting import MessageHub
from .resume import run_state
from .resume.publish import Target, check_dtype, check_target, publish
from .resume.weights import ToRead, read_pretrained

LossFunction = Callable[[Any, Any], Any]
"""``loss_fn(output, batch)``: of what the model's forward gave, and the batch on the device."""


class _FunctionStepper(Stepper):
    """A Stepper that may be given a function of the model's output, in place of the model's own loss and predictions."""

    def __init__(self, strategy: Strategy, model: nn.Module, optim: OptimWrapper | None) -> None:
        super().__init__(strategy, model, optim)
        self._of_model = self._losses, self.weighing
        self._function: LossFunction | None = None
        self._weighing: tuple[Any, Weighing] | None = None  # of the last function, which warns once
        self._for_output = {"mode": "tensor"} if self.takes_mode else {}
        self._taken: Callable[[Any], Any] = input_keys(self.module)

    def train_by(self, loss_fn: LossFunction | None, loss_weight: Callable[[Any], Any] | None) -> None:
        """Compute losses by a function, whose result is a mean of ``loss_weight(batch)`` items; None: by the model."""
        self._losses, self.weighing = self._of_model
        self._function = loss_fn
        if loss_fn is None:
            return
        self.weighing = None
        if loss_weight is not None:
            if self._weighing is None or self._weighing[0] is not loss_weight:
                made = Weighing(loss_weight, self.strategy.device, self.strategy.topology, where="loss_weight")
                self._weighing = loss_weight, made
            self.weighing = self._weighing[1]

    def predict_by(self, output_fn: LossFunction | None) -> None:
        """Give what a function makes of outputs; None: the outputs."""
        self._function = output_fn

    def cuts(self, batch: Any) -> bool:
        """Whether this process gets a part of a batch that is given to it."""
        return self._split is not None and self._split(batch) is not batch

    def forward(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """See TrainStep."""
        if self._function is not None:
            batch = self._to_device(batch, True)
            self._losses = partial(self._losses_of_function, batch)
            batch = self._input(batch)
        return super().forward(batch)

    def _losses_of_function(self, batch: Any, data: Any) -> tuple[Tensor, Mapping[str, Tensor]]:
        assert self._function is not None
        result = self._function(self._output(data), batch)
        values = {"loss": result} if isinstance(result, Tensor) else result
        if not isinstance(values, Mapping) or "loss" not in values:
            gave = (
                f"a dict with {', '.join(map(str, values)) or 'nothing'}"
                if isinstance(values, Mapping)
                else kind_of(values)
            )
            raise ConfigError(f"loss_fn: gave {gave}, return the loss, or a dict with loss and other values to log")
        for name, value in values.items():
            if not isinstance(value, Tensor) or value.dim():
                raise ConfigError(
                    f"loss_fn: {name} is {kind_of(value)}, return tensors without dimensions, such as a mean"
                )
        return values["loss"], values

    def _predict(self, batch: Any, mode: str) -> Any:
        batch = self._to_device(batch, False)
        data = self.preprocess(self._input(batch), False)
        with self.strategy.autocast():
            output = self._output(data)
            return output if self._function is None else self._function(output, batch)

    def _input(self, batch: Any) -> Any:
        # A preprocessor's arguments are others than those of forward.
        return batch if self.has_preprocessor else self._taken(batch)

    def _output(self, data: Any) -> Any:
        if self._own_forward is not None:
            return self._own_forward(data, "tensor")
        return run_forward(self.model, self._taken(data), **self._for_output)


def kind_of(value: Any) -> str:
    """What a value is, in words for a message."""
    return f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


class _AsRun:
    """An engine as saving and loading see it: a run that has neither data nor hooks nor schedules."""

    by_epoch, data, hooks, config_text, experiment_name = False, None, (), "", "engine"
    logger = logging.getLogger("flextrain")

    def __init__(self, engine: Engine, hugging_face: Any) -> None:
        self.strategy, self.optim_wrapper, self.seed = engine.strategy, engine.optim_wrapper, engine.seed
        self.hugging_face = hugging_face
        self.message_hub, self.hook_calls = MessageHub(topology=engine.strategy.topology), HookDispatcher()
        self.late_parameters: list[str] = []
        self.schedulers: dict[str, list[Any]] = {"": []} if self.optim_wrapper is not None else {}
        self.iter = self._epoch = self._validated = 0

    @property
    def train_loop(self) -> _AsRun:
        """Where training stands."""
        return self

    def call_hook(self, fn_name: str) -> None:
        """There are none."""

    def state_dict(self) -> dict[str, int | None]:
        """As of a training loop at the beginning of an epoch."""
        return {"epoch": self._epoch, "iter": self.iter, "inner": 0, "left": None, "validated": self._validated}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from where a run was; an epoch that it had begun begins anew."""
        self.iter, self._validated = state["iter"], state["validated"]
        self._epoch = state["epoch"] + (state["left"] == 0)


@dataclass(frozen=True, eq=False)
class TrainingCopy:
    """What one training has made of a model, see ``Engine.switch``; a copy, which never changes."""

    _engine: Engine
    _progress: Mapping[str, Any]
    _calls: int
    _has_gradients: bool
    _tensors: Mapping[str, Tensor]  # of this process: trained parameters and persistent buffers
    _gradients: Mapping[str, Tensor]
    _optimizer: Mapping[str, Any]  # in canonical form
    _plain_values: dict[str, Any]

    @property
    def iter(self) -> int:
        """Its updates so far."""
        return int(self._progress["iter"])


class Engine:
    """Trains a model step by step under any strategy, for programs that own their loop: reinforcement learning, notebooks, services.

    It calls what the runner's loop calls: autocast, reduction of gradients, accumulation, weights of losses, clipping and loss
    scaling are the strategy's and the optimizer wrapper's, and an update is the runner's, bit for bit. Every process makes the same
    calls in the same order, each with its own batches: ``strategy.topology.shard`` is (index, count) of its share of the data, and
    processes of one index, as under tensor parallelism, give the same batch.

    Args:
        model: a module, ``dict(type=...)``, or a function without arguments that returns a module.
        strategy: a Strategy, ``dict(type=...)``, a name, or None: one device for one process, DDP for several.
        optim_wrapper: as the runner's, with one optimizer and without ``accumulative_counts``: the calls say what an update consists
            of. None: for ``forward`` only.
        seed: of Python's, NumPy's and torch's random numbers, equal on all processes; None: they are left as they are.

    Attributes:
        strategy, model, optim_wrapper, seed: what was built; ``model`` may be the strategy's wrapper around the module.

    Raises:
        ConfigError, StrategyError: a setting is not possible, or the update cannot be separated from forward and backward, because
            the model has its own ``train_step``, or the wrapper its own ``update_params``.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module] | Mapping[str, Any],
        strategy: Strategy | Mapping[str, Any] | str | type[Strategy] | None = None,
        optim_wrapper: Any = None,
        *,
        seed: int | None = None,
    ) -> None:
        self.strategy = build_strategy(strategy)
        optim: Any = None if optim_wrapper is None else build_optim_wrapper(optim_wrapper)
        _check_wrapper(optim)
        self._is_closed, self._is_torn, self._is_checked, self._has_gradients = False, False, False, False
        self._calls = 0  # of forward_backward since the last update
        self._memory: HostCopies | None = None
        self._is_asleep = self._is_mixed = False
        if optim is not None:
            self.strategy.check(model_class(model), optim)
        try:
            self.strategy.join()
            meet(self.strategy, "Engine()")
            self.seed = draw_seed() if seed is None else set_seed(seed, topology=self.strategy.topology)
            self._set_up(model, optim)
        except BaseException:
            self.strategy.leave()
            raise

    def _set_up(self, given: Any, optim: Any) -> None:
        strategy, trains = self.strategy, optim is not None
        whole = build_model(given, None, strategy, for_training=trains)
        description, pretrained = None, list[ToRead]()
        if "transformers" in sys.modules:  # what makes a model of transformers has imported it
            description = describe(whole)  # before a strategy changes the configuration
            pretrained = [ToRead(source, whole) for source in pretrained_in(whole)]
        expect_values(strategy, {name for part in pretrained for name in part.names.values()})
        self.model, optim = strategy.setup(module_to_set_up(whole, trains=trains), optim)
        _check_wrapper(optim)
        self.optim_wrapper: OptimWrapper | None = optim
        self._stepper = _FunctionStepper(strategy, self.model, optim)
        if self._stepper.updates_itself:
            kind = type(strategy.module if self._stepper.custom_train else optim)
            method = "train_step" if self._stepper.custom_train else "update_params, scale_loss or should_update"
            raise ConfigError(
                f"Engine: {kind.__name__} defines its own {method}, which makes the update, and optim_step() has to; remove it, or train "
                "with FlexibleRunner"
            )
        self._run = cast(Any, _AsRun(self, description))
        for part in pretrained:
            read_pretrained(self._run, part)
        if optim is not None:
            self.model.train()
            groups, base = optim.param_groups, optim.optimizer.defaults.get("lr")
            self._rates = [value_of(group, "lr") / float(base) if base else 1.0 for group in groups]

    @property
    def iter(self) -> int:
        """Updates made or skipped so far, counted as a runner does."""
        return int(self._run.iter)

    # An update

    def forward_backward(
        self,
        batch: Any = None,
        loss_fn: LossFunction | None = None,
        *,
        window: Sequence[Any] | None = None,
        loss_weight: Callable[[Any], Any] | None = None,
    ) -> dict[str, Tensor]:
        """Run forward and backward of a micro-batch, or of several; a collective.

        The gradients of several calls before ``optim_step`` add up. Those of a ``window`` are the mean over its micro-batches, as in
        a window of the runner: two calls have the gradients of a window of two if each loss is divided by 2. A window also is
        faster on several processes, which reduce gradients once, and a pipeline needs it to be full.

        Args:
            batch: a micro-batch, as a dataloader gives it; a mapping is passed by name. What forward does not take is left out.
            loss_fn: ``loss_fn(output, batch)`` gives the loss, 0-dim, or a dict with ``loss`` and other 0-dim tensors to return. ``output``
                is what forward gives, under ``mode="tensor"`` if it has a mode, and ``batch`` the whole batch on the device. It is called
                under autocast, on the processes that have the output. None: the model's own loss.
            window: several micro-batches in place of ``batch``.
            loss_weight: ``loss_weight(batch)``, the number of items, such as tokens, of which the result of ``loss_fn`` is a mean. All items
                of the call then count the same, on every process, as with the model's ``loss_weight`` for its own loss. None: all
                micro-batches count the same.

        Returns:
            0-dim tensors on the device without graph: ``loss`` and the other values, means over the window on this process.
            ``strategy.topology.data.mean(value)`` is the mean over processes, of a copy: it writes into the tensor.

        Raises:
            ConfigError: neither or both of ``batch`` and ``window`` are given, or ``loss_fn`` gives no loss.
            StrategyError: the call comes in the wrong order, or the strategy gives each process a part of the batch and
                ``loss_fn`` would see that.
        """
        self._check("forward_backward")
        if self.optim_wrapper is None:
            raise ConfigError("optim_wrapper: missing, Engine.forward_backward() needs it")
        given: Any = window  # a batch by mistake would be taken apart
        if (batch is None) == (given is None) or not (given is None or (isinstance(given, Sequence) and given)):
            raise ConfigError("Engine.forward_backward: give a batch, or window=[...] with one or more")
        if loss_weight is not None and loss_fn is None:
            raise ConfigError(
                "Engine.forward_backward.loss_weight: has no meaning without loss_fn, define it in the model"
            )
        batches = [batch] if window is None else list(window)
        self._refuse_parts("loss_fn", loss_fn, batches[0])
        self._stepper.train_by(loss_fn, loss_weight)
        self._is_torn = True
        if not self._is_checked:
            self._stepper.check(batches)
            self._is_checked = True
        outputs = self._stepper.forward_backward(batches)
        self._stepper.keep_gradients()
        self._is_torn = False
        self._calls += 1
        if outputs is None:  # nothing in it counts
            return {"loss": torch.zeros((), device=self.strategy.device)}
        self._has_gradients = True
        return outputs

    def optim_step(self, lr: float | None = None) -> Tensor | None:
        """Unscale and clip the gradients, update the parameters, and drop the gradients; a collective.

        Args:
            lr: learning rate from now on; a group whose rate differs from the optimizer's, by ``paramwise_cfg``, keeps its ratio. None: as it is.

        Returns:
            The norm of all gradients before clipping, 0-dim on the device, which the host does not wait for. None without
            ``clip_grad=dict(max_norm=...)``; ``max_norm=float("inf")`` clips nothing. ``optim_wrapper.last_step.skipped`` tells whether
            the update was skipped, because a gradient overflowed or no item of any call counted.

        Raises:
            ConfigError: ``lr`` is below 0.
            StrategyError: there was no ``forward_backward`` since the last update, or it has failed.
        """
        self._check("optim_step")
        if not self._calls:
            raise StrategyError("Engine.optim_step(): there are no gradients, call forward_backward() first")
        assert self.optim_wrapper is not None
        if lr is not None:
            if not lr >= 0:
                raise ConfigError(f"Engine.optim_step.lr: {lr} is not allowed, give 0 or more")
            for group, ratio in zip(self.optim_wrapper.param_groups, self._rates, strict=True):
                set_value(group, "lr", lr * ratio)
        self._is_torn = True
        if self._has_gradients:
            self._stepper.optim_step()
        else:
            self._stepper.leave_out()
        self._forget_update()
        self._run.iter += 1
        return self.optim_wrapper.last_step.grad_norm

    def abort_update(self) -> None:
        """Drop the gradients of all calls since the last update; also after a call has failed.

        Raises:
            StrategyError: the strategy cannot drop them, as FSDP and DeepSpeed; make another engine and load a checkpoint.
        """
        self._check("abort_update", torn=True)
        self.strategy.abort_update()
        self._forget_update()

    def _forget_update(self) -> None:
        self._calls, self._has_gradients, self._is_torn = 0, False, False

    # Outputs

    @torch.no_grad()
    def forward(self, batch: Any, output_fn: LossFunction | None = None) -> Any:
        """Return the model's outputs for a batch in evaluation mode, without gradients; a collective.

        For log-probabilities and sampling. Each module is afterwards in the mode of before. Running statistics are those of this
        process: ``share_buffers(engine.strategy)`` of ``flextrain.strategies.parts`` gives all processes the first one's.

        Args:
            batch: as for ``forward_backward``.
            output_fn: ``output_fn(output, batch)``, returned in place of the output; as ``loss_fn``, it is called where the output is, so
                that large ones are not kept.

        Returns:
            The output, on the device; None on a process without one, such as the first stages of a pipeline.
        """
        self._check("forward", torn=True)
        self._refuse_parts("output_fn", output_fn, batch)
        self._stepper.predict_by(output_fn)
        back_to_training = modes_of(self.model)
        self.model.eval()
        try:
            return self._stepper.evaluate(batch, "val")
        finally:
            back_to_training()

    def _refuse_parts(self, name: str, function: Any, batch: Any) -> None:
        if function is not None and self._stepper.cuts(batch):
            raise StrategyError(
                f"{name}: {type(self.strategy).__name__} gives each process a part of the batch, which a function outside of the model "
                "would see; compute it in the model's forward"
            )

    # Checkpoints

    def save(self, path: str | Path, *, meta: Mapping[str, Any] | None = None, verify: bool = False) -> str:
        """Write a checkpoint directory, as a runner writes it; a collective. Any strategy and number of processes can load it.

        A runner resumes it with ``resume=dict(path=..., data=False)``, because an engine has no position in data; with
        ``param_scheduler=False`` if the run has schedules.

        Args:
            meta: plain values to save beside the state.
            verify: read back what was written before the checkpoint counts as complete.

        Raises:
            CheckpointError: on every process, if it could not be written.
            StrategyError: there are gradients, which a checkpoint does not hold.
        """
        self._check("save", no_gradients=True)
        folder = as_path(path)
        run_state.save(self._run, folder, meta=meta, verify=verify)
        return str(folder)

    def load(self, path: str | Path, *, optimizer: bool = True, random: bool = False, verify: bool = True) -> None:
        """Continue from a checkpoint of an engine or a runner, under any strategy; a collective.

        Args:
            path: the checkpoint. Without ``optimizer``, anything that a runner's ``load_from`` takes.
            optimizer: also restore the optimizer's state, learning rates, the loss scale and ``iter``. False, as always without
                ``optim_wrapper``: the weights alone, all of which have to fit.
            random: also restore the states of random numbers.
            verify: compare all files with their checksums.

        Raises:
            CheckpointError: the checkpoint is damaged, or does not fit the model or the optimizer.
            StrategyError: there are gradients, of other weights.
        """
        self._check("load", no_gradients=True, initialised=False)
        if not optimizer or self.optim_wrapper is None:
            if random:
                raise ConfigError("Engine.load.random: True is not possible for weights alone, give optimizer=True")
            prefix = ((r"^module\.", ""),)
            run_state.load_weights(self._run, local_copy(path), strict=True, revise_keys=prefix)
            return
        kept = Resume(random=random, verify=verify, param_scheduler=False, hooks=False, logs=False, data=False)
        run_state.resume(self._run, as_path(path), kept)

    def publish(self, target: Target, *, dtype: str | torch.dtype | None = None) -> Any:
        """Give the whole weights, as they are now, to a target such as an inference engine; see ``FlexibleRunner.publish``.

        It may be called between ``forward_backward`` and ``optim_step``.
        """
        self._check("publish")
        check_target(target)
        kind = check_dtype(dtype)
        meet(self.strategy, "Engine.publish()")
        return publish(self._run, target, kind)

    # Several trainings of one model

    @torch.no_grad()
    def switch(self, training: TrainingCopy | None = None) -> TrainingCopy:
        """Go on with another training of the same model, and return the one of before; a collective.

        For several users of one base model, each with adapters of its own. A training is all that updates change or add up: trained
        parameters, persistent buffers, gradients since the last update, the optimizer's state and settings, the loss scale, and
        ``iter``. Frozen parameters are shared, and so are random numbers: what a model draws, as for dropout, depends on the calls in between.

        Args:
            training: what ``switch`` has returned, as often as you like. None: a new training, with the values and settings of
                now, and without gradients and optimizer state; what an optimizer counts in its groups is among the settings.

        Returns:
            A copy on the device; parameters of which a process has shards are copied in shards.

        Raises:
            ConfigError: there is no ``optim_wrapper``, or the training is that of another engine.
            StrategyError: an earlier call has failed, other parameters were trained then than now, a module has extra state, or gradients
                are kept in memory of an engine (DeepSpeed) or optimizer. After another error in it the engine cannot be used.
        """
        self._check("switch")
        if self.optim_wrapper is None:
            raise ConfigError("optim_wrapper: missing, Engine.switch() needs it")
        if training is not None and training._engine is not self:
            raise ConfigError(
                "Engine.switch.training: is of another engine, give what this engine's switch() has returned"
            )
        if why := cannot_switch(self.strategy):
            raise StrategyError(f"Engine.switch(): {why}")
        before = self._training()
        if training is not None and (other := training._tensors.keys() ^ before._tensors.keys()):
            raise StrategyError(f"Engine.switch.training: {min(other)} was trained in one of the two trainings only")
        self._is_mixed = True
        self._forget_update()
        for _, parameter in self.strategy.parameters():
            parameter.grad = None
        if training is None:
            self.strategy.load(
                {key: value for key, value in before._optimizer.items() if not isinstance(value, Tensor)}
            )
            self._run.load_state_dict({"epoch": 0, "iter": 0, "left": None, "validated": 0})
        else:
            self._take_up(training)
        self._is_mixed = False
        return before

    def _training(self) -> TrainingCopy:
        """A copy of the training under way."""
        strategy, wrapper = self.strategy, self.optim_wrapper
        assert wrapper is not None
        gradients = {name: p.grad.clone() for name, p in strategy.parameters() if p.grad is not None}
        optimizer = {
            key: value.clone() if isinstance(value, Tensor) else value
            for key, value in strategy.state().items()
            if key.startswith("optim.")
        }
        tensors = {name: tensor.clone() for name, tensor in self._trained()}
        return TrainingCopy(
            self, self._run.state_dict(), self._calls, self._has_gradients, tensors, gradients, optimizer,
            wrapper.plain_values(),
        )  # fmt: skip

    def _take_up(self, training: TrainingCopy) -> None:
        strategy, saved = self.strategy, training._optimizer
        for name, tensor in self._trained():
            tensor.copy_(training._tensors[name])
        for name, parameter in strategy.parameters():
            if (grad := training._gradients.get(name)) is not None:
                parameter.grad = grad.clone()
        template = strategy.template(saved)
        for key, tensor in template.items():
            tensor.copy_(saved[key])
        strategy.load({**{key: value for key, value in saved.items() if not isinstance(value, Tensor)}, **template})
        assert self.optim_wrapper is not None
        self.optim_wrapper.load_plain_values(training._plain_values)
        self._run.load_state_dict(training._progress)
        self._calls, self._has_gradients = training._calls, training._has_gradients

    def _trained(self) -> Iterator[tuple[str, Tensor]]:
        assert self.optim_wrapper is not None
        # Also those that are frozen now: they may have been trained before.
        optimized = {id(parameter) for group in self.optim_wrapper.param_groups for parameter in group["params"]}
        for name, parameter in self.strategy.parameters():
            if parameter.requires_grad or id(parameter) in optimized:
                yield name, parameter.detach()
        yield from self.strategy.buffers().items()

    # Memory

    def sleep(self) -> int:
        """Move parameters, buffers and optimizer state to host memory, and return how many bytes of the device were freed.

        For another program on the same device, such as one that samples. The host's memory is page-locked where the device
        can, and kept for the next time. Until ``wake`` the model's tensors have no memory, and nothing may read them. What an engine of
        the strategy keeps besides, such as buffers of communication, stays on the device, and so do copies of ``switch``.

        Raises:
            StrategyError: there are gradients, or the engine sleeps already.
        """
        self._check("sleep", no_gradients=True)
        self._memory = self._memory or HostCopies()
        freed = self._memory.take(kept_tensors(self.strategy), self.strategy.device)
        self._is_asleep = True
        return freed

    def wake(self) -> None:
        """Bring back what ``sleep`` has moved, with the same bits.

        Raises:
            StrategyError: the engine does not sleep.
        """
        if not self._is_asleep or self._memory is None or self._is_closed:
            self._check("wake")
            raise StrategyError("Engine.wake(): this engine is awake, call sleep() first")
        self._memory.give_back()
        self._is_asleep = False

    # The end

    def close(self) -> None:
        """Leave the process group, if the strategy has joined it, and release the model; may be called again."""
        if not self._is_closed:
            self._is_closed = True
            self._memory = None
            self.strategy.leave()
            del self.model, self.optim_wrapper, self._stepper, self._run.optim_wrapper

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self, call: str, *, torn: bool = False, no_gradients: bool = False, initialised: bool = True) -> None:
        """Raise StrategyError if this call comes in the wrong order."""
        if self._is_closed:
            raise StrategyError(f"Engine.{call}(): this engine is closed, make another one")
        if self._is_asleep:
            raise StrategyError(f"Engine.{call}(): this engine is asleep, call wake() first")
        if self._is_mixed:
            raise StrategyError(
                f"Engine.{call}(): switch() failed between two trainings; make another engine and load a checkpoint"
            )
        if self._is_torn and not torn:
            raise StrategyError(
                f"Engine.{call}(): an earlier call failed in the middle of an update; call abort_update() to drop its gradients"
            )
        if no_gradients and self._calls:
            raise StrategyError(f"Engine.{call}(): there are gradients, call optim_step() or abort_update() first")
        if initialised:
            check_initialised(self.strategy)


def _check_wrapper(optim: OptimWrapper | OptimWrapperDict | None) -> None:
    """Raise ConfigError for several optimizers, and for windows that are not those of the calls."""
    if isinstance(optim, OptimWrapperDict):
        raise ConfigError(
            f"optim_wrapper: has {len(optim)} optimizers, an Engine takes one; make an Engine for each model"
        )
    if optim is not None and optim.accumulate != 1:
        raise ConfigError(
            f"{optim.where}.accumulative_counts: {optim.accumulate} has no meaning in an Engine, whose calls say what an update consists "
            "of; leave it out"
        )
