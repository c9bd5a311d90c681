"""Exported weights: what other programs read is what the checkpoint held, and little memory is needed for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from flextrain import CheckpointError, FlexibleRunner
from flextrain.cli import main
from flextrain.core.checkpoint import export_weights, open_weights, safetensors_file, save_checkpoint
from flextrain.core.checkpoint.export import files

from .test_sources import same, tensors

State = dict[str, Tensor]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    state = {f"model.{name}": tensor for name, tensor in tensors().items()}
    rest = {"optim.state.whole.exp_avg": torch.ones(3), "loop": {"iter": 3}, "aliases": {"tied": "whole"}}
    return save_checkpoint(tmp_path / "epoch_1", {**state, **rest})


def expected() -> State:
    return {**tensors(), "tied": tensors()["whole"]}


def load(path: Path) -> State:
    if path.suffix == ".safetensors":
        return load_file(path)
    loaded: State = torch.load(path, weights_only=True)
    return loaded


@pytest.mark.parametrize("name", ["w.safetensors", "w.pth", "w.pt", "new/w.bin"])
def test_one_file(tmp_path: Path, checkpoint: Path, name: str) -> None:
    assert export_weights(checkpoint, tmp_path / name) == [tmp_path / name]
    same(load(tmp_path / name), expected())
    same({n: t.clone() for n, t in load_through_us(tmp_path / name).items()}, expected())
    assert [file.name for file in (tmp_path / name).parent.iterdir() if "tmp" in file.name] == []


@pytest.mark.parametrize("name", ["Model.SAFETENSORS", "Model.Pth"])
def test_extensions_in_other_letters(tmp_path: Path, checkpoint: Path, name: str) -> None:
    assert export_weights(checkpoint, tmp_path / name) == [tmp_path / name]
    same({n: t.clone() for n, t in load_through_us(tmp_path / name).items()}, expected())


def test_folders_with_a_dot_in_their_names(tmp_path: Path, checkpoint: Path) -> None:
    for name in ("small-1.5", "is_there.1"):
        (tmp_path / "is_there.1").mkdir(exist_ok=True)
        given = f"{tmp_path / name}/" if name == "small-1.5" else tmp_path / name
        assert export_weights(checkpoint, given) == [tmp_path / name / "model.safetensors"]


def load_through_us(path: Path) -> State:
    source = open_weights(path)
    template = {key: torch.empty(info.shape, dtype=info.dtype) for key, info in source.tensors.items()}
    source.load(template)
    return {key.removeprefix("model."): tensor for key, tensor in template.items()}


def test_a_pth_is_a_whole_and_aligned_zip(tmp_path: Path, checkpoint: Path) -> None:
    export_weights(checkpoint, tmp_path / "w.pth")
    with zipfile.ZipFile(tmp_path / "w.pth") as archive:
        assert archive.testzip() is None
    mapped = torch.load(tmp_path / "w.pth", weights_only=True, mmap=True)
    same(mapped, expected())
    assert mapped["tied"].data_ptr() == mapped["whole"].data_ptr()
    assert mapped["whole"].data_ptr() % 64 == 0
    assert mapped["part"].data_ptr() % 64 == 0


def test_a_large_record_of_a_zip(tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of more than 2 GB have a longer head."""
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 100)
    export_weights(checkpoint, tmp_path / "w.pth")
    mapped = torch.load(tmp_path / "w.pth", weights_only=True, mmap=True)
    same(mapped, expected())
    assert mapped["whole"].data_ptr() % 64 == 0


@pytest.mark.parametrize("name", ["w.safetensors", "w.pth"])
def test_another_dtype(tmp_path: Path, checkpoint: Path, name: str) -> None:
    export_weights(checkpoint, tmp_path / name, dtype=torch.bfloat16)
    same(
        load(tmp_path / name),
        {n: t.to(torch.bfloat16) if t.is_floating_point() else t for n, t in expected().items()},
    )


def test_values_that_a_dtype_does_not_have_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = {
        "large": torch.tensor([1.0, 70000.0]),
        "mask": torch.tensor([float("-inf"), 0.0]),
        "none": torch.zeros(0, 2),
    }
    saved = save_checkpoint(tmp_path / "epoch_1", {f"model.{name}": tensor for name, tensor in state.items()})
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        export_weights(saved, tmp_path / f"{dtype}.safetensors", dtype=dtype)
    assert caplog.messages == [f"{saved}: model.large has values beyond 65504, which are infinite in float16"]


