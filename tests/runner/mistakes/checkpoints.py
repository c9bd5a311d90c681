"""Starting from weights and checkpoints, and folders that something else uses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from flextrain import FlexibleRunner
from flextrain.core.checkpoint.folders import FolderLock

from .parts import SGD, Net, OldState, Row, good, warns


def run(work_dir: Path, **changes: Any) -> None:
    """A run that has ended."""
    FlexibleRunner(**{**good(work_dir), **changes}).train()


def without(name: str) -> Any:
    """A run of which a file or folder is missing."""

    def prepare(work_dir: Path) -> None:
        run(work_dir)
        (work_dir / name).unlink()

    return prepare


def weights(content: Any) -> Any:
    def prepare(work_dir: Path) -> None:
        work_dir.parent.mkdir(exist_ok=True)
        if isinstance(content, bytes):
            (work_dir.parent / "w.pth").write_bytes(content)
        else:
            torch.save(content, work_dir.parent / "w.pth")

    return prepare


def load(config: dict[str, Any]) -> None:
    config["load_from"] = str(Path(config["work_dir"]).parent / "w.pth")


def resume(**more: Any) -> Any:
    return {"resume": True, **more}


def resume_path(name: str) -> Any:
    return lambda config: config.update(resume=str(Path(config["work_dir"]) / name))


def best(work_dir: Path) -> None:
    run(work_dir, default_hooks=dict(checkpoint=dict(save_best="accuracy")))
    (best_one,) = work_dir.glob("best_*")
    best_one.rename(work_dir / "best")


def two_locks(work_dir: Path) -> None:
    work_dir.mkdir()
    _held.append(FolderLock(work_dir))


_held: list[FolderLock] = []


def release(runner: FlexibleRunner) -> None:
    try:
        runner.train()
    finally:
        _held.pop().release()


def a_file(work_dir: Path) -> None:
    work_dir.write_text("")


def other_adam(config: dict[str, Any]) -> None:
    config.update(resume=True, optim_wrapper=dict(optimizer=dict(type="AdamW", lr=0.1)), train_cfg=dict(max_epochs=3))


ROWS = [
    Row("a second run in one folder", {}, "work_dir", prepare=run),
    Row("another run is training in the folder", {}, "is where another run trains at the moment: another run of this process", prepare=two_locks, do=release),
    Row("the folder is a file", {}, "is a file, give a folder", prepare=a_file),
    warns("latest names what is gone", resume(train_cfg=dict(max_epochs=2)), "epoch_1 is resumed, the newest complete checkpoint there", prepare=without("epoch_2/manifest.json")),
    warns("latest is gone", resume(train_cfg=dict(max_epochs=3)), "latest: is missing; epoch_2 is resumed", prepare=without("latest")),
    Row("resume of a path that is damaged", resume_path("epoch_2"), "epoch_2: is not a complete checkpoint, it has no manifest.json", prepare=without("epoch_2/manifest.json")),
    Row("resume of the work directory", resume_path(""), "is no checkpoint, but a folder of checkpoints, give one of them, such as", prepare=run),
    Row("resume of the file latest", resume_path("latest"), "latest: is no checkpoint, but the name of one, give ", prepare=run),
    Row("resume of MMEngine's file", lambda config: config.update(resume=str(Path(config["work_dir"]).parent / "w.pth")), "it is no checkpoint of flextrain; as with those of MMEngine's runner, load_from=", prepare=weights({"state_dict": {}})),
    Row("resume of the best", resume_path("best"), "cannot be resumed, it has no optim.wrapper", prepare=best),
    Row("resume with another model", resume(model=lambda: Net(5)), "does not fit the model", prepare=run),
    Row("resume with another optimizer", other_adam, "optim", prepare=run),
    Row("resume with pieces misspelled", {"resume": dict(optimzer=False)}, 'resume.optimzer: unknown key, did you mean "optimizer"?'),
    Row("resume and load_from", {"resume": __file__, "load_from": __file__}, "give one of them"),
    Row("weights of another model", load, "does not fit the model: missing", prepare=weights({"fc.weight": torch.ones(2)})),
    warns("weights that fit in part", load, "does not fit the model everywhere: missing net.bias", prepare=weights({"net.weight": torch.ones(2, 3)})),
    warns("weights for other classes", load, "does not fit the model everywhere: other shape net.bias", prepare=weights({"net.weight": torch.ones(2, 3), "net.bias": torch.ones(5)})),
    Row("weights in a list", load, "holds a list instead of a state dict", prepare=weights([torch.ones(2)])),
    Row("a whole model in a file", load, "w.pth", prepare=weights(nn.Linear(3, 2))),
    Row("text instead of weights", load, "cannot be read as weights", prepare=weights(b"garbage")),
    Row("an empty file", load, "cannot be read as weights", prepare=weights(b"")),
    Row("an optimizer's state instead of weights", load, "w.pth", prepare=weights(torch.optim.SGD([torch.ones(1)], lr=0.1).state_dict())),
    Row("a web page instead of weights", load, "cannot be read as weights", prepare=weights(b"<!DOCTYPE html><html>Not found</html>")),
    Row("sparse weights", load, "is of a sparse kind", prepare=weights({"net.weight": torch.eye(3).to_sparse()})),
    Row("work directory in a URL", {"work_dir": "s3://bucket/run"}, "logs need a local folder"),
    Row("load_from of a folder", lambda config: config.update(load_from=str(Path(config["work_dir"]).parent)), "is not a complete checkpoint"),
    Row("state of a hook that came with a background save", {"custom_hooks": [OldState({1})], "default_hooks": dict(checkpoint=dict(async_save=True))}, "hook.OldState/seen"),
    Row("an optimizer whose state is no state", {"optim_wrapper": dict(optimizer=SGD, type="OptimWraper")}, "optim_wrapper.type"),
]  # fmt: skip
