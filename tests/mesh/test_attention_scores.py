"""What models do to scores of attention beside masks: soft caps, sinks, linear biases, and positions that attend to none."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from flextrain.core.base.errors import StrategyError
from flextrain.strategies.mesh.context import attention as attending
from flextrain.strategies.mesh.context import masks
from flextrain.strategies.mesh.context.attention import SequenceAttention
from flextrain.strategies.mesh.context.masks import CAUSAL, FULL, Mask, Rule
from flextrain.strategies.mesh.context.scores import Scores, attention_with_dropout

from .rings import Names, in_a_ring, on_one_device
from .test_attention_kernels import MASKS, OneProcess, padded, tensors

LENGTH, HEADS = 20, 4
AT = torch.arange(LENGTH)[None]
SCORES = {
    "softcap": Scores(softcap=0.5),
    "sinks": Scores(sinks=torch.linspace(-1.0, 2.0, HEADS)),
    "slopes": Scores(slopes=0.5 ** torch.arange(1.0, 1.0 + HEADS), positions=AT),
    "slopes by sample": Scores(slopes=0.5 ** torch.arange(1.0, 1.0 + HEADS), positions=torch.cat([AT, AT.flip(1)])),
    "biases": Scores(biases=torch.linspace(-2.0, 2.0, HEADS * (2 * LENGTH - 1)).sin().view(HEADS, -1)),
    "all": Scores(1.0, torch.linspace(-1.0, 2.0, HEADS), 0.5 ** torch.arange(1.0, 1.0 + HEADS), AT),
}
SOME = ("causal", "full", "window", "padding", "all of a sample", "documents", "holes")


def given(**options: Any) -> list[Tensor]:
    return tensors(LENGTH, dtype=torch.float64, **options)


def close(found: list[Tensor], expected: list[Tensor]) -> None:
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.double(), other, rtol=0, atol=1e-13)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "SHORTEST", 1)
    monkeypatch.setattr(masks, "TILE", 7)


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("mask", SOME)
def test_a_ring(mask: str, scores: str) -> None:
    own = SCORES[scores]
    learned = {"sinks": own.sinks, "biases": own.biases}
    own = replace(own, **{name: each.double() for name, each in learned.items() if each is not None})
    of_mask = MASKS[mask](LENGTH)
    with Names() as seen:
        found = in_a_ring(*given(), of_mask, 0.3, own)
    close(found, on_one_device(*given(), of_mask, 0.3, own))
    assert bool(seen.kernels()) is (own.are_products and mask not in ("window", "holes"))


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("mask", ["causal", "window", "padding", "documents"])
def test_some_heads_of_a_whole_sequence(mask: str, scores: str) -> None:
    """What Ulysses computes between its exchanges: each process has its heads' sinks and slopes."""
    of_mask, parts = MASKS[mask](LENGTH), []
    for index in range(2):
        query, key, value, gradient = given()
        heads, shared = slice(2 * index, 2 * index + 2), slice(index, index + 1)
        inputs = [tensor.requires_grad_() for tensor in (query[:, heads], key[:, shared], value[:, shared])]
        own = SCORES[scores].of_heads(index, 2)
        found = attending._whole_attention(inputs[0], inputs[1], inputs[2], of_mask, None, 0.0, own)
        parts.append([found.detach(), *torch.autograd.grad(found, inputs, gradient[:, heads])])
    joined = [torch.cat(pair, 1) for pair in zip(*parts, strict=True)]
    close(joined, on_one_device(*given(), of_mask, None, SCORES[scores])[:4])