def test_tied_tensors_once(tmp_path: Path, checkpoint: Path) -> None:
    export_weights(checkpoint, tmp_path / "w.safetensors", tied=False)
    same(load(tmp_path / "w.safetensors"), tensors())


def test_float8(tmp_path: Path) -> None:
    state = {"w": torch.randn(3, 2).to(torch.float8_e4m3fn)}
    path = save_checkpoint(tmp_path / "a", {f"model.{name}": tensor for name, tensor in state.items()})
    for name in ("w.pth", "w.safetensors"):
        export_weights(path, tmp_path / name)
        same(load(tmp_path / name), state)


# Several files


@pytest.mark.parametrize("limit", [300, "300B", "0.3 kB", "0.29296875KiB"])
def test_several_files(tmp_path: Path, checkpoint: Path, limit: Any) -> None:
    files = export_weights(checkpoint, tmp_path / "out", max_shard_size=limit)
    *shards, index = files
    assert sorted(file.name for file in files) == sorted(file.name for file in (tmp_path / "out").iterdir())
    assert index.name == "model.safetensors.index.json"
    assert shards[0].name == f"model-00001-of-{len(shards):05d}.safetensors"
    content = json.loads(index.read_text())
    found: State = {}
    for shard in shards:
        part = load_file(shard)
        assert {content["weight_map"][name] for name in part} == {shard.name}
        assert sum(tensor.nbytes for tensor in part.values()) <= 300 or len(part) == 1
        found |= part
    same(found, expected())
    assert content["metadata"]["total_size"] == sum(tensor.numel() * tensor.itemsize for tensor in found.values())
    same(load_through_us(tmp_path / "out"), expected())
    with safe_open(shards[0], framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_folder_for_what_fits_into_one_file(tmp_path: Path, checkpoint: Path) -> None:
    assert export_weights(checkpoint, tmp_path / "out") == [tmp_path / "out" / "model.safetensors"]
    with pytest.raises(CheckpointError, match="model.safetensors: is there already, give another folder"):
        export_weights(checkpoint, tmp_path / "out")


def test_transformers_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # which Transformers sets
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=64, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    path = save_checkpoint(tmp_path / "a", {**state, "aliases": {"lm_head.weight": "transformer.wte.weight"}})
    config.save_pretrained(tmp_path / "out")
    export_weights(path, tmp_path / "out", max_shard_size="20KB", tied=False)
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out")
    same(dict(loaded.state_dict()), dict(model.state_dict()))


# What a run saved


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.head(self.norm(self.embedding(x))), y)}


def trained(folder: Path, **changes: Any) -> FlexibleRunner:
    data = torch.utils.data.TensorDataset(torch.arange(10), torch.arange(10).flip(0))
    runner = FlexibleRunner(
        model=Tied(),
        work_dir=folder,
        train_dataloader=torch.utils.data.DataLoader(data, batch_size=5),
        optim_wrapper=dict(optimizer=dict(type="AdamW", lr=0.1)),
        train_cfg=dict(max_epochs=2),
        **changes,
    )
    runner.train()
    return runner


@pytest.mark.parametrize("name", ["w.safetensors", "w.pth"])
def test_plain_torch_loads_a_tied_model(tmp_path: Path, name: str) -> None:
    runner = trained(tmp_path / "run")
    export_weights(tmp_path / "run" / "epoch_2", tmp_path / name)
    model = Tied()
    model.load_state_dict(load(tmp_path / name), strict=True)
    same(dict(model.state_dict()), dict(runner.strategy.module.state_dict()))


