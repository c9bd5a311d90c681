"""What pipelines refuse, in one line, before any update."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from flextrain import MeshStrategy, OptimWrapper
from flextrain.core.base.errors import FlexTrainError
from flextrain.strategies.mesh.config import MeshConfig
from flextrain.strategies.mesh.pipeline import Pipeline
from flextrain.strategies.mesh.pipeline.chain import chain_of, put_in_order
from flextrain.strategies.mesh.pipeline.rehearsal import Rehearsal
from flextrain.strategies.mesh.pipeline.stages import StageRun

from .models import LENGTH, VOCABULARY, Plain, PlainBlock, sample


@pytest.mark.parametrize("name", ["zero_bubble", "zbv"])
def test_a_torch_whose_backward_cannot_end_later(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(FSDPModule, "finalize_backward", raising=False)
    with pytest.raises(
        FlexTrainError, match=f'^strategy.pp_schedule: "{name}" needs FSDPModule.finalize_backward, which torch'
    ):
        MeshStrategy(pp=2, pp_schedule=name)
    MeshStrategy(pp=2, pp_schedule="interleaved_1f1b")


def test_graphs_that_hold_one_micro_batch() -> None:
    with pytest.raises(
        FlexTrainError, match=r"^strategy\.compile: CUDA graphs hold the activations of one micro-batch"
    ):
        MeshStrategy(pp=2, wrap="blocks", compile=dict(mode="reduce-overhead"))
    MeshStrategy(pp=2, wrap="blocks", compile=dict(mode="max-autotune-no-cudagraphs"))
    MeshStrategy(pp=2, wrap="blocks", compile=True)


class Updates(OptimWrapper):
    def update_params(self, loss: Tensor) -> None:
        super().update_params(loss)


def check(model: nn.Module, optim: OptimWrapper | None = None, **options: Any) -> Pipeline:
    options = {"pp": 2, **options}
    sizes = {name: options.get(name, 1) for name in ("pp", "tp")}
    layout: Any = SimpleNamespace(sizes=sizes, index={"pp": 0}, device_type="cpu")
    axis = Pipeline(MeshConfig(**options), layout)
    axis.check(model, optim)
    return axis


class Early(Plain):
    """What is called last is made first."""

    def __init__(self) -> None:
        super().__init__()
        made = dict(self.named_children())
        for name in ("head", "norm", "embed", "position", "layers"):
            delattr(self, name)
            setattr(self, name, made[name])


def test_what_is_called_after_the_layers_may_be_made_before_them() -> None:
    model = Early()
    weights = {name: (value, value.clone()) for name, value in model.state_dict(keep_vars=True).items()}
    chain = chain_of(model)
    assert (chain.before, chain.after) == (["head", "norm", "embed", "position"], [])
    put_in_order(chain, model, lambda: None)
    assert (chain.before, chain.after) == (["head", "norm", "embed", "position"], [])
    put_in_order(chain, model, lambda: sample("plain", 2, 0))
    assert (chain.before, chain.after) == (["embed", "position"], ["head", "norm"])
    for name, (value, before) in weights.items():
        assert model.state_dict(keep_vars=True)[name] is value
        assert torch.equal(value, before)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_an_update_that_one_process_would_make_alone() -> None:
    with pytest.raises(
        FlexTrainError, match=r"optim_wrapper: Updates\.update_params would be called on the last stage"
    ):
        check(Plain(), Updates(dict(type="SGD", lr=0.1)))


class Skips(Plain):
    """The embedding is used after the layers too."""

    def forward(self, input_ids: Tensor, labels: Any = None, position_ids: Any = None) -> Any:
        first = x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x + first))


@dataclass
class Scored:
    loss: Tensor
    embedded: Tensor


class Returns(Plain):
    """What only the first stage has computed is a field of the result."""

    def forward(self, input_ids: Tensor, labels: Any = None, position_ids: Any = None) -> Any:
        return Scored(super().forward(input_ids).mean(), self.embed(input_ids))


class Counts(Plain):
    """The model itself has a buffer that its forward changes."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, input_ids: Tensor, labels: Any = None, position_ids: Any = None) -> Any:
        found = super().forward(input_ids, labels, position_ids)
        self.steps += 1
        return found


class Side(Plain):
    """Every layer gets what only the first stage has computed."""

    def forward(self, input_ids: Tensor, labels: Any = None, position_ids: Any = None) -> Any:
        side = x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x + 0) if layer is self.layers[0] else layer(x + side)
        return self.head(self.norm(x))


