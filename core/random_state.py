"""The state of the generators that training draws from: read, kept as text, and put back."""

from __future__ import annotations

import base64
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .device import DEVICES


def torch_states(device: torch.device) -> dict[str, Tensor]:
    """The states of torch's generators that a model on ``device`` draws from: "torch" on the CPU, and the device's own."""
    states = {"torch": torch.get_rng_state()}
    if device.type != "cpu":
        states[device.type] = DEVICES[device.type].module.get_rng_state(device)
    return states


def rng_state(device: torch.device) -> dict[str, Any]:
    """The state of this process's generators, that of ``device`` among them, as JSON-able values."""
    version, internal, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(internal), gauss],
        "numpy": [str(kind), keys.tolist(), int(position), int(has_gauss), float(cached)],  # type: ignore[union-attr]
        **{name: encode(state) for name, state in torch_states(device).items()},
    }


def load_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Continue the generators where ``rng_state`` found them; that of another kind of device is left out."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(decode(state["torch"]))
    if device.type != "cpu" and device.type in state:
        DEVICES[device.type].module.set_rng_state(decode(state[device.type]), device)


@contextmanager
def drawing_from(state: Tensor) -> Iterator[None]:
    """Inside, torch draws on the CPU from ``state``; afterwards a process that had another one goes on with its own."""
    own = torch.get_rng_state()
    torch.set_rng_state(state)
    try:
        yield
    finally:
        if not torch.equal(own, state):
            torch.set_rng_state(own)


def encode(state: Tensor) -> str:
    """A generator's state (uint8, 1-D) as text."""
    return base64.b64encode(state.cpu().numpy().tobytes()).decode("ascii")


def decode(text: str) -> Tensor:
    """The tensor that ``encode`` was given."""
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
