"""With a newer library than was tried there is one warning, and its errors in private parts name the versions."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version
from torch import Tensor, nn

from flextrain import FlexibleRunner
from flextrain.core.torch_compat.torch_private import version_of
from flextrain.core.version import TRIED, is_from_private_use, untried
from flextrain.runner.health.failures import Failure, advice_on
from flextrain.runner.health.origin import Origin

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


class Mean(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"loss": super().forward(x).mean()}


NEWER = "torch {} is newer than the versions that flextrain was tried with (2.4 to 2.5)"


def test_the_oldest_versions_are_those_of_pyproject() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for line in (*project["dependencies"], *extras["deepspeed"], *extras["hf"]):
        found = Requirement(line)
        if found.name in TRIED:
            (bound,) = found.specifier
            assert Version(bound.version) == Version(TRIED[found.name][0]), found.name


def test_new_releases_fail_no_run_of_the_tests_but_their_own() -> None:
    lines = (Path(__file__).parents[1] / "tried.txt").read_text().splitlines()
    bounds = {(found := Requirement(line)).name: str(found.specifier) for line in lines if not line.startswith("#")}
    newest = {name: Version(newest).release for name, (_, newest) in TRIED.items()}
    assert bounds == {name: f"<{major}.{minor + 1}" for name, (major, minor, *_) in newest.items()}


def test_patch_releases_and_older_versions_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("2.15.9", "2.14.0+cpu", "2.15.0.dev20270101"):
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__version__=version))  # type: ignore[arg-type]
        assert not [line for line in untried() if "torch" in line]


def test_a_newer_version_is_told_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(TRIED, "torch", ("2.4", "2.5"))
    samples = [{"x": torch.ones(2)} for _ in range(4)]
    runner = FlexibleRunner(
        Mean, str(tmp_path), train_dataloader=samples, train_cfg=dict(max_iters=2),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
    )  # fmt: skip
    runner.train()
    (log,) = tmp_path.rglob("*.log")
    assert log.read_text().count(NEWER.format(torch.__version__)) == 1


def test_an_error_in_a_users_file_of_such_a_name_does_not() -> None:
    with pytest.raises(AttributeError) as caught:
        exec(compile("object().missing", "/home/me/model_private.py", "exec"), {"__name__": "model_private"})
    assert not is_from_private_use(caught.value)


def test_an_error_in_a_private_part_names_the_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    def advice() -> str | None:
        with pytest.raises(AttributeError) as caught:
            version_of(object())  # type: ignore[arg-type]
        return advice_on(Failure(None, caught.value, Origin([]), "AttributeError", str(caught.value)))  # type: ignore[arg-type]

    assert advice() is None
    monkeypatch.setitem(TRIED, "torch", ("2.4", "2.5"))
    assert advice() == f"{NEWER.format(torch.__version__)}: install one of these"
