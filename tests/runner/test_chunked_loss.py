"""Logits by their hidden states: every function on them gives what whole logits give, and no tensor has all of them."""

from __future__ import annotations

import copy
import functools
import logging
import pickle
import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from flextrain import ConfigError, FlexibleRunner, StrategyError
from flextrain.core.model import logits as module
from flextrain.core.torch_compat.torch_private import TorchDispatchMode, tree_flatten
from flextrain.runner.transforms import chunked_loss
from flextrain.runner.transforms.chunked_loss import ChunkedLoss, large_logits
from flextrain.runner.transforms.lora import LoRA

from .training import log_lines

WORDS, WIDTH, ROWS, CHUNK = 97, 8, (4, 10), 6


class Speaker(nn.Module):
    """A table of embeddings and a head; ``says`` makes the loss of logits and labels."""

    def __init__(self, says: Callable[[Tensor, Tensor], Tensor], **options: Any) -> None:
        super().__init__()
        self.table, self.says = nn.Embedding(WORDS, WIDTH), says
        self.head = nn.Linear(WIDTH, WORDS, **options)

    def forward(self, words: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(torch.tanh(self.table(words)))
        return {"loss": self.says(logits, labels), "logits": logits}


WEIGHT = torch.rand(WORDS, dtype=torch.float64)
BIAS = torch.randn(1, WORDS, dtype=torch.float64)
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "flat": lambda x, y: functional.cross_entropy(x.view(-1, x.size(-1)), y.view(-1)),
    "flatten": lambda x, y: functional.cross_entropy(x.flatten(0, 1), y.flatten()),
    "unknown size": lambda x, y: functional.cross_entropy(x.reshape(-1, WORDS), y.reshape(-1)),
    "shifted": lambda x, y: functional.cross_entropy(x[..., :-1, :].contiguous().view(-1, WORDS), y[..., 1:].reshape(-1)),
    "transposed": lambda x, y: functional.cross_entropy(x.transpose(1, 2), y),
    "permuted": lambda x, y: functional.cross_entropy(x.permute(0, 2, 1), y, reduction="none").mean(1).sum(),
    "turned": lambda x, y: functional.cross_entropy(x.mT, y),
    "smooth": lambda x, y: functional.cross_entropy(x.flatten(0, 1), y.flatten(), label_smoothing=0.1),
    "weighted": lambda x, y: functional.cross_entropy(x.flatten(0, 1), y.flatten(), WEIGHT, label_smoothing=0.1),
    "sum": lambda x, y: functional.cross_entropy(x.flatten(0, 1), y.flatten(), reduction="sum"),
    "by token": lambda x, y: (functional.cross_entropy(x.flatten(0, 1), y.flatten(), reduction="none") * torch.arange(40.0)).sum(),
    "capped": lambda x, y: functional.cross_entropy(torch.tanh(x / 3.0).mul(3.0).flatten(0, 1), y.flatten()),
    "biased": lambda x, y: functional.cross_entropy((2 * x + BIAS - 1).flatten(0, 1), y.flatten()),
    "z": lambda x, y: functional.cross_entropy(x.flatten(0, 1), y.flatten()) + 1e-2 * x.logsumexp(-1).square().mean(),
    "chosen": lambda x, y: -x.log_softmax(-1).gather(-1, y.clamp(0).unsqueeze(-1)).mean(),
    "likelihood": lambda x, y: functional.nll_loss(functional.log_softmax(x, dim=-1).flatten(0, 1), y.flatten()),
    "some": lambda x, y: functional.cross_entropy(x[y != -100], y[y != -100]),
    "last": lambda x, y: functional.cross_entropy(x[:, -1], y[:, -1].clamp(0)),
    "first of two": lambda x, y: functional.cross_entropy(x[None, 1:][0].flatten(0, 1), y[1:].flatten()),
    "none counts": lambda x, y: functional.cross_entropy(x.flatten(0, 1), torch.full((40,), -100), reduction="sum"),
}  # fmt: skip
WHOLE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sort": lambda x, y: x.sort(-1).values[..., 0].sum(),
    "some words": lambda x, y: x[..., :5].sum(),
    "one word": lambda x, y: x[0, 0, 3] + x[:, 2:3, -1].sum(),
    "written": lambda x, y: functional.cross_entropy(x.mul_(2.0).flatten(0, 1), y.flatten()),
    "filled": lambda x, y: (x.masked_fill_(x < 0, 0.0), x.sum())[1],
    "over rows": lambda x, y: x.softmax(1)[..., 0].sum(),
    "by rows": lambda x, y: (x * torch.arange(10.0).view(1, 10, 1)).logsumexp(-1).sum(),
    "stacked": lambda x, y: torch.cat([x, x * 2], 1).logsumexp(-1).sum(),
    "distribution": lambda x, y: functional.cross_entropy(x.flatten(0, 1), functional.one_hot(y.clamp(0), WORDS).flatten(0, 1).to(x)),
}  # fmt: skip


def data() -> tuple[Tensor, Tensor]:
    words = torch.randint(0, WORDS, ROWS, generator=torch.Generator().manual_seed(2))
    labels = words.clone()
    labels[0, :3] = -100
    return words, labels


