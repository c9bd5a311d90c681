"""Plug-ins: `flextrain new plugin`, packages that add names, and the conformance checks as tests of pytest."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flextrain.cli import main
from flextrain.commands.new_plugin import KINDS
from flextrain.core.base.registry import HOOKS

PLUGIN = ["-m", "pytest", "-p", "flextrain.pytest_plugin", "-p", "no:xdist", "-p", "no:cacheprovider"]


def run_pytest(folder: Path, *arguments: str, path: list[Path]) -> str:
    """What pytest prints in a process of its own, which finds packages in these folders."""
    places = os.pathsep.join(map(str, [*path, os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, *PLUGIN, *arguments]
    env = {**os.environ, "PYTHONPATH": places, "COLUMNS": "140"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    return done.stdout + done.stderr


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """A package of each kind, my-hook and so on, by kind."""
    monkeypatch.chdir(tmp_path)
    for kind in KINDS:
        assert main(["new", "plugin", f"my-{kind}", "--kind", kind]) == 0
    return {kind: tmp_path / f"my-{kind}" for kind in KINDS}


@pytest.mark.processes
def test_the_tests_of_a_new_package_pass(packages: dict[str, Path], tmp_path: Path) -> None:
    tests = [str(folder / "tests") for folder in packages.values()]
    said = run_pytest(tmp_path, "--import-mode=importlib", *tests, path=[*packages.values()])
    assert re.search(r"^=+ 6 passed", said, re.MULTILINE), said


def test_the_next_commands_are_those_of_the_readme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", "plugin", "my-strategy"]) == 0
    assert capsys.readouterr().out.strip() == (
        "5 files in my-strategy; next: cd my-strategy && pip install -e '.[test]' && pytest --flextrain-strategy my_strategy:MyStrategyStrategy"
    )


def test_a_new_package_has_its_own_name_everywhere(packages: dict[str, Path]) -> None:
    for kind, folder in packages.items():
        files = [path for path in folder.rglob("*") if path.is_file()]
        assert len(files) == 5
        for path in files:
            assert not re.search(r"my_plugin|my-plugin|MyPlugin|MY_[A-Z]", path.read_text() + path.name), path
        assert f"A {kind} for" in (folder / "README.md").read_text()


@pytest.mark.parametrize("name", ["My-plugin", "1st", "a b", "class", "../up", "my--plugin", ""])
def test_a_name_that_no_package_can_have(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "plugin", name]) == 2
    assert f'new.name: "{name}" is not allowed, give lower-case words' in capsys.readouterr().err


def test_nothing_is_overwritten(packages: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["new", "plugin", "my-hook", "--kind", "source"]) == 2
    assert "exists and nothing is overwritten, give another folder" in capsys.readouterr().err


def install(folder: Path, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an installer writes, for this process."""
    text = (folder / "pyproject.toml").read_text()
    (group, name, value) = re.findall(r'^\[project.entry-points."(.+)"\]\n(\w+) = "(.+)"', text, re.MULTILINE)[0]
    info = site / f"{folder.name.replace('-', '_')}-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {folder.name}\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {value}\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.syspath_prepend(str(site))


