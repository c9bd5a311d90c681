"""The scripts in ``mmengine/``: MMEngine's examples at tiny size, as their users have them after changing the imports.

Each is written anew from what MMEngine's example of the same name does.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from flextrain.runner.reporting import close_logger
from flextrain.testing import WorkerGroup

from .conftest import run_script

SCRIPTS = Path(__file__).parent / "mmengine"
LOG_LINE = re.compile(
    r"\d\d/\d\d \d\d:\d\d:\d\d - flextrain - INFO - Epoch\(train\) +"
    r"\[(?P<epoch>\d+)\]\[(?P<step>[ \d]+)/(?P<steps>\d+)\]  lr: (?P<lr>\d\.\d{4}e[+-]\d\d)  eta: \d:\d\d:\d\d  "
    r"time: \d+\.\d{4}  data_time: \d+\.\d{4}  memory: \d+  loss: \d+\.\d{4}"
)


@dataclass
class Trained:
    """What a script has printed, and the figures that its runs have stored, the oldest first."""

    code: int
    out: str
    err: str
    figures: list[dict[str, Any]] = field(default_factory=list)

    def __getitem__(self, name: str) -> list[float]:
        return [line[name] for line in self.figures if name in line]


RunScript = Callable[..., Trained]


def seeded(path: Path, flags: tuple[str, ...], processes: int) -> tuple[int, str, str]:
    """In a worker or here: the script as ``python script.py`` runs it, from the same initial weights everywhere."""
    torch.manual_seed(0)
    return run_script(path, flags, processes)


def run_in(folder: Path, script: str, *flags: str, group: WorkerGroup | None = None, check: bool = True) -> Trained:
    """Run a script in an empty or used folder, in this process or in those of a group."""
    folder.mkdir(exist_ok=True)
    path = SCRIPTS / f"{script}.py"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(path)])
        patch.setattr(sys, "path", list(sys.path))
        patch.chdir(folder)
        answers = [seeded(path, flags, 1)] if group is None else group.run(seeded, path, flags, group.world_size)
    close_logger()
    codes, out, err = zip(*answers, strict=True)
    done = Trained(max(codes), "".join(out), "".join(err))
    assert not check or done.code == 0, done.out + done.err
    for file in sorted(folder.rglob("scalars.json")):
        done.figures += [json.loads(line) for line in file.read_text().splitlines()]
    return done


@pytest.fixture
def run(tmp_path: Path) -> RunScript:
    """``run(script, *flags, group=None, check=True, folder="run")``, in a folder of the test."""
    return lambda script, *flags, folder="run", **options: run_in(tmp_path / folder, script, *flags, **options)


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trained]:
    """``one_device(script)``: its run in one process, once for all tests that compare with it."""
    return functools.cache(lambda script: run_in(tmp_path_factory.mktemp(script), script))


OneDevice = Callable[[str], Trained]


def test_flexible_runner(one_device: OneDevice) -> None:
    pytest.importorskip("torchvision")
    done = one_device("flexible_runner")
    lines = [match.groupdict() for line in done.out.splitlines() if (match := LOG_LINE.fullmatch(line))]
    positions = [(line["epoch"], line["step"], line["steps"]) for line in lines]
    assert positions == [("1", "10", "20"), ("1", "20", "20"), ("2", "10", "20"), ("2", "20", "20")], done.out
    assert lines[0]["lr"] == "3.3333e-04"
    assert re.search(r"Epoch\(val\) +\[2\]\[4/4\] +accuracy: \d+\.\d{4}", done.out), done.out
    assert done["accuracy"][-1] > 80


@pytest.mark.distributed
@pytest.mark.parametrize(
    "flag",
    [
        pytest.param("", id="ddp", marks=pytest.mark.full),
        "--use-fsdp",
        pytest.param("--use-deepspeed", marks=pytest.mark.deepspeed),
    ],
)
def test_flexible_runner_on_two_processes(
    run: RunScript, one_device: OneDevice, workers2: WorkerGroup, flag: str
) -> None:
    """Half of every batch each, in bfloat16: the losses are one device's, to its rounding."""
    pytest.importorskip("torchvision")
    if "deepspeed" in flag:
        pytest.importorskip("deepspeed")
    done = run("flexible_runner", *flag.split(), "--batch-size", "16", group=workers2)
    alone = one_device("flexible_runner")
    name = {"": "DDP", "--use-fsdp": "FSDP", "--use-deepspeed": "DeepSpeed"}[flag]
    assert f"{name}Strategy on 2 processes" in done.out
    assert done["loss"] == pytest.approx(alone["loss"], rel=0.03)
    assert done["accuracy"] == pytest.approx(alone["accuracy"], abs=3)


def test_flexible_runner_without_colossalai(run: RunScript) -> None:
    pytest.importorskip("torchvision")
    done = run("flexible_runner", "--use-colossalai", check=False)
    assert done.code == 1
    assert done.err.endswith(
        'optim_wrapper.optimizer.type: "HybridAdam" is not supported, it belongs to ColossalAI, choose AdamW\n'
    )


def test_gan(run: RunScript, tmp_path: Path) -> None:
    """Two optimizers that are built before the run, as its DataLoader is."""
    done = run("gan")
    assert len(done["loss_gen"]) == 4
    assert done["loss_disc_real"][-1] < 0.5, "a guess has log(2)"
    assert done["loss_gen"][-1] < 0.69 < done["loss_disc_fake"][-1], "some pictures are taken for real ones"
    assert (tmp_path / "run" / "runs" / "gan" / "epoch_4").is_dir()


