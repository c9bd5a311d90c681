"""The names of the files that processes write, and of the chunks in them."""

from __future__ import annotations

import re
from collections.abc import Sequence

SHARD = re.compile(r"rank-\d{5}\.safetensors")


def file_of(rank: int) -> str:
    """Name of the file that ``rank`` writes."""
    return f"rank-{rank:05d}.safetensors"


def name_in_file(key: str, box: tuple[Sequence[int], Sequence[int]], shape: Sequence[int]) -> str:
    """Name of a chunk in its file: the tensor's key, with the offsets if it is not the whole tensor."""
    offsets, sizes = box
    return key if tuple(sizes) == tuple(shape) else f"{key}@{','.join(map(str, offsets))}"