def test_an_installed_package_is_found_by_name_and_listed(
    packages: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for kind in ("hook", "reporter"):
        install(packages[kind], tmp_path / "site", monkeypatch)
    capsys.readouterr()
    assert main(["list", "plugins", "--json"]) == 0
    said = capsys.readouterr().out
    assert '"my-hook 0.1.0": "hooks: MyHookHook"' in said
    assert '"my-reporter 0.1.0": "reporters: MyReporterReporter"' in said
    assert "my_hook" not in sys.modules
    try:
        assert type(HOOKS.build(dict(type="MyHookHook"), "custom_hooks[0]")).__module__ == "my_hook"
        assert "MyHookHook" in HOOKS
    finally:
        HOOKS._modules.pop("MyHookHook", None)
        sys.modules.pop("my_hook", None)


ROOT = Path(__file__).parents[1]
PACKAGES = sorted(path.parent for path in (ROOT / "plugins").glob("*/pyproject.toml"))


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_a_plug_in_of_this_repository_takes_only_what_is_public(package: Path) -> None:
    """No name that begins with an underscore, and under 1,500 lines; its README has two commands."""
    sources = [path for path in package.rglob("*.py") if "tests" not in path.parts]
    public = re.compile(
        r"flextrain(?:\.(?:commands\.output|script_facts|testing|data|runner\.hooks|runner\.reporting|strategies(?:\.parts)?))?"
    )
    for path in sources:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "flextrain":
                assert public.fullmatch(node.module or ""), f"{path}: {node.module}"
                assert not [alias.name for alias in node.names if alias.name.startswith("_")], path
            if isinstance(node, ast.Attribute) and re.match("_[a-z]", node.attr):
                assert isinstance(node.value, ast.Name), f"{path}:{node.lineno} {node.attr}"
                assert node.value.id == "self", f"{path}:{node.lineno} {node.attr}"
    assert sum(len(path.read_text().splitlines()) for path in sources) < 1500
    assert len(re.findall(r"^    \S", (package / "README.md").read_text(), re.MULTILINE)) == 2


def test_flextrain_does_not_know_them() -> None:
    names = [package.name.replace("-", "_") for package in PACKAGES]
    for folder in ("core", "optim", "strategies", "runner", "flextrain"):
        for path in (ROOT / folder).rglob("*.py"):
            assert not [name for name in names if name in path.read_text()], path


# Conformance as tests

STRATEGIES = '''
from contextlib import nullcontext

import torch
from flextrain import DDPStrategy, SingleDeviceStrategy


class ForgetsToAverage(DDPStrategy):
    """Every process trains by its own part of the batch."""

    def grad_sync(self, enabled):
        return super().grad_sync(False)


class AveragesTooOften(DDPStrategy):
    """Right, and more than it promises: unused parameters are not what it differs in."""

    not_promised = {"losses": "reports its own"}

    def grad_sync(self, enabled):
        return super().grad_sync(True)


class WrongRank(DDPStrategy):
    def _arrange(self):
        found = super()._arrange()
        return found.__class__(**{**vars(found), "rank": 0})


class ForgetsState(DDPStrategy):
    def load(self, state):
        super().load({key: value for key, value in state.items() if not key.endswith("exp_avg")})


class LosesBuffers(DDPStrategy):
    def buffers(self):
        return {}


class ComputesInHalf(DDPStrategy):
    def autocast(self):
        return torch.autocast("cpu", torch.bfloat16)


class Differs(DDPStrategy):
    not_promised = {"evaluation": "rounds what it returns"}

    def evaluate(self, batch, step):
        found = super().evaluate(batch, step)
        return torch.utils._pytree.tree_map(lambda one: one.round() if isinstance(one, torch.Tensor) else one, found)
'''


@pytest.mark.processes
def test_checks_are_tests_that_can_be_chosen(tmp_path: Path) -> None:
    """Results are those of check_strategy, the table too; a difference that is not promised is no failure."""
    (tmp_path / "mine.py").write_text(STRATEGIES)
    given = ["--flextrain-strategy", "mine:Differs", "-k", "facts or evaluation or unused", "-rxs"]
    said = run_pytest(tmp_path, *given, path=[tmp_path])
    assert re.search(r"1 passed, 1 skipped, \d+ deselected, 1 xfailed", said), said
    assert "not promised: rounds what it returns: " in said
    assert "refused: " in said
    assert "Differs on 2 processes" in said
    assert len(re.findall("^│ (?:facts|evaluation|unused) +│", said, re.MULTILINE)) == 3


@pytest.mark.processes
@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "check"),
    [
        ("ForgetsToAverage", "gradients"),
        ("WrongRank", "facts"),
        ("ForgetsState", "resume_itself"),
        ("LosesBuffers", "state_keys"),
        ("ComputesInHalf", "gradients"),
    ],
)
def test_a_fault_is_named_by_the_check_that_promises_it(tmp_path: Path, kind: str, check: str) -> None:
    (tmp_path / "mine.py").write_text(STRATEGIES)
    said = run_pytest(tmp_path, "--flextrain-strategy", f"mine:{kind}", "-k", check, path=[tmp_path])
    assert re.search(rf"^FAILED .*{check}", said, re.MULTILINE), said
    assert re.search(rf"│ {check} +│ failed", said)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("mine:Missing", "has no attribute 'Missing'"),
        ("missing_package:Mine", "No module named 'missing_package'"),
        ("fsdpp", 'did you mean "fsdp"?'),
    ],
)
def test_a_wrong_name_is_one_line(tmp_path: Path, given: str, said: str) -> None:
    (tmp_path / "mine.py").write_text(STRATEGIES)
    found = run_pytest(tmp_path, "--flextrain-strategy", given, path=[tmp_path])
    (line,) = [line for line in found.splitlines() if line.startswith("ERROR")]
    assert line.startswith(f"ERROR: --flextrain-strategy {given}: ")
    assert said in line


@pytest.mark.processes
def test_without_the_option_nothing_is_imported(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("import sys\n\n\ndef test_it():\n    assert 'torch' not in sys.modules\n")
    assert "1 passed" in run_pytest(tmp_path, path=[])


def test_modules_of_plugins_tests_do_not_hide_others() -> None:
    """pytest imports all of them as ``tests.NAME``, and workers look for functions there."""
    root = Path(__file__).parents[1]
    names = [path.stem for path in (*root.glob("tests/*.py"), *root.glob("plugins/*/tests/*.py"))]
    assert len(names) == len(set(names)), sorted(name for name in names if names.count(name) > 1)
