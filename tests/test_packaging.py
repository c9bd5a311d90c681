"""What an installed flextrain looks like, and what importing it loads."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import flextrain

ROOT = Path(__file__).parents[1]
# Folder in the repository -> folder in the wheel.
LAYOUT = {
    "flextrain": "flextrain",
    "core": "flextrain/core",
    "optim": "flextrain/optim",
    "runner": "flextrain/runner",
    "strategies": "flextrain/strategies",
}
OPTIONAL = {
    "accelerate",
    "deepspeed",
    "matplotlib",
    "mlflow",
    "mmengine",
    "tensorboard",
    "torch_npu",
    "torchmetrics",
    "torchvision",
}
OPTIONAL |= {"sklearn", "transformers", "wandb"}


@pytest.fixture(scope="module")
def wheel_files(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The names in a wheel that was built from an sdist, as a package index would get it."""
    source = tmp_path_factory.mktemp("packaging") / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for folder in LAYOUT:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist", "."]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (source / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_wheel_puts_nothing_beside_flextrain(wheel_files: set[str]) -> None:
    tops = {name.split("/")[0] for name in wheel_files}
    assert tops == {"flextrain", f"flextrain-{flextrain.__version__}.dist-info"}


def test_wheel_holds_every_module(wheel_files: set[str]) -> None:
    expected = {
        (Path(target) / path.relative_to(ROOT / folder)).as_posix()
        for folder, target in LAYOUT.items()
        for path in (ROOT / folder).rglob("*.py")
    }
    assert expected - wheel_files == set(), "a folder is missing in pyproject.toml under tool.setuptools.packages"
    assert {name for name in wheel_files if name.endswith(".py")} == expected


def test_wheel_holds_the_templates(wheel_files: set[str]) -> None:
    templates = ROOT / "flextrain" / "templates"
    files = {path.relative_to(ROOT).as_posix() for path in templates.rglob("*") if path.is_file()}
    assert {name for name in files if "__pycache__" not in name} == {
        name for name in wheel_files if name.startswith("flextrain/templates/")
    }


def test_wheel_holds_marker_and_licence(wheel_files: set[str]) -> None:
    assert "flextrain/py.typed" in wheel_files
    assert any(name.endswith("licenses/LICENSE") for name in wheel_files)


def loaded_by(code: str, tmp_path: Path) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after `code`, run far from the repository."""
    code += "\nimport sys\nprint(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.processes
def test_import_alone_loads_no_torch(tmp_path: Path) -> None:
    loaded = loaded_by("import flextrain", tmp_path)
    assert "flextrain" in loaded
    assert loaded & {"torch", "numpy", "pydantic", "rich", *OPTIONAL} == set()


@pytest.mark.processes
def test_public_names_load_no_optional_package(tmp_path: Path) -> None:
    """Nor do the strategies that need one, until an object is made."""
    assert loaded_by("from flextrain import *", tmp_path) & OPTIONAL == set()


MODULES_OF_ONE_DEVICE = 169
"""Modules of flextrain that a script on one device imports; the number only falls."""
READ_ON_ONE_DEVICE = dict(functions=851, files=90, lines=8646)
"""What a reader of such a script has to follow: functions that run from the runner on, their files and lines. They only fall."""
ONE_DEVICE = """
import sys
import torch
from torch.utils.data import DataLoader, TensorDataset
from flextrain import BaseModel, FlexibleRunner
class Net(BaseModel):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def forward(self, x, mode="loss"):
        return dict(loss=self.layer(x).mean())
data = DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2)
optim = dict(optimizer=dict(type="SGD", lr=0.1))
seen = set()
def note(frame, event, _):
    code = frame.f_code
    if event == "call" and code.co_name[0] != "<" and str(frame.f_globals.get("__name__")).startswith("flextrain."):
        seen.add(code)
def length(code):
    return max(line for *_, line in code.co_lines() if line) - code.co_firstlineno + 1
sys.setprofile(note)
with FlexibleRunner(model=Net, work_dir="work", train_dataloader=data, optim_wrapper=optim, train_cfg=dict(max_epochs=1)) as runner:
    runner.train()
    sys.setprofile(None)
seen = {code for code in seen if code.co_filename[0] != "<"}  # methods of dataclasses have no lines
print("READ", len(seen), len({code.co_filename for code in seen}), sum(map(length, seen)))
print("IMPORTED", *(name for name in sys.modules if name.startswith("flextrain.") or name in WATCHED))
"""


@pytest.mark.processes
def test_a_script_on_one_device_imports_what_it_needs(tmp_path: Path) -> None:
    """A run that saves checkpoints: nothing of the strategies of several devices, nor of what other commands do."""
    watched = ("torch.distributed.checkpoint",)
    code = f"WATCHED = {watched}\n{ONE_DEVICE}"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = done.stdout.rpartition("IMPORTED")[2].split()
    folders = ("strategies.mesh", "strategies.fsdp", "strategies.deepspeed", "plan", "mmengine", "ray", "testing")
    unused = (*(f"flextrain.{folder}" for folder in folders), *watched)
    assert [name for name in names if f"{name}.".startswith(tuple(f"{each}." for each in unused))] == []
    assert len(names) + 1 <= MODULES_OF_ONE_DEVICE  # and flextrain itself
    figures = done.stdout.rpartition("READ ")[2].partition("\n")[0].split()
    found = dict(zip(READ_ON_ONE_DEVICE, map(int, figures), strict=True))
    assert {name: number for name, number in found.items() if number > READ_ON_ONE_DEVICE[name]} == {}


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="FlexRunner"):
        flextrain.FlexRunner  # noqa: B018


def test_type_checkers_see_the_same_names() -> None:
    """The imports under TYPE_CHECKING and the table that __getattr__ uses say the same."""
    tree = ast.parse((ROOT / "flextrain" / "__init__.py").read_text())
    (guarded,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.name: node.module for node in guarded.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert seen == flextrain._HOME_OF


def test_the_oldest_versions_are_those_that_are_tested() -> None:
    """Every floor in pyproject.toml, but those of tools for developers, stands in tests/oldest.txt: the first one of a package, because an extra may ask for more."""
    text = (ROOT / "pyproject.toml").read_text()
    users = (
        text[text.index("dependencies = [") : text.index("\nnpu = ")]
        + text[text.index("\nexamples = ") : text.index("\nbench = ")]
    )
    floors = dict(reversed(re.findall(r'"([a-z0-9-]+)(?:\[[^]]*\])?>=([0-9.]+)"', users)))
    lines = [line for line in (ROOT / "tests" / "oldest.txt").read_text().splitlines() if not line.startswith("#")]
    tested = dict(line.split("==") for line in lines)
    assert {"torch", "deepspeed", "numpy"} <= floors.keys() & tested.keys()
    not_installed = {"mlflow-skinny"}  # not among what developers have
    assert floors.keys() - tested.keys() == not_installed
    for name, floor in floors.items():
        parts = floor.split(".")
        assert name in not_installed or tested[name].split(".")[: len(parts)] == parts, f"{name}: {tested[name]}"
