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
# Adding or removing a name here is a decision about the public interface.
PUBLIC = {
    "__version__",
    "BaseLoop",
    "ImgDataPreprocessor",
    "stack_batch",
    "BaseTTAModel",
    "EVALUATOR",
    "Evaluator",
    "HistoryBuffer",
    "MessageHub",
    "VISUALIZERS",
    "Visualizer",
    "FlexibleRunner",
    "BaseModel",
    "BaseDataPreprocessor",
    "BaseMetric",
    "Hook",
    "Strategy",
    "DataShard",
    "Topology",
    "SingleDeviceStrategy",
    "DDPStrategy",
    "DeepSpeedOptimWrapper",
    "DefaultOptimWrapperConstructor",
    "DeepSpeedStrategy",
    "FSDPStrategy",
    "MeshStrategy",
    "Axis",
    "NPUStrategy",
    "DeviceSpec",
    "register_device",
    "gather_with_gradient",
    "heartbeat",
    "Config",
    "ConfigDict",
    "DictAction",
    "read_base",
    "launch",
    "OptimWrapper",
    "AmpOptimWrapper",
    "ApexOptimWrapper",
    "OptimWrapperDict",
    "Registry",
    "MODELS",
    "DATASETS",
    "DATA_SAMPLERS",
    "FUNCTIONS",
    "OPTIMIZERS",
    "OPTIM_WRAPPERS",
    "OPTIM_WRAPPER_CONSTRUCTORS",
    "PARAM_SCHEDULERS",
    "HOOKS",
    "LOOPS",
    "METRICS",
    "REPORTERS",
    "STRATEGIES",
    "TRANSFORMS",
    "FlexTrainError",
    "ConfigError",
    "LaunchError",
    "DivergenceError",
    "NonFiniteError",
    "StrategyError",
    "CheckpointError",
    "TrialPruned",
}


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


def test_public_names() -> None:
    assert set(flextrain.__all__) == PUBLIC
    assert set(dir(flextrain)) >= PUBLIC
    for name in PUBLIC:
        assert getattr(flextrain, name) is not None


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
    """Every floor in pyproject.toml, but those of tools for developers, stands in tests/oldest.txt."""
    text = (ROOT / "pyproject.toml").read_text()
    users = (
        text[text.index("dependencies = [") : text.index("\nnpu = ")]
        + text[text.index("\nexamples = ") : text.index("\nbench = ")]
    )
    floors = dict(re.findall(r'"([a-z0-9-]+)(?:\[[^]]*\])?>=([0-9.]+)"', users))
    lines = [line for line in (ROOT / "tests" / "oldest.txt").read_text().splitlines() if not line.startswith("#")]
    tested = dict(line.split("==") for line in lines)
    assert {"torch", "deepspeed", "numpy"} <= floors.keys() & tested.keys()
    not_installed = {"mlflow-skinny"}  # not among what developers have
    assert floors.keys() - tested.keys() == not_installed
    for name, floor in floors.items():
        parts = floor.split(".")
        assert name in not_installed or tested[name].split(".")[: len(parts)] == parts, f"{name}: {tested[name]}"
