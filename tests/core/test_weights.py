"""Weights of other programs and a model whose names and shapes need not quite agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flextrain.core.checkpoint import match_weights, open_weights


def match(saved: dict[str, Tensor], own: dict[str, Tensor], tmp_path: Path, **kwargs: Any) -> Any:
    torch.save(saved, tmp_path / "w.pth")
    template = {f"model.{name}": tensor for name, tensor in own.items()}
    aliases = kwargs.pop("aliases", {})
    source, fits, report = match_weights(open_weights(tmp_path / "w.pth"), template, aliases, **kwargs)
    source.load(fits)
    return fits, report


def ones(*shape: int) -> Tensor:
    return torch.ones(*shape)


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")])
def test_of_a_tied_parameter_the_first_name_counts(tmp_path: Path, names: tuple[str, str]) -> None:
    """Whatever comes first in the file."""
    torch.save({name: torch.full((2,), float(name == "a")) for name in names}, tmp_path / "both.pth")
    weight = torch.zeros(2)
    source, fits, report = match_weights(open_weights(tmp_path / "both.pth"), {"model.a": weight}, {"b": "a"})
    found = report.with_untied(source, {"model.a": weight}).of_all()
    assert weight.tolist() == [0.0, 0.0], "nothing is loaded yet"
    source.load(fits)
    assert (weight.tolist(), found.untied) == ([1.0, 1.0], {"b": "a"})
    assert str(found) == "b has other values than a, and the model has one tensor for both"


def test_equal_values_of_a_tied_parameter_are_nothing_to_report(tmp_path: Path) -> None:
    shared = ones(2)
    for saved, seconds in (({"a": shared, "b": shared}, []), ({"a": ones(2), "b": ones(2)}, ["b"])):
        fits, report = match(saved, {"a": torch.zeros(2)}, tmp_path, aliases={"b": "a"})
        assert [*report.second] == seconds, "one tensor of a file is not compared with itself"
        assert not report.with_untied(open_weights(tmp_path / "w.pth"), fits)


def test_weights_that_fit_leave_nothing_to_report(tmp_path: Path) -> None:
    own = {"a": torch.zeros(2), "b": torch.zeros(3)}
    fits, report = match({"a": ones(2), "b": ones(3)}, own, tmp_path)
    assert not report
    assert str(report) == ""
    assert fits.keys() == {"model.a", "model.b"}
    assert own["a"].tolist() == [1.0, 1.0]


def test_what_does_not_fit_is_reported_and_the_rest_is_loaded(tmp_path: Path) -> None:
    own = {name: torch.zeros(2) for name in ("backbone.weight", "head.weight", "head.bias")}
    saved = {"backbone.weight": ones(2), "head.wieght": ones(2), "head.bias": ones(3)}
    fits, report = match(saved, own, tmp_path)
    assert report
    assert (report.missing, report.unexpected) == (("head.weight",), ("head.wieght",))
    assert report.misshaped == {"head.bias": ((3,), (2,))}
    assert str(report) == (
        "missing head.weight (like head.wieght); unexpected head.wieght (like head.weight); "
        "other shape head.bias (file (3,), model (2,))"
    )
    assert fits.keys() == {"model.backbone.weight"}
    assert own["backbone.weight"].tolist() == [1.0, 1.0]
    assert own["head.bias"].tolist() == [0.0, 0.0]


def test_long_reports_are_cut(tmp_path: Path) -> None:
    own = {f"layer{i}.weight": torch.zeros(1) for i in range(30)}
    _, report = match({"x": ones(1)}, own, tmp_path)
    assert str(report).endswith("layer9.weight and 20 more; unexpected x")
    assert "layer10" not in str(report)


def test_keys_are_revised_in_order(tmp_path: Path) -> None:
    own = {"net.a": torch.zeros(1), "net.b": torch.zeros(1)}
    saved = {"module.old.a": ones(1), "module.b": ones(1) * 2}
    _, report = match(saved, own, tmp_path, revise_keys=[(r"^module\.", "net."), (r"old\.", "")])
    assert not report
    assert (own["net.a"].item(), own["net.b"].item()) == (1.0, 2.0)


def test_tied_weights_are_found_under_any_of_their_names(tmp_path: Path) -> None:
    own = {"embedding": torch.zeros(1)}
    _, report = match({"head": ones(1)}, own, tmp_path, aliases={"head": "embedding"})
    assert not report
    assert own["embedding"].item() == 1.0
