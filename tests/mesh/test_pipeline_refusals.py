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


FORWARDS: list[tuple[type[Plain], str]] = [
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


def rehearse(model: nn.Module, *, device: str = "cpu") -> Rehearsal:
    made = Rehearsal(model, chain_of(model), [(0, 1), (1, 2)], torch.device(device))
    made.plan((), {"input_ids": sample("plain", 2, 0)["input_ids"]}, True)
    return made


@pytest.mark.parametrize("kind, message", FORWARDS)
def test_forwards_that_cannot_be_cut(kind: type[Plain], message: str) -> None:
    with pytest.raises(FlexTrainError) as caught:
        rehearse(kind())
    assert message in str(caught.value)
    assert str(caught.value).startswith("strategy.pp: ")
    assert "\n" not in str(caught.value)


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
