"""Train configurations of mmpretrain, mmdetection and mmsegmentation with MMEngine's runner and with flextrain's, and compare.

Their packages have their configurations and their tools/train.py in them. ``configs/`` here inherits the smallest ones, with small
data, which data.py writes, and without changes by chance. Everything is installed under build/openmmlab, nothing into the environment.

    python tests/mmengine/openmmlab/run.py                  # all
    python tests/mmengine/openmmlab/run.py mmpretrain_lenet5 # some: arguments are parts of names
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
sys.path.insert(0, str(HERE))
import data  # noqa: E402

CASES = sorted(path.stem for path in (HERE / "configs").glob("*.py"))
FOLDER = ROOT / "build" / "openmmlab"
PACKAGES = {
    "mmpretrain": [
        "mmpretrain==1.2.0",
        "mmcv-lite==2.1.0",
        *(
            "einops",
            "ftfy",
            "importlib-metadata<9",
            "mat4py",
            "model-index",
            "ordered-set",
            "setuptools<81",
            "wcwidth",
            "zipp",
        ),
    ],
    "ops": [
        *("mmdet==3.3.0", "mmsegmentation==1.2.2"),
        *("ftfy", "prettytable", "pycocotools", "setuptools<81", "shapely", "terminaltables", "wcwidth"),
    ],
}
"""What is installed, without what it depends on, into which folder.

mmpretrain stands apart: beside pycocotools it imports parts of transformers that versions since 5 do not have.
"""
MMCV = "mmcv==2.1.0"
OPTIONS = "-O1 -g0"
"""The compiler's."""
MINUTES = 30
"""The limit for one command."""

ONE, TWO = 4, 2
"""Samples per batch on one process, and on each of two."""
STRATEGIES = {
    "ddp": ["strategy.type=DDPStrategy"],
    "fsdp": ["strategy.type=FSDPStrategy"],
    "zero2": ["strategy.type=DeepSpeedStrategy", "strategy.zero_optimization.stage=2"],
}


class Failed(Exception):
    """What a configuration does not do; the message is one line."""


def pip(*arguments: str, **environment: str) -> None:
    """Run pip.

    Raises:
        Failed: it cannot.
    """
    quiet = ("--disable-pip-version-check", "-q")
    command(f"pip {arguments[0]}", sys.executable, "-m", "pip", *quiet, *arguments, **environment)


def command(name: str, *arguments: str, **environment: str) -> None:
    """Run a command.

    Raises:
        Failed: it cannot; ``name`` is how the message calls it.
    """
    done = subprocess.run(arguments, capture_output=True, text=True, env={**os.environ, **environment})
    if done.returncode:
        lines = [
            line
            for line in done.stderr.splitlines()
            if line.strip() and not line.startswith(("WARNING", "hint", "note"))
        ]
        raise Failed(f"{name} failed: {lines[-1] if lines else done.returncode}")


def install(name: str) -> Path:
    """The folder with the packages of one of PACKAGES, installed once."""
    folder = FOLDER / name
    if not (folder / "complete").exists():
        print(f"installing {', '.join(PACKAGES[name])}", flush=True)
        pip("install", "--no-deps", "--target", str(folder), *PACKAGES[name])
        if name == "ops":
            compile_mmcv(folder)
        (folder / "complete").touch()
    return folder


def compile_mmcv(to: Path) -> None:
    """Compile mmcv's operations for the CPU, which mmdetection and mmsegmentation import; it takes five minutes and more.

    Its setup.py needs pkg_resources, which setuptools has no more, and asks for C++17, which torch's headers take no more.
    A file of it takes the compiler 2 seconds, torch's headers 25: these are compiled first, once for all files.
    """
    from torch.utils.cpp_extension import include_paths  # which warns where there is no CUDA

    print(f"compiling {MMCV}, which takes five minutes or more", flush=True)
    work = FOLDER / "mmcv"
    pip("install", "--target", str(work / "setuptools"), "setuptools<81", "wheel")
    old = {"PYTHONPATH": str(work / "setuptools")}
    pip("download", "--no-deps", "--no-binary", ":all:", "--no-build-isolation", "-d", str(work), MMCV, **old)
    with tarfile.open(next(work.glob("mmcv-*.tar.gz"))) as archive:
        archive.extractall(work, filter="data")
    source = next(path for path in work.glob("mmcv-*") if path.is_dir())
    setup = source / "setup.py"
    setup.write_text(setup.read_text().replace("-std=c++17", "-std=c++20"))
    header = work / "torch_types.hpp"
    header.write_text("#include <torch/types.h>\n")
    folders = [f"-I{folder}" for folder in (*include_paths(), sysconfig.get_path("include"))]
    as_in_setup = ["-fPIC", "-std=c++20", "-DTORCH_API_INCLUDE_EXTENSION_H", "-DTORCH_EXTENSION_NAME=_ext"]
    command("c++", "c++", *OPTIONS.split(), *as_in_setup, *folders, "-x", "c++-header", str(header))
    flags = {"MMCV_WITH_OPS": "1", "CFLAGS": f"{OPTIONS} -include {header}", **old}
    pip("install", "--no-deps", "--no-build-isolation", "--target", str(to), str(source), **flags)
    shutil.rmtree(work)


