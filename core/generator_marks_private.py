"""Marks: states of torch's generator on the CPU that stand for a state which is not computed yet.

The layout of a state is private: the seed (8 bytes), three counters (16 bytes), the 624 words (8 bytes each), a spare normal
number. It was checked with torch 2.6 and 2.15. A mark has the state's seed, and words that no seeding gives.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_WORDS = slice(24, 24 + 8 * 5)
_NAME = (0x9E3779B9, 0x7F4A7C15, 0xBF58476D, 0x1CE4E5B9)


def marked(state: Tensor, number: int) -> Tensor:
    """Return mark ``number``, below 2**32, of a state."""
    mark = state.numpy().copy()
    mark[_WORDS] = np.array((*_NAME, number), dtype=np.uint64).view(np.uint8)
    return torch.from_numpy(mark)


def mark_of(state: Tensor) -> int | None:
    """Return the number of a mark; None: it is an ordinary state."""
    words = state.numpy()[_WORDS]
    found = tuple(np.frombuffer(words.tobytes(), dtype=np.uint64).tolist())
    return int(found[-1]) if found[:-1] == _NAME else None
