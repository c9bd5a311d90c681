"""Outputs whose memory is written again later: what is kept of them stays as it was.

A compiled model may write every call's outputs to the same memory, as CUDA graphs do; a parameter or buffer that a model
gives to log changes with the update.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flextrain import BaseMetric, Engine, SingleDeviceStrategy
from flextrain.testing import WorkerGroup

from .training import Net, Outputs, make_runner, validation

pytestmark = pytest.mark.usefixtures("quick")


class InPlace(torch.autograd.Function):
    """A value moved to a given place."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, place: Tensor) -> Tensor:
        return place.copy_(value).detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


def same_places(module: Any, inputs: Any) -> Any:
    """A back end for ``torch.compile`` whose results lie where those of the call before lay."""
    places: dict[tuple[int, torch.Size], Tensor] = {}

    def run(*arguments: Any) -> tuple[Any, ...]:
        found = module.forward(*arguments)
        return tuple(
            InPlace.apply(value, places.setdefault((i, value.shape), torch.empty_like(value)))  # type: ignore[no-untyped-call]
            for i, value in enumerate(found)
        )

    return run


class KeepsLogits(BaseMetric):
    """The predictions as they came."""

    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results.append(data_samples["logits"])

    def compute_metrics(self, results: list[Any]) -> dict[str, Any]:
        return {"mean": float(torch.cat(results).square().sum())}


def make_graphed_callables(module: nn.Module) -> None:
    """Replace forward as torch's function of this name does; the results lie where those of the call before lay."""
    forward, places = module.forward, dict[torch.Size, Tensor]()

    def new_forward(*arguments: Any) -> Any:
        found = forward(*arguments)
        return InPlace.apply(found, places.setdefault(found.shape, torch.empty_like(found)))  # type: ignore[no-untyped-call]

    module.forward = new_forward  # type: ignore[method-assign]


def trained(folder: Path, how: str) -> tuple[list[float], float]:
    model: nn.Module = Net(dropout=0.0)
    changes: dict[str, Any] = {**validation(), "val_evaluator": dict(type=KeepsLogits)}
    if how == "in place":
        model.compile(backend=same_places)
    elif how == "a part":
        model.net = torch.compile(model.net, backend=same_places)  # type: ignore[assignment]
    elif how == "by the runner":
        changes["compile"] = dict(backend=same_places)
    outputs = Outputs()
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    runner = make_runner(folder, model=model, train_cfg=dict(max_epochs=1), custom_hooks=[outputs], **changes)
    runner.train()
    return [float(seen["loss"]) for seen in outputs.seen], float(runner.message_hub.get_scalar("val/mean").current())


@pytest.mark.parametrize("how", ["in place", "a part", "by the runner"])
def test_kept_outputs(tmp_path: Path, how: str) -> None:
    plain = trained(tmp_path / "plain", "")
    assert len(set(plain[0])) == len(plain[0])
    assert trained(tmp_path / "compiled", how) == plain


class GradientInPlace(torch.autograd.Function):
    """The same value, with a gradient that is moved to a given place, as a recorded backward's is."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, place: Tensor) -> Tensor:
        ctx.place = place
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.place.copy_(gradient).detach(), None


class Recorded(Net):
    """In training its gradients lie where those of the call before lay."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.places = {name: torch.zeros_like(value) for name, value in self.net.named_parameters()}
        self.count = 0

    @torch.compiler.disable
    def moved(self) -> dict[str, Tensor]:
        """The weights; of every third call without the biases."""
        self.count += 1
        for place in self.places.values():
            place.fill_(torch.nan)  # what was there is lost
        found = dict(self.net.named_parameters())
        return {
            name: value if self.count % 3 == 1 and "bias" in name else GradientInPlace.apply(value, self.places[name])  # type: ignore[no-untyped-call]
            for name, value in found.items()
        }

    def forward(self, index: Any, x: Tensor, y: Tensor, mode: str = "tensor") -> Any:
        logits = torch.func.functional_call(self.net, self.moved(), (x,))
        return {"loss": nn.functional.cross_entropy(logits, y)}


