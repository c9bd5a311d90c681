"""RNG state of Python, NumPy, torch and the device: read it, encode it as text, restore it."""

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
    """RNG states of torch's generators that a model on ``device`` draws from: "torch" (CPU), and the device's type."""
    states = {"torch": torch.get_rng_state()}
    if device.type != "cpu":
        states[device.type] = DEVICES[device.type].module.get_rng_state(device)
    return states


def rng_state(device: torch.device) -> dict[str, Any]:
    """The RNG state of this process, including that of ``device``, as JSON-able values."""
    version, internal, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(internal), gauss],
        "numpy": [str(kind), keys.tolist(), int(position), int(has_gauss), float(cached)],  # type: ignore[union-attr]
        **{name: encode(state) for name, state in torch_states(device).items()},
    }


def load_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore a state from ``rng_state``; the state of another kind of device is ignored."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(decode(state["torch"]))
    if device.type != "cpu" and device.type in state:
        DEVICES[device.type].module.set_rng_state(decode(state[device.type]), device)


@contextmanager
def kept_random_state(device: torch.device) -> Iterator[None]:
    """Context after which Python, NumPy, torch and ``device`` draw as if nothing had been drawn inside."""
    python, legacy, states = random.getstate(), np.random.get_state(legacy=True), torch_states(device)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)
        torch.set_rng_state(states["torch"])
        if device.type != "cpu":
            DEVICES[device.type].module.set_rng_state(states[device.type], device)


@contextmanager
def drawing_from(state: Tensor) -> Iterator[None]:
    """Context in which torch draws on the CPU from ``state``; a process that had another state gets it back."""
    own = torch.get_rng_state()
    torch.set_rng_state(state)
    try:
        yield
    finally:
        if not torch.equal(own, state):
            torch.set_rng_state(own)


@contextmanager
def drawing_apart(state: Tensor) -> Iterator[None]:
    """Context in which torch draws on the CPU from ``state``, and after which it draws as if nothing had been drawn inside."""
    own = torch.get_rng_state()
    torch.set_rng_state(state)
    try:
        yield
    finally:
        torch.set_rng_state(own)


def encode(state: Tensor) -> str:
    """Encode a generator's state (uint8, 1-D) as text."""
    return base64.b64encode(state.cpu().numpy().tobytes()).decode("ascii")


def decode(text: str) -> Tensor:
    """Decode a state that ``encode`` has encoded."""
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
