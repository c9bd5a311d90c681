"""Weights from other programs: read without executing anything, under names that need not quite agree."""

from __future__ import annotations

import collections
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from flextrain.core.base.errors import CheckpointError
from flextrain.core.checkpoint import match_weights, open_weights, save_checkpoint


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(collections.OrderedDict(conv=nn.Conv2d(1, 2, 3), norm=nn.BatchNorm2d(2)))


WRITERS: dict[str, Any] = {
    "state dict": lambda state, path: torch.save(state, path),
    "MMEngine": lambda state, path: torch.save({"meta": {"epoch": 3, "cfg": "..."}, "state_dict": state}, path),
    "under model": lambda state, path: torch.save({"model": state, "epoch": 3}, path),
    "parameters": lambda state, path: torch.save({k: nn.Parameter(v) if v.is_floating_point() else v for k, v in state.items()}, path),
    "before zip": lambda state, path: torch.save(state, path, _use_new_zipfile_serialization=False),
    "with numbers": lambda state, path: torch.save({**state, "step": 3}, path),
    "safetensors": lambda state, path: save_file(state, path.with_suffix(".safetensors")),
    "our own": lambda state, path: save_checkpoint(path.with_suffix(""), {f"model.{k}": v for k, v in state.items()} | {"x": 1}),
}  # fmt: skip
SUFFIX = {"safetensors": ".safetensors", "our own": ""}


@pytest.mark.parametrize("kind", WRITERS)
def test_every_layout_is_read(tmp_path: Path, kind: str) -> None:
    state = dict(net().state_dict())
    path = tmp_path / "weights.pth"
    WRITERS[kind](state, path)
    source = open_weights(path.with_suffix(SUFFIX.get(kind, ".pth")))
    assert {key: (info.shape, info.dtype) for key, info in source.tensors.items()} == {
        f"model.{name}": (tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()
    }
    template = {f"model.{name}": torch.zeros_like(tensor) for name, tensor in state.items()}
    source.load(template)
    for name, tensor in state.items():
        assert torch.equal(template[f"model.{name}"], tensor), name


class HistoryBuffer:
    """Pickles as MMEngine's log does."""

    __module__ = "mmengine.logging.history_buffer"

    def __init__(self) -> None:
        self.values = torch.arange(3.0).numpy()
        self.method = self.mean  # bound methods are pickled as calls of getattr

    def mean(self) -> float:
        return float(self.values.mean())


def test_mmengines_log_beside_the_weights_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType(HistoryBuffer.__module__)
    module.HistoryBuffer = HistoryBuffer  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        for name in ("mmengine", "mmengine.logging"):
            patch.setitem(sys.modules, name, types.ModuleType(name))
        patch.setitem(sys.modules, module.__name__, module)
        log = {"loss": HistoryBuffer(), "lr": HistoryBuffer().values.mean()}
        torch.save({"state_dict": {"weight": torch.ones(2)}, "message_hub": log}, tmp_path / "epoch_1.pth")
    allowed = set(torch.serialization.get_safe_globals())
    template = {"model.weight": torch.zeros(2)}
    open_weights(tmp_path / "epoch_1.pth").load(template)
    assert template["model.weight"].tolist() == [1.0, 1.0]
    assert set(torch.serialization.get_safe_globals()) == allowed  # for others nothing has changed


class Attack:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


class CallsGetattr:
    """Pickles a look-up that could reach anything, were it carried out."""

    def __reduce__(self) -> Any:
        return getattr, (collections.OrderedDict, "__class__")


@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_file_is_refused_and_not_run(tmp_path: Path, zipped: bool) -> None:
    path, proof = tmp_path / "evil.pth", tmp_path / "proof"
    torch.save({"state_dict": {"w": torch.ones(1)}, "meta": Attack(proof)}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match=r"evil.pth: cannot be read as weights, it holds posix.system"):
        open_weights(path)
    assert not proof.exists()


def test_what_the_log_is_pickled_with_is_not_carried_out(tmp_path: Path) -> None:
    path = tmp_path / "weights.pth"
    torch.save({"state_dict": {"w": torch.ones(1), "reached": CallsGetattr()}}, path)
    with pytest.raises(CheckpointError, match="it holds getattr of __class__, and loading that would execute code"):
        open_weights(path)


def broken(path: Path, kind: str) -> Path:
    if kind == "cut":
        torch.save({"w": torch.ones(1000)}, path)
        path.write_bytes(path.read_bytes()[:2000])
    elif kind == "garbage":
        path.write_bytes(b"garbage")
    elif kind == "nothing":
        path.write_bytes(b"")
    elif kind == "list":
        torch.save([torch.ones(1)], path)
    elif kind == "numbers":
        torch.save({"a": 1}, path)
    elif kind == "no known dtype":
        torch.save({"a": torch.ones(1, dtype=torch.float8_e4m3fnuz)}, path)
    elif kind == "garbage.safetensors":
        path = path.with_suffix(".safetensors")
        path.write_bytes(b"garbage")
    elif kind == "no known dtype.safetensors":
        path = path.with_suffix(".safetensors")
        try:
            save_file({"a": torch.ones(1, dtype=torch.float8_e4m3fnuz)}, path)
        except KeyError:
            pytest.skip("this version of safetensors writes no such file")
    return path


@pytest.mark.parametrize(
    "kind, message",
    [
        ("missing", "w.pth: does not exist"),
        ("cut", "w.pth: cannot be read as weights, it is damaged"),
        ("garbage", "w.pth: cannot be read as weights, it is damaged, or was not written by torch.save"),
        ("nothing", "w.pth: cannot be read as weights, it is damaged"),
        ("list", "w.pth: holds a list instead of a state dict"),
        ("numbers", "w.pth: holds no tensors by name"),
        ("no known dtype", "w.pth: a is of torch.float8_e4m3fnuz, and tensors of that kind cannot be read"),
        ("garbage.safetensors", "w.safetensors: is no safetensors file"),
        ("no known dtype.safetensors", "w.safetensors: a is of F8_E4M3FNUZ, and tensors of that kind cannot be read"),
    ],
)
def test_files_that_hold_no_weights(tmp_path: Path, kind: str, message: str) -> None:
    path = broken(tmp_path / "w.pth", kind)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_weights(path)
    assert "\n" not in str(caught.value)


# Names


def match(saved: dict[str, Tensor], own: dict[str, Tensor], tmp_path: Path, **kwargs: Any) -> Any:
    torch.save(saved, tmp_path / "w.pth")
    template = {f"model.{name}": tensor for name, tensor in own.items()}
    aliases = kwargs.pop("aliases", {})
    source, fits, report = match_weights(open_weights(tmp_path / "w.pth"), template, aliases, **kwargs)
    source.load(fits)
    return fits, report


def ones(*shape: int) -> Tensor:
    return torch.ones(*shape)


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