@pytest.mark.parametrize("others", [8, 20, 50])
@pytest.mark.parametrize("mask", ["full", "padding", "holes", "all of a sample"])
@pytest.mark.parametrize("shortest", [1, 1000])
def test_to_another_sequence(shortest: int, mask: str, others: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a decoder attends to its encoder: in a ring, and by what Ulysses computes between its exchanges."""
    monkeypatch.setattr(masks, "SHORTEST", shortest)
    query, _, _, gradient = given()
    _, key, value, _ = tensors(others, dtype=torch.float64)
    of_mask = replace(MASKS[mask](others), rule=FULL, queries=LENGTH)
    expected = on_one_device(query, key, value, gradient, of_mask)
    close(in_a_ring(query, key, value, gradient, of_mask), expected)
    inputs = [tensor.requires_grad_() for tensor in (query, key, value)]
    found = attending._whole_attention(inputs[0], inputs[1], inputs[2], of_mask, None, 0.0)
    close([found.detach(), *torch.autograd.grad(found, inputs, gradient)], expected)


def test_who_attends_to_none_of_another_sequence() -> None:
    keys = torch.ones(2, 30, dtype=torch.bool)
    keys[1] = False
    found = Mask(FULL, keys, averages=True, queries=LENGTH).alone
    assert found is not None
    assert found.shape == (2, LENGTH)
    assert found.all(-1).tolist() == found.any(-1).tolist() == [False, True]


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("mask", ["causal", "window", "documents"])
def test_with_dropout(mask: str, scores: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of_mask, rates = MASKS[mask](LENGTH), []
    monkeypatch.setattr(functional, "dropout", lambda weights, rate: rates.append(rate) or weights)
    query, key, value, gradient = given()
    inputs = [tensor.requires_grad_() for tensor in (query, key, value)]
    found = attending._whole_attention(query, key, value, of_mask, None, 0.25, SCORES[scores])
    close(
        [found.detach(), *torch.autograd.grad(found, inputs, gradient)],
        on_one_device(*given(), of_mask, None, SCORES[scores])[:4],
    )
    assert rates == [0.25]


def test_dropout_takes_weights_away() -> None:
    query, key, value, _ = given()
    allowed = Mask(CAUSAL).dense(LENGTH, query.device)
    found = attention_with_dropout(query, key, torch.ones_like(value), allowed, 0.3, SCORES["softcap"], 0.5)
    assert (found - 1.0).abs().mean() > 0.05
    assert found.mean() == pytest.approx(1.0, abs=0.15)


# Positions that attend to none


@pytest.mark.parametrize("rule", [CAUSAL, FULL, Rule(True, 4), Rule(False, 2)])
def test_who_attends_to_none(rule: Rule) -> None:
    keys = padded(LENGTH, (6, LENGTH), (0, 4))
    allowed = Mask(rule, keys).tile((0, LENGTH), (0, LENGTH), keys.device)
    assert isinstance(allowed, Tensor)
    expected = ~allowed[:, 0].any(-1)
    found = Mask(rule, keys, averages=True).alone
    assert torch.equal(expected if found is None else found, expected)
    assert Mask(rule, keys).alone is None
    assert (found is not None) is bool(expected.any())


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 0.5])
def test_positions_that_attend_to_none_weigh_all_alike(softcap: float | None, has_sinks: bool) -> None:
    """As in models' own attention, which adds the least number to scores: its gradient goes on to queries and keys."""
    keys = padded(LENGTH, (6, LENGTH), (0, LENGTH))
    sinks = torch.linspace(-1.0, 2.0, HEADS).double() if has_sinks else None
    mask, scores = Mask(CAUSAL, keys, averages=True), Scores(softcap, sinks)
    query, key, value, gradient = given(heads=(4, 4))
    inputs = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    products = inputs[0] @ inputs[1].transpose(-1, -2) * 0.3
    products = products if softcap is None else torch.tanh(products / softcap) * softcap
    allowed = mask.dense(LENGTH, keys.device)
    assert allowed is not None
    least = torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(~allowed, torch.finfo(torch.float64).min)
    of_sinks = [] if sinks is None else [sinks.view(1, -1, 1, 1).expand(*products.shape[:3], 1)]
    out = torch.cat([products + least, *of_sinks], -1).softmax(-1)[..., :LENGTH] @ inputs[2]
    torch.testing.assert_close(
        out[0, :, 5], value[0].mean(1) * (not has_sinks)
    )  # of all values; a sink takes all instead
    expected = [out.detach(), *torch.autograd.grad(out, inputs, gradient)]
    close(in_a_ring(query, key, value, gradient, mask, 0.3, scores)[:4], expected)
    inputs = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    found = attending._whole_attention(inputs[0], inputs[1], inputs[2], mask, 0.3, 0.0, scores)
    close([found.detach(), *torch.autograd.grad(found, inputs, gradient)], expected)


# What does not fit


@pytest.mark.parametrize("name", ["sinks", "slopes"])
def test_numbers_by_head_that_are_not_of_these_heads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda group: [0])
    attention = SequenceAttention("ring", OneProcess())  # type: ignore[arg-type]
    scores = Scores(**{name: torch.ones(8)}, positions=AT if name == "slopes" else None)
    query, key, value, _ = given()
    with pytest.raises(StrategyError, match=f"^model: X: has 8 {name} of attention for 4 heads on a process$"):
        attention(query, key, value, Mask(CAUSAL), None, 0.0, "model: X", scores)


def test_a_cap_in_half_precision_is_that_of_float32() -> None:
    query, key, value, gradient = tensors(LENGTH, dtype=torch.bfloat16)
    scores = Scores(2.0, torch.ones(HEADS, dtype=torch.bfloat16))
    found = in_a_ring(query, key, value, gradient, Mask(CAUSAL), None, scores)
    expected = on_one_device(query, key, value, gradient, Mask(CAUSAL), None, scores)
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.double(), other, rtol=0, atol=4e-2 * max(1.0, math.sqrt(other.numel() / 100)))
    assert {mine.dtype for mine in found} == {torch.bfloat16}
