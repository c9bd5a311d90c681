"""Compare the settings of an optimizer with those of a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ...core.comm.joint_errors import gather_differing, raising_together
from ...core.errors import CheckpointError
from ...optim.canonical import FROZEN, GROUP, KIND, split_key

if TYPE_CHECKING:
    from ..run import Run


def check_optimizer(runner: Run, values: Mapping[str, Any]) -> None:
    """Check that every parameter can get the settings that the checkpoint has under its name, in its current group.

    Raises:
        CheckpointError: parameters in one group have different settings in the checkpoint, or it lacks a parameter.
    """
    now = _hyper_parameters(runner)
    then = {key: value for key, value in values.items() if key.startswith(GROUP)}
    frozen_then, frozen_now = values.get(FROZEN, ()), set(frozen(runner))
    with raising_together():
        _check_settings(then, now, frozen_then if isinstance(frozen_then, list) else ())
    lacking = set.intersection(*map(set, gather_differing(sorted(then.keys() - now.keys()))))  # on all processes
    gone = sorted({name for key in lacking if (name := _optimized(key))} - frozen_now)
    if gone:
        runner.logger.warning(f"The optimizer state of {', '.join(gone)} is left out: they are not optimized now")


def frozen(runner: Run) -> list[str]:
    """Return the names of this process's frozen parameters, of which a checkpoint has no settings."""
    return sorted(name for name, parameter in runner.strategy.named_parameters() if not parameter.requires_grad)


def _check_settings(then: Mapping[str, Any], now: Mapping[str, Any], frozen_then: Collection[str]) -> None:
    for key in now:
        if key not in then and (lost := _optimized(key)) and lost not in frozen_then:
            raise CheckpointError(f"has no optimizer state of {lost}, which was not optimized then")
    for key, value in then.items():
        if key in now and not _same(value, now[key]):
            _, name, setting = split_key(key)
            raise CheckpointError(
                f"{name} has {setting}={value}, and shares a group now with parameters that have {now[key]}; give each of "
                "them a group of its own"
            )


def _hyper_parameters(runner: Run) -> dict[str, Any]:
    return {key: value for key, value in runner.strategy.state_dict().items() if key.startswith(GROUP)}


def _optimized(key: str) -> str:
    """Return the parameter if the key is one that every optimized parameter has; otherwise an empty string."""
    _, parameter, item = split_key(key)
    return parameter if item == KIND else ""


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-6)  # a value may have been stored as a float32 tensor
    return bool(one == other)


@contextmanager
def telling_what_differs(runner: Run) -> Iterator[None]:
    """Warn if the optimizer's settings in the checkpoint differ from those in the configuration."""
    before = _hyper_parameters(runner)
    yield
    after = _hyper_parameters(runner)
    replaced: dict[str, str] = {}
    for key, value in after.items():
        parameter, _, setting = key.rpartition(".")
        scheduled = f"{parameter}.initial_{setting}" in before  # its initial value is compared instead
        if not scheduled and key in before and not _same(value, before[key]):
            replaced.setdefault(setting.removeprefix("initial_"), f"{value} instead of {before[key]}")
    if replaced:
        runner.logger.warning(
            f"The optimizer continues with the checkpoint's settings, not the configuration's: "
            f"{', '.join(f'{setting} {values}' for setting, values in replaced.items())}; "
            "resume=dict(optimizer=False) starts with the configuration's"
        )
