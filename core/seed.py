"""Random numbers: one seed for a run, and the state of every generator that training draws from."""

from __future__ import annotations

import base64
import os
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .comm.collectives import broadcast_object
from .comm.topology import Topology
from .device import DEVICES


def draw_seed() -> int:
    """A seed from the operating system, the same on every process; collective."""
    return broadcast_object(int.from_bytes(os.urandom(4), "little") & 0x7FFFFFFF)


def set_seed(
    seed: int | None = None,
    *,
    diff_rank_seed: bool = False,
    deterministic: bool = False,
    topology: Topology | None = None,
) -> int:
    """Seed Python, NumPy and torch (all devices); returns the run's seed, which all processes share.

    Args:
        seed: None draws one from the operating system; collective then.
        diff_rank_seed: add the number of this process's part of the data, so that dropout differs between the parts.
        deterministic: choose deterministic kernels only; torch raises where it has none.
        topology: the strategy's; default: every process has data of its own.
    """
    run_seed = draw_seed() if seed is None else seed
    _seed(run_seed + (topology or Topology()).data.index if diff_rank_seed else run_seed)
    if deterministic:
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
        # cuBLAS reads this when its first handle is made; torch raises with its name when it is missing.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    return run_seed


def seed_process(*numbers: int) -> None:
    """Seed this process's generators from several numbers; other numbers give unrelated streams.

    Source: Python's and torch's generators get a number that ``numpy.random.SeedSequence`` makes of them.
    """
    _seed(int(np.random.SeedSequence([number % 2**64 for number in numbers]).generate_state(1)[0]))


def _seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number)


def rng_state(device: torch.device) -> dict[str, Any]:
    """The state of this process's generators, that of ``device`` among them, as JSON-able values."""
    version, internal, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": [version, list(internal), gauss],
        "numpy": [str(kind), keys.tolist(), int(position), int(has_gauss), float(cached)],  # type: ignore[union-attr]
        "torch": encode(torch.get_rng_state()),
    }
    if device.type != "cpu":
        state[device.type] = encode(DEVICES[device.type].module.get_rng_state(device))
    return state


def load_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Continue the generators where ``rng_state`` found them; that of another kind of device is left out."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(decode(state["torch"]))
    if device.type != "cpu" and device.type in state:
        DEVICES[device.type].module.set_rng_state(decode(state[device.type]), device)


def encode(state: Tensor) -> str:
    """A generator's state (uint8, 1-D) as text."""
    return base64.b64encode(state.cpu().numpy().tobytes()).decode("ascii")


def decode(text: str) -> Tensor:
    """The tensor that ``encode`` was given."""
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