def pair(says: Callable[[Tensor, Tensor], Tensor], **options: Any) -> tuple[Speaker, Speaker]:
    """A model with whole logits and its copy with some rows at a time."""
    torch.manual_seed(0)
    with_whole = Speaker(says, **options).double()
    by_rows = copy.deepcopy(with_whole)
    ChunkedLoss(CHUNK, "head")(by_rows)
    return with_whole, by_rows


def compare(says: Callable[[Tensor, Tensor], Tensor]) -> None:
    with_whole, by_rows = pair(says)
    for each in (with_whole, by_rows):
        each(*data())["loss"].backward()
    torch.testing.assert_close(by_rows(*data())["loss"], with_whole(*data())["loss"], rtol=1e-12, atol=1e-12)
    for (name, one), other in zip(with_whole.named_parameters(), by_rows.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-12, atol=1e-12, msg=name)


@pytest.fixture(autouse=True)
def _told(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    monkeypatch.setattr(module, "_told", set())
    return module._told


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_by_rows(name: str, _told: set[str]) -> None:
    with Largest() as largest:
        pair(LOSSES[name])[1](*data())["loss"].backward()
    assert largest.words <= CHUNK * WORDS
    compare(LOSSES[name])
    assert not module._told


@pytest.mark.parametrize("name", WHOLE)
def test_what_needs_all_logits_gets_them_and_is_named(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "flextrain"):
        compare(WHOLE[name])
    assert any("logits are computed whole, because" in line for line in caplog.messages)


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the number of elements of the largest tensor that has words and is not a parameter's."""

    words = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = operation(*args, **(kwargs or {}))
        for each in tree_flatten(found)[0]:
            if isinstance(each, Tensor) and each.ndim > 1 and each.shape[-1] == WORDS and each.shape != (WIDTH, WORDS):
                self.words = max(self.words, each.numel())
        return found


def test_a_chunk_may_be_larger_than_the_batch() -> None:
    one, other = pair(LOSSES["flat"])
    other.head.forward._chunk = 1000  # type: ignore[attr-defined, union-attr]
    torch.testing.assert_close(other(*data())["loss"], one(*data())["loss"])


def test_gradients_of_the_head_are_added_up_in_float32() -> None:
    """In bfloat16 a sum of 2,000 equal numbers stops at 256."""
    torch.manual_seed(0)
    model = Speaker(lambda x, y: functional.cross_entropy(x.flatten(0, 1), y.flatten(), reduction="sum")).bfloat16()
    nn.init.zeros_(model.head.weight)
    nn.init.zeros_(model.head.bias)
    ChunkedLoss(1, "head")(model)
    words = torch.zeros(1, 2000, dtype=torch.long)
    model(words, words)["loss"].backward()
    assert model.head.bias.grad is not None
    assert float(model.head.bias.grad[0]) == pytest.approx(-2000 * (1 - 1 / WORDS), rel=1e-2)


def test_autocast_and_frozen_parts() -> None:
    for frozen in ("head.weight", "table.weight"):
        for each in (models := pair(LOSSES["flat"])):
            each.float().get_parameter(frozen).requires_grad_(False)
            with torch.autocast("cpu", torch.bfloat16):
                found = each(*data())["loss"]
            found.backward()
        for one, other in zip(*(model.parameters() for model in models), strict=True):
            assert (one.grad is None) == (other.grad is None) == (not one.requires_grad)
            if one.grad is not None:
                torch.testing.assert_close(other.grad, one.grad, rtol=2e-2, atol=2e-3)


class Dropping(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(functional.dropout(input, 0.5, self.training))


def test_a_head_that_draws_drops_the_same_in_backward() -> None:
    """The loss is linear in the weight: its gradient times the weight is the loss only if the masks agree."""
    model = Speaker(lambda x, y: x.gather(-1, y.clamp(0).unsqueeze(-1)).sum()).double()
    model.head = Dropping(WIDTH, WORDS, bias=False).double()
    ChunkedLoss(CHUNK, "head")(model)
    torch.manual_seed(3)
    loss = model(*data())["loss"]
    loss.backward()
    assert model.head.weight.grad is not None
    assert float((model.head.weight.grad * model.head.weight).sum()) == pytest.approx(float(loss), rel=1e-9)


def test_one_token() -> None:
    one, other = pair(LOSSES["flat"])
    words, labels = (each[1:2, :1] for each in data())
    for model in (one, other):
        model(words, labels)["loss"].backward()
    torch.testing.assert_close(other.head.weight.grad, one.head.weight.grad)


def test_hidden_states_before_a_frozen_head() -> None:
    one, other = pair(LOSSES["flat"])
    for model in (one, other):
        model.head.requires_grad_(False)
        model(*data())["loss"].backward()
    torch.testing.assert_close(other.table.weight.grad, one.table.weight.grad, rtol=1e-12, atol=1e-12)
    assert other.head.weight.grad is None


def test_backward_again() -> None:
    _, model = pair(LOSSES["flat"])
    loss = model(*data())["loss"]
    loss.backward(retain_graph=True)
    once = cast(Tensor, model.head.weight.grad).clone()
    loss.backward()
    torch.testing.assert_close(model.head.weight.grad, 2 * once)
    with pytest.raises(
        StrategyError, match="create_graph=True goes through the logits, which have first derivatives only"
    ):
        torch.autograd.grad(model(*data())["loss"], [model.table.weight], create_graph=True)


def test_a_reduction_that_there_is_not() -> None:
    with pytest.raises(ValueError, match="avg is not a valid value for reduction"):
        pair(lambda x, y: functional.cross_entropy(x.flatten(0, 1), y.flatten(), reduction="avg"))[1](*data())


class Lowered(Speaker):
    """Makes logits in bfloat16, and the loss outside of it, or the other way round."""

    inside = True

    def forward(self, words: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.table(words))
        with torch.autocast("cpu", torch.bfloat16, enabled=self.inside):
            logits = self.head(hidden.bfloat16() if self.inside else hidden) * 1.5
        with torch.autocast("cpu", torch.bfloat16, enabled=not self.inside):
            return {"loss": self.says(logits, labels)}


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize(
    "says",
    [lambda x, y: LOSSES["flat"](x.float(), y), lambda x, y: x.logsumexp(-1).square().sum() + LOSSES["flat"](x, y)],
)
def test_logits_are_those_of_the_autocast_of_their_head(says: Any, inside: bool) -> None:
    torch.manual_seed(0)
    one = Lowered(says)
    one.inside = inside
    other = copy.deepcopy(one)
    ChunkedLoss(CHUNK, "head")(other)
    losses = [each(*data())["loss"] for each in (one, other)]
    assert losses[0].dtype == losses[1].dtype
    within = 2e-2 if inside else 1e-5  # in float32 what is computed in bfloat16 shows
    torch.testing.assert_close(losses[1], losses[0], rtol=within, atol=within)
    for loss in losses:
        loss.backward()
    for mine, whole in zip(other.parameters(), one.parameters(), strict=True):
        assert mine.grad is not None
        assert whole.grad is not None
        assert float((mine.grad - whole.grad).norm() / whole.grad.norm()) < within


def test_a_head_that_gets_more_than_hidden_states() -> None:
    class Scaled(Speaker):
        def forward(self, words: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": self.says(self.head(self.table(words), scale=2.0), labels)}

    model = Scaled(LOSSES["flat"])
    ChunkedLoss(CHUNK, "head")(model)
    with pytest.raises(StrategyError, match="Linear, which makes the logits, is called with more than hidden states"):
        model(*data())


class Borrowing(nn.Module):
    """A matrix of another module, which is in no list of its parameters."""

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.scale, self.held = nn.Parameter(torch.ones(())), [table]

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.held[0].weight.T * self.scale


class Centring(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input - input.mean(1, keepdim=True))


class Both(nn.Linear):
    def forward(self, input: Tensor) -> Any:
        return super().forward(input), input


class Turned(nn.Conv1d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.mT).mT


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WORDS)


LOST = r"ChunkedLoss: the gradient of a parameter \({}\) would be lost, with which {} makes the logits"
ROWS_APART = "rows of hidden states are not computed each by itself in {}"
HEADS: dict[str, tuple[Callable[[nn.Embedding], nn.Module], str]] = {
    "borrowing": (Borrowing, LOST.format(r"one of shape \(97, 8\)", "Borrowing")),
    "spectral norm": (lambda _: nn.utils.spectral_norm(linear()), LOST.format("weight_orig", "Linear")),
    "weight norm": (lambda _: nn.utils.weight_norm(linear()), LOST.format("weight_[gv]", "Linear")),
    "centring": (lambda _: Centring(WIDTH, WORDS), ROWS_APART.format("Centring")),
    "normalising": (
        lambda _: nn.Sequential(nn.Flatten(0, 1), nn.BatchNorm1d(WIDTH, track_running_stats=False), linear()),
        r"rows of hidden states of shape \(4, 10, 8\) cannot be given to Sequential by themselves \(",
    ),
    "table": (lambda table: table, ROWS_APART.format("Embedding")),
    "channels": (lambda _: nn.Conv1d(10, WORDS, 1), "cannot be given to Conv1d by themselves"),
    "positions": (lambda _: Turned(WIDTH, WORDS, 3, padding=1), "Turned"),
    "two outputs": (lambda _: Both(WIDTH, WORDS), "cannot be given to Both by themselves"),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADS)
def test_a_head_whose_rows_or_gradients_would_be_others(name: str) -> None:
    make, says = HEADS[name]
    model = Speaker(LOSSES["flat"])
    model.head = make(model.table)  # type: ignore[assignment]
    if name == "table":
        model.forward = lambda words, labels: {"loss": model.head(words).sum()}  # type: ignore[method-assign]
    ChunkedLoss(CHUNK, "head")(model)
    for _ in range(2):
        with pytest.raises(StrategyError, match=says) as caught:
            model(*data())
        assert "\n" not in str(caught.value)


def test_a_head_is_watched_once_and_draws_nothing_for_it() -> None:
    """Its own forward, and weights that a parametrisation makes, are those of whole logits."""

    class Counting(nn.Linear):
        calls = 0

        def forward(self, input: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(functional.dropout(input, 0.5, self.training))

    model = Speaker(LOSSES["flat"])
    model.head = Counting(WIDTH, WORDS)
    ChunkedLoss(CHUNK, "head")(model)
    states = []
    for _ in range(2):
        torch.manual_seed(0)
        before = model.head.calls
        model(*data())
        states.append((torch.get_rng_state(), model.head.calls - before))
    assert torch.equal(states[0][0], states[1][0])
    assert states[0][1] == states[1][1] + 4


@pytest.mark.parametrize(
    "change",
    [
        lambda head: nn.utils.parametrizations.weight_norm(head),
        lambda head: vars(head).update(forward=functools.partial(scaled, head)),
        lambda head: vars(head).update(forward=types.MethodType(scaled, head)),
    ],
    ids=["parametrised", "partial", "method"],
)
def test_a_head_that_was_changed_on_the_object(change: Callable[[nn.Module], Any]) -> None:
    torch.manual_seed(0)
    expected = Speaker(LOSSES["flat"]).double()
    change(expected.head)
    found = copy.deepcopy(expected)
    ChunkedLoss(CHUNK, "head")(found)
    losses = [model(*data())["loss"] for model in (expected, found)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-12, atol=1e-12)
    for one, other in zip(expected.parameters(), found.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-12, atol=1e-12)


def scaled(head: nn.Linear, x: Tensor) -> Tensor:
    return functional.linear(x, head.weight, head.bias) * 3


def test_two_heads_with_options_of_their_own() -> None:
    model = Twice(lambda x, z, y: LOSSES["flat"](x, y) + LOSSES["flat"](z, y))  # type: ignore[arg-type]
    model.second = linear()
    model.forward = lambda words, labels: {  # type: ignore[method-assign]
        "first": (x := model.head(model.table(words))),
        "second": (z := model.second(model.table(words))),
        "loss": cast(Any, model.says)(x, z, labels),
    }
    ChunkedLoss(CHUNK, "head", evaluation_logits=False)(model)
    ChunkedLoss(CHUNK, "second")(model)
    with torch.no_grad():
        found = model(*data())
    assert type(found["second"]) is Tensor
    with pytest.raises(StrategyError, match="the logits of an evaluation are gone"):
        torch.argmax(found["first"])


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_a_head_that_is_not_called(z_loss: float, caplog: pytest.LogCaptureFixture) -> None:
    class Apart(Speaker):
        def forward(self, words: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": self.says(functional.linear(self.table(words), self.head.weight), labels)}

    model = Apart(LOSSES["flat"])
    ChunkedLoss(CHUNK, "head", z_loss=z_loss)(model)
    if z_loss:
        with pytest.raises(StrategyError, match=r"z_loss: Apart.forward computes no cross_entropy of its logits"):
            model(*data())
        return
    with caplog.at_level(logging.WARNING, "flextrain"):
        model(*data())
        model(*data())
    (line,) = caplog.messages
    assert (
        line
        == "ChunkedLoss: Apart.forward does not call the Linear that makes its logits, so none are computed by chunks"
    )


def test_hooks_of_parameters_see_one_gradient() -> None:
    _, model = pair(LOSSES["flat"])
    seen: list[Tensor] = []
    model.head.weight.register_hook(seen.append)
    model(*data())["loss"].backward()
    assert len(seen) == 1


def test_logits_are_whole_in_evaluation_and_gone_in_training() -> None:
    one, other = pair(LOSSES["flat"])
    with torch.no_grad():
        assert torch.equal(other(*data())["logits"], one(*data())["logits"])
    gone = other(*data())["logits"]
    for use in (lambda: gone.argmax(-1), lambda: torch.argmax(gone), lambda: gone[0]):
        with pytest.raises(StrategyError, match="the logits of training are gone after the loss"):
            use()


@pytest.mark.parametrize("doubled", [lambda x: x * 2, lambda x: x.cumsum(-1)], ids=["a step", "all of it"])
def test_a_gradient_that_would_be_lost(doubled: Callable[[Tensor], Tensor]) -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return doubled(x)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            return gradients[0] * 2

    _, model = pair(lambda x, y: Double.apply(x).sum())  # type: ignore[no-untyped-call]
    with pytest.raises(StrategyError, match=r"a torch.autograd.Function got the logits"):
        model(*data())["loss"].backward()


def with_z(says: Callable[[Tensor, Tensor], Tensor], weight: float = 0.25) -> Speaker:
    model = pair(says)[0]
    ChunkedLoss(CHUNK, "head", z_loss=weight)(model)
    return model


def squares(x: Tensor, y: Tensor) -> Tensor:
    return 0.25 * x.flatten(0, 1).logsumexp(-1).square()[y.flatten() != -100]


Z_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "flat": lambda x, y: LOSSES["flat"](x, y) + squares(x, y).mean(),
    "transposed": lambda x, y: LOSSES["transposed"](x, y) + squares(x, y).mean(),
    "sum": lambda x, y: LOSSES["sum"](x, y) + squares(x, y).sum(),
    "smooth": lambda x, y: LOSSES["smooth"](x, y) + squares(x, y).mean(),
    "weighted": lambda x, y: (
        LOSSES["weighted"](x, y) + (squares(x, y) * (share := WEIGHT[y[y != -100]])).sum() / share.sum()
    ),
    "capped": lambda x, y: LOSSES["capped"](x, y) + squares(torch.tanh(x / 3.0).mul(3.0), y).mean(),
}


@pytest.mark.parametrize("name", Z_LOSSES)
def test_the_z_loss_counts_the_tokens_of_the_cross_entropy(name: str) -> None:
    """Beside whole logits, to whose loss it is added by hand."""
    expected, found = pair(Z_LOSSES[name])[0], with_z(LOSSES[name])
    losses = [each(*data())["loss"] for each in (expected, found)]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-12, atol=1e-12)
    for loss in losses:
        loss.backward()
    for one, other in zip(expected.parameters(), found.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-12, atol=1e-12)
    with torch.no_grad():  # an evaluation has the cross entropy alone
        torch.testing.assert_close(found(*data())["loss"], pair(LOSSES[name])[0](*data())["loss"])


@pytest.mark.parametrize("name", ["likelihood", "chosen"])
def test_a_z_loss_without_a_cross_entropy_is_refused(name: str) -> None:
    with pytest.raises(StrategyError, match=r"z_loss: Speaker.forward computes no cross_entropy of its logits"):
        with_z(LOSSES[name])(*data())
    with_z(LOSSES[name], 0.0)(*data())


class Twice(Speaker):
    """Calls its head twice in a forward; ``says`` makes the loss of both logits and of labels."""

    def forward(self, words: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.table(words))
        first, second = self.head(hidden), self.head(hidden.roll(1, 1).square())
        return {"loss": cast(Any, self.says)(first, second, labels), "logits": first, "others": second}


def likelihood(x: Tensor, y: Tensor) -> Tensor:
    return x.log_softmax(-1).gather(-1, y.clamp(0).unsqueeze(-1)).sum(1)


def later(x: Tensor, z: Tensor, y: Tensor, weight: float = 0.0) -> Tensor:
    """The next token, and the one after it."""
    losses = [LOSSES["flatten"](x, y), LOSSES["flatten"](z[:, :-1], y[:, 1:])]
    if weight:
        losses = [losses[0] + weight * squares(x, y).mean(), losses[1] + weight * squares(z[:, :-1], y[:, 1:]).mean()]
    return losses[0] + 0.3 * losses[1]


def pairs(x: Tensor, z: Tensor, y: Tensor, weight: float = 0.0) -> Tensor:
    """The first is preferred to the second, by likelihoods alone."""
    return -functional.logsigmoid(likelihood(x, y) - likelihood(z, y)).mean()


def imitated(x: Tensor, z: Tensor, y: Tensor, weight: float = 0.0) -> Tensor:
    """The same beside a cross entropy of the first."""
    return pairs(x, z, y) + LOSSES["flat"](x, y) + (weight * squares(x, y).mean() if weight else 0.0)


@pytest.mark.parametrize("weight", [0.0, 4.0])
@pytest.mark.parametrize("says", [later, imitated, pairs])
def test_a_head_that_is_called_twice(says: Any, weight: float, _told: set[str]) -> None:
    torch.manual_seed(0)
    expected = Twice(functools.partial(says, weight=weight)).double()
    found = copy.deepcopy(expected)
    found.says = says
    ChunkedLoss(CHUNK, "head", z_loss=weight / 4)(found)  # as squares are a quarter
    if says is pairs and weight:
        with pytest.raises(StrategyError, match=r"z_loss: Twice.forward computes no cross_entropy of its logits"):
            found(*data())
        return
    for _ in range(2):  # an update's second micro-batch
        losses = [each(*data())["loss"] for each in (expected, found)]
        for each in losses:
            each.backward()
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-12, atol=1e-12)
    for one, other in zip(expected.parameters(), found.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-12, atol=1e-12)
    assert not _told


def with_adapter(*transforms: Any) -> nn.Module:
    """A model with an adapter of its head that is not zero."""
    pytest.importorskip("peft", reason="needs pip install flextrain[peft]")
    torch.manual_seed(0)
    model: nn.Module = Speaker(LOSSES["flat"]).double()
    for each in transforms:
        model = each(model) or model
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.5)
    return model


