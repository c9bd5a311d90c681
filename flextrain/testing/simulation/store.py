"""SimulatedStore: the store of a job whose ranks are threads; it counts what each rank asks for."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from .turns import Turns


class SimulatedStore(dist.Store):  # type: ignore[misc,name-defined,unused-ignore]
    """A store as torch's TCPStore has it; a rank that waits for a key lets other ranks run.

    Attributes:
        requests: number of requests, by rank.
    """

    def __init__(self, turns: Turns) -> None:
        super().__init__()
        self._turns = turns
        self._values: dict[str, bytes] = {}
        self.requests: collections.Counter[int] = collections.Counter()

    def clone(self) -> SimulatedStore:
        """The same store: its connections are all alike."""
        return self

    def set(self, key: str, value: Any) -> None:
        """Set a key."""
        self._asked(changes=True)
        self._values[key] = _as_bytes(value)

    def get(self, key: str) -> bytes:
        """The value of a key, once it is set."""
        self._asked()
        self._await([key])
        return self._values[key]

    def add(self, key: str, number: int) -> int:
        """Add to a number that begins with 0; with 0 it is only read, which other ranks may change first."""
        self._asked(changes=number != 0)
        if not number:
            self._turns.ask_again(f"a question for {key}")
        total = int(self._values.get(key, b"0")) + number
        self._values[key] = str(total).encode()
        return total

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """Set a key if it has the expected value, or none and "" is expected; return its value then."""
        self._asked(changes=True)
        found = self._values.get(key)
        if (found is None and not _as_bytes(expected)) or found == _as_bytes(expected):
            found = self._values[key] = _as_bytes(desired)
        return _as_bytes(expected) if found is None else found

    def append(self, key: str, value: Any) -> None:
        """Append to the value of a key."""
        self._asked(changes=True)
        self._values[key] = self._values.get(key, b"") + _as_bytes(value)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are set."""
        self._asked()
        if not all(key in self._values for key in keys):
            self._turns.ask_again(f"a question for {keys[0]}")
        return all(key in self._values for key in keys)

    def wait(self, keys: Sequence[str], timeout: Any = None) -> None:
        """Wait until all keys are set."""
        self._asked()
        self._await(keys)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of several keys, once they are set."""
        self._asked()
        self._await(keys)
        return [self._values[key] for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        """Set several keys."""
        self._asked(changes=True)
        self._values.update(zip(keys, map(_as_bytes, values), strict=True))

    def has_extended_api(self) -> bool:
        """True: there are ``append``, ``multi_get`` and ``multi_set``."""
        return True

    def deleteKey(self, key: str) -> bool:  # noqa: N802 - torch's name
        """Delete a key; return whether it was set."""
        self._asked(changes=True)
        return self._values.pop(key, None) is not None

    def getNumKeys(self) -> int:  # noqa: N802
        """Number of keys."""
        self._asked()
        return len(self._values)

    delete_key, num_keys = deleteKey, getNumKeys

    def _asked(self, changes: bool = False) -> None:
        self.requests[self._turns.number] += 1
        if changes:
            self._turns.happened()

    def _await(self, keys: Sequence[str]) -> None:
        self._turns.wait_until(lambda: all(key in self._values for key in keys), f"a wait for the store's {keys[0]}")


def _as_bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
