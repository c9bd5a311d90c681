"""flextrain show, and what flextrain list has besides the types."""

from __future__ import annotations

import argparse
import itertools
import json

import pytest

from flextrain.cli import main
from flextrain.core.base.registry import HOOKS, registrations_undone
from flextrain.runner.hooks import Hook


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal of 80 columns without colours."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")


@pytest.mark.usefixtures("narrow")
def test_a_hook_at_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "EMAHook"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "EMAHook  hook"
    assert lines[lines.index("  momentum  float | None, default None") + 1].startswith(
        "      weight of the newest weights"
    )
    assert any(line.strip() == 'custom_hooks=[dict(type="EMAHook", momentum=0.0002)]' for line in lines)
    assert "" in lines
    assert not any(pair == ("", "") for pair in itertools.pairwise(lines)), "an empty line too many"


def test_in_a_pipe_an_argument_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["show", "EMAHook"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "  interval  int, default 1: the average moves at every ``interval``-th update." in lines


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize(
    "name, says",
    [
        ("strategy.zero_optimization.stage", ["0 | 1 | 2 | 3, default 0", "See also: DeepSpeedStrategy"]),
        ("fsdp", ['Short for dict(type="FSDPStrategy").', 'strategy="fsdp"']),
        ("zero_optimization.stage", ["strategy.zero_optimization.stage  argument of"]),
        ("flextrain.FlexibleRunner", ["flextrain.runner.runner:FlexibleRunner"]),
        ("flextrain.ray.train_loop", ["flextrain.ray.ray_loop:train_loop"]),
        ("MeanMetric", ["torchmetrics."]),
        ("LinearLR", ["flextrain fills in optimizer."]),
        ("Hook", ["Attributes and methods", "before_train_epoch(runner)"]),
        ("HOOKS", ["@HOOKS.register_module()"]),
        ("LBFGS", ["Every runner refuses it"]),
        ("CheckpointHook", ["save_best", 'priority  str | int, default "VERY_LOW"']),
        ("slurm", ['launcher="slurm"']),
        ("h100", ["h100", "bfloat16"]),
        ("mesh:tp2xdp2", ["tp=2", "MeshStrategy"]),
        ("EMAHook.momentum", ["argument of EMAHook", "weight of the newest weights"]),
        ("AdamW.lr", ["argument of AdamW", "learning rate"]),
        ("Hook.before_run", ["before_run(runner)"]),
        ("before_run", ["Hook.before_run  method"]),
        ("Axis", ["Attributes and methods", "its processes have the same parameters", "own_random_numbers()"]),
        ("Axis.folds", ["Axis.folds  attribute"]),
        ("own_random_numbers", ["Axis.own_random_numbers  method"]),
        ("Layout", ["this process's index, by axis", "over(*axes)"]),
        ("Layout.index", ["Layout.index  attribute"]),
        ("Registry", ["expand(cfg, where)"]),
        ("Strategy.setup", ["optim", "Returns"]),
        ("torch.optim.AdamW", ["weight_decay  float"]),
        ("StrategyConfig", ["flextrain.strategies", "timeout_s"]),
        ("Needs", ["packages", "processes"]),
        ("TrainStep", ["flextrain.strategies.base:TrainStep"]),
        ("hooks", ["EarlyStoppingHook", "Stops training"]),
        ("verify", ["usage: flextrain verify"]),
        ("launch", ["nprocs  int, must be given", "LaunchError: a process failed"]),
    ],
)
def test_what_is_shown(capsys: pytest.CaptureFixture[str], name: str, says: list[str]) -> None:
    assert main(["show", name]) == 0
    out = capsys.readouterr().out
    assert [each for each in says if each not in out] == []


def test_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "strategy.activation_checkpointing", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found) == 2, "options that differ between strategies are shown apart"
    assert {"DeepSpeedStrategy", "FSDPStrategy"} <= {name for entry in found for name in entry["see_also"]}
    assert {"name", "summary", "arguments", "example"} <= found[0].keys()


@pytest.mark.parametrize(
    "name, nearest",
    [
        ("EmaHook", '"EMAHook"'),
        ("AdanW", '"AdamW"'),
        ("checkpoint_hook", '"CheckpointHook"'),
        ("docter", '"doctor"'),
        ("tran", 'did you mean "train"'),
        ("machins", '"machines"'),
        ("zero_optimisation.stage", '"strategy.zero_optimization.stage"'),
        ("qqqqqqqqq", "`flextrain list`"),
        ("", "`flextrain list`"),
        ("nowhere.at.all", "`flextrain list`"),
    ],
)
def test_an_unknown_name_is_one_line(capsys: pytest.CaptureFixture[str], name: str, nearest: str) -> None:
    assert main(["show", name]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert nearest in captured.err


def test_an_import_path_that_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "torch.nn:Lineer"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["show", "torch.nn:Linear"]) == 0
    assert "in_features" in capsys.readouterr().out


@pytest.mark.usefixtures("narrow")
def test_a_hook_of_the_user(capsys: pytest.CaptureFixture[str]) -> None:
    with registrations_undone(__name__):

        @HOOKS.register_module()
        class Shout(Hook):
            """Shouts [loudly].

            Args:
                volume: in dB.

            Example:
                custom_hooks=[dict(type="Shout", volume=90)]
            """

            def __init__(self, volume: float, quiet: bool = False) -> None: ...

        assert main(["show", "Shout"]) == 0
    out = capsys.readouterr().out
    assert "Shouts [loudly]." in out
    assert "volume  float, must be given\n      in dB." in out
    assert "quiet  bool, default False" in out
    assert "volume=90" in out


@pytest.mark.parametrize(
    "kind, name, says",
    [
        ("options", "train_dataloader.num_workers", "worker processes"),
        ("strategy-options", "strategy.wrap", "units"),
        ("launchers", "slurm", "srun"),
        ("public-names", "flextrain.launch", "processes"),
    ],
)
def test_further_kinds_of_list(capsys: pytest.CaptureFixture[str], kind: str, name: str, says: str) -> None:
    assert main(["list", kind, "--json"]) == 0
    assert says in json.loads(capsys.readouterr().out)[name]


def test_every_command_says_what_it_does_at_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No line of the help of any command is broken by a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    for command in [[], *([each] for each in commands())]:
        with pytest.raises(SystemExit):
            main([*command, "--help"])
        out = capsys.readouterr().out
        assert [line for line in out.splitlines() if len(line) > 80] == [], command


def commands() -> list[str]:
    from flextrain.cli import COMMANDS

    found = argparse.ArgumentParser().add_subparsers()
    for each in COMMANDS:
        each.add(found)
    return [*found.choices]