@pytest.mark.parametrize(
    "options", [dict(target_modules=["head"]), dict(target_modules=["table"], modules_to_save=["head"])]
)
def test_a_z_loss_of_a_head_with_an_adapter(options: dict[str, Any], _told: set[str]) -> None:
    lora = functools.partial(LoRA, r=2, lora_alpha=4, lora_dropout=0.0, **options)
    expected, found = with_adapter(lora()), with_adapter(lora(), ChunkedLoss(CHUNK, "head", z_loss=0.25))
    expected.says = Z_LOSSES["flat"]  # type: ignore[assignment]
    losses = [each(*data())["loss"] for each in (expected, found)]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-12, atol=1e-12)
    for loss in losses:
        loss.backward()
    assert sum(each.requires_grad for each in found.parameters()) >= 2
    for one, other in zip(expected.parameters(), found.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-12, atol=1e-12)
    assert not _told


def test_an_adapter_that_is_added_afterwards() -> None:
    """It adds to logits of its own: all of them are computed, and a z-loss would have no cross entropy."""
    lora = functools.partial(LoRA, r=2, lora_dropout=0.0, target_modules=["head"])
    expected, found = with_adapter(lora()), with_adapter(ChunkedLoss(CHUNK, "head"), lora())
    torch.testing.assert_close(found(*data())["loss"], expected(*data())["loss"])
    with pytest.raises(StrategyError, match=r"z_loss: Speaker.forward computes no cross_entropy"):
        with_adapter(ChunkedLoss(CHUNK, "head", z_loss=0.25), lora())(*data())


