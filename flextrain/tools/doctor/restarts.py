"""Whether processes that torchrun restarts, and machines that join a job, find each other with the installed torch."""

from __future__ import annotations

from collections.abc import Mapping

SHARED_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Variable of torchrun; "1" lets every start have a store of its own."""


def restarts_in_words(torch: str | None, variables: Mapping[str, str]) -> str:
    """Return a line on restarts; empty without torch.

    Since torch 2.5 torchrun's agents make the store of the processes once for all starts (pytorch/pytorch#135712). What
    an old start has left in it does no harm, because flextrain gives every process group its own keys. But an agent that
    joins waits for an address that the first one has told before.
    """
    if torch is None:
        return ""
    if variables.get(SHARED_STORE) == "1":
        return f"torchrun (torch {torch}, {SHARED_STORE}=1) restarts processes, and machines may join and leave"
    return (
        f"torchrun (torch {torch}) restarts processes; machines may join a job (--nnodes MIN:MAX) only under `flextrain run`, or "
        f"with {SHARED_STORE}=1"
    )
