"""`flextrain train` and `flextrain config`, with the files of a project."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from flextrain import Config, ConfigError, FlexibleRunner
from flextrain.cli import main
from flextrain.core.checkpoint import Checkpoint
from flextrain.user_script import is_config_file, runner_arguments

FILES = {
    "downstream/__init__.py": "",
    "downstream/models.py": """
from torch import nn
from flextrain import MODELS, BaseModel

@MODELS.register_module()
class DownstreamNet(BaseModel):
    def __init__(self, width=4, num_classes=2):
        super().__init__()
        self.hidden, self.head = nn.Linear(4, width), nn.Linear(width, num_classes)

    def forward(self, x, y, mode="tensor"):
        out = self.head(self.hidden(x).relu())
        return {"loss": nn.functional.cross_entropy(out, y)} if mode == "loss" else out
""",
    "downstream/data.py": """
import torch
from flextrain import DATASETS

@DATASETS.register_module()
class DownstreamPoints(torch.utils.data.Dataset):
    def __init__(self, size):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(size, 4, generator=generator)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "y": (self.x[index].sum() > 0).long()}
""",
    "configs/_base_/runtime.py": """
custom_imports = dict(imports=["downstream.models", "downstream.data"], allow_failed_imports=False)
default_scope = "flextrain"
randomness = dict(seed=3)
""",
    "configs/_base_/net.py": """
_base_ = "runtime.py"
num_classes = 2
model = dict(type="DownstreamNet", width=4, num_classes=num_classes)
train_dataloader = dict(
    dataset=dict(type="DownstreamPoints", size=16),
    batch_size=4,
    sampler=dict(type="DefaultSampler", shuffle=True),
    collate_fn="default_collate",
)
optim_wrapper = dict(
    optimizer=dict(type="SGD", lr=0.1),
    clip_grad=dict(max_norm=1.0),
)
train_cfg = dict(by_epoch=True, max_epochs=2)
""",
    "configs/wide.py": """
_base_ = "./_base_/net.py"
model = dict(width=8)
optim_wrapper = dict(optimizer=dict(_delete_=True, type="AdamW", lr=0.01, betas=(0.9, 0.98)))
note = "{{ fileBasenameNoExtension }} of {{$NO_SUCH_VARIABLE:nobody}}"
""",
    "configs/other.yaml": """
custom_imports: {imports: [downstream.models, downstream.data]}
model: {type: DownstreamNet, width: 8}
train_dataloader:
  dataset: {type: DownstreamPoints, size: 16}
  batch_size: 4
  collate_fn: default_collate
