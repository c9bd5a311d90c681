"""A look at the generators that data draw from: whoever moved which, and what is put back."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from flextrain.core.random import generators as generator_memory
from flextrain.core.random.generators import RandomStream, Watch

DRAWS: dict[str, Callable[[], Any]] = {
    "python": random.random,
    "second of a pair in python": lambda: random.gauss(0, 1),
    "numpy": np.random.rand,
    "second of a pair in numpy": np.random.randn,
    "torch": lambda: torch.rand(1),
    "second of a pair in torch": lambda: torch.randn(1),
    "second of a pair of doubles in torch": lambda: torch.randn(1, dtype=torch.float64),
    # As many words as a Mersenne twister has: the place in them is the same afterwards.
    "all of python's words": lambda: [random.getrandbits(32) for _ in range(624)],
    "all of numpy's words": lambda: np.random.bytes(4 * 624),
    "all of torch's words": lambda: torch.randint(2, (624,)),
}


def states() -> tuple[Any, ...]:
    numpy: Any = np.random.get_state()
    return random.getstate(), numpy[1].tolist(), numpy[2], torch.get_rng_state().tolist()


@pytest.fixture(params=["fast", "public"])
def watch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Watch:
    """With the looks into memory, and without."""
    if request.param == "public":
        monkeypatch.setattr(generator_memory, "_ADDRESS", None)
        monkeypatch.setattr(generator_memory, "_VIEWS", None)
    return Watch()


@pytest.mark.parametrize("others_draw", [False, True], ids=["alone", "beside others"])
@pytest.mark.parametrize("draw", DRAWS)
def test_a_draw_is_noticed_and_taken_back(watch: Watch, draw: str, others_draw: bool) -> None:
    if draw.startswith("second"):
        DRAWS[draw]()  # of the pair, in the process
    for _ in range(5):
        torch.rand(int(others_draw))
        with watch:
            assert not watch.moved()
    torch.rand(int(others_draw))
    before = states()
    with watch:
        if draw == "second of a pair in numpy":
            DRAWS[draw]()  # numpy begins a pair anew
        DRAWS[draw]()
        assert watch.moved()
    assert states() == before
    with watch:
        assert not watch.moved()


def test_what_others_draw_is_theirs(watch: Watch) -> None:
    torch.manual_seed(3)
    random.seed(3)
    expected = [(torch.rand(1).item(), random.random()) for _ in range(6)]
    torch.manual_seed(3)
    random.seed(3)
    found = []
    for _ in range(6):
        found.append((torch.rand(1).item(), random.random()))
        with watch:
            assert not watch.moved()
    assert found == expected


def test_others_may_begin_to_draw_at_any_time(watch: Watch) -> None:
    """As dropout does between the windows of several batches."""
    for drawn in (0, 0, 0, 1, 0, 1):
        torch.rand(drawn)
        before = states()
        with watch:
            assert not watch.moved()
        assert states() == before


def test_an_error_puts_back_what_was_drawn_until_then(watch: Watch) -> None:
    before = states()

    def fail() -> None:
        DRAWS["torch"]()
        DRAWS["python"]()
        DRAWS["numpy"]()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), watch:
        fail()
    assert states() == before


def test_a_stream_goes_on_where_it_ended_whatever_others_draw(watch: Watch) -> None:
    def draws() -> list[float]:
        return [random.random(), random.gauss(0, 1), np.random.rand(), torch.rand(1).item(), torch.randn(1).item()]

    stream = RandomStream(7)
    with stream:
        expected = [draws(), draws(), draws()]
    stream.begin(7)
    found = []
    for others_draw in (True, False, True):
        if others_draw:
            draws()
        before = states()
        with stream:
            found.append(draws())
        assert states() == before
        with stream:
            pass  # nothing is drawn, as by most data
        assert states() == before
    assert found == expected


def test_seeds_are_those_of_splitmix64() -> None:
    """Augmentations of a resumed run would be others if a version computed others. Source: the numbers that Rosetta Code lists for splitmix64."""
    expected = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert [generator_memory.nth_seed(1234567, number) for number in range(5)] == expected
