"""Raise an error of one process on all processes, and gather values only where processes differ."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar, cast

from ..errors import FlexTrainError
from ..rehearsing import rehearsing
from .collectives import broadcast_object, gather_object, get_world_size, is_alone, is_main, side_group
from .exchanges import gather_kinds

T = TypeVar("T")


@contextmanager
def raising_together() -> Iterator[None]:
    """A context in which all processes raise if one raises a FlexTrainError; every process must enter it.

    The code inside must not wait for another process, because that process may have failed.

    Raises:
        FlexTrainError: on every process, with class and text of the first failed process.
    """
    failure: FlexTrainError | None = None
    try:
        yield
    except FlexTrainError as error:
        if rehearsing():
            raise
        failure = error
    reports = gather_object(_report(failure), side_group())
    first = None if reports is None else next((report for report in reports if report is not None), None)
    _raise(broadcast_object(first, group=side_group()), failure)


def told_by_rank_0(read: Callable[[], T]) -> T:
    """The result of ``read``, which only rank 0 calls, on every process; it must be picklable. A collective.

    Raises:
        FlexTrainError: on every process, if rank 0 raised one; another error of rank 0 becomes one on the others.
    """
    result: T | None = None
    report: _Report | None = None
    failure: Exception | None = None
    if is_main():
        try:
            result = read()
        except Exception as error:  # raised below, when the others know of it
            failure = error
            report = _report(error if isinstance(error, FlexTrainError) else FlexTrainError(f"rank 0: {error!r}"))
    answer, report = broadcast_object((result, report), group=side_group())
    if failure is not None:
        raise failure
    _raise(report, None)
    return cast(T, answer)


_Report = tuple[type[FlexTrainError], str]


def _report(failure: FlexTrainError | None) -> _Report | None:
    return None if failure is None else (type(failure), str(failure))


def _raise(report: _Report | None, own: FlexTrainError | None) -> None:
    """Raise the reported error, if there is one: this process's own one, if that says the same."""
    if report is not None:
        kind, text = report
        raise own if own is not None and str(own) == text else kind(text)


def gather_differing(own: T) -> list[T]:
    """The values of all processes, by rank; values must be JSON-able.

    32 bytes are sent if all are equal. Otherwise one process of each kind sends its value, and equal ones share the object.
    """
    if is_alone() or rehearsing():
        return [own] * get_world_size()
    digest = hashlib.blake2b(json.dumps(own).encode(), digest_size=16).digest()
    return gather_kinds(own, digest, side_group()).by_rank()
