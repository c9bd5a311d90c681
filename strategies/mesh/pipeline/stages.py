"""Stages: a model whose own forward computes the layers of one stage, with stand-ins for what other processes have."""

from __future__ import annotations

import functools
import itertools
import logging
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ....core.base.errors import StrategyError, is_the_user_s, shown
from ....core.device.device import DEVICES
from ....core.model.base_model import class_name
from ....core.random.generators import nth_seed, torch_states
from ....core.torch_compat.torch_private import tree_flatten, with_values
from .chain import Chain, stage_of
from .rehearsal import Plan, Rehearsal, chained

_logger = logging.getLogger("flextrain")

# Streams: random numbers of a model's forward that stages compute in parts.


class Streams:
    """Lets every stage draw the same numbers before the layers, and numbers of its own from the layers on.

    What a model draws from its batch, such as the noise that a loss compares with, has to be the same on the first and on the
    last stage. Masks of dropout must not repeat from stage to stage, nor from micro-batch to micro-batch. All processes have
    the same random state after a window, whatever they have computed, and in whatever order.

    A model that draws before its layers only, in modules that every stage has, draws what it draws on one device. If layers draw,
    or what comes after them, or submodules with parameters before them (dropout inside of embeddings), then each of these has
    a stream of its own, which starts from one number of the model's stream, on every stage. So masks are others than on one
    device, and what is drawn after them, such as the noise of the next micro-batch, is too. All of it depends on the random
    state alone, in evaluation as well.

    Args:
        device: on which the model draws.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begun: dict[int, dict[str, Any]] = {}
        self._restored: dict[str, Any] | None = None  # for the end of a call that began from an earlier state
        self._resume: dict[str, Any] | None = None  # for the end of this call
        self._outside: list[dict[str, Any]] = []  # for the ends of the submodules under way
        self._base = 0
        self.on_host = False
        """Whether the forward draws from Python's or NumPy's generator, too."""

    def begin_window(self) -> None:
        """Forget the micro-batches of the window before."""
        self._begun = {}

    def again(self, micro_batch: int) -> None:
        """A call of the model begins, which this process may have called for another of its stages; draw the same."""
        self.on_host = True  # it is not known yet
        now = self._states()
        before = self._begun.setdefault(micro_batch, now)
        if before is not now:
            self._restored = now
            self._restore(before)

    def leave_shared(self) -> None:
        """The first layer is reached, on any stage."""
        self._base = self._number()
        self._resume = self._states()

    def enter_layers(self, stage: int) -> None:
        """The layers of a stage begin."""
        self._seed(nth_seed(self._base, stage))

    def repeat_layer(self) -> None:
        """The first layer is computed again in backward, from the state in which it was entered."""
        self._seed(nth_seed(self._number(), 0))

    def pass_part(self) -> None:
        """A submodule is called that draws on a stage which has it; go on as there."""
        self._number()

    def enter_part(self) -> None:
        """Such a submodule begins, on that stage."""
        number = self._number()
        self._outside.append(self._states())
        self._seed(number)

    def leave_part(self) -> None:
        """The submodule has ended."""
        self._restore(self._outside.pop())

    def leave_model(self) -> None:
        """The forward of the last stage has ended; no other draws what a loss outside of the model does."""
        if self._resume is None:
            self._resume = self._states()
            self._seed(self._number())

    def end(self) -> None:
        """The call has ended."""
        for states in (self._resume, self._restored):
            if states is not None:
                self._restore(states)
        self._resume = self._restored = None
        self._outside = []

    @staticmethod
    def _number() -> int:
        with with_values():
            return int(torch.randint(2**62, (), device="cpu"))

    def _seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed % 2**63)
        if self._device.type != "cpu":
            DEVICES[self._device.type].module.manual_seed(seed % 2**63)
        if self.on_host:
            random.seed(seed)
            np.random.seed(seed >> 32)

    def _states(self) -> dict[str, Any]:
        states: dict[str, Any] = dict(torch_states(self._device))
        if self.on_host:
            states.update(python=random.getstate(), numpy=np.random.get_state(legacy=True))
        return states

    def _restore(self, states: dict[str, Any]) -> None:
        torch.set_rng_state(states["torch"])
        if self._device.type != "cpu":
            state: Tensor = states[self._device.type]
            DEVICES[self._device.type].module.set_rng_state(state, self._device)
        if "python" in states:
            random.setstate(states["python"])
            np.random.set_state(states["numpy"])


class Left(NamedTuple):
    """What the layers of a stage that is not the last have computed.

    Attributes:
        value: has the graph of the stage.
        spread: it was a DTensor.
    """

    value: Tensor
    spread: bool = False


class Leaving(BaseException):
    """Ends a forward of a stage that is not the last; not an error, and not to be caught as one by a model.

    It must not outlive its handler: its traceback has the frames that would hold it, a cycle that would keep the activations of
    the stage until Python looks for such cycles.
    """

    def __init__(self, left: Left) -> None:
        super().__init__()
        self.left = left


class _Elsewhere(nn.Module):
    """Stands for a submodule of another process; it has the attributes of that one, with zeros in its tensors."""

    def __init__(self, run: StageRun, name: str) -> None:
        super().__init__()
        self._run, self._name = (run,), name  # in a tuple, because it is no submodule

    def __getattr__(self, key: str) -> Any:
        if "_run" not in vars(self):  # while it is being copied
            return super().__getattr__(key)
        found = self._run[0].attribute(self._name, key)
        return Part(self._run[0], f"{self._name}.{key}") if found is NotImplemented else found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)  # without hooks, which the process that has the submodule calls

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """See nn.Module."""
        self._run[0].check_complete([self])
        return super().named_parameters(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """See nn.Module."""
        self._run[0].check_complete([self])
        return super().state_dict(*args, **kwargs)


class Part(_Elsewhere):
    """Stands for a submodule of one that another process has: it can be looked at."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise StrategyError(self._run[0].rehearsal.elsewhere(self._name, self._name.rpartition(".")[0]))


