"""Errors that all processes raise as soon as one has them, and what each process has, gathered only where they differ."""

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
    """A context in which all processes raise if one raises a FlexTrainError; every process must come here.

    What is inside may not wait for another process, which may have failed.

    Raises:
        FlexTrainError: the first process's, of its class, on every process.
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
    """What each process has, by rank, of what JSON can hold; one message of 16 bytes where it is the same on all."""
    if is_alone():
        return [own]
    digest = hashlib.blake2b(json.dumps(own).encode(), digest_size=16).digest()
    # The device is named, because the user may have made another one the default.
    digests = all_gather(torch.tensor(list(digest), dtype=torch.uint8, device="cpu"), side_group())
    if all(torch.equal(other, digests[0]) for other in digests):
        return [own] * len(digests)
    return all_gather_object(own, side_group())
