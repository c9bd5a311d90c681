"""All private names of torch with which threads of one process become the ranks of a job.

Each entry says what it does, and with which versions of torch it was checked, as in torch_private.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from packaging.version import Version

from ...core.base.errors import StrategyError

CHECKED = Version("2.15")
"""The version with which threads as ranks were checked. Others may differ in what a thread has of its own, and then compute
something else without an error."""

MakeGroup = Callable[[str, tuple[int, ...], int, int], Any]
"""Makes a process group, given its name and its ranks in the job (none: all), this rank's number in it, and its size."""


class _ProcessGroup(dist.ProcessGroup):
    """Base of groups in Python, which have no back ends by device: each is its own. 2.15."""

    def _get_backend(self, device: Any) -> Any:
        return self


PROCESS_GROUP: Any = _ProcessGroup
"""To derive from: torch's annotations list overloads that nobody calls."""


def check_threads_as_ranks() -> None:
    """Raise StrategyError if this version of torch is not one with which threads as ranks were checked. 2.15."""
    found = Version(torch.__version__)
    if found.release[:2] != CHECKED.release[:2]:
        raise StrategyError(f"simulate: checked with torch {CHECKED} only, this is torch {found}; install that version")


@contextmanager
def threads_as_ranks(make: MakeGroup, store: Any) -> Iterator[None]:
    """Context in which every thread may join process groups of its own, and ``make`` makes those of the back end gloo. 2.15.

    Groups that C++ code finds by their names are a thread's own too. ``env://`` leads to ``store``.

    Raises:
        StrategyError: this version of torch was not checked.
    """
    check_threads_as_ranks()
    threaded: Any = importlib.import_module("torch.testing._internal.distributed.multi_threaded_pg")
    c10d: Any = dist.distributed_c10d
    bindings: Any = importlib.import_module("torch._C._distributed_c10d")
    plugins = c10d.Backend._plugins
    handlers = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers

    def meet(*_: Any, **__: Any) -> Iterator[tuple[Any, int, int]]:
        yield store, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def create(options: Any, _: Any) -> Any:
        return make(options.group_id, tuple(options.global_ranks_in_group), options.group_rank, options.group_size)

    world, gloo, env = c10d._world, plugins.get("GLOO"), handlers["env"]
    bindings._set_thread_isolation_mode(True)
    c10d._world = threaded.ThreadLocalWorld()
    plugins["GLOO"], handlers["env"] = c10d.Backend._BackendPlugin(create, True), meet
    try:
        yield
    finally:
        c10d._world = world
        bindings._set_thread_isolation_mode(False)
        handlers["env"] = env
        if gloo is None:  # torch registers it when it is first used
            del plugins["GLOO"]
        else:
            plugins["GLOO"] = gloo


@contextmanager
def without_modes() -> Iterator[None]:
    """Context in which no mode of this thread sees an operation on tensors. 2.15."""
    with (
        torch._C.DisableTorchFunction(),
        importlib.import_module("torch.utils._python_dispatch")._disable_current_modes(),
    ):
        yield