optim_wrapper: {optimizer: {type: SGD, lr: 1e-1}}
train_cfg: {by_epoch: false, max_iters: 2}
""",
}
SCRIPT = """
from pathlib import Path
import sys
import downstream.models, downstream.data
from flextrain import FlexibleRunner
FlexibleRunner(
    model=dict(type="DownstreamNet", width=8, num_classes=2),
    work_dir=sys.argv[1],
    train_dataloader=dict(dataset=dict(type="DownstreamPoints", size=16), batch_size=4,
        sampler=dict(type="DefaultSampler", shuffle=True), collate_fn="default_collate"),
    optim_wrapper=dict(optimizer=dict(type="AdamW", lr=0.01, betas=(0.9, 0.98)), clip_grad=dict(max_norm=1.0)),
    train_cfg=dict(by_epoch=True, max_epochs=2),
    randomness=dict(seed=3),
).train()
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with three levels of bases, a model and a dataset of its own."""
    folder = tmp_path_factory.mktemp("project")
    for name, text in {**FILES, "train.py": SCRIPT}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.fixture(autouse=True)
def _inside(project: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(project)
    monkeypatch.setattr(sys, "path", [*sys.path, str(project)])
    logger = logging.getLogger("flextrain")
    handlers = list(logger.handlers)
    yield
    for handler in [each for each in logger.handlers if each not in handlers]:
        handler.close()
        logger.removeHandler(handler)


def test_a_project_trains_as_its_script_does(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["train", "configs/wide.py", "--work-dir", str(tmp_path / "file")]) == 0
    monkeypatch.setattr(sys, "argv", ["train.py", str(tmp_path / "script")])
    exec(compile(SCRIPT, "train.py", "exec"), {"__name__": "__main__"})
    assert_same_weights(tmp_path / "file" / "epoch_2", tmp_path / "script" / "epoch_2")
    resolved = Config.fromfile(tmp_path / "file" / "config.py")
    given = Config.fromfile("configs/wide.py")
    given.work_dir = str(tmp_path / "file")
    assert resolved == given
    assert resolved.pretty_text == given.pretty_text == (tmp_path / "file" / "config.py").read_text()
    assert main(["train", str(tmp_path / "file" / "config.py"), "--work-dir", str(tmp_path / "again")]) == 0
    assert_same_weights(tmp_path / "file" / "epoch_2", tmp_path / "again" / "epoch_2")


def assert_same_weights(first: Path, second: Path) -> None:
    one, other = (read(path) for path in (first, second))
    assert one.keys() == other.keys()
    assert len(one) == 4
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def read(path: Path) -> dict[str, torch.Tensor]:
    checkpoint = Checkpoint.open(path)
    found = {
        key: torch.full(info.shape, torch.nan) for key, info in checkpoint.tensors.items() if key.startswith("model.")
    }
    checkpoint.load(found)
    return found


def test_other_names_stay_in_the_configuration_and_in_checkpoints(project: Path, tmp_path: Path) -> None:
    config = Config.fromfile("configs/wide.py")
    config.merge_from_dict({"work_dir": str(tmp_path), "model_name": "x"})
    runner = FlexibleRunner.from_cfg(config)
    assert runner.cfg.num_classes == 2  # type: ignore[attr-defined]
    assert runner.cfg.note == "wide of nobody"  # type: ignore[attr-defined]
    assert runner.cfg["seed"] == 3
    assert "model_name is no argument of the runner, as model is" in next(tmp_path.glob("*/*.log")).read_text()
    runner.train()
    assert Checkpoint.open(tmp_path / "epoch_2").values["meta"]["cfg"] == runner.config_text
    assert Config.fromstring(runner.config_text, ".py") == config


def test_resuming_and_data_files(project: Path, tmp_path: Path) -> None:
    folder = str(tmp_path / "yaml")
    assert main(["train", "configs/other.yaml", "--work-dir", folder, "--cfg-options", "model.width=5"]) == 0
    assert Config.fromfile(tmp_path / "yaml" / "config.py").model.width == 5
    more = ["--resume", "--cfg-options", "model.width=5", "train_cfg.max_iters=3"]
    assert main(["train", "configs/other.yaml", "--work-dir", folder, *more]) == 0
    newest = max((tmp_path / "yaml").glob("*/*.log"))
    assert "epoch 0, iteration 2" in newest.read_text()


WRONG = [
    ("optim_wraper.x=1", '--cfg-options: optim_wraper: unknown key, did you mean "optim_wrapper"? Else give it another name'),
    ("optim_wrapper.clip_grad.max_nrom=1", '--cfg-options: optim_wrapper.clip_grad.max_nrom: unknown key, did you mean "max_norm"?'),
    ("model.type=DownstreamNt", '--cfg-options: model.type: "DownstreamNt" is no known model, did you mean "DownstreamNet"?'),
    ("strategy=fsdpp", '--cfg-options: strategy.type: "fsdpp" is no known strategy, did you mean "fsdp"?'),
    ("find_unused_parameters=True", "--cfg-options: cfg.find_unused_parameters: has no effect"),
]  # fmt: skip


@pytest.mark.parametrize("option, message", WRONG, ids=[option for option, _ in WRONG])
def test_wrong_options(option: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", "configs/wide.py", "--cfg-options", option]) == 1
    assert message in capsys.readouterr().err


def test_errors_name_file_and_line(project: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for old, new, message in [
        ("max_norm=1.0", "max_norm='x'", 'net.py:13: optim_wrapper.clip_grad.max_norm: "x" is not allowed'),
        ("size=16", "size='x'", "net.py:6: train_dataloader.dataset"),
        ("max_epochs=2", "max_epoch=2", 'net.py:15: train_cfg.max_epoch: unknown key, did you mean "max_epochs"?'),
        ("train_cfg", "train_cfgs", 'net.py:15: train_cfgs: unknown key, did you mean "train_cfg"?'),
    ]:
        path = project / "configs" / "_base_" / "net.py"
        path.write_text(FILES["configs/_base_/net.py"].replace(old, new))
        try:
            status = main(["train", "configs/wide.py", "--work-dir", str(tmp_path / "none")])
        except TypeError:  # of the dataset's own constructor
            continue
        finally:
            path.write_text(FILES["configs/_base_/net.py"])
        assert status == 2
        assert f"configs/_base_/{message}" in capsys.readouterr().err


def test_show_and_diff(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "configs/wide.py", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["model.width"] == {"value": "8", "from": "configs/wide.py:3"}
    assert shown["optim_wrapper.clip_grad.max_norm"] == {"value": "1.0", "from": "configs/_base_/net.py:13"}
    assert main(["config", "diff", "configs/wide.py", "configs/wide.py"]) == 0
    assert main(["config", "diff", "configs/wide.py", "configs/_base_/net.py"]) == 1
    out = capsys.readouterr().out
    assert "- model.width = 8" in out
    assert "+ model.width = 4" in out
    assert main(["config", "show", "configs/wid.py"]) == 2
    assert 'did you mean "wide.py"?' in capsys.readouterr().err


def test_check_writes_nothing(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(project.rglob("*"))
    assert main(["config", "check", "configs/wide.py"]) == 0
    assert [path for path in project.rglob("*") if path not in before and "__pycache__" not in str(path)] == []
    assert "configs/wide.py is right" in capsys.readouterr().out


def test_tools_take_a_file_for_a_script(project: Path) -> None:
    with runner_arguments("configs/wide.py", ["--cfg-options", "model.width=3"]) as given:
        assert given["model"] == dict(type="DownstreamNet", width=3, num_classes=2)
        assert given["work_dir"] == "work_dirs/wide"
        assert given["resume"] is False
    with (
        pytest.raises(ConfigError, match="--lr is none of its options"),
        runner_arguments("configs/wide.py", ["--lr", "1"]),
    ):
        pass
    assert not is_config_file(project / "train.py")
    assert is_config_file(project / "configs" / "other.yaml")


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize(
    "launcher", [["-m", "torch.distributed.run"], ["-m", "flextrain", "run"]], ids=["torchrun", "run"]
)
def test_two_processes(launcher: list[str], project: Path, tmp_path: Path) -> None:
    start = [sys.executable, *launcher, "--standalone", "--nproc-per-node=2"]
    config = ["configs/wide.py", "--work-dir", str(tmp_path / "file"), "--cfg-options", "strategy=ddp"]
    for command in ([*start, "-m", "flextrain", "train", *config], [*start, "train.py", str(tmp_path / "script")]):
        done = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
    assert_same_weights(tmp_path / "file" / "epoch_2", tmp_path / "script" / "epoch_2")


TESTED = """
test_dataloader = dict(dataset=dict(type="DownstreamPoints", size=16), batch_size=4, collate_fn="default_collate")
test_cfg = dict()
test_evaluator = dict(type="downstream.scores:Wrong")
"""
SCORES = """
from flextrain import BaseMetric