class RecordedStep(Recorded):
    """The same in MMEngine's train_step."""

    def train_step(self, data: Any, optim_wrapper: Any) -> Any:
        losses = self(**data, mode="loss")
        optim_wrapper.update_params(losses["loss"])
        return losses


class OwnLoss(nn.Module):
    """The loss, as a part of a model."""

    def forward(self, logits: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits, y)


class WithOwnLoss(Net):
    """Its loss comes from a part."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.own_loss = OwnLoss()

    def forward(self, index: Any, x: Tensor, y: Tensor, mode: str = "tensor") -> Any:
        return {"loss": self.own_loss(self.net(x), y)}


def test_values_of_a_part_that_the_user_has_recorded(tmp_path: Path) -> None:
    found = {}
    for how in ("plain", "recorded"):
        torch.manual_seed(0)
        model, outputs = WithOwnLoss(), Outputs()
        if how == "recorded":
            make_graphed_callables(model.own_loss)
        make_runner(tmp_path / how, model=model, train_cfg=dict(max_epochs=1), custom_hooks=[outputs]).train()
        found[how] = [float(seen["loss"]) for seen in outputs.seen]
    assert len(set(found["plain"])) > 2
    assert found["recorded"] == found["plain"]


def prepared(model: Net, how: str) -> Net:
    """The model, of which the runner can see that something may be written to the memory of its gradients."""
    if how == "compiled":
        model.compile(backend="eager")
    elif how == "recorded":
        make_graphed_callables(model.net)
    return model


def accumulated(folder: Path, kind: type[Net], windows: int, how: str) -> list[Tensor]:
    torch.manual_seed(0)
    model = prepared(kind(), how)
    optim_wrapper = dict(optimizer=dict(type="SGD", lr=0.5), accumulative_counts=windows)
    runner = make_runner(folder, model=model, train_cfg=dict(max_epochs=1), optim_wrapper=optim_wrapper)
    runner.train()
    return [value.detach().clone() for value in model.parameters()]


@pytest.mark.parametrize("how", ["compiled", "recorded"])
@pytest.mark.parametrize("windows", [1, 2, 4])
@pytest.mark.parametrize("kind", [Recorded, RecordedStep])
def test_gradients_are_added_up_that_lie_in_one_place(tmp_path: Path, kind: type[Net], windows: int, how: str) -> None:
    expected = accumulated(tmp_path / "plain", lambda: Net(dropout=0.0), windows, "plain")  # type: ignore[arg-type]
    found = accumulated(tmp_path / "recorded", kind, windows, how)
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other)


def sharded(folder: Path, kind: type[Net], windows: int, **options: Any) -> list[Tensor]:
    torch.manual_seed(0)
    optim_wrapper = dict(optimizer=dict(type="SGD", lr=0.5), accumulative_counts=windows)
    strategy = dict(type="FSDPStrategy", device="cpu", **options)
    runner = make_runner(
        folder, model=kind(), strategy=strategy, train_cfg=dict(max_epochs=1), optim_wrapper=optim_wrapper
    )
    runner.train()
    found = [value.full_tensor().detach().clone() for value in runner.strategy.module.parameters()]  # type: ignore[attr-defined]
    runner.strategy.leave()
    return found


class Ordinary(Net):
    def __init__(self) -> None:
        super().__init__(dropout=0.0)


class NotCompiled(Recorded):
    """Which takes the compiler no time."""

    forward = torch.compiler.disable(Recorded.forward)  # type: ignore[no-untyped-call]


@pytest.mark.distributed
def test_gradients_of_shards_are_not_kept_whole(workers2: WorkerGroup, tmp_path: Path) -> None:
    expected = workers2.run(sharded, tmp_path / "plain", Ordinary, 2)
    found = workers2.run(
        sharded, tmp_path / "recorded", NotCompiled, 2, compile=dict(backend="eager", mode="reduce-overhead")
    )
    for mine, other in zip(found[0], expected[0], strict=True):
        torch.testing.assert_close(mine, other)


def stepped(model: Net, batches: list[dict[str, Any]]) -> list[Tensor]:
    """Weights after an Engine's update of two calls, with a look at another batch before it."""
    with Engine(model, "single", dict(optimizer=dict(type="SGD", lr=0.5))) as engine:
        for batch in batches[:2]:
            engine.forward_backward(batch, lambda output, _: output["loss"])
        engine.forward(batches[2])
        engine.optim_step()
    return [value.detach().clone() for value in model.parameters()]


