"""BaseModel, its preprocessor, and what the loop asks of any other module."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flextrain.core.base.errors import ConfigError
from flextrain.core.model.base_model import (
    BaseDataPreprocessor,
    BaseModel,
    overrides,
    parse_losses,
    run_forward,
    takes_mode,
)


class Doubles(BaseDataPreprocessor):
    def forward(self, data: Any, training: bool = False) -> Any:
        return {**super().forward(data, training), "factor": 2.0 if training else 3.0}


class Net(BaseModel):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.weight = nn.Parameter(torch.tensor(4.0))

    def forward(self, x: Tensor, factor: float = 1.0, mode: str = "tensor") -> Any:
        out = self.weight * x * factor
        return {"loss": {"loss": out.mean(), "seen": x.sum()}, "predict": [out.detach()], "tensor": out}[mode]


class RecordingOptim:
    """What train_step needs of an OptimWrapper, writing down the order."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    @contextlib.contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        self.events.append("enter")
        yield
        self.events.append("leave")

    def update_params(self, loss: Tensor) -> None:
        self.events.append(loss.item())


def test_train_step_computes_the_loss_in_the_context_and_updates_after_it() -> None:
    optim = RecordingOptim()
    logs = Net(data_preprocessor=Doubles()).train_step({"x": torch.tensor([1.0, 3.0])}, optim)
    assert optim.events == ["enter", "leave", 16.0]
    assert {name: value.item() for name, value in logs.items()} == {"loss": 16.0, "seen": 4.0}


@pytest.mark.parametrize("step", ["val_step", "test_step"])
def test_evaluation_steps_predict(step: str) -> None:
    model = Net(data_preprocessor=dict(type=Doubles))
    assert getattr(model, step)({"x": torch.tensor([1.0])})[0].tolist() == [12.0]


def test_forward_must_be_defined() -> None:
    with pytest.raises(NotImplementedError, match="BaseModel.forward"):
        BaseModel()(torch.ones(1))


