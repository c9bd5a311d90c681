"""Streams: random numbers of a model's forward that stages compute in parts."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....core.device import DEVICES
from ....core.generators import nth_seed
from ....core.random_state import torch_states
from ....core.rehearsing import with_values


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