@pytest.mark.parametrize(
    "options", [dict(target_modules=["head"]), dict(target_modules=["table"], modules_to_save=["head"])]
)
def test_an_adapter_of_the_head_comes_before(tmp_path: Any, options: dict[str, Any]) -> None:
    pytest.importorskip("peft", reason="needs pip install flextrain[peft]")
    order = [dict(type="ChunkedLoss", head="head"), dict(type="LoRA", r=2, **options)]
    with pytest.raises(ConfigError) as caught:
        runner(tmp_path / "wrong", *order).train()
    assert str(caught.value) == (
        "transforms[1]: LoRA replaces head, whose logits ChunkedLoss computes in chunks; give it before ChunkedLoss in the list"
    )
    runner(tmp_path / "right", *reversed(order)).train()
    runner(tmp_path / "elsewhere", order[0], dict(type="LoRA", r=2, target_modules=["table"])).train()


@pytest.mark.parametrize("how", ["cast", "autocast"])
def test_a_z_loss_in_bfloat16(how: str) -> None:
    """As near to float64 as whole logits are."""
    gradients, found = [], []
    exact, whole = (pair(Z_LOSSES["flat"])[0] for _ in range(2))
    for model in (exact, whole, with_z(LOSSES["flat"])):
        if model is not exact:
            model.to(torch.bfloat16 if how == "cast" else torch.float32)
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast" and model is not exact):
            loss = model(*data())["loss"]
        loss.backward()
        found.append(loss)
        gradients.append(torch.cat([cast(Tensor, each.grad).double().flatten() for each in model.parameters()]))
    assert found[2].dtype == found[1].dtype
    assert float((found[2].double() - found[0]).abs()) <= 2 * float((found[1].double() - found[0]).abs()) + 1e-3
    errors = [float((each - gradients[0]).norm() / gradients[0].norm()) for each in gradients]
    assert errors[2] <= 1.5 * errors[1] + 1e-3


