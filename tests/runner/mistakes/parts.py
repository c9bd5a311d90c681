"""A good configuration, and what its mistaken neighbours are made of."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, IterableDataset

from flextrain import BaseMetric, BaseModel, FlexibleRunner
from flextrain.runner.hooks import Hook

SGD = dict(type="SGD", lr=0.1)
SAMPLES = 12


@dataclass(frozen=True)
class Row:
    """One mistake: what to change in the good configuration, and the line that a user has to see.

    Attributes:
        name: what is wrong, in words.
        changes: dotted key to value; ``REMOVE`` removes the key. Or a function that changes the configuration.
        says: text that the line contains.
        hears: "error": one of flextrain's errors, of one line, with this text; "warning": the run goes on, and the log
            has the text once; "advice": torch's or Python's error goes on, and the log has one line with its first line
            and the text before it.
        do: what is called after the runner is made.
        env: environment variables.
        prepare: called with the work directory first.
        late: an error may come after the first update: at a validation of which the dry pass knows nothing, for example.
    """

    name: str
    changes: dict[str, Any] | Callable[[dict[str, Any]], Any]
    says: str
    hears: str = "error"
    do: Callable[[FlexibleRunner], Any] = FlexibleRunner.train
    env: dict[str, str] = field(default_factory=dict)
    prepare: Callable[[Path], Any] | None = None
    late: bool = False


def warns(name: str, changes: Any, says: str, **options: Any) -> Row:
    return Row(name, changes, says, "warning", **options)


def advises(name: str, changes: Any, says: str, **options: Any) -> Row:
    return Row(name, changes, says, "advice", **options)


REMOVE = object()


class Samples(Dataset[dict[str, Tensor]]):
    """Twelve points and the sign of their sum."""

    def __init__(self, length: int = SAMPLES, classes: int = 2, dtype: torch.dtype = torch.float32) -> None:
        self.x = torch.randn(length, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
        self.y = torch.arange(length) % classes

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return {"x": self.x[index], "y": self.y[index]}


class Changed(Samples):
    """Samples of another form, made by a function of the index and the usual sample."""

    def __init__(self, change: Callable[[int, dict[str, Tensor]], Any]) -> None:
        super().__init__()
        self.change = change

    def __getitem__(self, index: int) -> Any:
        return self.change(index, super().__getitem__(index))


class Stream(IterableDataset[Any]):
    """A stream without a length."""

    def __init__(self, length: int = SAMPLES) -> None:
        self.samples = Samples(max(length, 1))
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        return (self.samples[index] for index in range(self.length))


class Net(nn.Module):
    """One linear layer, with ``mode``."""

    def __init__(self, classes: int = 2) -> None:
        super().__init__()
        self.net = nn.Linear(3, classes)

    def forward(self, x: Tensor, y: Tensor, mode: str = "loss") -> Any:
        out = self.net(x)
        return self.loss(out, y) if mode == "loss" else {"p": out.argmax(1), "y": y}

    def loss(self, out: Tensor, y: Tensor) -> Any:
        return {"loss": functional.cross_entropy(out, y)}


def net_with_loss(loss: Callable[[Tensor, Tensor], Any]) -> type[Net]:
    """A class of models whose forward gives ``loss(output, y)``."""
    return type("Net", (Net,), {"loss": lambda self, out, y: loss(out, y)})


class Plain(nn.Module):
    """A model without ``mode``, whose result is made by a function."""

    def __init__(self, result: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.net, self.result = nn.Linear(3, 2), result

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.result(self.net(x), y)


class WithBuffer(Net):
    """A model with one more buffer."""

    def __init__(self, buffer: Tensor) -> None:
        super().__init__()
        self.register_buffer("table", buffer)


class ExtraState(Net):
    """A model with extra state."""

    def get_extra_state(self) -> Any:
        return {1, 2}

    def set_extra_state(self, state: Any) -> None: ...


class NoSetter(Net):
    def get_extra_state(self) -> Any:
        return {"seen": 3}


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


class NoParameter(nn.Module):
    def forward(self, x: Tensor, y: Tensor, mode: str = "loss") -> Any:
        return {"loss": x.sum()} if mode == "loss" else {"p": y, "y": y}


class NoForward(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 2)


class Accuracy(BaseMetric):
    """The share of right answers."""

    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results += (data_samples["p"] == data_samples["y"]).tolist()

    def compute_metrics(self, results: list[Any]) -> Any:
        return {"accuracy": sum(results) / len(results)}


class Gives(Accuracy):
    """A metric with given values."""

    def __init__(self, metrics: Any) -> None:
        super().__init__()
        self.metrics = metrics

    def compute_metrics(self, results: list[Any]) -> Any:
        return self.metrics


class Silent(Accuracy):
    """Keeps no results."""

    def process(self, data_batch: Any, data_samples: Any) -> None: ...

    def compute_metrics(self, results: list[Any]) -> Any:
        return {"accuracy": 0.0}


class OldState(Hook):
    """A hook with state that no checkpoint can hold."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.state}


def good(work_dir: Path) -> dict[str, Any]:
    """Two epochs of three batches, with validation."""
    return dict(
        model=Net,
        work_dir=str(work_dir),
        train_dataloader=dict(batch_size=4, dataset=Samples(), collate_fn="default_collate"),
        optim_wrapper=dict(optimizer=SGD),
        train_cfg=dict(max_epochs=2),
        val_dataloader=dict(batch_size=4, dataset=Samples(), collate_fn="default_collate"),
        val_cfg=dict(),
        val_evaluator=Accuracy(),
        strategy=dict(type="SingleDeviceStrategy", device="cpu"),
        randomness=dict(seed=0),
    )


def changed(config: dict[str, Any], changes: dict[str, Any] | Callable[[dict[str, Any]], Any]) -> None:
    """Make the changes of a row."""
    if not isinstance(changes, dict):
        changes(config)
        return
    for path, value in changes.items():
        *outer, last = path.split(".")
        place = config
        for key in outer:
            place[key] = copy.copy(place.get(key)) or {}
            place = place[key]
        if value is REMOVE:
            del place[last]
        else:
            place[last] = value
