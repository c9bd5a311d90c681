"""The comparisons behind the conformance kit: what they let pass, and what they say when they do not."""

from __future__ import annotations

import pytest
import torch

from flextrain.testing.differences import (
    CheckFailedError,
    multiple,
    relative_difference,
    same_keys,
    same_numbers,
    same_tensors,
)

INF, NAN = float("inf"), float("nan")


def test_relative_difference_is_over_the_largest_magnitude() -> None:
    expected = torch.tensor([1.0, -4.0, 0.0])
    assert relative_difference(expected, expected) == 0
    assert relative_difference(expected + torch.tensor([0.0, 0.0, 0.02]), expected) == pytest.approx(0.005)
    assert relative_difference(expected + torch.tensor([0.0, 0.0, 0.02]), expected, scale=40.0) == pytest.approx(0.0005)


@pytest.mark.parametrize(
    "found, expected, difference", [(NAN, 1.0, INF), (1.0, NAN, INF), (INF, INF, 0), (INF, -INF, INF), (0.5, 0.0, 5e29)]
)
def test_relative_difference_of_numbers_that_are_none(found: float, expected: float, difference: float) -> None:
    assert relative_difference(torch.tensor([found]), torch.tensor([expected])) == pytest.approx(difference)


def test_a_multiple_is_recognised() -> None:
    value = torch.tensor([1.0, 2.0, -3.0])
    assert multiple(value / 2, value) == ", it is 0.5 times what it should be"
    assert multiple(value + torch.tensor([0.0, 0.1, 0.0]), value) == ""
    assert multiple(value, value) == ""
    assert multiple(value, torch.zeros(3)) == ""


def test_numbers_are_compared_update_by_update() -> None:
    same_numbers([1.0, 2.0], [1.0, 2.0 + 1e-7], "the loss", 1e-6)
    same_numbers([None], [None], "the norm", 1e-6)
    with pytest.raises(CheckFailedError, match=r"the loss of update 1 is 4, single-device has 2 .* it is 2 times"):
        same_numbers([1.0, 4.0], [1.0, 2.0], "the loss", 1e-6)
    with pytest.raises(CheckFailedError, match="the norm of update 0 is None, single-device has 2"):
        same_numbers([None], [2.0], "the norm", 1e-6)
    with pytest.raises(CheckFailedError, match="1 updates were made, single-device makes 2"):
        same_numbers([1.0], [1.0, 2.0], "the loss", 1e-6)
    with pytest.raises(CheckFailedError, match="the loss of update 0 is nan"):
        same_numbers([NAN], [2.0], "the loss", 1e-6)


def test_tensors_are_compared_on_the_scale_of_their_kind() -> None:
    expected = {"model.weight": torch.tensor([10.0]), "model.bias": torch.tensor([1e-3]), "optim.state.bias.step": 3}
    rounding = {**expected, "model.bias": torch.tensor([1e-3 + 5e-8])}
    same_tensors(rounding, expected, "weights", 1e-6)
    with pytest.raises(CheckFailedError, match=r"weights: model.bias differs by 1.0e-02 relative, allowed 1e-06"):
        same_tensors({**expected, "model.bias": torch.tensor([2e-3])}, expected, "weights", 1e-6)
    with pytest.raises(CheckFailedError, match="must be equal"):
        same_tensors(rounding, expected, "weights")
    with pytest.raises(CheckFailedError, match=r"model.weight has shape \(2,\), expected \(1,\)"):
        same_tensors({**expected, "model.weight": torch.ones(2)}, expected, "weights")
    with pytest.raises(CheckFailedError, match=r"optim.state.bias.step is 4, expected 3"):
        same_tensors({**expected, "optim.state.bias.step": 4}, expected, "state")
    with pytest.raises(CheckFailedError, match="nothing to compare"):
        same_tensors({"a": torch.ones(1)}, {"b": torch.ones(1)}, "weights")


def test_keys_are_compared_with_the_nearest_name() -> None:
    same_keys(["a", "b"], ["b", "a"], "state")
    with pytest.raises(
        CheckFailedError, match=r'1 missing, head.weight \(renamed to "module.head.weight"\?\); 1 unexp'
    ):
        same_keys(["module.head.weight"], ["head.weight"], "state")
    with pytest.raises(CheckFailedError, match=r"5 unexpected, a, b, c, ..."):
        same_keys("abcde", "", "state")