class Case:
    """One configuration, and its runs.

    Args:
        name: that of its file in ``configs/``; the project's comes first.
    """

    def __init__(self, name: str) -> None:
        self.project = name.split("_")[0]
        self.packages = install("mmpretrain" if self.project == "mmpretrain" else "ops")
        self.config = str(HERE / "configs" / f"{name}.py")
        self.folder = FOLDER / "runs" / name
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        (self.folder / "data").symlink_to(FOLDER / "data")
        self.tools = self.packages / self.project / ".mim" / "tools"
        for tool in ("train", "test"):  # the one import that a user changes
            text = (self.tools / f"{tool}.py").read_text()
            theirs, ours = (
                "from mmengine.runner import Runner",
                "from flextrain.mmengine import FlexibleRunner as Runner",
            )
            assert theirs in text, f"{tool}.py of {self.project} has another import"
            (self.folder / f"{tool}.py").write_text(text.replace(theirs, ours))

    def check(self) -> None:
        """Compare flextrain's runs with MMEngine's.

        Raises:
            Failed: one differs, or does not run.
        """
        step, given = self._step, str(self.folder)
        theirs, ours = str(self.tools / "train.py"), f"{given}/train.py"
        start = "load_from=initial.pth"
        half = "epoch_1" if "max_epochs" in Path(self.config).read_text() else "iter_2"
        whole = half.replace("iter_2", "iter_4").replace("_1", "_2")
        self._run(
            1,
            {"title": "initial", "initial": self.config},
            step("theirs", theirs, ONE, start),
            step("ours", ours, ONE, start),
            step("resumed", "train", ONE, before=["--resume", f"{given}/ours/{half}"]),
        )
        self.compare_losses("ours", self.losses("theirs"))
        self.compare_losses("resumed", self.losses("theirs")[-2:])
        for name in ("ours", "resumed"):
            self.compare(name, "theirs")
            self.compare_metrics(name, self.metrics("theirs"))
        wrapper = [
            f"model_wrapper_cfg.{each}"
            for each in ("type=MMDistributedDataParallel", "device_ids=None", "broadcast_buffers=False")
        ]
        self._run(
            2,
            step("theirs_2", theirs, TWO, start, *wrapper),
            *(step(name, ours, TWO, start, *options) for name, options in STRATEGIES.items()),
            step("tested_2", f"{given}/test.py", TWO, positional=[f"{given}/ours/{whole}"]),
        )
        self.compare_metrics("tested_2", self.metrics("ours"))
        checkpoints = {f"{name}_tested": f"{given}/{name}/{whole}.pth" for name in ("theirs", "theirs_2")}
        self._run(1, *(step(name, "test", ONE, positional=[path]) for name, path in checkpoints.items()))
        self.compare_metrics("theirs_tested", self.metrics("theirs"))
        for name in STRATEGIES:  # in MMEngine's own validation each process has running statistics of its own
            self.compare(name, "theirs_2")
            self.compare_metrics(name, self.metrics("theirs_2_tested"))

    def _step(
        self,
        title: str,
        script: str,
        batch_size: int,
        *more: str,
        before: Sequence[str] = (),
        positional: Sequence[str] = (),
    ) -> dict[str, Any]:
        """A command line: a script, or "train" or "test" for flextrain's commands."""
        loaders = [
            f"{mode}_dataloader.{key}={value}"
            for mode in ("train", "val", "test")
            for key, value in (("num_workers", 0), ("persistent_workers", False), ("sampler.shuffle", False))
        ]
        options = [
            *loaders,
            f"train_dataloader.batch_size={batch_size}",
            "default_hooks.logger.interval=1",
            "log_processor.window_size=1",
            "randomness.seed=0",
            "env_cfg.dist_cfg.backend=gloo",
        ]
        arguments = [self.config, *positional, "--work-dir", str(self.folder / title), *before]
        return {"title": title, "script": script, "arguments": [*arguments, "--cfg-options", *options, *more]}

    def _run(self, processes: int, *steps: dict[str, Any]) -> None:
        """Run command lines one after the other, in one process or on several."""
        log, plan = (self.folder / f"from_{steps[0]['title']}.{kind}" for kind in ("log", "json"))
        plan.write_text(json.dumps(steps))
        start = [sys.executable]
        if processes > 1:
            start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        path = os.pathsep.join([str(self.packages), str(ROOT)])
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        with log.open("w") as output:
            try:
                done = subprocess.run(
                    [*start, str(HERE / "steps.py"), str(plan)],
                    cwd=self.folder,
                    env=environment,
                    stdout=output,
                    stderr=output,
                    timeout=60 * MINUTES,
                )
            except subprocess.TimeoutExpired:
                raise Failed(f"not ready after {MINUTES} minutes, see {log}") from None
        if done.returncode:
            lines = [line.strip() for line in log.read_text().splitlines() if "FAILED " in line]
            raise Failed(f"{lines[0][:300] if lines else done.returncode}, see {log}")

    def losses(self, title: str) -> list[float]:
        """The losses of all updates."""
        return [line["loss"] for line in self._records(title) if "loss" in line]

    def metrics(self, title: str) -> dict[str, float]:
        """The metrics of the last validation or test."""
        tested = self.folder / title / "metrics.json"
        last = (
            json.loads(tested.read_text())
            if tested.exists()
            else [line for line in self._records(title) if "loss" not in line][-1]
        )
        return {key: value for key, value in last.items() if key not in ("step", "data_time", "time")}

    def _records(self, title: str) -> list[dict[str, Any]]:
        files = sorted((self.folder / title).glob("*/vis_data/scalars.json"))
        return [json.loads(line) for path in files for line in path.read_text().splitlines()]

    def weights(self, title: str) -> dict[str, torch.Tensor]:
        """The parameters and buffers at the end of a run; without averages."""
        from safetensors.torch import load_file

        from flextrain.core.checkpoint import export_weights

        found = [path for path in (self.folder / title).glob("*_[0-9]*") if path.suffix == ".pth" or path.is_dir()]
        last = max(
            (path for path in found if path.stem.startswith(("epoch_", "iter_"))),
            key=lambda path: int(path.stem.split("_")[1]),
        )
        if last.suffix == ".pth":
            saved = torch.load(last, weights_only=False)
            state = saved.get("ema_state_dict", saved["state_dict"])  # their EMAHook swaps the two
            return {name.removeprefix("module."): value for name, value in state.items() if name != "steps"}
        export_weights(last, self.folder / title / "weights.safetensors")
        return load_file(self.folder / title / "weights.safetensors")

    def compare(self, title: str, reference: str) -> None:
        """Compare the weights of two runs."""
        found, expected = self.weights(title), self.weights(reference)
        if found.keys() != expected.keys():
            raise Failed(f"{title}: other names than {reference}, {sorted(found.keys() ^ expected.keys())[:3]}")
        initial = torch.load(self.folder / "initial.pth")["state_dict"]
        apart = {
            name: float((found[name].double() - value.double()).abs().max() / max(1.0, float(value.abs().max())))
            for name, value in expected.items()
        }  # a running variance may be in the thousands
        moved = max(
            float((value.double() - initial[name].double()).abs().max())
            for name, value in expected.items()
            if not name.endswith(("running_mean", "running_var", "num_batches_tracked"))
        )
        worst = max(apart, key=lambda name: apart[name])
        print(
            f"  {title}: weights differ from {reference} by {apart[worst]:.1e} at most ({worst}), training moved them by {moved:.1e}"
        )
        if not apart[worst] < 5e-5 * max(1.0, moved) or not moved > 1e-3:
            raise Failed(f"{title}: {worst} differs from {reference} by {apart[worst]:.2e}")

    def compare_metrics(self, title: str, expected: dict[str, float]) -> None:
        """Compare the metrics of a run with those of another."""
        found = self.metrics(title)
        print(f"  {title}: metrics {found}")
        alike = found.keys() == expected.keys() and all(
            math.isclose(found[key], expected[key], abs_tol=1e-3)
            or (math.isnan(found[key]) and math.isnan(expected[key]))
            for key in found
        )
        if not found or not alike:
            raise Failed(f"{title}: metrics {found}, expected {expected}")

    def compare_losses(self, title: str, expected: list[float]) -> None:
        """Compare the losses of all updates."""
        found = self.losses(title)
        print(f"  {title}: losses {[round(loss, 5) for loss in found]}")
        if len(found) != len(expected) or not all(
            math.isclose(*pair, rel_tol=1e-4) for pair in zip(found, expected, strict=True)
        ):
            raise Failed(f"{title}: losses {found}, expected {expected}")


def main() -> int:
    wanted = [name for name in CASES if not sys.argv[1:] or any(part in name for part in sys.argv[1:])]
    FOLDER.mkdir(parents=True, exist_ok=True)
    data.write_all(FOLDER / "data")
    failed = 0
    for name in wanted:
        started = time.time()
        print(name, flush=True)
        try:
            Case(name).check()
        except Failed as error:
            failed += 1
            print(f"  FAILED: {error}")
        print(f"  {time.time() - started:.0f} s", flush=True)
    print(f"{len(wanted) - failed} of {len(wanted)} configurations train as with MMEngine's runner")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