class Borrows(PlainBlock):
    others: tuple[nn.Module, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + sum(other.norm2.weight for other in self.others)


class Inside(Plain):
    """A layer computes with the weights of another one."""

    def __init__(self) -> None:
        super().__init__(Borrows)
        self.layers[1].others = (self.layers[0],)  # type: ignore[assignment]


class Twice(Plain):
    def forward(self, input_ids: Tensor, labels: Any = None, position_ids: Any = None) -> Any:
        x = self.embed(input_ids)
        for layer in (*self.layers, *self.layers):
            x = layer(x)
        return self.head(self.norm(x))


class Backwards(Plain):
    """Stage order reversed."""

    def forward(self, input_ids: Tensor, labels: Any = None, position_ids: Any = None) -> Any:
        x = self.embed(input_ids)
        for layer in reversed(self.layers):
            x = layer(x)
        return self.head(self.norm(x))


class LeavesOut(Plain):
    def forward(self, input_ids: Tensor, labels: Any = None, position_ids: Any = None) -> Any:
        return self.head(self.norm(self.layers[0](self.embed(input_ids))))


class Keeps(Plain):
    """The result has something of every layer."""

    def forward(self, input_ids: Tensor, labels: Any = None, position_ids: Any = None) -> Any:
        x, kept = self.embed(input_ids), []
        for layer in self.layers:
            x = layer(x)
            kept.append(layer.q(x).mean())
        return {"loss": self.head(self.norm(x)).mean() + sum(kept)}


class InGraph(Plain):
    """A term of the loss that is there only where gradients are."""

    def forward(self, input_ids: Tensor, labels: Any = None, position_ids: Any = None) -> Any:
        logits = super().forward(input_ids)
        return logits + self.embed.weight.square().mean() if torch.is_grad_enabled() else logits


class Rows(Plain):
    """Layers write rows of what the result is made of."""

    def forward(self, input_ids: Tensor, labels: Any = None, position_ids: Any = None) -> Any:
        x, rows = self.embed(input_ids), torch.zeros(2)
        for i, layer in enumerate(self.layers):
            x = layer(x)
            rows[i] = layer.q(x).mean()
        return {"loss": self.head(self.norm(x)).mean(), "rows": rows}


class SumsRows(Rows):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        found = super().forward(*args, **kwargs)
        return found["loss"] + found["rows"].view(1, 2).sum()


class InPlace(Plain):
    """What a layer returned is changed before the next one, where a stage begins."""

    def forward(self, input_ids: Tensor, labels: Any = None, position_ids: Any = None) -> Any:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
            x += input_ids[..., None]
        return self.head(self.norm(x))


FORWARDS: list[tuple[type[Plain], str]] = [
    (Rows, "what Rows returns was computed from layers.0.q.weight, which the last stage lacks"),
    (SumsRows, "what SumsRows returns was computed from layers.0.q.weight, which the last stage lacks"),
    (InPlace, "layers.1 is called with another tensor than layers.0 returned, and a stage begins with it"),
    (Skips, "what Skips returns was computed from embed.weight, which the last stage lacks"),
    (Returns, "what Returns returns was computed from embed.weight, which the last stage lacks"),
    (Counts, "the forward of Counts changes the buffer steps, which every stage has a copy of"),
    (Side, "layers.1 is called with another tensor than layers.0 returned, and a stage begins with it"),
    (Inside, "layers.1 on stage 1 needs what was computed from layers.0.norm2.weight, which another stage has"),
    (Twice, "layers.0 is called where all layers had been called"),
    (
        Backwards,
        "layers.1 is called where layers.0 comes next; the layers of a pipeline are called once, in their order",
    ),
    (LeavesOut, "layers.1 is not called by the forward of LeavesOut"),
    (InGraph, "what InGraph returns was computed from embed.weight, which the last stage lacks"),
    (Keeps, "what Keeps returns was computed from layers.0.q.weight, which the last stage lacks"),
]


def rehearse(model: nn.Module, *, device: str = "cpu", is_repeated: bool = False) -> Rehearsal:
    made = Rehearsal(model, chain_of(model), [(0, 1), (1, 2)], torch.device(device), is_repeated=is_repeated)
    made.plan((), {"input_ids": sample("plain", 2, 0)["input_ids"]}, True)
    return made


@pytest.mark.parametrize("kind, message", FORWARDS)
def test_forwards_that_cannot_be_cut(kind: type[Plain], message: str) -> None:
    with pytest.raises(FlexTrainError) as caught:
        rehearse(kind())
    assert message in str(caught.value)
    assert str(caught.value).startswith("strategy.pp: ")
    assert "\n" not in str(caught.value)


class Notes(PlainBlock):
    rows: Any = None
    number = 0

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.rows[self.number] = x.detach().mean()
        return x


class WritesRows(Plain):
    """Layers write rows that no result has."""

    def __init__(self) -> None:
        super().__init__(Notes)

    def forward(self, input_ids: Tensor, labels: Any = None, position_ids: Any = None) -> Any:
        rows = torch.zeros(2)
        for i, layer in enumerate(self.layers):
            layer.rows, layer.number = rows, i  # type: ignore[assignment]
        return super().forward(input_ids)


def test_rows_that_no_result_has() -> None:
    rehearse(WritesRows())


class CountsCalls(Plain):
    """A number of the model itself counts its calls, and another one says what the last batch was."""

    calls, length = 0, 0
    counts = True

    def forward(self, input_ids: Tensor, labels: Any = None, position_ids: Any = None) -> Any:
        self.calls += self.counts
        self.length = input_ids.shape[1]
        return super().forward(input_ids) * self.calls


def test_a_number_that_forward_counts_in() -> None:
    rehearse(CountsCalls())
    with pytest.raises(
        FlexTrainError, match=r"the forward of CountsCalls changes the number calls, and a process with"
    ):
        rehearse(CountsCalls(), is_repeated=True)
    model = CountsCalls()
    model.counts = False
    rehearse(model, is_repeated=True)


class Weighs(PlainBlock):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), 0.5, 3, None


