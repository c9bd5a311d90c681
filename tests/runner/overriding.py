"""Subclasses that note down which of their methods are called, and whole runs in which they all have something to do."""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from flextrain import BaseModel, BaseTTAModel, FlexibleRunner, Hook

from .training import SGD, Accuracy, Samples, SaveEvery, Stop, make_runner

MMENGINE = {"_run_forward", "_before_epoch", "_after_epoch", "_before_iter", "_after_iter", "_get_value", "_next"} | {
    "_save_checkpoint", "_save_checkpoint_with_step", "_save_best_checkpoint", "__iter__", "__len__", "__getitem__"
}  # fmt: skip
"""Names with an underscore that users define anew all the same: MMEngine's, and Python's own."""


def overridable(kind: type) -> list[str]:
    """What a subclass may define anew: the methods and properties of the class and of its bases in this library."""
    names: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.partition(".")[0] == "flextrain":
            names |= vars(base)
    return sorted(name for name, value in names.items() if _is_method(value) and (name[0] != "_" or name in MMENGINE))


def _is_method(value: Any) -> bool:
    return isinstance(value, (types.FunctionType, property, classmethod, staticmethod))


def spying(base: type, name: str, called: Callable[[str], object]) -> Any:
    """A subclass that defines one method anew: it tells of every call, and does what the base's does."""
    inherited = next(vars(kind)[name] for kind in base.__mro__ if name in vars(kind))

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        called(name)
        return getattr(super(sub, self), name)(*args, **kwargs)

    if isinstance(inherited, property):

        def get(self: Any) -> Any:
            called(name)
            return getattr(super(sub, self), name)

        def set_(self: Any, value: Any) -> None:
            called(name)
            inherited.fset(self, value)

        setter = set_ if inherited.fset else None
        sub = type(f"Own{base.__name__}", (base,), {name: property(get, setter), "__module__": __name__})
    elif isinstance(inherited, classmethod):

        def of_class(cls: Any, *args: Any, **kwargs: Any) -> Any:
            called(name)
            return getattr(super(sub, cls), name)(*args, **kwargs)

        sub = type(f"Own{base.__name__}", (base,), {name: classmethod(of_class), "__module__": __name__})
    else:
        sub = type(f"Own{base.__name__}", (base,), {name: method, "__module__": __name__})
    return sub


class Last(nn.Linear):
    def init_weights(self) -> None:
        nn.init.normal_(self.weight)


class Net(BaseModel):
    """A classifier, with a part that initialises itself."""

    def __init__(self, data_preprocessor: Any = None) -> None:
        super().__init__(data_preprocessor)
        self.net = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), Last(4, 2))

    def forward(self, index: Any, x: Tensor, y: Tensor, mode: str = "tensor") -> Any:
        logits = self.net(x)
        if mode == "loss":
            return {"loss": nn.functional.cross_entropy(logits.float(), y)}
        return logits if mode == "tensor" else {"index": index, "logits": logits, "y": y}


class Gan(nn.Module):
    """Two parts with an optimizer each."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = nn.Linear(6, 6), nn.Linear(6, 1)

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        with optim_wrapper.optim_context(self):
            loss = self.critic(data["x"]).square().mean()
            optim_wrapper["critic"].update_params(loss)
            generator_loss = self.critic(self.generator(data["x"])).mean()
            optim_wrapper["generator"].update_params(generator_loss)
        return {"loss": loss.detach()}

    def val_step(self, data: Any) -> Any:
        return {"index": data["index"], "logits": torch.zeros(len(data["y"]), 2), "y": data["y"]}

    test_step = val_step


class Merging(BaseTTAModel):
    """Takes the first augmentation's prediction."""

    def merge_preds(self, data_samples_list: list[tuple[Any, ...]]) -> Any:
        first = [predictions[0] for predictions in data_samples_list]
        return {name: torch.stack([prediction[name] for prediction in first]) for name in first[0]}


def twice(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """A batch with two augmentations, which are the same."""
    return {name: [value, value] for name, value in default_collate(samples).items()}


def augmented() -> dict[str, Any]:
    return loader() | dict(collate_fn=twice)


class FailAt(Hook):
    """Ends training before an update, as an error of the model's would."""

    def __init__(self, at: int) -> None:
        self.at = at

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if runner.iter == self.at:
            raise Stop


def loader(**options: Any) -> dict[str, Any]:
    return dict(batch_size=4, dataset=Samples(8), collate_fn="default_collate", **options)


def life(folder: Path, make: Callable[[], dict[str, Any]], **resume: Any) -> None:
    """A run of two epochs of two updates that trains, validates, saves and tests; one that resumes it early, and fails.

    Args:
        make: gives the runner's arguments, with new objects for every run.
        resume: what the second run leaves out of the first one's state.
    """
    runner = _runner(folder, make(), SaveEvery({1}))
    runner.train()
    runner.test()
    runner.strategy.leave()
    resumed = _runner(folder, make(), FailAt(3), resume=dict(path=str(folder / "iter_1"), **resume))
    with pytest.raises(Stop):
        resumed.train()
    resumed.strategy.leave()


def _runner(folder: Path, own: dict[str, Any], *hooks: Hook, **more: Any) -> FlexibleRunner:
    checkpoint = dict(interval=2, save_best="accuracy", rule="greater")
    given: dict[str, Any] = {
        "model": Net,
        "optim_wrapper": dict(optimizer=SGD, clip_grad=dict(max_norm=1.0)),
        "auto_scale_lr": dict(base_batch_size=8),
        "train_dataloader": loader(),
        "train_cfg": dict(max_epochs=2),
        "param_scheduler": dict(type="LinearLR", end=3, by_epoch=False),
        "default_hooks": {"logger": dict(interval=1), "checkpoint": checkpoint, **own.pop("default_hooks", {})},
        "custom_hooks": [*own.pop("custom_hooks", ()), dict(type="EMAHook"), dict(type="SyncBuffersHook"), *hooks],
        **{f"{mode}_dataloader": loader() for mode in ("val", "test")},
        **{f"{mode}_cfg": {} for mode in ("val", "test")},
        **{f"{mode}_evaluator": dict(type=Accuracy) for mode in ("val", "test")},
        **more,
    }
    return make_runner(folder, **{**given, **own})