def test_averages(tmp_path: Path) -> None:
    runner = trained(tmp_path / "run", custom_hooks=[dict(type="EMAHook", momentum=0.1)])
    path = tmp_path / "run" / "epoch_2"
    export_weights(path, tmp_path / "own.pth")
    export_weights(path, tmp_path / "averaged.pth", averaged=True)
    export_weights(path, tmp_path / "named.pth", averaged="EMAHook")
    hook = next(hook for hook in runner.hooks if type(hook).__name__ == "EMAHook")
    own, averaged = load(tmp_path / "own.pth"), load(tmp_path / "averaged.pth")
    same(load(tmp_path / "named.pth"), averaged)
    same(own, dict(runner.strategy.module.state_dict()))
    averages = {key.removeprefix("averaged."): value for key, value in hook.state_dict().items() if "averaged" in key}
    assert not torch.equal(averaged["embedding.weight"], own["embedding.weight"])
    assert torch.equal(averaged["head.weight"], averages["embedding.weight"])  # tied
    same({name: averaged[name] for name in averages}, averages)
    assert torch.equal(averaged["norm.running_mean"], own["norm.running_mean"])  # not averaged
    with pytest.raises(CheckpointError, match='averaged: "EMA" is not allowed, give EMAHook, did you mean "EMAHook"?'):
        export_weights(path, tmp_path / "x.pth", averaged="EMA")


def test_averages_that_are_none(tmp_path: Path, checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no averaged weights, the training had no EMAHook"):
        export_weights(checkpoint, tmp_path / "x.pth", averaged=True)
    keys = {"model.w": torch.ones(1), "hook.EMAHook/averaged.w": torch.ones(1), "hook.EMAHook/updates": 0}
    path = save_checkpoint(tmp_path / "a", keys)
    with pytest.raises(CheckpointError, match="EMAHook had not started averaging"):
        export_weights(path, tmp_path / "x.pth", averaged=True)
    path = save_checkpoint(tmp_path / "a", {**keys, "hook.EMAHook_1/averaged.w": torch.ones(1)})
    with pytest.raises(CheckpointError, match="holds averages of several hooks, give averaged=EMAHook or EMAHook_1"):
        export_weights(path, tmp_path / "x.pth", averaged=True)
    assert not (tmp_path / "x.pth").exists()


# What goes wrong


@pytest.mark.parametrize(
    "name, options, says",
    [
        ("w.pth", dict(max_shard_size=5), "w.pth: is one file, give a folder with max_shard_size=5"),
        ("out", dict(max_shard_size="5 apples"), 'max_shard_size: "5 apples" is not allowed'),
        ("out", dict(max_shard_size=0), 'max_shard_size: "0" is not allowed'),
        ("epoch_1", {}, "rank-00000.safetensors: is there already"),
        ("there", {}, "there: is a file, give .safetensors, .pth, .pt or .bin, or a folder"),
        (
            "m.onnx",
            {},
            'm.onnx: ".onnx" is not allowed, give .safetensors, .pth, .pt or .bin, or a folder with "/" at its end',
        ),
        ("m.safetensor", {}, 'at its end, did you mean ".safetensors"?'),
        ("M.SAFETENSER", {}, 'at its end, did you mean ".safetensors"?'),
        ("there.pth", {}, "there.pth: is there already, give another name, or replace=True (--force) to replace it"),
    ],
)
def test_what_cannot_be_written(tmp_path: Path, checkpoint: Path, name: str, options: Any, says: str) -> None:
    for there in ("there", "there.pth"):
        (tmp_path / there).write_bytes(b"what was there")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(CheckpointError) as caught:
        export_weights(checkpoint, tmp_path / name, **options)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "there.pth").read_bytes() == b"what was there"


def test_a_file_that_is_there_is_replaced_when_asked(tmp_path: Path, checkpoint: Path) -> None:
    (tmp_path / "w.pth").write_bytes(b"what was there")
    export_weights(checkpoint, tmp_path / "w.pth", replace=True)
    same(load(tmp_path / "w.pth"), expected())


