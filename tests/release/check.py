"""Install what is released into a clean environment, and use it as its reader does: `make release-check`.

    python tests/release/check.py --python python3.13
    python tests/release/check.py --python python3.10 --oldest   # with tests/oldest.txt

It builds an sdist from the files that git knows, and a wheel from that sdist. The wheel goes into a new virtual environment, first alone, then with
extras. In an empty folder it runs the commands, trains a configuration of each format, and trains on two processes under every strategy that can run.
Then it runs tests out of the sdist. An environment takes 5 GB and is deleted at the end.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXTRAS = "deepspeed,metrics,tensorboard,tune"
STRATEGIES = ("ddp", "fsdp", "mesh:tp2", "zero1", "zero3")
TESTS = ("tests/core", "tests/optim", "tests/test_public_api.py", "tests/test_cli.py")
PROJECT = {
    "parts.py": """
import torch
from torch import nn
from torch.utils.data import TensorDataset


class Net(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 2))

    def forward(self, x, y):
        return {"loss": nn.functional.cross_entropy(self.layers(x), y)}


def data():
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x.sum(1) > 0).long())
""",
    "config.py": """
model = dict(type="parts:Net", width=16)
train_dataloader = dict(dataset=dict(type="parts:data"), batch_size=16, collate_fn="default_collate")
optim_wrapper = dict(optimizer=dict(type="AdamW", lr=1e-2))
train_cfg = dict(max_epochs=2)
""",
    "config.yaml": """
model: {type: "parts:Net"}
train_dataloader: {dataset: {type: "parts:data"}, batch_size: 16, collate_fn: default_collate}
optim_wrapper: {optimizer: {type: AdamW, lr: 0.01}}
train_cfg: {max_epochs: 2}
""",
    "config.json": """
{"model": {"type": "parts:Net"}, "optim_wrapper": {"optimizer": {"type": "AdamW", "lr": 0.01}}, "train_cfg": {"max_epochs": 2},
 "train_dataloader": {"dataset": {"type": "parts:data"}, "batch_size": 16, "collate_fn": "default_collate"}}
""",
    "config.toml": """
[model]
type = "parts:Net"
[train_dataloader]
batch_size = 16
collate_fn = "default_collate"
dataset = {type = "parts:data"}
[optim_wrapper.optimizer]
type = "AdamW"
lr = 0.01
[train_cfg]
max_epochs = 2
""",
    "script.py": """
import sys

from flextrain import FlexibleRunner
from parts import Net, data

