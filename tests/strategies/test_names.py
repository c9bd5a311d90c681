"""Names of the model on a process that holds a part of it."""

from __future__ import annotations

from typing import Any

from torch import nn

from flextrain.strategies.noted import Names

from .split import Net


class StandIn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("late", None)


def stages(monkeypatch: Any) -> tuple[Names, Net, Net]:
    """The names, and the models of two processes, as process 1 sees them."""
    first, last = Net(), Net()
    names = Names(last)
    for i in range(4):
        (last if i < 2 else first).layers[str(i)] = StandIn()
    del first.head, last.embed
    everyones = []
    monkeypatch.setattr("flextrain.strategies.noted.gather_differing", lambda own: [everyones.append(own), own][1:])
    for model in (first, last):
        Names(model).gather(model)
    monkeypatch.setattr("flextrain.strategies.noted.gather_differing", lambda own: everyones)
    names.gather(last)
    return names, first, last


def test_a_stand_in_owns_nothing(monkeypatch: Any) -> None:
    names, first, last = stages(monkeypatch)
    assert names.owner("layers.0.norm.running_mean", first, 0) == 0
    assert names.owner("layers.3.norm.running_mean", last, 1) == 1
    assert names.owner("layers.3.late", last, 1) == 1, "first has a layers.3, of another class"
    assert names.owner("layers.3", last, 1) == 1
    assert names.owner("", last, 1) == 0
    assert names.owner("appeared", last, 1) == 0, "a buffer of the model itself, which both have"


def test_tied_names_outlive_the_cut_and_not_the_tie(monkeypatch: Any) -> None:
    names, _, last = stages(monkeypatch)
    assert names.aliases(last) == {"head.weight": "embed.weight"}
    assert dict(names.parameters(last))["embed.weight"] is last.head.weight
    assert "layers.0.linear.weight" in names.elsewhere(last)
    assert not {"embed.weight", "head.bias", "layers.3.linear.bias"} & names.elsewhere(last)
    model = Net()
    names = Names(model)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    assert names.aliases(model) == {}
    assert {"embed.weight", "head.weight"} <= dict(names.parameters(model)).keys()
