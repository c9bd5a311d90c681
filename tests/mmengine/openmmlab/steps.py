"""Run command lines of run.py one after the other in this process, because importing a project takes longer than a small run."""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from mmengine.runner import Runner
from mmengine.utils import ManagerMixin

from flextrain.cli import main as flextrain
from flextrain.mmengine import FlexibleRunner

SEVERAL = int(os.environ.get("WORLD_SIZE", "1")) > 1


def initial(config: str) -> None:
    """Write the weights that all runs start from, because MMEngine and flextrain draw other numbers."""
    cfg = Config.fromfile(config)
    init_default_scope(cfg.default_scope)
    torch.manual_seed(0)
    preprocessor = cfg.get("data_preprocessor")
    model = MODELS.build({**({} if preprocessor is None else {"data_preprocessor": preprocessor}), **cfg.model})
    model.init_weights()
    torch.save({"state_dict": model.state_dict()}, "initial.pth")


def noting_metrics(runner_class: Any) -> None:
    """Let ``test`` of a runner also write what it returns, which is printed only."""
    original = runner_class.test

    def test(self: Any) -> Any:
        metrics = original(self)
        if int(os.environ.get("RANK", "0")) == 0:
            (Path(self.work_dir) / "metrics.json").write_text(json.dumps({key: float(metrics[key]) for key in metrics}))
        return metrics

    runner_class.test = test


def run(step: dict[str, Any]) -> None:
    """Run one command line."""
    if "initial" in step:
        return initial(step["initial"])
    script, arguments = step["script"], step["arguments"]
    if script in ("train", "test"):
        status = flextrain([script, *arguments])
        assert status in (0, None), f"exit status {status}"
        return None
    if SEVERAL:
        arguments = ["--launcher", "pytorch", *arguments]
        if step["title"] == "theirs_2":  # MMEngine's own start of a group needs an accelerator
            torch.distributed.init_process_group("gloo")
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
    return None


def clean_up(runners: list[Any]) -> None:
    """Leave no group and no instance that code finds without being given it."""
    for runner in runners:
        runner.strategy.leave()
    runners.clear()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    kinds = [ManagerMixin]
    for kind in kinds:
        kinds += kind.__subclasses__()
        getattr(kind, "_instance_dict", {}).clear()


def main() -> int:
    for runner_class in (Runner, FlexibleRunner):
        noting_metrics(runner_class)
    made: list[Any] = []
    construct = FlexibleRunner.__init__

    def constructed(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        made.append(self)

    FlexibleRunner.__init__ = constructed
    for step in json.loads(Path(sys.argv[1]).read_text()):
        print(f"==== {step['title']}", flush=True)
        try:
            run(step)
        except BaseException as error:
            traceback.print_exc()
            print(
                f"FAILED {step['title']}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
                flush=True,
            )
            os._exit(1)  # the other process may wait for this one
        clean_up(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
