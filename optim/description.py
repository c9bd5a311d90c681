"""Description of the optimizers as text, to be compared between processes."""

from __future__ import annotations

from .wrapper import OptimWrapper
from .wrapper_dict import OptimWrapperDict


def description(optim: OptimWrapper | OptimWrapperDict) -> dict[str, str]:
    """Return class, plain group settings and micro-batches per update of every optimizer, by configuration key."""
    found = {}
    for wrapper in optim.wrappers.values():
        prefix = f"{wrapper.where}.optimizer"
        found[f"{prefix}.type"] = type(wrapper.optimizer).__name__
        found[f"{wrapper.where}.accumulative_counts"] = str(wrapper.accumulate)
        for number, group in enumerate(wrapper.param_groups):
            settings = {key: value for key, value in group.items() if isinstance(value, (bool, int, float, str, tuple))}
            found |= {f"{prefix} group {number} {key}": repr(value) for key, value in settings.items()}
    return found
