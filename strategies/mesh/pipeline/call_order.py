"""Whether the submodules of a chain are called before its layers or after them, which their order in the model may not say."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from ....core.comm.joint_errors import gather_differing
from ..plans import without_memory
from .chain import Chain


def put_in_order(chain: Chain, model: nn.Module, example: Callable[[], Any]) -> None:
    """Sort ``before`` and ``after`` of a chain by when forward calls them first; a collective.

    What forward does not call, and all where it cannot run without values, keeps its order in the model. A wrong order
    is found by the rehearsal.

    Args:
        example: gives a batch, or None.
    """
    called = gather_differing(_first_calls(chain, model, example))[0]  # samples may differ
    parts = [*chain.before, *chain.after]
    chain.before = [name for name in parts if called.get(name, name in chain.before)]
    chain.after = [name for name in parts if name not in chain.before]


def _first_calls(chain: Chain, model: nn.Module, example: Callable[[], Any]) -> dict[str, bool]:
    """By name of a submodule that forward calls: whether it does so before it calls a layer."""
    called: dict[str, bool] = {}
    begun: list[str] = []

    def begin(name: str, module: nn.Module, args: Any) -> None:
        begun.append(name)

    def note(name: str, module: nn.Module, args: Any) -> None:
        called.setdefault(name, not begun)

    first = chain.layers[0]
    handles = [model.get_submodule(first).register_forward_pre_hook(partial(begin, first))]
    for name in (*chain.before, *chain.after):
        for part in model.get_submodule(name).modules():  # a list of heads is not called itself
            handles.append(part.register_forward_pre_hook(partial(note, name)))
    try:
        batch = example()
        if batch is not None:
            with without_memory(model, batch) as (_, run):
                run()
    except Exception:
        return {}
    finally:
        for handle in handles:
            handle.remove()
    return called if begun else {}
