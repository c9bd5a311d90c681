"""flextrain.ray where there is no Ray, and what needs none; tests/cluster/test_ray.py has the rest."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from typing import Any

import pytest

from flextrain import ConfigError
from flextrain.core.checkpoint.manifest import MANIFEST
from flextrain.ray import RayReportHook, train_loop
from flextrain.ray.report import _linked

HAS_RAY = importlib.util.find_spec("ray") is not None


def build(config: dict[str, Any]) -> dict[str, Any]:
    return {}


@pytest.mark.skipif(HAS_RAY, reason="Ray is installed")
def test_without_ray_one_line_names_the_extra() -> None:
    with pytest.raises(ConfigError, match=re.escape("pip install flextrain[ray]")) as caught:
        train_loop(build)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(not HAS_RAY, reason="needs pip install flextrain[ray]")
def test_a_function_that_takes_no_configuration_is_refused_before_workers_start() -> None:
    with pytest.raises(ConfigError, match="give a function of one argument"):
        train_loop(lambda: build({}))  # type: ignore[arg-type, misc]


@pytest.mark.parametrize("wrong", [dict(interval=0), dict(interval_s=-1.0)])
def test_arguments_out_of_range(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(ConfigError, match=rf"RayReportHook\.{name}: .* is not allowed"):
        RayReportHook(**wrong)


def checkpoint(path: Path, text: str) -> Path:
    (path / "part").mkdir(parents=True)
    (path / MANIFEST).write_text(text)
    (path / "part" / "a.safetensors").write_text(text)
    return path


def test_rays_copy_takes_no_space_and_outlives_the_checkpoint(tmp_path: Path) -> None:
    first = checkpoint(tmp_path / "iter_10", "first")
    copy = _linked(first, tmp_path / "reported")
    assert (copy / "part" / "a.safetensors").samefile(first / "part" / "a.safetensors")
    assert _linked(first, tmp_path / "reported") == copy, "made before a failure"
    (first / "part" / "a.safetensors").unlink()
    assert (copy / "part" / "a.safetensors").read_text() == "first"

    again = _linked(checkpoint(tmp_path / "again" / "iter_10", "again"), tmp_path / "reported")
    assert again != copy
    assert (again / MANIFEST).read_text() == "again"
    assert (copy / MANIFEST).read_text() == "first", "what Ray knows stays as it is"


def test_where_there_are_no_hard_links_files_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    first = checkpoint(tmp_path / "iter_10", "first")
    copy = _linked(first, tmp_path / "reported")
    assert (copy / "part" / "a.safetensors").read_text() == "first"
    assert not (copy / MANIFEST).samefile(first / MANIFEST)