def test_test_time_augmentation(run: RunScript) -> None:
    """The configuration of a training, with another model and another last transform, is only tested."""
    done = run("tta")
    found = re.findall(r"Epoch\(test\).* count: 297.0000  accuracy: ([\d.]+)  entropy: ([\d.]+)", done.out)
    (plain, of_plain), (merged, of_merged) = ((float(accuracy), float(entropy)) for accuracy, entropy in found)
    assert plain > 75
    assert merged == pytest.approx(plain, abs=3)
    assert of_merged < of_plain, "the mean of three guesses is surer than one"


def test_segmentation(run: RunScript, tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    assert run("segmentation")["iou"][-1] > 0.9
    predictions = sorted(path.name for path in tmp_path.rglob("prediction_*.png"))
    assert predictions == ["prediction_0_32.png", "prediction_1_32.png", "prediction_2_32.png"]
    assert len(list(tmp_path.glob("run/work_dir/*/vis_data/0/*.png"))) == 2, "pictures of two batches"


def instructions(path: Path) -> str:
    rows = [{"instruction": "next", "input": chr(97 + i % 16), "output": chr(98 + i % 16)} for i in range(48)]
    path.write_text(json.dumps(rows))
    return str(path)


@pytest.mark.distributed
def test_llama2(run: RunScript, tmp_path: Path, workers2: WorkerGroup) -> None:
    """A strategy without a runner: the loop is the script's, and the whole model is written for transformers."""
    transformers = pytest.importorskip("transformers")
    data = instructions(tmp_path / "alpaca.json")
    done = run("llama2", data, group=workers2)
    assert len(done["loss"]) == 18
    assert done["lr"] == [1e-2] * 6 + [5e-3] * 6 + [2.5e-3] * 6
    path = next(tmp_path.rglob("iter_12"))
    model = transformers.LlamaForCausalLM.from_pretrained(path)
    assert done["loss"][0] > 4 > 2.2 > done["loss"][-1]
    prompt = torch.tensor([[ord(character) % 64 for character in "next: c = d"] + [0]])
    labels = torch.where(torch.arange(12) < 10, -100, prompt)
    assert model(input_ids=prompt, labels=labels).loss < 2.5, "what was saved after two thirds of the training"


@pytest.mark.distributed
def test_llama2_accumulates(run: RunScript, tmp_path: Path, workers2: WorkerGroup) -> None:
    """Two batches of two, with accumulative_counts=4 / 2, are one of four, on each process."""
    safetensors = pytest.importorskip("safetensors.torch")
    pytest.importorskip("transformers")
    data, weights = instructions(tmp_path / "alpaca.json"), []
    for size, interval in (("4", "6"), ("2", "12")):
        run(
            "llama2",
            data,
            "--max-epoch",
            "1",
            "--batch-size",
            size,
            "--save-interval",
            interval,
            group=workers2,
            folder=size,
        )
        weights.append(safetensors.load_file(tmp_path / size / "work_dirs" / f"iter_{interval}" / "model.safetensors"))
    torch.testing.assert_close(weights[1], weights[0], atol=1e-4, rtol=1e-3)


def test_gradient_accumulation(run: RunScript) -> None:
    """Four batches of two are one of eight: two losses without reduction, and a DataLoader that is built."""
    one = run("saving_memory", "--batch-size", "8", folder="one")
    four = run("saving_memory", "--batch-size", "2", "--accumulate", "4", folder="four")
    assert len(one["loss"]) == len(four["loss"]) == 6
    assert four["loss"] == pytest.approx(one["loss"], rel=1e-5)
    assert one["loss"] == pytest.approx([a + b for a, b in zip(one["loss1"], one["loss2"], strict=True)])
    assert one["loss"][-1] < one["loss"][0]


def test_mixed_precision_and_compilation(run: RunScript) -> None:
    plain = run("saving_memory", folder="plain")
    amp = run("saving_memory", "--amp", folder="amp")
    compiled = run("saving_memory", "--compile", folder="compiled")
    assert "compute bfloat16" in amp.out
    assert amp["loss"] != plain["loss"]
    assert amp["loss"] == pytest.approx(plain["loss"], rel=0.05, abs=0.01)
    assert compiled["loss"] == pytest.approx(plain["loss"], rel=1e-5)


def test_resuming(run: RunScript) -> None:
    through = run("saving_memory", "--epochs", "2", folder="through")
    run("saving_memory", "--epochs", "1")
    resumed = run("saving_memory", "--epochs", "2", "--resume")
    assert resumed["loss"] == through["loss"]
    by_path = run("saving_memory", "--epochs", "3", "--resume", "--load-from", "tmp_dir/epoch_2")
    assert len(by_path["loss"]) == 3 * 24


def test_sharding_of_the_other_runner_is_named(run: RunScript) -> None:
    done = run("saving_memory", "--fsdp-as-model-wrapper", check=False)
    assert done.err.endswith(
        "ConfigError: cfg.model_wrapper_cfg: has no effect, cfg is kept for the record; give "
        "strategy=dict(type=..., model_wrapper=dict(...))\n"
    )