class Absent(_Elsewhere):
    """Gives zeros of the shape that the submodule would give, and takes no memory."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._run[0].stand_in(self._name, args, kwargs)


class AbsentLayer(_Elsewhere):
    """Stands for a layer of another stage: gives what that stage has sent, ends the forward, or passes its input on."""

    def __init__(self, run: StageRun, number: int) -> None:
        super().__init__(run, run.chain.layers[number])
        self._number = number

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._run[0].pass_on(self._number, args, kwargs)


class StageRun:
    """The forward of a model of which this process has some stages.

    The model runs its own forward. Before the layers of the stage under way it computes with stand-ins: what depends on
    the batch alone, such as masks and positions, is right, and the rest is replaced by what the stage before has sent. After
    the layers the forward ends, unless the stage is the last one.

    Args:
        model: the whole model; it is cut by ``cut``.
        chain: its layers.
        split: number of layers of every stage.
        own: the stages of this process.
        device: on which it computes.
        dtype: in which FSDP computes; None: that of the parameters.

    Attributes:
        current: the stage under way; None between the stages.
    """

    def __init__(
        self,
        model: nn.Module,
        chain: Chain,
        split: Sequence[int],
        own: Sequence[int],
        device: torch.device,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.chain, self.own, self.count, self._device = chain, list(own), len(split), device
        starts = [sum(split[:stage]) for stage in range(len(split) + 1)]
        self.spans = list(itertools.pairwise(starts))
        self.rehearsal = Rehearsal(model, chain, self.spans, device, dtype, is_repeated=len(self.own) > 1)
        self._slots: dict[int, list[tuple[nn.Module, str, nn.Module]]] = {}
        self.current: int | None = None
        self._given: Callable[[Callable[[], Tensor]], Tensor] | None = None
        self._model = model
        self._left: Tensor | None = None
        self._was_given = False
        self._is_called = self._is_in_forward = self.only_plans = self._has_warned = False
        self._drawing: set[tuple[str, bool]] = set()  # ("" for layers, or a part before them; in training)
        self._plan = Plan()
        self.streams = Streams(device)

    # Cutting

    def cut(self) -> None:
        """Replace what other processes have, and let the model's forward run a stage at a time."""
        model, held = self._model, set(self.own)
        ends = [(name, 0) for name in self.chain.before] + [(name, self.count - 1) for name in self.chain.after]
        parts = [(name, stage_of(i, self.spans), AbsentLayer(self, i)) for i, name in enumerate(self.chain.layers)]
        every: list[tuple[str, int, nn.Module]] = [*parts, *((name, stage, Absent(self, name)) for name, stage in ends)]
        real = {name: model.get_submodule(name) for name, _, _ in every}
        for name, stage, absent in every:
            path, _, key = name.rpartition(".")
            parent = model.get_submodule(path)
            absent.train(real[name].training)
            if stage not in held:
                setattr(parent, key, absent)
            elif len(held) > 1:
                for run in held:
                    self._slots.setdefault(run, []).append((parent, key, real[name] if run == stage else absent))
        if not held & {0, self.count - 1}:
            for name in self.chain.own:
                path, _, key = name.rpartition(".")
                _stand_in_for_parameter(model.get_submodule(path), key, self._device)
        own_forward = model.forward

        @functools.wraps(own_forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._forward(own_forward, args, kwargs)

        model.forward = forward
        model.register_forward_pre_hook(self._note_call)
        for path in {"", *(name.rpartition(".")[0] for name in real)}:
            self._watch_parameters(model.get_submodule(path))
        if 0 in held:
            real[self.chain.layers[0]].register_forward_pre_hook(self._first_layer)
        for name, stage in ends:
            if stage in held:
                real[name].register_forward_pre_hook(functools.partial(self._enter_part, name))
                # Also after an error, with which computing again in backward ends.
                real[name].register_forward_hook(functools.partial(self._leave_part, name), always_call=True)

    def _watch_parameters(self, module: nn.Module) -> None:
        """Raise an error where a step has gone through all parameters, of which another process has some."""
        own = module.named_parameters

        @functools.wraps(own)
        def named_parameters(module: nn.Module, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
            yield from own(*args, **kwargs)  # the first one is often asked for its device
            if kwargs.get("recurse", True):
                self.check_complete(module.modules())

        module.named_parameters = MethodType(named_parameters, module)  # type: ignore[method-assign]  # as torch.compile needs it

    def check_complete(self, modules: Iterable[nn.Module]) -> None:
        """Raise StrategyError if a stage is under way, and another process has one of ``modules``; warn code of the user's once."""
        absent = next((module for module in modules if isinstance(module, _Elsewhere)), None)
        if absent is None:
            return
        if self.current is None:
            self._warn()
        else:
            raise StrategyError(
                f"model: {class_name(self._model)} goes through its parameters in a step, and another process of the pipeline has "
                f"those of {absent._name}; compute in a layer what needs them, or give strategy.pp=1"
            )

    def _warn(self) -> None:
        caller = sys._getframe(1)
        while caller.f_back is not None and str(caller.f_globals.get("__name__")).startswith(("torch.", __name__)):
            caller = caller.f_back
        if is_the_user_s(caller) and not self._has_warned:
            self._has_warned = True
            _logger.warning(
                f"strategy.pp: parameters() and state_dict() of the model, called at {shown(caller.f_code.co_filename, caller.f_lineno)}, have "
                "those of this process's stages only; flextrain.strategies.parts.full_weights(runner.strategy) gives all"
            )

    @property
    def layers(self) -> list[nn.Module]:
        """The layers of this process."""
        return [self._model.get_submodule(self.chain.layers[i]) for s in self.own for i in range(*self.spans[s])]

    # Running

    @contextmanager
    def stage(self, number: int, given: Callable[[Callable[[], Tensor]], Tensor]) -> Iterator[None]:
        """Context in which the model computes one stage from what the stage before has sent."""
        self.current, self._given = number, given
        slots = self._slots.get(number, ())
        for parent, key, module in slots:
            setattr(parent, key, module)
        try:
            yield
        finally:
            self.current = self._given = None
            if slots:
                for stage in self.own:
                    for parent, key, module in self._slots[stage]:
                        if not isinstance(module, _Elsewhere):
                            setattr(parent, key, module)

    def run(
        self, number: int, micro_batch: int, given: Callable[[Callable[[], Tensor]], Tensor], call: Callable[[], Any]
    ) -> Any:
        """Return what the layers of a stage give; of the last stage, what ``call`` returns.

        Args:
            number: of the stage.
            micro_batch: its index in the window.
            given: returns what the stage before has sent, from what returns a tensor of the same shape; not called by the first.
            call: calls the model.

        Raises:
            StrategyError: the model did not come to the end of the stage.
        """
        self._left, self._was_given = None, number == 0
        if len(self.own) > 1:
            self.streams.again(micro_batch)
        found: Any = None
        left: Left | None = None
        with self.stage(number, given):
            try:
                found = call()
            except Leaving as leaving:
                left = leaving.left
            finally:
                self.streams.end()
        if not self._was_given:
            raise StrategyError(
                f"model: {class_name(self._model)} did not call {self.chain.layers[self.spans[number][0] - 1]}, the layer before "
                f"pipeline stage {number}; a pipeline cannot leave out layers (layerdrop)"
            )
        if left is not None:
            return left
        if number + 1 < self.count:
            raise StrategyError(
                f"model: {class_name(self._model)} returned without calling {self.chain.layers[self.spans[number][1]]}, "
                "the first layer of the next pipeline stage"
            )
        return found

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forward hook of the model, after all others: end the call of a stage that is not the last."""
        if self.current is not None and self._left is not None:
            value, self._left = self._left, None
            spread = isinstance(value, DTensor)
            # FSDP may have cast its output, which the next stage would compute with in another dtype.
            raise Leaving(Left(output.to(value.dtype) if spread else value, spread))

    # Drawing: what is known of a kind of calls stays known, because backward may compute modules again, whatever was called last

    def _is_drawing(self, part: str = "") -> bool:
        return (part, self._model.training) in self._drawing

    def _first_layer(self, module: nn.Module, args: Any) -> None:
        if self._is_drawing():
            if self.current is None:
                self.streams.repeat_layer()
            else:
                self.streams.leave_shared()
                self.streams.enter_layers(0)

    def _enter_part(self, name: str, module: nn.Module, args: Any) -> None:
        if self._is_drawing(name):
            self.streams.enter_part()

    def _leave_part(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if self._is_drawing(name):
            self.streams.leave_part()

    def _note_call(self, module: nn.Module, args: Any) -> None:
        self._is_called = True

    def _forward(self, own_forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        is_called, self._is_called = self._is_called, False
        if self.current is None:
            raise StrategyError(
                "model: was called outside of an update and an evaluation, but no process of a pipeline has all of it; give the "
                "call to runner.val() or runner.test()"
            )
        self._left = None
        self._plan = self.rehearsal.plan(args, kwargs, self._model.training)
        if self.only_plans:
            self._left = torch.zeros((), device=self._device)
            return self._left
        training = self._model.training
        self.streams.on_host = self._plan.draws_on_host
        self._drawing.update((name, training) for name in self._plan.apart)
        if self._plan.draws_inside:
            self._drawing.add(("", training))
        self._is_in_forward = True
        try:
            found = own_forward(*args, **kwargs)
        except Leaving as leaving:
            if not is_called:  # a val_step calls forward itself
                raise
            self._left = leaving.left.value  # here, so that hooks of the model see its end
            return self._left
        finally:
            self._is_in_forward = False
        if self._plan.draws:
            self.streams.leave_model()
        return found

    def _check_in_forward(self, name: str) -> None:
        if not self._is_in_forward:
            raise StrategyError(
                f"model: {class_name(self._model)} calls {name} outside of its forward, and another process of the pipeline has it; "
                "call the whole model, as self(...), or give strategy.pp=1"
            )

    def attribute(self, name: str, key: str) -> Any:
        """Return an attribute of a submodule of another process, see Rehearsal; of no tensor where none is followed."""
        found = self.rehearsal.attribute(name, key)
        if not self._is_in_forward and any(isinstance(leaf, Tensor) for leaf in tree_flatten(found)[0]):
            raise AttributeError(
                f"model: {name}.{key} is read outside of the forward of {class_name(self._model)}, and another process of the "
                "pipeline has it"
            )
        return found

    def stand_in(self, name: str, args: Any, kwargs: Any) -> Any:
        """Return zeros in place of what a submodule of another process would give."""
        self._check_in_forward(name)
        if self._is_drawing(name):
            self.streams.pass_part()
        return self.rehearsal.stand_in(name, args, kwargs)

    def pass_on(self, number: int, args: Any, kwargs: Any) -> Any:
        """Stand for layer ``number`` in the stage under way."""
        self._check_in_forward(self.chain.layers[number])
        assert self.current is not None
        start, end = self.spans[self.current]
        value = chained(args, kwargs)
        draws = self._is_drawing()
        if number == 0 and draws:
            self.streams.leave_shared()
        if number >= end:
            raise Leaving(Left(value))
        if number + 1 == start:
            assert self._given is not None
            if self._was_given:
                raise StrategyError(
                    f"model: {class_name(self._model)} is called twice for one batch, a pipeline sends each through its stages once; "
                    "call it once in a step, with all samples, or give strategy.pp=1"
                )
            value, self._was_given = self._given(functools.partial(self._passed, number, value, args, kwargs)), True
            if draws:
                self.streams.enter_layers(self.current)
            if self.rehearsal.overwrites(start):
                value = value.clone()  # autograd has none of a leaf changed
        else:
            value = self._passed(number, value, args, kwargs)
            if number == 0 and value.is_floating_point() and not isinstance(value, DTensor):
                # A later batch may take a branch that needs it, and gets no wrong number. It may be changed in place.
                value = torch.full_like(value, torch.nan)
        return self.rehearsal.as_given(number, value)

    def _passed(self, number: int, value: Tensor, args: Any, kwargs: Any) -> Tensor:
        """Return a tensor of the shape that layer ``number`` gives for ``value``."""
        if not self.rehearsal.changes_shape(number):
            return value
        found = self.rehearsal.stand_in(self.chain.layers[number], args, kwargs)
        first: Tensor = found[0] if isinstance(found, tuple) else found
        return first


def _stand_in_for_parameter(module: nn.Module, key: str, device: torch.device) -> None:
    parameter = getattr(module, key)
    delattr(module, key)
    object.__setattr__(module, key, torch.zeros((), dtype=parameter.dtype, device=device).expand(parameter.shape))