def test_no_label_counts() -> None:
    """A mean over no token is no number, and gives gradients of 0, also with a z-loss."""
    words, labels = data()
    for model in (*pair(LOSSES["flat"]), with_z(LOSSES["flat"])):
        loss = model(words, torch.full_like(labels, -100))["loss"]
        assert loss.isnan()
        loss.backward()
        assert all(each.grad is not None and not each.grad.any() for each in model.parameters())


def test_large_logits_have_a_finite_z_loss() -> None:
    model = with_z(lambda x, y: LOSSES["flat"](x * 1e4, y))
    loss = model(*data())["loss"]
    loss.backward()
    assert loss.isfinite()
    assert all(each.grad is not None and each.grad.isfinite().all() for each in model.parameters())


def test_an_evaluation_without_logits() -> None:
    whole, model = pair(LOSSES["flat"])[0], pair(LOSSES["flat"])[0]
    ChunkedLoss(CHUNK, "head", evaluation_logits=False)(model)
    with torch.no_grad(), Largest() as largest:
        found = model(*data())
    assert largest.words <= CHUNK * WORDS
    torch.testing.assert_close(found["loss"], whole(*data())["loss"], rtol=1e-12, atol=1e-12)
    with pytest.raises(
        StrategyError, match="the logits of an evaluation are gone after the loss; give it evaluation_logits=True"
    ):
        torch.argmax(found["logits"], -1)
    model.says = lambda x, y: y.sum()  # of no logits: without labels a model gives them all, as in generation
    with torch.no_grad():
        assert torch.equal(model(*data())["logits"], whole(*data())["logits"])


