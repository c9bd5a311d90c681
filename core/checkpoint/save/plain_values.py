"""Plain values of a checkpoint: those of rank 0, those that only other processes have, and values per rank."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import xxhash

from .. import directory, rows

Own = tuple[int, dict[str, Any]]
"""The number of a process, and its values that differ by process."""


class PlainValues:
    """The plain values of one process, to be sent to rank 0. If all have the same keys, only ``per_rank`` is sent.

    Args:
        values: rank 0's are saved; for a key that rank 0 lacks, the value of the first process that has it.
        number: position of this process's ``per_rank`` in the lists of the checkpoint.
        per_rank: values that differ by process; read back as lists of those that are not empty.
        joined: lists of names, or mappings to such lists; the checkpoint gets the union over all processes.
    """

    def __init__(
        self, values: Mapping[str, Any], number: int, per_rank: Mapping[str, Any], joined: Mapping[str, Any]
    ) -> None:
        self.own: Own = (number, dict(per_rank))
        self._values, self._joined = {**values, **joined}, dict(joined)

    def fingerprint(self) -> int:
        """A hash that is equal on processes with the same keys and the same names in ``joined``.

        Raises:
            CheckpointError: JSON cannot hold a value of ``per_rank``; it must not be sent then.
        """
        directory.to_json(self.own[1], "per_rank")
        names = [*self._values, str(self._joined)]
        return xxhash.xxh3_64_intdigest("\0".join(names).encode())

    def beyond(self, known: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The values of this process whose keys are not in ``known``, and its ``joined``.

        Raises:
            CheckpointError: JSON cannot hold them.
        """
        extra = {key: value for key, value in self._values.items() if key not in known}
        directory.to_json(extra, "checkpoint")
        directory.to_json(self._joined, "checkpoint")
        return extra, self._joined

    def keys(self) -> list[str]:
        """Keys of this process's values."""
        return list(self._values)

    def text(
        self,
        own: Sequence[Own],
        others: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]] = (),
        row_keys: Sequence[str] = (),
    ) -> bytes:
        """All values as JSON; for rank 0.

        Args:
            own: number and ``per_rank`` of each process.
            others: result of ``beyond`` on each process, if their fingerprints differ.
            row_keys: keys of the values that processes have in their own files.

        Raises:
            CheckpointError: JSON cannot hold them.
        """
        values = dict(self._values)
        for extra, joined in others:
            values = {**extra, **values}
            values |= {key: _union(values.get(key), names) for key, names in joined.items()}
        given = [per_rank for _, per_rank in sorted(own, key=lambda one: one[0]) if per_rank]
        lists = {key: [per_rank[key] for per_rank in given] for key in (given[0] if given else ())}
        if row_keys:
            lists[rows.KEY] = list(row_keys)
        return directory.to_json(values | lists, "checkpoint")


def _union(one: Any, other: Any) -> Any:
    """The names of both without duplicates, in order."""
    if one is None:
        return other
    if isinstance(one, Mapping):
        return {key: _union(one.get(key), other.get(key, one.get(key))) for key in {**one, **other}}
    return list(dict.fromkeys([*one, *other]))