class Wrong(BaseMetric):
    def process(self, data_batch, data_samples):
        self.results += [int(sample.argmax() != y) for sample, y in zip(data_samples, data_batch["y"])]

    def compute_metrics(self, results):
        return dict(wrong=sum(results) / len(results), seen=len(results))
"""


def test_a_checkpoint_is_tested_with_a_configuration(
    project: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (project / "downstream" / "scores.py").write_text(SCORES)
    (project / "configs" / "tested.py").write_text('_base_ = "wide.py"\nresume = True\n' + TESTED)
    run = tmp_path / "run"
    assert main(["train", "configs/wide.py", "--work-dir", str(run)]) == 0
    config = Config.fromfile("configs/tested.py")
    config.merge_from_dict({"work_dir": str(tmp_path / "script"), "load_from": str(run / "epoch_1"), "resume": False})
    expected = FlexibleRunner.from_cfg(config).test()
    capfd.readouterr()
    assert main(["test", "configs/tested.py", str(run / "epoch_1"), "--work-dir", str(tmp_path / "tested")]) == 0
    assert f"wrong: {expected['wrong']:.4f}" in "".join(capfd.readouterr())
    for arguments, error in (
        (["configs/tested.py", str(run / "epoch_1"), "--val"], "val_dataloader has no value, test_dataloader has: leave out --val"),
        (["configs/wide.py", str(run / "epoch_1")], "configs/wide.py: test_dataloader has no value"),
        (["configs/tested.py", str(run / "epoch_9")], "epoch_9"),
    ):  # fmt: skip
        assert main(["test", *arguments, "--work-dir", str(tmp_path / "none")]) == 2
        assert error in capfd.readouterr().err


FREEZING = """
strategy = dict(type="single", exclude_frozen_parameters=True)
transforms = [dict(type="Freeze", patterns=["hidden.*"])]
"""


def test_a_checkpoint_without_its_frozen_weights_is_tested_with_them(
    project: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (project / "downstream" / "scores.py").write_text(SCORES)
    (project / "configs" / "frozen.py").write_text('_base_ = "wide.py"\n' + TESTED + FREEZING)
    (project / "configs" / "all.py").write_text('_base_ = "wide.py"\n' + TESTED)
    assert main(["train", "configs/wide.py", "--work-dir", str(tmp_path / "base")]) == 0
    base = f"load_from={tmp_path / 'base' / 'epoch_2'}"
    config = Config.fromfile("configs/frozen.py")
    config.merge_from_dict({"work_dir": str(tmp_path / "run"), "load_from": str(tmp_path / "base" / "epoch_2")})
    runner = FlexibleRunner.from_cfg(config)
    runner.train()
    expected = runner.test()
    checkpoint = str(tmp_path / "run" / "epoch_2")
    capfd.readouterr()
    arguments = ["test", "configs/frozen.py", checkpoint, "--work-dir", str(tmp_path / "tested")]
    assert main(arguments) == 2
    assert "was saved without its frozen parameters, give the weights that the run began with" in capfd.readouterr().err
    assert main([*arguments, "--cfg-options", base]) == 0
    said = "".join(capfd.readouterr())
    assert f"wrong: {expected['wrong']:.4f}" in said
    assert "not as in that run" not in said
    other = f"load_from={tmp_path / 'base' / 'epoch_1'}"
    assert main([*arguments, "--cfg-options", other]) == 0
    assert "and 1 other are not as in that run" in "".join(capfd.readouterr())
