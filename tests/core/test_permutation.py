"""Random orders that are computed by index: permutations, others for other seeds, and random as far as statistics tell."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from flextrain.core.random.permutation import Shuffled


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64, 1000, 4097, 2**20 + 1])
def test_a_computed_order_has_every_number_once(size: int) -> None:
    orders = [Shuffled(size, *seeds)[np.arange(size)] for seeds in ((0, 0), (0, 1), (1, 0))]
    for order in orders:
        assert np.array_equal(np.sort(order), np.arange(size))
    if size > 5:  # one place is the same by chance
        same = [int(np.sum(a == b)) for a, b in combinations([*orders, np.arange(size)], 2)]
        assert max(same) < 9, "epochs, seeds and the dataset's own order have no more than chance in common"


def test_a_computed_order_looks_random() -> None:
    """Where numbers come, which pairs come one after the other, and how neighbours are related: within five deviations."""
    size, trials = 12, 6_000
    orders = np.array([Shuffled(size, seed)[np.arange(size)] for seed in range(trials)])
    cells = [np.bincount(orders[:, place], minlength=size) for place in range(size)]
    pairs = np.bincount(orders[:, 3] * size + orders[:, 4], minlength=size**2)
    for counts, expected, freedom in (
        (np.concatenate(cells), trials / size, (size - 1) ** 2),
        (pairs[pairs > 0], trials / (size * (size - 1)), size * (size - 1) - 1),
    ):
        squares = float(((counts - expected) ** 2 / expected).sum())
        assert abs(squares - freedom) < 5 * (2 * freedom) ** 0.5
    size = 2**20 + 3
    order = Shuffled(size, 7)[np.arange(size)]
    for one, other in ((order[1:], order[:-1]), (order, np.arange(size)), (order[2:], order[:-2])):
        assert abs(np.corrcoef(one, other)[0, 1]) < 5 * size**-0.5
    lengths = np.diff(np.flatnonzero(np.diff(order) < 0))  # of ascents: 2 on average
    assert abs(lengths.mean() - 2) < 5 * size**-0.5
    low = np.bincount(order[: size // 8] * 64 // size, minlength=64)  # an eighth of an epoch sees all parts alike
    assert abs(low - size / 512).max() < 5 * (size / 512) ** 0.5
