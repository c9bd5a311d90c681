"""Seed the random generators of a run: draw the run's seed, and derive the seed of each process."""

from __future__ import annotations

import os

import numpy as np
import torch

from .comm.collectives import broadcast_object
from .comm.topology import Topology
from .generators import seed_alike


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
    """Seed Python, NumPy and torch (all devices); return the run's seed, which all processes share.

    Args:
        seed: None draws one from the operating system; the call is a collective then.
        diff_rank_seed: add the index of this process's shard of the data, so that dropout differs between the shards.
        deterministic: use deterministic kernels only; torch raises if an operation has none. If False, the settings are
            again those of before the first run in this process that used True.
        topology: the strategy's; default: every process has its own shard of the data.
    """
    run_seed = draw_seed() if seed is None else seed
    _seed(run_seed + (topology or Topology()).data.index if diff_rank_seed else run_seed)
    _use_deterministic(deterministic)
    return run_seed


_before: tuple[bool, bool, bool] | None = None
"""The program's settings of determinism, while those of a run that asked for it hold."""


def _use_deterministic(wanted: bool) -> None:
    """Use deterministic kernels only; without ``wanted``, as the program had it before a run in this process wanted that."""
    global _before
    cudnn = torch.backends.cudnn
    if wanted:
        if _before is None:
            algorithms = torch.are_deterministic_algorithms_enabled()
            _before = (algorithms, torch.is_deterministic_algorithms_warn_only_enabled(), cudnn.deterministic)
        cudnn.deterministic = True
        cudnn.benchmark = False
        # cuBLAS reads this variable when it creates its first handle; torch raises if it is missing.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    elif _before is not None:
        algorithms, warns, cudnn.deterministic = _before
        torch.use_deterministic_algorithms(algorithms, warn_only=warns)
        _before = None


def seed_process(*numbers: int) -> None:
    """Seed this process's generators from several numbers; different numbers give unrelated random streams.

    Source: ``numpy.random.SeedSequence`` derives the seed from the numbers.
    """
    _seed(int(np.random.SeedSequence([number % 2**64 for number in numbers]).generate_state(1)[0]))


def _seed(number: int) -> None:
    seed_alike(number)
    torch.manual_seed(number)  # on all devices
