"""What a checkpoint holds beside tensors: rank 0's values, what only other processes have, and each process's own."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import xxhash

from .. import directory

Own = tuple[int, dict[str, Any]]
"""The place of a process, and what it has of its own."""


class PlainValues:
    """The plain values of one process, on their way to rank 0. Where all have the same keys, only ``per_rank`` is sent.

    Args:
        values: rank 0's count; of a key that rank 0 lacks, those of the first process that has it.
        number: the place of this process's own among all of them.
        per_rank: each process's own; read back as lists of those that gave some.
        joined: lists of names, or mappings to such lists, of which the checkpoint gets what any process has.
    """

    def __init__(
        self, values: Mapping[str, Any], number: int, per_rank: Mapping[str, Any], joined: Mapping[str, Any]
    ) -> None:
        self.own: Own = (number, dict(per_rank))
        self._values, self._joined = {**values, **joined}, dict(joined)

    def fingerprint(self) -> int:
        """A number that is equal on processes with the same keys and the same names in ``joined``.

        Raises:
            CheckpointError: something differs by process and JSON cannot hold it, so that it may not be sent either.
        """
        directory.to_json(self.own[1], "per_rank")
        names = [*self._values, str(self._joined)]
        return xxhash.xxh3_64_intdigest("\0".join(names).encode())

    def beyond(self, known: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        """What this process has under other keys than ``known``, and its ``joined``.

        Raises:
            CheckpointError: JSON cannot hold it.
        """
        extra = {key: value for key, value in self._values.items() if key not in known}
        directory.to_json(extra, "checkpoint")
        directory.to_json(self._joined, "checkpoint")
        return extra, self._joined

    def keys(self) -> list[str]:
        """Of the values of this process."""
        return list(self._values)

    def text(self, own: Sequence[Own], others: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]] = ()) -> bytes:
        """All values as JSON; rank 0's to make.

        Args:
            own: what each process has of its own, with its place.
            others: what ``beyond`` gave on each process, if their fingerprints differ.

        Raises:
            CheckpointError: JSON cannot hold them.
        """
        values = dict(self._values)
        for extra, joined in others:
            values = {**extra, **values}
            values |= {key: _union(values.get(key), names) for key, names in joined.items()}
        given = [per_rank for _, per_rank in sorted(own, key=lambda one: one[0]) if per_rank]
        lists = {key: [per_rank[key] for per_rank in given] for key in (given[0] if given else ())}
        return directory.to_json(values | lists, "checkpoint")


def _union(one: Any, other: Any) -> Any:
    """The names of both, in their order."""
    if one is None:
        return other
    if isinstance(one, Mapping):
        return {key: _union(one.get(key), other.get(key, one.get(key))) for key in {**one, **other}}
    return list(dict.fromkeys([*one, *other]))
