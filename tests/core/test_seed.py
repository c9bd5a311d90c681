"""Seeds, and the state of the generators as JSON."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from flextrain.core.comm import collectives as dist
from flextrain.core.random.generators import decode, draw_seed, encode, load_rng_state, rng_state, set_seed
from flextrain.testing import WorkerGroup

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _generators_as_before() -> Iterator[None]:
    state = rng_state(CPU)
    yield
    load_rng_state(state, CPU)


def draw() -> list[Any]:
    """Numbers from every generator; the Gaussian ones are drawn in pairs, one of which is kept for the next call."""
    return [
        random.random(),
        random.gauss(0, 1),
        np.random.rand(),
        np.random.randn(),
        torch.rand(1).item(),
        torch.nn.functional.dropout(torch.ones(8)).tolist(),
    ]


def test_the_same_seed_gives_the_same_numbers() -> None:
    drawn = []
    for seed in (3, 3, 4):
        assert set_seed(seed) == seed
        drawn.append(draw())
    assert drawn[0] == drawn[1]
    assert all(a != b for a, b in zip(drawn[0], drawn[2], strict=True))


@pytest.mark.parametrize("seed", [0, 2**32 + 5, 2**62])
def test_any_size_of_seed(seed: int) -> None:
    assert set_seed(seed) == seed


def test_without_a_seed_one_is_drawn() -> None:
    seeds = {set_seed() for _ in range(4)}
    assert len(seeds) == 4
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert draw_seed() not in seeds


def test_the_state_survives_json_and_continues_every_generator() -> None:
    set_seed(5)
    draw()  # leaves half a pair of Gaussian numbers in two generators
    saved = json.dumps(rng_state(CPU), allow_nan=False)
    expected = draw()
    set_seed(6)
    draw()
    load_rng_state(json.loads(saved), CPU)
    assert draw() == expected


def test_the_state_of_a_device_that_is_not_here_is_left_out() -> None:
    state = rng_state(CPU)
    expected = draw()
    load_rng_state({**state, "somebody's device": "AAAA"}, CPU)
    assert draw() == expected


def test_generator_state_as_text() -> None:
    state = torch.get_rng_state()
    text = encode(state)
    assert text.isascii()
    assert torch.equal(decode(text), state)


def test_deterministic_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    try:
        set_seed(1, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
        assert (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark) == (True, False)
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"  # the user's own stays
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic = False


def seeds_of_ranks() -> list[Any]:
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=2, init_method="env://", timeout_s=30)
    results: list[Any] = []
    for kwargs in (dict(seed=7), dict(seed=7, diff_rank_seed=True), dict()):
        seed = set_seed(**kwargs)
        results.append((seed, draw()))
    return results


@pytest.mark.distributed
def test_ranks_share_the_seed_and_differ_on_request(workers2: WorkerGroup) -> None:
    (same0, own0, drawn0), (same1, own1, drawn1) = workers2.run(seeds_of_ranks)
    assert same0 == same1
    assert own0[0] == own1[0] == 7
    assert all(a != b for a, b in zip(own0[1], own1[1], strict=True))
    assert own0 == same0  # rank 0 draws the same with and without
    assert drawn0 == drawn1