class AddsNumbers(Plain):
    """Layers return numbers beside their tensor."""

    def __init__(self) -> None:
        super().__init__(Weighs)

    def forward(self, input_ids: Tensor, labels: Any = None, position_ids: Any = None) -> Any:
        x, total = self.embed(input_ids), 0.0
        for layer in self.layers:
            x, one, other, none = layer(x)
            assert none is None
            total += (one or 0.0) + (other or 0)
        return self.head(self.norm(x)) * total


def test_numbers_that_layers_of_another_stage_return() -> None:
    assert stage_of(AddsNumbers(), 1).isnan().all()


class LeavesOutLater(Plain):
    """Leaves its first layer out, which it did not in the rehearsal."""

    later = False

    def forward(self, input_ids: Tensor, labels: Any = None, position_ids: Any = None) -> Any:
        x = self.embed(input_ids)
        for layer in list(self.layers)[int(self.later) :]:
            x = layer(x)
        return self.head(self.norm(x))


def test_a_layer_that_is_left_out_later() -> None:
    model = LeavesOutLater()
    run = StageRun(model, chain_of(model), [1, 1], [1], torch.device("cpu"))
    run.cut()
    ids = sample("plain", 2, 0)["input_ids"]
    run.run(1, 0, lambda passed: torch.zeros(2, LENGTH, 32), lambda: model(ids))
    model.later = True
    with pytest.raises(
        FlexTrainError, match=r"^model: LeavesOutLater did not call layers\.0, the layer before pipeline stage 1; "
    ):
        run.run(1, 0, lambda passed: torch.zeros(2, LENGTH, 32), lambda: model(ids))


class TakesLater(Plain):
    """Needs weights of the first stage in its last one, which it did not in the rehearsal."""

    later: str | None = None

    def forward(self, input_ids: Tensor, labels: Any = None, position_ids: Any = None) -> Any:
        logits = super().forward(input_ids)
        if self.later == "weight":
            return logits + self.embed.weight.square().mean()
        return logits if self.later is None else logits + self.embed(input_ids).mean()


@pytest.mark.parametrize("later", ["weight", "call"])
def test_what_another_stage_has_is_no_number_later(later: str) -> None:
    model = TakesLater()
    run = StageRun(model, chain_of(model), [1, 1], [1], torch.device("cpu"))
    run.cut()
    ids = sample("plain", 2, 0)["input_ids"]
    assert run.run(1, 0, lambda passed: torch.zeros(2, LENGTH, 32), lambda: model(ids)).isfinite().all()
    model.later = later
    assert run.run(1, 0, lambda passed: torch.zeros(2, LENGTH, 32), lambda: model(ids)).isnan().all()