@pytest.mark.parametrize("how", ["compiled", "recorded"])
def test_gradients_of_several_calls_of_an_engine(how: str) -> None:
    torch.manual_seed(0)
    batches = [dict(index=0, x=torch.randn(4, 6), y=torch.tensor([0, 1, 1, 0])) for _ in range(3)]
    torch.manual_seed(1)
    plain = Recorded()
    plain.moved = lambda: dict(plain.net.named_parameters())  # type: ignore[method-assign]
    torch.manual_seed(1)
    for mine, other in zip(stepped(prepared(Recorded(), how), batches), stepped(plain, batches), strict=True):
        torch.testing.assert_close(mine, other)


class OwnTensors(Net):
    """Gives its own tensors to log: a buffer that counts its calls, a parameter, and a view of one."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))
        self.scale = nn.Parameter(torch.zeros(()))
        self.scales = nn.Parameter(torch.zeros(2))

    def forward(self, *args: Any, mode: str = "tensor", **kwargs: Any) -> Any:
        found = super().forward(*args, mode=mode, **kwargs)
        if mode != "loss":
            return found
        self.calls += 1
        loss = found["loss"] + self.scale + self.scales.sum()
        return {"loss": loss, "calls": self.calls, "scale": self.scale, "first": self.scales[0]}


class WithTrainStep(OwnTensors):
    """The same in MMEngine's train_step."""

    def train_step(self, data: Any, optim_wrapper: Any) -> Any:
        losses = self(**data, mode="loss")
        optim_wrapper.update_params(losses["loss"])
        return losses


class WithoutMode(OwnTensors):
    """The same in a dict of a forward without mode."""

    def forward(self, index: Any, x: Tensor, y: Tensor) -> Any:  # type: ignore[override]
        return super().forward(index, x, y, mode="loss")


@pytest.mark.parametrize("kind", [OwnTensors, WithTrainStep, WithoutMode])
def test_a_model_logs_its_own_tensors(tmp_path: Path, kind: type[OwnTensors]) -> None:
    """Each figure is that of its iteration, however late it is read."""
    optim_wrapper = dict(optimizer=dict(type="SGD", lr=1.0))
    runner = make_runner(tmp_path, model=kind(), train_cfg=dict(max_epochs=1), optim_wrapper=optim_wrapper)
    runner.train()
    calls = runner.message_hub.get_scalar("train/calls").values
    assert len(calls) > 2
    assert calls == [i + 1.0 for i in range(len(calls))]
    # Some model's train_step gives its values after the update.
    before = 1.0 if kind is WithTrainStep else 0.0
    for name in ("scale", "first"):
        assert runner.message_hub.get_scalar(f"train/{name}").values == [-(i + before) for i in range(len(calls))]


class WithGraph(SingleDeviceStrategy):
    def run_window(self, window: Any, step: Any) -> dict[str, Tensor]:
        (batch,) = window
        step.begin(0)
        loss, _ = step.forward(batch)
        step.backward(loss, 0)
        return {"loss": loss}


def test_the_graph_of_a_logged_loss_is_let_go(tmp_path: Path) -> None:
    outputs = Outputs()
    make_runner(tmp_path, strategy=WithGraph(), custom_hooks=[outputs]).train()
    assert len(outputs.seen) > 1
    assert not any(seen["loss"].requires_grad for seen in outputs.seen)
