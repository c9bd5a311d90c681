"""Writes to parameters between updates, as by a hook that bounds weights: they raise where the engine would lose them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ...core.base.errors import StrategyError
from ...core.comm.agreement import raising_together
from ...core.torch_compat.torch_private import version_of
from .engine_internals import Fragment, gathered_small, in_master, is_partitioned, own_shard


class OutsideWrites:
    """Raises before an update if somebody has written to a parameter since the last one: the engine takes its values from elsewhere.

    Torch counts writes in place, which waits for nothing, but not those to ``.data``. Therefore values are compared too, before the
    updates 1, 2, 4, 8 and so on. Of what stage 3 has freed, ``.data`` raises.

    Args:
        parameters: those whose values the engine takes from elsewhere, by name.
        fragments: this process's shards of those that are trained, as the engine has them.
        compares: whether values are where they can be compared, and not in files.
    """

    def __init__(self, parameters: Mapping[str, Tensor], fragments: Sequence[Fragment], *, compares: bool) -> None:
        self._names, self._parameters = [*parameters], [*parameters.values()]
        self._fragments, self._compares = fragments, compares
        self._updates = 0
        self.note()

    def note(self) -> None:
        """Take the parameters as they are now."""
        self._versions = [*map(version_of, self._parameters)]

    def check(self) -> None:
        """Raise StrategyError if a write to a parameter was counted."""
        now = [*map(version_of, self._parameters)]
        if now != self._versions:
            raise _lost(next(n for n, new, old in zip(self._names, now, self._versions, strict=True) if new != old))

    def check_update(self) -> None:
        """Raise StrategyError if a parameter was written to; before every update, on every process."""
        self.check()
        self._updates += 1
        if self._compares and not self._updates & (self._updates - 1):
            with raising_together():  # each process compares its own shards
                if found := [*self._changed()]:
                    raise _lost(found[0])

    def _changed(self) -> Iterator[str]:
        pairs = [(f.name, f.copy_in_model(), in_master(f)) for f in self._fragments if not is_partitioned(f.parameter)]
        for name, parameter in zip(self._names, self._parameters, strict=True):
            if gathered_small(parameter):
                shard = own_shard(parameter)
                own = shard.to_local()
                pairs.append((name, parameter.detach().reshape(-1)[shard.start : shard.start + own.numel()], own))
        pairs = [(name, ours.reshape(-1), theirs.reshape(-1)) for name, ours, theirs in pairs if ours.numel()]
        if pairs:
            # NaN is a possible value too.
            same = [
                torch.isclose(theirs.to(ours), ours, rtol=0.0, atol=0.0, equal_nan=True).all()
                for _, ours, theirs in pairs
            ]
            yield from (
                name for (name, *_), is_same in zip(pairs, torch.stack(same).tolist(), strict=True) if not is_same
            )


def _lost(name: str) -> StrategyError:
    return StrategyError(
        f"model.{name}: was written to between updates, which DeepSpeed's engine would lose: it updates a copy, and gives the model its "
        'values; choose strategy="fsdp" or "ddp", or in float32 strategy.zero_optimization.stage=0'
    )
