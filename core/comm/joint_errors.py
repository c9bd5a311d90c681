"""Raise an error of one process on all processes, and gather values only where processes differ."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from ..errors import FlexTrainError
from .collectives import all_gather, all_gather_object, is_alone, side_group

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
        failure = error
    reports = all_gather_object(None if failure is None else (type(failure), str(failure)), side_group())
    found = next((report for report in reports if report is not None), None)
    if found is None:
        return
    kind, text = found
    raise failure if failure is not None and str(failure) == text else kind(text)


def gather_differing(own: T) -> list[T]:
    """The values of all processes, by rank; values must be JSON-able. Only 16 bytes are sent if all are equal."""
    if is_alone():
        return [own]
    digest = hashlib.blake2b(json.dumps(own).encode(), digest_size=16).digest()
    # The device is explicit, because the user may have set another default device.
    digests = all_gather(torch.tensor(list(digest), dtype=torch.uint8, device="cpu"), side_group())
    if all(torch.equal(other, digests[0]) for other in digests):
        return [own] * len(digests)
    return all_gather_object(own, side_group())