@pytest.mark.parametrize(
    "kwargs, message",
    [
        (dict(data_preprocessor=dict(type="BaseDataPreprocesor")), 'did you mean "BaseDataPreprocessor"'),
        (dict(data_preprocessor=dict(type="BaseDataPreprocessor", non_block=1)), "model.data_preprocessor.non_block"),
        (dict(init_cfg=dict(type="Pretrained")), "model.init_cfg: has no meaning here"),
    ],
)
def test_wrong_arguments(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BaseModel(**kwargs)


def test_the_preprocessor_follows_the_model_to_its_device() -> None:
    model = Net()
    assert model.data_preprocessor.device == torch.device("cpu")
    assert copy.deepcopy(model).to("meta").data_preprocessor.device == torch.device("meta")
    moved = model.to("meta").half()
    assert moved.data_preprocessor.device == torch.device("meta")
    data = moved.data_preprocessor({"x": torch.ones(1), "y": ["a"]}, True)
    assert data["x"].device == torch.device("meta")
    assert moved.to_empty(device="cpu").data_preprocessor.device == torch.device("cpu")
    assert list(moved.state_dict()) == ["weight"]


# Losses


@pytest.mark.parametrize(
    "losses, total, logged",
    [
        (dict(loss=torch.tensor(2.0)), 2.0, dict(loss=2.0)),
        (dict(loss=torch.tensor([1.0, 3.0])), 2.0, dict(loss=2.0)),
        (
            dict(acc=torch.tensor(9.0), loss_a=torch.tensor(1.0), b_loss=torch.tensor(2.0)),
            3.0,
            dict(loss=3.0, acc=9.0, loss_a=1.0, b_loss=2.0),
        ),
        (dict(loss_x=[torch.tensor([1.0, 3.0]), torch.tensor(5.0)]), 7.0, dict(loss=7.0, loss_x=7.0)),
        (dict(losses=(torch.tensor(1.0),)), 1.0, dict(loss=1.0, losses=1.0)),
    ],
)
def test_parse_losses(losses: dict[str, Any], total: float, logged: dict[str, float]) -> None:
    found, log = parse_losses(losses)
    assert found.item() == total
    assert {name: value.item() for name, value in log.items()} == logged
    assert next(iter(log)) == "loss"
    assert all(value.dim() == 0 for value in log.values())


def test_the_total_can_be_differentiated() -> None:
    weight = torch.ones(2, requires_grad=True)
    total, _ = parse_losses({"loss_a": weight * 3, "loss_b": [weight.sum(), weight * 4]})
    total.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [1.5 + 1 + 2, 1.5 + 1 + 2]


@pytest.mark.parametrize(
    "losses, message",
    [
        (
            dict(acc=torch.tensor(1.0)),
            r"^model: gave 'acc', and no key contains 'loss'; those that do are summed: a tensor counts by its mean, "
            r"a list of tensors by the sum of means$",
        ),
        (dict(), r"^model: gave nothing, and no key contains 'loss'; those"),
        (torch.tensor(1.0), r"^model: forward\(mode='loss'\) gave Tensor, give a dict of losses$"),
        (dict(loss=1.0), "loss 'loss' is float, give a tensor or a list of tensors"),
        (dict(loss=[]), "loss 'loss' is list"),
        (dict(loss="abc"), "loss 'loss' is str"),
        (dict(loss=[torch.tensor(1.0), 2.0]), "loss 'loss' is list"),
    ],
)
def test_losses_that_mean_nothing(losses: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_losses(losses)


# Any module


class HasMode(nn.Module):
    def forward(self, x: Tensor, mode: str = "loss") -> Any: ...


class HasSteps(BaseModel):
    def train_step(self, data: Any, optim_wrapper: Any) -> Any: ...


class ForeignSteps(nn.Module):
    def train_step(self, data: Any, optim_wrapper: Any) -> Any: ...


@pytest.mark.parametrize("module, mode", [(HasMode(), True), (Net(), True), (nn.Linear(1, 1), False)])
def test_takes_mode(module: nn.Module, mode: bool) -> None:
    assert takes_mode(module) is mode


@pytest.mark.parametrize(
    "module, train, val",
    [
        (Net(), False, False),
        (HasSteps(), True, False),
        (ForeignSteps(), True, False),
        (nn.Linear(1, 1), False, False),
    ],
)
def test_overrides(module: nn.Module, train: bool, val: bool) -> None:
    assert (overrides(module, "train_step"), overrides(module, "val_step")) == (train, val)


@pytest.mark.parametrize("data", [{"a": 1, "b": 2}, [1, 2], (1, 2)])
def test_data_becomes_arguments(data: Any) -> None:
    assert run_forward(lambda a, b, mode: (a, b, mode), data, mode="loss") == (1, 2, "loss")


def test_other_data_is_the_one_argument() -> None:
    assert run_forward(lambda x: x, "text") == "text"


class Part(nn.Module):
    """Says how often it was told to initialise itself."""

    calls = 0

    def init_weights(self) -> None:
        self.calls += 1


class Needs(Part):
    def init_weights(self, module: nn.Module) -> None:  # type: ignore[override]
        raise AssertionError("a function for apply()")


class FromTheHub(Part):
    pretrained_cfg = None


class Outer(Part):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Part()


def test_parts_of_a_base_model_initialise_themselves() -> None:
    """As in MMEngine, and also inside of containers; what is inside of a part is the part's business."""
    model = BaseModel()
    model.part, model.outer, model.hub, model.needs = Part(), Outer(), FromTheHub(), Needs()
    model.row = nn.Sequential(nn.Linear(2, 2), Part())
    model.model = BaseModel()
    model.model.part = Part()
    before = model.row[0].weight.clone()
    model.init_weights()
    assert [model.part.calls, model.outer.calls, model.row[1].calls, model.model.part.calls] == [1, 1, 1, 1]
    assert [model.outer.inner.calls, model.hub.calls] == [0, 0]
    assert torch.equal(model.row[0].weight, before)  # type: ignore[arg-type]