FlexibleRunner(
    model=Net,
    work_dir="runs/" + sys.argv[1].replace(":", "_"),
    strategy=sys.argv[1],
    train_dataloader=dict(dataset=data(), batch_size=8, collate_fn="default_collate"),
    optim_wrapper=dict(optimizer=dict(type="AdamW", lr=1e-2)),
    train_cfg=dict(max_epochs=2),
    randomness=dict(seed=0),
).train()
""",
}


class Failed(Exception):
    """A step did not do what it should."""


class Check:
    """One environment.

    Args:
        folder: where everything goes.
        python: the interpreter.
        constraints: a file for pip, or None.
    """

    def __init__(self, folder: Path, python: str, constraints: Path | None) -> None:
        self.folder, self.constraints = folder, constraints
        self.bin = folder / "venv" / "bin"
        self.project = folder / "project"
        self.failures: list[str] = []
        self.call("make the environment", [python, "-m", "venv", str(folder / "venv")])
        self.project.mkdir()
        for name, text in PROJECT.items():
            (self.project / name).write_text(text.lstrip("\n"))

    def call(self, what: str, command: list[str], cwd: Path | None = None, expect: str = "") -> str:
        """Run a command; print a line, and note a failure with the end of the output."""
        began = time.monotonic()
        environment = {**os.environ, "PYTHONWARNINGS": "", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "OMP_NUM_THREADS": "1"}
        environment.pop("PYTHONPATH", None)
        done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
        output = done.stdout + done.stderr
        is_right = done.returncode == 0 and expect in output
        print(f"{'ok  ' if is_right else 'FAIL'} {time.monotonic() - began:6.1f} s  {what}", flush=True)
        if not is_right:
            # Both ends: libraries that are unloaded write their own lines after everything else.
            ends = [*done.stdout.splitlines()[-25:], *done.stderr.splitlines()[-10:]]
            print("      " + "\n      ".join(ends), flush=True)
            self.failures.append(what)
        return output

    def install(self, what: str, *packages: str) -> None:
        """Install with pip; without it nothing else can be checked."""
        limits = ["--constraint", str(self.constraints)] if self.constraints else []
        before = len(self.failures)
        self.call(what, [str(self.bin / "python"), "-m", "pip", "install", "--quiet", *limits, *packages])
        if len(self.failures) > before:
            raise Failed(what)

    def use(self, extras: str) -> None:
        """Use the commands and strategies, as far as they are installed."""
        python, flextrain = str(self.bin / "python"), str(self.bin / "flextrain")
        with_what = f"with {extras}" if extras else "alone"
        version = "import flextrain, sys; print(flextrain.__version__, flextrain.__file__)"
        place = self.call("import", [python, "-c", version], self.project, expect="site-packages")
        print("      " + place.strip(), flush=True)
        self.call("pip check", [python, "-m", "pip", "check"])
        for command, expect in (
            (["--version"], "flextrain "),
            (["doctor"], "torch"),
            (["list"], "strategies"),
            (["config", "check", "config.py"], ""),
        ):
            self.call(f"flextrain {' '.join(command)}, {with_what}", [flextrain, *command], self.project, expect)
        for kind in ("py", "yaml", "json", "toml"):
            train = [flextrain, "train", f"config.{kind}", "--work-dir", f"runs/{kind}{len(extras)}"]
            self.call(f"flextrain train config.{kind}, {with_what}", train, self.project, "Epoch(train) [2]")
        for strategy in STRATEGIES:
            if strategy.startswith("zero") and "deepspeed" not in extras:
                continue
            if strategy.startswith(("fsdp", "mesh")) and "2.6" in self._torch():
                print(f"skip          {strategy}: torch 2.6 cannot shard on the CPU", flush=True)
                continue
            start = [
                python,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                "2",
                "script.py",
                strategy,
            ]
            self.call(f"two processes, {strategy}, {with_what}", start, self.project, "Epoch(train) [2]")
        shutil.rmtree(self.project / "runs", ignore_errors=True)

    def _torch(self) -> str:
        done = subprocess.run(
            [str(self.bin / "python"), "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True
        )
        return done.stdout

    def test_the_sdist(self, sdist: Path) -> None:
        """Run quick tests out of the unpacked sdist, which has to hold all that they need."""
        with tarfile.open(sdist) as archive:
            archive.extractall(self.folder / "unpacked")
        (source,) = (self.folder / "unpacked").iterdir()
        self.install("install what tests need", "pytest>=8", "pytest-xdist>=3.5", "setuptools>=77")
        self.install("install the unpacked sdist", "--no-deps", "--no-build-isolation", "--editable", str(source))
        quick = ["-q", "-p", "no:xdist", "-m", "not full and not processes and not slow and not cluster"]
        output = self.call("tests of the sdist", [str(self.bin / "python"), "-m", "pytest", *quick, *TESTS], source)
        print(f"      {output.strip().splitlines()[-1] if output.strip() else ''}", flush=True)


def built(folder: Path) -> tuple[Path, Path]:
    """Build the sdist of the files that git knows, and the wheel of the sdist; their paths."""
    source = folder / "source"
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist"), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Failed(done.stdout[-2000:] + done.stderr[-2000:])
    (sdist,), (wheel,) = (folder / "dist").glob("*.tar.gz"), (folder / "dist").glob("*.whl")
    for path in (sdist, wheel):
        print(f"built {path.name}, {path.stat().st_size / 1e6:.1f} MB", flush=True)
    return sdist, wheel


def main() -> int:
    """Check one environment; the exit status is 1 if something failed."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--python", default=sys.executable, help="interpreter of the environment")
    parser.add_argument("--oldest", action="store_true", help="install the versions of tests/oldest.txt")
    parser.add_argument("--extras", default=EXTRAS, help="extras of the second installation; an empty text: none")
    parser.add_argument("--no-tests", action="store_true", help="leave out the tests of the sdist")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="flextrain-release-") as name:
        folder = Path(name)
        try:
            sdist, wheel = built(folder)
            check = Check(folder, arguments.python, ROOT / "tests" / "oldest.txt" if arguments.oldest else None)
            check.install("install the wheel", str(wheel))
            check.use("")
            if arguments.extras:
                # DeepSpeed's setup.py wants setuptools of its own time, and torch's version.
                check.install(f"install the wheel with {arguments.extras}", f"{wheel}[{arguments.extras}]")
                check.use(arguments.extras)
            if not arguments.no_tests:
                check.test_the_sdist(sdist)
        except Failed as failed:
            print(f"stopped: {failed}")
            return 1
    print(f"{len(check.failures)} failed: {', '.join(check.failures)}" if check.failures else "all is well")
    return int(bool(check.failures))


if __name__ == "__main__":
    sys.exit(main())
