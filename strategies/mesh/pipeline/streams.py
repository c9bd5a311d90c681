"""Streams: random numbers of a model's forward that stages compute in parts."""

from __future__ import annotations

import torch
from torch import Tensor

from ....core.device import DEVICES
from ....core.generators import nth_seed
from ....core.random_state import torch_states


class Streams:
    """Lets every stage draw the same numbers before the layers, and numbers of its own from the layers on.

    What a model draws from its batch, such as the noise that a loss compares with, has to be the same on the first and on the
    last stage. Masks of dropout must not repeat from stage to stage. All processes have the same state after a window,
    whatever the order in which they computed.

    Args:
        device: on which the model draws.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begun: dict[int, tuple[dict[str, Tensor], int]] = {}
        self._resume: dict[str, Tensor] | None = None  # the state to go on with after this forward
        self._base = self._stage = 0

    def begin_window(self) -> None:
        """Forget the micro-batches of the window before."""
        self._begun = {}

    def begin(self, micro_batch: int, stage: int, draws_inside: bool) -> None:
        """A forward of a stage begins; ``draws_inside``: its layers draw too, or what comes after them."""
        self._resume, self._stage = None, stage
        if micro_batch in self._begun:  # an earlier stage of this process has drawn for it
            self._resume = torch_states(self._device)
            state, self._base = self._begun[micro_batch]
            self._restore(state)
        else:
            if draws_inside:  # otherwise the numbers are those of one device
                self._base = int(torch.randint(2**62, (), device="cpu"))
            self._begun[micro_batch] = torch_states(self._device), self._base

    def enter_layers(self) -> None:
        """The layers of the stage begin."""
        if self._resume is None:
            self._resume = torch_states(self._device)
        seed = nth_seed(self._base, self._stage)
        torch.default_generator.manual_seed(seed % 2**63)
        if self._device.type != "cpu":
            DEVICES[self._device.type].module.manual_seed(seed % 2**63)

    def end(self) -> None:
        """The forward has ended."""
        if self._resume is not None:
            self._restore(self._resume)

    def _restore(self, states: dict[str, Tensor]) -> None:
        torch.set_rng_state(states["torch"])
        if self._device.type != "cpu":
            DEVICES[self._device.type].module.set_rng_state(states[self._device.type], self._device)
