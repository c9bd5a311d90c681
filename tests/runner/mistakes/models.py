"""Models: nothing to train, no loss, state that cannot be saved."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from .parts import (
    ExtraState,
    Frozen,
    Net,
    NoForward,
    NoParameter,
    NoSetter,
    Plain,
    Row,
    WithBuffer,
    advises,
    net_with_loss,
    warns,
)


def model(given: Any) -> dict[str, Any]:
    return {"model": given}


def plain(result: Any) -> dict[str, Any]:
    """A model without ``mode``, in a run without validation."""
    return {"model": lambda: Plain(result), "val_dataloader": None, "val_cfg": None, "val_evaluator": None}


def loss(of: Any) -> dict[str, Any]:
    return {"model": net_with_loss(of)}


class InPlace(Net):
    def loss(self, out: Any, y: Any) -> Any:
        out = out.exp()
        out += 1
        return {"loss": functional.cross_entropy(out, y)}


class Kept(Net):
    def __init__(self) -> None:
        super().__init__()
        self.sum: Any = 0.0

    def loss(self, out: Any, y: Any) -> Any:
        self.sum = self.sum + functional.cross_entropy(out, y)
        return {"loss": self.sum}


ROWS = [
    Row("all parameters frozen", model(Frozen), "model: Frozen has nothing to train, all 2 parameters are frozen"),
    Row("no parameters", model(NoParameter), "model: NoParameter has nothing to train, it has no parameter"),
    warns('reduction="none"', loss(lambda o, y: {"loss": functional.cross_entropy(o, y, reduction="none")}), 'model: loss "loss" is no scalar but of shape (4,)'),
    warns("one loss for each class", loss(lambda o, y: {"loss_cls": (o - 1).square().mean(0)}), 'model: loss "loss_cls" is no scalar but of shape (2,)'),
    Row("loss as a number", loss(lambda o, y: {"loss": float(o.mean())}), "model: loss 'loss' is float, give a tensor"),
    advises("loss without a graph", loss(lambda o, y: {"loss": o.mean().detach()}), "the loss depends on no trainable parameter"),
    advises("loss of predictions", loss(lambda o, y: {"loss": (o.argmax(1) != y).float().mean()}), "the loss depends on no trainable parameter"),
    Row("no name with loss", loss(lambda o, y: {"error": o.mean()}), "model: gave 'error', and"),
    Row("no losses", loss(lambda o, y: {}), "model: gave nothing, and"),
    Row("a tensor instead of losses", loss(lambda o, y: o.mean()), "model: forward(mode='loss') gave Tensor, give a dict of losses"),
    Row("nothing instead of losses", loss(lambda o, y: None), "model: forward(mode='loss') gave NoneType"),
    Row("a number beside the loss", loss(lambda o, y: {"loss": o.mean(), "accuracy": 0.5}), "model: loss 'accuracy' is float"),
    Row("a plain model without a loss", plain(lambda o, y: o), "without a loss"),
    Row("a plain model that gives nothing", plain(lambda o, y: None), "without a loss"),
    Row("a plain model's loss as a number", plain(lambda o, y: {"loss": float(o.mean())}), "model: loss 'loss' is float"),
    Row("NaN", loss(lambda o, y: {"loss": o.mean() * math.nan}), "Training ended with NaN or infinity in 2 parameters", late=True),
    Row("NaN, to be raised", {**loss(lambda o, y: {"loss": o.mean() * math.nan}), "env_cfg": dict(nonfinite="raise")}, "nan", late=True),
    advises("an operation in place", model(InPlace), "replace x += y and relu_(x) by x = x + y"),
    advises("a loss that is kept", model(Kept), "a tensor of an earlier batch is part of this loss"),
    advises("BaseModel without forward", model(NoForward), "NoForward.forward(..., mode) is not defined"),
    Row("a lambda without a model", model(lambda: None), "model: gave NoneType, not a torch.nn.Module"),
    Row("a class from a function", model(lambda: Net), "model: gave "),
    Row("a list of layers", model([nn.Linear(3, 2)]), "model: list is not allowed"),
    Row("weights instead of a model", model(Net().state_dict()), "model.type: missing"),
    Row("a wrapped model", model(lambda: nn.DataParallel(Net())), "model: is wrapped in DataParallel"),
    Row("a lazy layer", model(lambda: nn.Sequential(nn.LazyLinear(2))), "has no shape before the first batch"),
    Row("a sparse buffer", model(lambda: WithBuffer(torch.eye(3).to_sparse())), "model.table: tensors of layout sparse_coo cannot be saved"),
    Row("a dtype that no checkpoint has", model(lambda: WithBuffer(torch.ones(2).to(torch.float8_e4m3fnuz))), "model.table: tensors of torch.float8_e4m3fnuz cannot be saved"),
    Row("extra state that is a set", model(ExtraState), "model._extra_state: set cannot be saved"),
    Row("extra state that nobody loads", model(NoSetter), "defines get_extra_state but no set_extra_state"),
    advises("weights in half precision", model(lambda: Net().bfloat16()), "tensors of different dtypes meet"),
    Row("a preprocessor for a model that has none", {"data_preprocessor": dict(type="BaseDataPreprocessor")}, "data_preprocessor"),
]  # fmt: skip