class Doubles(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class OfBatch(Plain):
    """Its layers begin with the batch alone; what the first one gives may be used after all of them."""

    later = False

    def forward(self, input_ids: Tensor, labels: Any = None, position_ids: Any = None) -> Any:
        x = torch.ones(*input_ids.shape, 32)
        given = []
        for layer in self.layers:
            x = layer(x)
            given.append(x)
        return self.head(self.norm(x + given[0] if self.later else x))


def test_what_a_layer_of_another_stage_gave_is_no_number_later() -> None:
    model = OfBatch(layers=3)
    run = StageRun(model, chain_of(model), [2, 1], [1], torch.device("cpu"))
    run.cut()
    ids = sample("plain", 2, 0)["input_ids"]
    assert run.run(1, 0, lambda passed: torch.zeros(2, LENGTH, 32), lambda: model(ids)).isfinite().all()
    model.later = True
    assert run.run(1, 0, lambda passed: torch.zeros(2, LENGTH, 32), lambda: model(ids)).isnan().all()


def test_what_a_layer_without_parameters_gave() -> None:
    model = OfBatch(layers=2)
    model.layers.insert(0, Doubles())
    model.later = True
    made = Rehearsal(model, chain_of(model), [(0, 2), (2, 3)], torch.device("cpu"))
    with pytest.raises(FlexTrainError, match=r"what OfBatch returns was computed from layers\.0, which the last stage"):
        made.plan((), {"input_ids": sample("plain", 2, 0)["input_ids"]}, True)


class ChangesInput(PlainBlock):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.relu_())


def test_a_stage_that_begins_with_a_layer_that_changes_its_input() -> None:
    model = Plain(ChangesInput)
    run = StageRun(model, chain_of(model), [1, 1], [1], torch.device("cpu"))
    run.cut()
    ids = sample("plain", 2, 0)["input_ids"]
    given = torch.linspace(-1, 1, 2 * LENGTH * 32).view(2, LENGTH, 32).requires_grad_()
    run.run(1, 0, lambda passed: given, lambda: model(ids)).square().sum().backward()
    assert given.grad is not None
    assert given.grad[0].eq(0).all()
    assert given.grad[1].any()


class Reads(Plain):
    """Asks other submodules than the one that computes for what they are."""

    asks = "reset_parameters"

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].kind = "full"  # type: ignore[assignment]

    def forward(self, input_ids: Tensor, labels: Any = None, position_ids: Any = None) -> Any:
        x = self.embed(input_ids).to(self.head.weight.dtype)
        assert self.head.weight.shape == (VOCABULARY, 32)
        assert [getattr(layer, "kind", None) for layer in self.layers] == [None, "full"]
        assert [layer.norm2.eps for layer in self.layers] == [1e-5, 1e-5]  # type: ignore[union-attr]
        for layer in self.layers:
            x = layer(x)
        if self.asks == "norm2":
            x = self.layers[0].norm2(x)  # type: ignore[operator]
        elif self.asks:
            getattr(self.embed, self.asks)()
        return self.head(self.norm(x))


def stage_of(model: nn.Module, stage: int) -> Any:
    """Run one of two stages, each of a layer."""
    run = StageRun(model, chain_of(model), [1, 1], [stage], torch.device("cpu"))
    run.cut()
    model.register_forward_hook(run.leave)
    ids = sample("plain", 2, 0)["input_ids"]
    return run.run(stage, 0, lambda passed: torch.ones(2, LENGTH, 32), lambda: model(ids))


def test_attributes_of_what_another_stage_has() -> None:
    expected = Plain()
    for stage in range(2):
        model = Reads()
        model.asks = ""
        model.load_state_dict(expected.state_dict())
        found = stage_of(model, stage)
        if stage:
            x = expected.layers[1](torch.ones(2, LENGTH, 32))
            torch.testing.assert_close(found, expected.head(expected.norm(x)))
    with pytest.raises(
        AttributeError, match=r"^strategy\.pp: Reads uses embed\.reset_parameters where another stage has embed; let"
    ):
        stage_of(Reads(), 1)
    model = Reads()
    model.asks = "norm2"
    with pytest.raises(FlexTrainError, match=r"layers\.0\.norm2"):
        stage_of(model, 1)


def test_a_rehearsal_changes_nothing() -> None:
    torch.manual_seed(0)
    model = Plain(dropout=0.5)
    before, weights = torch.get_rng_state(), {k: v.clone() for k, v in model.state_dict().items()}
    made = rehearse(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    plan = made.plan((), {"input_ids": sample("plain", 4, 0)["input_ids"]}, True)  # another size, the same kind
    assert plan.draws_inside
    assert not plan.changes
