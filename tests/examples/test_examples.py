"""Every example does what its first lines say, in short form."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from .conftest import EXAMPLES, RunExample


def accuracies(output: str) -> list[float]:
    return [float(value) for value in re.findall(r"Epoch\(val\).*accuracy: (\d+\.\d+)", output)]


def figures(name: str, output: str) -> list[float]:
    return [float(value) for value in re.findall(rf"\b{name}: (\d+\.\d+)", output)]


def test_train_classifier_alone_then_resumed(run_example: RunExample) -> None:
    first = run_example("train_classifier.py", "--epochs", "2")
    assert accuracies(first.stdout)[-1] > 85
    # 22 batches and no padding: the demo compares strategies on this.
    assert "[1][20/22]" in first.stdout
    more = run_example("train_classifier.py", "--epochs", "3", "--resume")
    assert "Epoch(train) [3]" in more.stdout
    assert "Epoch(train) [2]" not in more.stdout
    assert accuracies(more.stdout)[0] > accuracies(first.stdout)[0]


@pytest.mark.distributed
def test_train_classifier_with_ddp(run_example: RunExample) -> None:
    flags = ("--use-ddp", "--epochs", "2", "--batch-size", "32", "--amp", "--accumulate", "2")
    done = run_example("train_classifier.py", *flags, processes=2)
    assert "[1][10/11]" in done.stdout
    assert len(accuracies(done.stdout)) == 2, "rank 0 alone reports"
    assert accuracies(done.stdout)[-1] > 70


@pytest.mark.distributed
@pytest.mark.deepspeed
def test_train_classifier_with_deepspeed(run_example: RunExample) -> None:
    pytest.importorskip("deepspeed")
    flags = ("--use-deepspeed", "--zero-stage", "2", "--epochs", "1", "--batch-size", "32")
    done = run_example("train_classifier.py", *flags, processes=2)
    assert "DeepSpeedStrategy on 2 processes" in done.stdout
    assert len(accuracies(done.stdout)) == 1, "rank 0 alone reports"


@pytest.mark.full
@pytest.mark.distributed
def test_train_classifier_with_the_old_launcher(run_example: RunExample) -> None:
    flags = ("--launcher", "pytorch", "--epochs", "1")
    done = run_example("train_classifier.py", *flags, processes=2, launcher="torch.distributed.launch")
    assert "DDPStrategy on 2 processes" in done.stdout


def test_missing_cifar10_is_one_message(run_example: RunExample) -> None:
    pytest.importorskip("torchvision")
    done = run_example("train_classifier.py", "--dataset", "cifar10", "--data-root", "nowhere", check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("--data-root: no CIFAR-10 in nowhere")
    assert done.stderr.count("\n") == 1


@pytest.mark.skipif(importlib.util.find_spec("torch_npu") is not None, reason="torch_npu is installed")
def test_a_device_that_is_missing_says_what_to_install(run_example: RunExample) -> None:
    for script in (
        ("train_classifier.py", "--use-npu"),
        ("custom_device.py", *["--type", "mlu", "--backend", "cncl", "--package", "torch_mlu"]),
    ):
        done = run_example(*script, check=False)
        assert done.returncode == 1
        assert re.search(
            r'strategy.device: "\w+" is not usable on this machine, install torch_', done.stderr.splitlines()[-1]
        )


@pytest.mark.distributed
def test_custom_strategy(run_example: RunExample) -> None:
    done = run_example("custom_strategy.py", processes=2)
    assert accuracies(done.stdout)[-1] > 85


def test_custom_strategy_is_short() -> None:
    assert len((EXAMPLES / "custom_strategy.py").read_text().splitlines()) < 60


@pytest.mark.full
@pytest.mark.distributed
def test_custom_axis(run_example: RunExample) -> None:
    """Divided batches are the batches of one data loader: groups of two on four processes have as many as two processes."""
    two = run_example("custom_axis.py", processes=2)
    assert "DividingMesh on 2 processes: divide 2" in two.stdout
    assert "[1][20/23]" in two.stdout
    assert accuracies(two.stdout)[-1] > 85
    four = run_example("custom_axis.py", processes=4)
    assert "[1][10/12]" in four.stdout


def test_custom_axis_is_short() -> None:
    assert len((EXAMPLES / "custom_axis.py").read_text().splitlines()) < 80


@pytest.mark.distributed
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.full)])
def test_gan(run_example: RunExample, tmp_path: Path, processes: int) -> None:
    done = run_example("gan.py", "--epochs", "2", processes=processes)
    assert re.search(r"loss_d: \d+\.\d+  loss_g: \d+\.\d+", done.stdout)
    assert {path.name for path in (tmp_path / "work_dirs" / "gan").glob("*.png")} == {"samples_1.png", "samples_2.png"}


def test_horovod_style(run_example: RunExample) -> None:
    """Alone; tests/cluster/test_horovod_style.py runs it under mpirun."""
    done = run_example("horovod_style.py", "--epochs", "2")
    assert accuracies(done.stdout)[-1] > 80
    assert "The weights' norm is 7." in done.stdout


@pytest.mark.full
def test_hugging_face(run_example: RunExample) -> None:
    pytest.importorskip("transformers")
    done = run_example("hugging_face.py", "--max-iters", "40")
    (accuracy,) = [float(value) for value in re.findall(r"\(val\).*accuracy: (\d+\.\d+)", done.stdout)]
    assert accuracy > 60


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.parametrize(
    "script, flags",
    [
        ("hugging_face.py", ("--max-iters", "10")),
        ("language_model.py", ("--layers", "2", "--dim", "32", "--heads", "2", "--context", "32", "--steps", "10")),
    ],
)
def test_meshes(run_example: RunExample, script: str, flags: tuple[str, ...]) -> None:
    """Two processes that divide matrices have the losses of one device, with the same samples."""
    alone = run_example(script, *flags).stdout
    mesh = run_example(script, *flags, "--mesh", "tp=2,dp_shard=1", processes=2).stdout
    assert "Mesh of 2 processes" in mesh
    assert figures("loss", mesh)
    assert figures("loss", mesh) == pytest.approx(figures("loss", alone), abs=2e-4)


@pytest.mark.full
@pytest.mark.distributed
def test_a_pipeline_generates_the_text_of_one_device(run_example: RunExample) -> None:
    size = ("--layers", "2", "--dim", "32", "--heads", "2", "--context", "32", "--steps", "10", "--accumulate", "2")
    alone = run_example("language_model.py", *size).stdout
    pipeline = run_example("language_model.py", *size, "--mesh", "pp=2", processes=2).stdout
    assert figures("loss", pipeline) == pytest.approx(figures("loss", alone), abs=2e-4)
    (text,) = re.findall(r'^The "with" statement.*', alone, re.MULTILINE | re.DOTALL)
    assert pipeline.endswith(text)


@pytest.mark.full
def test_a_mesh_that_is_none(run_example: RunExample) -> None:
    done = run_example("language_model.py", "--mesh", "tp=two", check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith(
        'strategy: "mesh:tp=two" is not allowed, write axes with their sizes, such as "mesh:dp2xtp2" or "mesh:dp=2,tp=2"'
    )


@pytest.mark.full
@pytest.mark.distributed
def test_language_model(run_example: RunExample) -> None:
    """Alone, and sharded over two processes with the same 16 sequences per update."""
    size = ("--layers", "2", "--dim", "32", "--heads", "2", "--context", "32", "--steps", "40", "--sample-length", "20")
    alone = run_example("language_model.py", *size).stdout
    flags = ("--use-fsdp", "--batch-size", "8", "--peak-tflops", "0.01")
    sharded = run_example("language_model.py", *size, *flags, processes=2).stdout
    assert "2 x Block" in sharded
    for output in (alone, sharded):
        losses = figures("loss", output)
        assert losses[-1] < 3.8 < losses[0], "the loss of a guess is log(256) = 5.5"
        assert len(figures("bits_per_byte", output)) == 4
        assert min(figures("mfu", output)) > 0
        assert output.count('\nThe "with" statement') == 1, "the sample, by rank 0 alone"
    assert figures("loss", sharded) == pytest.approx(figures("loss", alone), abs=0.02)
    # The head, two blocks and the last norm; 6 for each parameter and 12 * 2 * 32 * 32 for attention.
    parameters = 256 * 32 + 2 * (12 * 32**2 + 4 * 32) + 2 * 32
    utilisations = [rate * (6 * parameters + 24576) / (2 * 0.01e12) for rate in figures("tokens_per_s", sharded)]
    assert figures("mfu", sharded) == pytest.approx(utilisations, abs=1e-4)


def rows(output: str) -> list[tuple[str, str, str]]:
    """Of the demo's table: name, processes, largest difference of a loss from the first's."""
    row = r"^\S (\S+) +\S +(\d) +\S +[\d.]+ % +\S +[\d.]+ +\S +(\d+e[+-]\d+|) "
    return re.findall(row, output, re.MULTILINE)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.distributed
def test_demo_in_short(run_example: RunExample, tmp_path: Path) -> None:
    """One that the demo starts as a process, and one that torchrun starts."""
    done = run_example("demo.py", "--epochs", "1", "--only", "SingleDevice", "DDP", check=False)
    found = rows(done.stdout)
    assert [row[:2] for row in found] == [("SingleDevice", "1"), ("DDP", "2")], done.stdout + done.stderr
    assert all(float(difference) < 1e-3 for _, _, difference in found[1:])
    first = re.findall(
        r"^The first model is trained, (\d+\.\d) s after the demo began: (\S+)$", done.stdout, re.MULTILINE
    )
    assert [Path(folder, "epoch_1").is_dir() for _, folder in first] == [True]
    assert (tmp_path / "work_dirs" / "demo" / "loss_curves.png").stat().st_size > 10_000
    assert done.stderr == "validation accuracy is not above 97.0 % for SingleDevice, DDP\n", "one epoch is little"
    assert done.returncode == 1


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.deepspeed
def test_demo(run_example: RunExample, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    done = run_example("demo.py")
    found = rows(done.stdout)
    assert [name for name, _, _ in found] == ["SingleDevice", "DDP", "FSDP", "ZeRO-1", "ZeRO-2", "ZeRO-3"]
    assert [processes for _, processes, _ in found] == ["1", "2", "2", "2", "2", "2"]
    assert all(float(difference) < 1e-3 for _, _, difference in found[1:])
    assert (tmp_path / "work_dirs" / "demo" / "loss_curves.png").stat().st_size > 10_000


def test_examples_say_what_they_need() -> None:
    """Every script starts with a sentence and the command that runs it."""
    for script in EXAMPLES.glob("*.py"):
        head = script.read_text().partition('"""\n')[0]
        assert "python examples/" in head or "torchrun" in head or "make demo" in head, script.name
