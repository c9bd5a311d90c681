"""Looks at torch's generator in memory: in use where they tell the truth, and left alone where anything is elsewhere."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

import pytest
import torch

from flextrain.core.random import generators as memory


@pytest.mark.skipif(sys.platform != "linux", reason="the functions of torch are called")
def test_the_looks_into_memory_are_in_use() -> None:
    assert memory._ADDRESS is not None
    assert memory._VIEWS is not None


@pytest.mark.skipif(sys.platform != "linux", reason="the functions of torch are called")
def test_a_look_agrees_with_the_state_through_ten_thousand_draws() -> None:
    """It is another exactly when the state is another, whatever is drawn, and of whatever size."""
    probe = torch.Generator().manual_seed(5)
    views = memory._torch_views(probe)
    assert views is not None
    look = memory._look_at(views)
    choose = torch.Generator().manual_seed(6)
    draws: list[Callable[[int], object]] = [
        lambda n: torch.rand(n, generator=probe),
        lambda n: torch.rand(n, generator=probe, dtype=torch.float64),
        lambda n: torch.randn(n, generator=probe),
        lambda n: torch.randn(n, generator=probe, dtype=torch.float64),
        lambda n: torch.randperm(n, generator=probe),
        lambda n: torch.empty(n).bernoulli_(generator=probe),
        lambda n: torch.normal(0.0, 1.0, (n,), generator=probe),
        lambda n: torch.empty(n).exponential_(generator=probe),
        lambda n: torch.randint(2**40, (n,), generator=probe),
    ]
    before, state = look(), probe.get_state()
    changes = 0
    for _ in range(10_000):
        which, size = (int(torch.randint(high, (), generator=choose)) for high in (len(draws), 5))
        if which % 4 == 0:
            size *= 624
        draws[which](size)
        now, after = look(), probe.get_state()
        assert (now != before) == (not torch.equal(state, after))
        changes += now != before
        before, state = now, after
    assert changes > 5000


def without_words(address: int, size: int) -> bytes:
    found = bytearray(memory._read_safely(address, size))
    found[500:504] = b"\0\0\0\0"
    return bytes(found)


def twice(address: int, size: int) -> bytes:
    return memory._read_safely(address, size) * 2


def cut_short(address: int, size: int) -> bytes:
    """The words are there, and not what is behind them."""
    return memory._read_safely(address, 2600)


def nothing(address: int, size: int) -> bytes:
    return memory._read_safely(0, size)  # no memory is there


@pytest.mark.parametrize("read", [without_words, twice, cut_short, nothing])
def test_what_is_not_as_known_is_not_looked_at(read: Callable[[int, int], bytes]) -> None:
    assert memory._torch_views(torch.default_generator, read) is None


def test_what_is_not_readable_is_not_read() -> None:
    page = 4096
    for address in (0, 8, 2**47 - page, 2**63, 2**64 - page, -page):
        assert memory._read_safely(address, page) == b""
    number = ctypes.c_uint64(0x1122334455667788)
    if sys.platform == "linux":
        assert memory._read_safely(ctypes.addressof(number), 8) == bytes(number)


@pytest.mark.parametrize("part", [0, 1], ids=["place", "spare numbers"])
def test_a_look_that_misses_draws_is_not_used(part: int) -> None:
    probe = torch.Generator().manual_seed(1)
    address = memory._words_address(probe, memory._read_safely)
    if address is None:
        pytest.skip("no look at torch's memory here")
    views = memory._views_beside(address)
    assert not memory._tells_draws(probe, memory._look_at([views[part]]))
    assert memory._tells_draws(probe.manual_seed(1), memory._look_at(views))
