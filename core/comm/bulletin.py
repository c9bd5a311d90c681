"""Bulletin: short texts that the processes of a job leave for each other in the job's store."""

from __future__ import annotations

import collections
import copy
import datetime
import uuid
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from ..errors import LaunchError
from ..torch_private import default_store
from .collectives import get_rank, get_world_size

_numbers: weakref.WeakKeyDictionary[Any, collections.Counter[str]] = weakref.WeakKeyDictionary()
_QUESTIONS_PER_S = 1000.0


class StoreLostError(LaunchError):
    """The store of the job cannot be reached: the process that keeps it has ended, or its machine is cut off."""


class Bulletin:
    """Short texts under keys, which every process of the job may set and read at any time.

    It has a connection of its own, so that a thread may use it while the main thread waits for the store or in a
    collective; two threads must not share one. No method waits for another process. But a call does not return while
    the process that keeps the store is stopped: a second thread has to watch over the one that uses a bulletin.

    All processes make their bulletins in the same order, after the process group exists; each starts empty.

    Args:
        timeout_s: seconds until a store that cannot be connected to counts as lost.

    Raises:
        StoreLostError: by every method, if the connection is broken.
    """

    def __init__(self, timeout_s: float = 30.0) -> None:
        self.rank, self.world_size = get_rank(), get_world_size()
        counter = _numbers.setdefault(dist.group.WORLD, collections.Counter())
        counter["bulletins"] += 1
        self._lost: list[str] = []
        with _store_errors():
            shared = default_store()
            # Named by chance, because a store may outlive the processes: that of torchrun's agent does.
            name = shared.compare_set(f"flextrain bulletin {counter['bulletins']}", "", uuid.uuid4().hex)
            self._timeout = datetime.timedelta(seconds=timeout_s)
            self._prefix = f"flextrain/bulletin/{name.decode()}"
            own = _own_connection(shared, self._timeout)
            self._store: Any = dist.PrefixStore(self._prefix, own)  # type: ignore[attr-defined]

    def for_another_thread(self) -> Bulletin:
        """Return the same bulletin with a connection of its own."""
        other = copy.copy(self)
        other._lost = []
        with _store_errors():
            other._store = dist.PrefixStore(self._prefix, _own_connection(self._store, self._timeout))  # type: ignore[attr-defined]
        return other

    @property
    def pace_s(self) -> float:
        """Seconds between two questions of a process, with which all processes together ask about 1000 in a second."""
        return self.world_size / _QUESTIONS_PER_S

    def put(self, key: str, text: str) -> None:
        """Set ``key``, whatever it was before."""
        with _store_errors(self._lost):
            self._store.set(key, text)

    def put_first(self, key: str, text: str) -> str:
        """Set ``key`` if no process has set it yet; return its text, which is then the same for all."""
        with _store_errors(self._lost):
            # An empty text would count as none.
            return str(self._store.compare_set(key, "", f"={text}").decode()[1:])

    def read_first(self, key: str) -> str | None:
        """Return what ``put_first`` has set, or None."""
        text = self.read([key])[0]
        return None if text is None else text[1:]

    def read(self, keys: Sequence[str]) -> list[str | None]:
        """Return the text of every key, None for those that nobody has set; two messages if all are set."""
        with _store_errors(self._lost):
            if not keys:
                return []
            if self._store.check(list(keys)):
                return [text.decode() for text in self._store.multi_get(list(keys))]
            if len(keys) == 1:
                return [None]
            present = [key for key in keys if self._store.check([key])]
            texts = dict(zip(present, self._store.multi_get(present), strict=True)) if present else {}
            return [texts[key].decode() if key in texts else None for key in keys]

    def count(self, key: str, add: int = 1) -> int:
        """Add to a number that begins with 0, and return the sum; ``add=0`` reads it."""
        with _store_errors(self._lost):
            return int(self._store.add(key, add))


@contextmanager
def _store_errors(lost: list[str] | None = None) -> Iterator[None]:
    """Context of calls of a store.

    Args:
        lost: of the connection: what was said when it broke. It is not used again, because torch would write a stack of
            C++ functions to stderr for each call.
    """
    if lost:
        raise StoreLostError(lost[0])
    try:
        yield
    except RuntimeError as error:  # torch's DistError and its kind
        said = " ".join(str(error).split()) or type(error).__name__
        text = f"the store of the job, which rank 0 or the launcher keeps, was lost ({said[:200]})"
        if lost is not None:
            lost.append(text)
        raise StoreLostError(text) from error


def _own_connection(store: Any, timeout: datetime.timedelta) -> Any:
    """Return another connection to ``store``; Store.clone came after torch 2.6."""
    while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    if isinstance(store, dist.TCPStore):  # type: ignore[attr-defined]
        return dist.TCPStore(store.host, store.port, is_master=False, wait_for_workers=False, timeout=timeout)  # type: ignore[attr-defined]
    if isinstance(store, dist.FileStore):  # type: ignore[attr-defined]
        return dist.FileStore(store.path)  # type: ignore[attr-defined]
    return store.clone() if hasattr(store, "clone") else store