def test_what_is_made_without_gradients_gives_none() -> None:
    def says(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            target = (x / 2.0).argmax(-1)
            constant, other = x * 2.0, x[:, 1:]
        parts = (
            functional.cross_entropy(constant.flatten(0, 1), y.flatten())
            + other.logsumexp(-1).sum()
            + x.detach().logsumexp(-1).sum()
        )
        return functional.cross_entropy(x.flatten(0, 1), target.flatten()) + parts

    compare(says)
    assert not module._told


@pytest.mark.parametrize("nothing", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    "look",
    [lambda x: x.abs().max(), lambda x: x.sort(-1), lambda x: x.mul_(2.0)],
    ids=["largest", "sorted", "written"],
)
def test_a_look_without_gradients_leaves_those_of_the_loss(look: Callable[[Tensor], Any], nothing: Any) -> None:
    """What makes all logits, as for a figure in the log, comes before the loss."""

    def says(x: Tensor, y: Tensor) -> Tensor:
        with nothing():
            look(x)
        return LOSSES["flat"](x, y) + x.logsumexp(-1).mean()

    compare(says)


def test_written_after_it_was_taken_apart() -> None:
    def says(x: Tensor, y: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        x.mul_(2.0)
        return functional.cross_entropy(flat, y.flatten())

    with pytest.raises(StrategyError, match="mul_ changes logits that were taken apart before"):
        pair(says)[1](*data())


CHANGED: dict[str, tuple[Callable[[Speaker, Tensor, Tensor], Any], str]] = {
    "hidden states": (lambda model, hidden, offset: hidden.mul_(2), "hidden states"),
    "weights": (lambda model, hidden, offset: model.head.weight.mul_(2), "weights"),
    "an operand": (lambda model, hidden, offset: offset.add_(torch.arange(WORDS)), "operand"),
}


@pytest.mark.parametrize("name", CHANGED)
def test_what_logits_are_made_of_changes_before_the_loss(name: str) -> None:
    """The loss would be that of other logits than the model has computed."""
    change, says = CHANGED[name]
    offset = torch.zeros(WORDS, dtype=torch.float64)

    class Changing(Speaker):
        def forward(self, words: Tensor, labels: Tensor) -> dict[str, Tensor]:
            hidden = torch.tanh(self.table(words))
            logits = self.head(hidden) + offset
            with torch.no_grad():
                change(self, hidden, offset)
            return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}

    model = Changing(lambda x, y: x.sum()).double()
    ChunkedLoss(CHUNK, "head")(model)
    with pytest.raises(StrategyError, match=f"{says}.* changed in place before the loss"):
        model(*data())


@pytest.mark.parametrize("changed", ["labels", "offset"])
def test_operands_change_before_backward(changed: str) -> None:
    """Backward computes the logits again, as torch's own functions keep what they need."""
    offset = torch.zeros(WORDS, dtype=torch.float64)
    _, model = pair(lambda x, y: functional.cross_entropy((x + offset).flatten(0, 1), y.flatten()))
    words, labels = data()
    loss = model(words, labels)["loss"]
    (labels if changed == "labels" else offset).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_copies_have_their_own_head() -> None:
    _, model = pair(LOSSES["flat"])
    model.says = functional.mse_loss
    model.says = torch.nn.functional.cross_entropy  # type: ignore[assignment]
    hidden = torch.randn(5, WIDTH, dtype=torch.float64)
    for again in (copy.deepcopy(model.head), pickle.loads(pickle.dumps(model.head))):
        nn.init.zeros_(model.head.weight)
        assert float((again(hidden) + 0).detach().abs().sum()) != float((model.head(hidden) + 0).detach().abs().sum())


@pytest.mark.parametrize(
    "options, says",
    [
        ({"chunk": 0}, r"transforms\[0\].chunk: 0 is not allowed, give a number of tokens, 1 or more"),
        ({"chunk": True}, r"transforms\[0\].chunk: True is not allowed"),
        ({"head": "haed"}, r'transforms\[0\].head: the model has no module "haed", did you mean "head"\?'),
        (
            {},
            r'transforms\[0\].head: Speaker does not say which module makes its logits, give its name, such as "lm_head"',
        ),
        ({"z_loss": -1.0}, r"transforms\[0\].z_loss: -1.0 is not allowed, give a number, 0 or more, such as 1e-4"),
        ({"z_loss": float("nan")}, r"transforms\[0\].z_loss: nan is not allowed"),
        ({"evaluation_logits": 1}, r"transforms\[0\].evaluation_logits: 1 is not allowed, give True or False"),
        ({"size": 3}, r"transforms\[0\].size: unknown key, choose chunk, head, z_loss or evaluation_logits"),
        ({"chunks": 3}, r'transforms\[0\].chunks: unknown key, did you mean "chunk"\?'),
        ({"chunk": "1024"}, r'transforms\[0\].chunk: "1024" is not allowed, give an integer'),
        ({"chunk": 2.0}, r"transforms\[0\].chunk: 2.0 is not allowed, give an integer"),
        ({"chunk": -1}, r"transforms\[0\].chunk: -1 is not allowed, give a number of tokens, 1 or more"),
        ({"chunk": None}, r"transforms\[0\].chunk: None is not allowed, give an integer"),
        ({"head": 5}, r"transforms\[0\].head: 5 is not allowed, give a string"),
        ({"head": ["head"]}, r"transforms\[0\].head: \['head'\] is not allowed, give a string"),
        ({"head": ""}, r'transforms\[0\].head: the model has no module ""'),
        ({"head": "parts"}, r"transforms\[0\].head: is a ModuleList, which has no forward; give the module that makes"),
        ({"head": "parts.0"}, r"transforms\[0\].head: is a BatchNorm1d with running_mean, a statistic of all tokens"),
        ({"z_loss": "1e-4"}, r'transforms\[0\].z_loss: "1e-4" is not allowed, give a number'),
        ({"z_loss": True}, r"transforms\[0\].z_loss: True is not allowed, give a number"),
        ({"z_loss": float("inf")}, r"transforms\[0\].z_loss: inf is not allowed, give a number, 0 or more"),
        ({"evaluation_logits": None}, r"transforms\[0\].evaluation_logits: None is not allowed, give True or False"),
        (
            {"type": "ChunkedLos"},
            r'transforms\[0\].type: "ChunkedLos" is no known transform, did you mean "ChunkedLoss"',
        ),
        ({"where": "x"}, r"transforms\[0\].where: is filled in by flextrain, leave it out"),
    ],
)
def test_wrong_options(options: dict[str, Any], says: str, tmp_path: Any) -> None:
    model = Speaker(LOSSES["flat"])
    model.parts = nn.ModuleList([nn.BatchNorm1d(WIDTH)])
    with pytest.raises(ConfigError, match=says) as caught:
        runner(tmp_path, dict({"type": "ChunkedLoss"}, **options), model=model).train()
    assert "\n" not in str(caught.value)


def test_one_chunk_of_all_tokens_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model = Speaker(LOSSES["flat"])
    ChunkedLoss(40, "head")(model)
    with caplog.at_level(logging.INFO, "flextrain"):
        model(*data())
    assert caplog.messages == [
        "ChunkedLoss: the logits of head are computed for all tokens at a time, of 40 in the first batch, which is one chunk and saves no "
        "memory; give a smaller chunk"
    ]


@pytest.mark.parametrize("head", [5, ["head"]])
def test_an_object_is_checked_as_a_configuration_is(head: Any) -> None:
    with pytest.raises(ConfigError, match=r"^ChunkedLoss.head: .* is not allowed, give the name of a module$"):
        ChunkedLoss(head=head)


def test_twice_and_compiled(tmp_path: Any) -> None:
    once = dict(type="ChunkedLoss", head="head")
    with pytest.raises(ConfigError, match="the model has a ChunkedLoss already"):
        runner(tmp_path / "twice", once, once).train()
    with pytest.raises(ConfigError, match="strategy.compile: Speaker has a ChunkedLoss, which cannot be compiled"):
        runner(tmp_path / "compiled", once, strategy=dict(type="SingleDeviceStrategy", compile=True)).train()


def test_a_run_trains_the_same_and_evaluates(tmp_path: Any) -> None:
    """And a line in the log confirms that there are chunks."""
    found = []
    for number, transforms in enumerate([(), (dict(type="ChunkedLoss", head="head", chunk=CHUNK),)]):
        with log_lines(logging.INFO) as lines:
            run = runner(tmp_path / str(number), *transforms)
            model = run.train()
        said = [
            (f"ChunkedLoss(head='head', chunk={CHUNK})", "logits and the loss are computed for some tokens at a time")
        ]
        assert [*run.outline.transforms] == said * number
        told = f"ChunkedLoss: the logits of head are computed for {CHUNK} tokens at a time, of 20 in the first batch"
        assert [line for line in lines if line.startswith("ChunkedLoss:")] == [told] * number
        found.append([each.detach().clone() for each in model.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


class Said(Speaker):
    """Its configuration has the number of words, as in models of transformers; asked for its head it fails."""

    def __init__(self, says: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(says)
        self.config = SimpleNamespace(vocab_size=WORDS)

    def get_output_embeddings(self) -> nn.Module:
        raise RuntimeError("not now")


def test_a_run_tells_large_logits_once_and_asks_the_model_nothing(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(chunked_loss, "_LARGE", 2 * 10 * WORDS * 4 - 1)
    with log_lines(logging.INFO) as lines:
        runner(tmp_path / "whole", model=Said(LOSSES["flat"])).train()
    assert sum("model: logits of 2 x 10 x 97 take" in line for line in lines) == 1
    with log_lines(logging.INFO) as lines:
        runner(tmp_path / "chunked", dict(type="ChunkedLoss", head="head"), model=Said(LOSSES["flat"])).train()
        runner(tmp_path / "unknown").train()
    assert not any("model: logits of" in line for line in lines)


def test_large_logits_are_told() -> None:
    model = Said(LOSSES["flat"])
    labels = torch.zeros(8, 200_000, dtype=torch.long)
    line = large_logits(model, {"labels": labels})
    assert line.startswith("model: logits of 8 x 200,000 x 97 take 592 MiB in float32")
    for batch in ({"labels": labels[:, :1000]}, {"labels": labels.float()}, {"words": labels}, (labels,)):
        assert not large_logits(model, batch)
    assert not large_logits(Speaker(LOSSES["flat"]), {"labels": labels})
    ChunkedLoss(CHUNK, head="head")(model)
    assert not large_logits(model, {"labels": labels})


def runner(folder: Any, *transforms: Any, **more: Any) -> FlexibleRunner:
    torch.manual_seed(0)
    words, labels = data()
    rows = [{"words": one, "labels": other} for one, other in zip(words, labels, strict=True)]
    given = dict(
        model=Speaker(LOSSES["flat"]),
        transforms=list(transforms),
        train_dataloader=DataLoader(rows, batch_size=2),  # type: ignore[arg-type]
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.5)),
        train_cfg=dict(max_epochs=2),
        work_dir=str(folder),
    )
    return FlexibleRunner(**{**given, **more})