@pytest.mark.parametrize("name", ["w.safetensors", "w.pth"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_nothing_is_left_of_an_export_that_failed(
    tmp_path: Path, checkpoint: Path, name: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).write_bytes(b"what was there")
    calls = iter(range(100))
    bytes_of = safetensors_file.bytes_of

    def fails(tensor: Tensor) -> Any:
        if next(calls) == 3:
            raise error
        return bytes_of(tensor)

    monkeypatch.setattr(files, "bytes_of", fails)
    monkeypatch.setattr(safetensors_file, "bytes_of", fails)
    kind = CheckpointError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(kind):
        export_weights(checkpoint, tmp_path / name, replace=True)
    assert (tmp_path / name).read_bytes() == b"what was there"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["epoch_1", name]


# Memory

MEASURE = """
import json, sys
from pathlib import Path
import torch
from flextrain.core.checkpoint import export_weights
import flextrain.core.checkpoint.export.files

def status(key):
    line = next(line for line in open("/proc/self/status") if line.startswith(key))
    return int(line.split()[1]) / 1024

source, target, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
options["dtype"] = getattr(torch, options["dtype"]) if "dtype" in options else None
export_weights(source + "_small", target + "_warm" + Path(target).suffix, **options)
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = status("VmRSS")
export_weights(source, target, **options)
print(status("VmHWM") - before)
"""


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are measured as Linux does")
@pytest.mark.parametrize(
    "target, options",
    [
        ("w.safetensors", {}),
        pytest.param("w.pth", {}, marks=pytest.mark.full),
        pytest.param("w.pth", {"dtype": "bfloat16"}, marks=pytest.mark.full),
        pytest.param("out", {"max_shard_size": "30MB"}, marks=pytest.mark.full),
    ],
)
def test_peak_memory(tmp_path: Path, target: str, options: Any) -> None:
    """96 MB of weights in tensors of 8 MiB need two of them: what is in memory, and the file that it comes from."""
    state = {f"model.{i}": torch.full((1024, 2048), float(i)) for i in range(12)}
    save_checkpoint(tmp_path / "a", state)
    save_checkpoint(tmp_path / "a_small", {"model.w": torch.ones(2)})
    arguments = [sys.executable, "-c", MEASURE, str(tmp_path / "a"), str(tmp_path / target), json.dumps(options)]
    # glibc keeps freed blocks of this size otherwise, more or fewer of them in each process.
    variables = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**20)}
    done = subprocess.run(arguments, env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    grown = float(done.stdout)
    print(f"{target} {options}: {grown:.1f} MiB")
    assert grown < 20


@pytest.mark.parametrize("kind", [[], ["--hf"], ["--dcp"], ["--peft"]])
@pytest.mark.parametrize(
    "out, says",
    [
        ("s3://bucket/x", "s3://bucket/x: is a URL, and exports write to local files"),
        ("", '"": is not allowed, give the name of what is to be written'),
        ("file/x", "file/x: could not be written, {}/file is a file"),
        ("/proc/x", "/proc/x: could not be written, No such file or directory"),
    ],
)
def test_targets_that_cannot_be_written(
    tmp_path: Path, kind: list[str], out: str, says: str, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    if kind == ["--hf"]:
        pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    adapter = {"peft_type": "LORA", "r": 1}
    meta = {"hugging_face": {"architecture": "GPT2Model", "config": TINY}}
    values = {"adapters": {"": {"default": adapter}}} if kind == ["--peft"] else {"meta": meta}
    state = {"model.x.lora_A.default.weight": torch.ones(1, 1)} if kind == ["--peft"] else _tiny_gpt2()
    save_checkpoint(tmp_path / "saved", {**state, **values})
    (tmp_path / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    target = out if "/" not in out or out.startswith(("s3", "/")) else str(tmp_path / out)
    assert main(["checkpoint", "export", "saved", target, *kind]) != 0
    error = capsys.readouterr().err
    assert says.format(tmp_path) in error
    assert error.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("kind", ["--hf", "--dcp", "--peft"])
def test_a_folder_with_the_name_of_a_file_is_refused(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    save_checkpoint(tmp_path / "saved", {"model.w": torch.ones(1), "adapters": {"": {"a": {"peft_type": "LORA"}}}})
    assert main(["checkpoint", "export", str(tmp_path / "saved"), str(tmp_path / "x.safetensors"), kind]) != 0
    assert "x.safetensors: has the name of a file, and this export writes a folder" in capsys.readouterr().err


TINY = dict(n_embd=4, n_layer=0, n_head=1, vocab_size=5, n_positions=3, model_type="gpt2")


def _tiny_gpt2() -> dict[str, torch.Tensor]:
    shapes = {"wte.weight": (5, 4), "wpe.weight": (3, 4), "ln_f.weight": (4,), "ln_f.bias": (4,)}
    return {f"model.{name}": torch.ones(shape) for name, shape in shapes.items()}
