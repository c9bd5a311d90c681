"""Weights in the files of other programs: every form of them gives the tensors that were written."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from flextrain import CheckpointError
from flextrain.core.checkpoint import Checkpoint, mark_latest, open_weights, save_checkpoint, without_prefix

State = dict[str, Tensor]


def read(path: Path) -> State:
    """Everything in a source, and under the names of the model."""
    source = open_weights(path)
    template = {key: torch.full(info.shape, 1).to(info.dtype) for key, info in source.tensors.items()}
    source.load(template)
    return {key.removeprefix("model."): tensor for key, tensor in template.items()}


def same(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype is tensor.dtype, name
        assert torch.equal(found[name].double(), tensor.detach().double()), name


def tensors() -> State:
    """Tensors of every dtype that checkpoints have, and lying in memory in every way."""
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(6, 8, generator=generator)
    dtypes = [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8]
    return {
        "whole": base,
        "transposed": base.t(),
        "column": base[:, 3],
        "part": base[1:5:2, 2:],
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "expanded": torch.tensor([[1.0], [2.0]]).expand(2, 300),
        "parameter": nn.Parameter(torch.randn(3, generator=generator)),
        "frozen": nn.Parameter(torch.ones(2), requires_grad=False),
        "mask": torch.tensor([True, False, True]),
        "bytes": torch.arange(7, dtype=torch.uint8),
        **{str(dtype): (torch.randn(5, generator=generator) * 9).to(dtype) for dtype in dtypes},
    }


FORMS: dict[str, dict[str, Any]] = {
    "zip": {},
    "old": {"_use_new_zipfile_serialization": False},
    **{f"protocol {number}": {"pickle_protocol": number} for number in (3, 4, 5)},
    "old, protocol 4": {"_use_new_zipfile_serialization": False, "pickle_protocol": 4},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_torch_save(tmp_path: Path, form: str) -> None:
    torch.save(tensors(), tmp_path / "weights.pth", **FORMS[form])
    same(read(tmp_path / "weights.pth"), tensors())


def test_dtypes_that_only_new_files_have(tmp_path: Path) -> None:
    state = {"float8": torch.randn(4).to(torch.float8_e4m3fn)}
    torch.save(state, tmp_path / "weights.pth")
    same(read(tmp_path / "weights.pth"), state)


@pytest.mark.parametrize("key", ["state_dict", "model", "module"])
def test_weights_beside_other_things(tmp_path: Path, key: str) -> None:
    """What stands beside weights may be of classes that are not looked at."""
    model, optimizer = nn.Linear(3, 2), None
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    beside = {
        "optimizer": optimizer.state_dict(),
        "epoch": 3,
        "score": np.float64(0.5),
        "table": np.arange(3),
        "path": Path("x"),
        "counts": defaultdict(int, a=1),
        "names": {"a", "b"},
        "nested": OrderedDict(a=[{"b": (1, 2.5, None, True, b"x", 1j)}]),
        "shape": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "big": 2**100,
    }
    torch.save({key: model.state_dict(), **beside}, tmp_path / "weights.pth")
    same(read(tmp_path / "weights.pth"), dict(model.state_dict()))


def test_a_path_as_python_3_13_names_it(tmp_path: Path) -> None:
    file = tmp_path / "weights.pth"
    torch.save({"state_dict": tensors(), "path": Path("x")}, file, _use_new_zipfile_serialization=False)
    file.write_bytes(file.read_bytes().replace(b"cpathlib\n", b"cpathlib._local\n"))
    assert b"cpathlib._local\n" in file.read_bytes()
    same(read(file), tensors())


def test_mmengines_own_log(tmp_path: Path) -> None:
    history = pytest.importorskip("mmengine.logging.history_buffer").HistoryBuffer([1.0, 2.0], [1, 1])
    state = {"w": torch.ones(2)}
    content = {"state_dict": state, "message_hub": {"log_scalars": {"loss": history}}, "meta": {"epoch": 1}}
    torch.save(content, tmp_path / "weights.pth")
    same(read(tmp_path / "weights.pth"), state)


@pytest.mark.parametrize("form", ["zip", "old"])
def test_parts_are_read_alone(tmp_path: Path, form: str) -> None:
    """A template may be a view; what is read is its part of the file."""
    torch.save({"w": torch.arange(12.0).view(4, 3).t()}, tmp_path / "weights.pth", **FORMS[form])
    source = open_weights(tmp_path / "weights.pth")
    with source.source("rank-00000.safetensors") as fetch:
        part = fetch("w", (slice(1, 3), slice(0, 2)))
        assert part.tolist() == torch.arange(12.0).view(4, 3).t()[1:3, 0:2].tolist()
        whole = fetch("w", (slice(0, 3), slice(0, 4)))
        if form == "zip":  # mapped: both are the same memory
            assert part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    "content, says",
    [
        ([torch.ones(1)], "holds a list instead of a state dict"),
        (torch.ones(1), "holds a tensor instead of a state dict"),
        ({"epoch": 3}, "holds no tensors by name"),
        ({"net": {"w": torch.ones(1)}, "epoch": 3}, "; it has net, save one of them alone"),
        ({"w": torch.ones(2).to_sparse()}, "w is of a sparse kind, and tensors of that kind cannot be read"),
        ({"w": torch.ones(2).to(torch.float8_e4m3fnuz)}, "w is of torch.float8_e4m3fnuz, and tensors of that kind"),
        ({"w": torch.ones(2, device="meta")}, "w is of a meta kind"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_weights(tmp_path: Path, content: Any, says: str) -> None:
    torch.save(content, tmp_path / "weights.pth")
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path / "weights.pth")
    assert says in str(caught.value)


def test_a_state_dict_beside_that_of_an_optimizer(tmp_path: Path) -> None:
    own = {"state": {0: {"step": torch.ones(())}}, "param_groups": [{"lr": 0.1}]}
    torch.save({"model_state_dict": {"w": torch.ones(2)}, "optimizer_state_dict": own}, tmp_path / "weights.pt")
    assert read(tmp_path / "weights.pt")["w"].tolist() == [1, 1]


def test_averages_beside_the_weights_are_told(tmp_path: Path) -> None:
    model, moments = {"w": torch.ones(2)}, {"state": {0: {"step": torch.ones(())}}}
    torch.save({"model": model, "model_ema": {"w": torch.zeros(2)}, "optimizer": moments}, tmp_path / "weights.pt")
    assert read(tmp_path / "weights.pt")["w"].tolist() == [1, 1]
    _, line = without_prefix(open_weights(tmp_path / "weights.pt"), ["w"])
    assert line == f"{tmp_path / 'weights.pt'} (torch.save): not loaded: model_ema"


def test_a_folder_of_checkpoints_names_the_newest(tmp_path: Path) -> None:
    for name in ("checkpoint-8", "checkpoint-16", "checkpoint-24", "runs"):
        (tmp_path / name).mkdir()
    for name in ("checkpoint-8", "checkpoint-16"):  # the third is not complete
        save_file({"w": torch.ones(2)}, tmp_path / name / "model.safetensors")
    with pytest.raises(CheckpointError, match=r": is no checkpoint, but a folder .* such as .*checkpoint-16$"):
        open_weights(tmp_path)


def test_a_folder_of_own_checkpoints_names_the_newest_complete_one(tmp_path: Path) -> None:
    for seconds, name in enumerate(("any_name", "best_accuracy_epoch_2", "epoch_3")):
        path = save_checkpoint(tmp_path / name, {"model.w": torch.ones(2)})
        os.utime(path / "manifest.json", (seconds, seconds))
    (tmp_path / "epoch_3" / "manifest.json").unlink()
    for open_it in (open_weights, Checkpoint.open):
        with pytest.raises(CheckpointError, match=r"a folder of checkpoints, give .* such as .*best_accuracy_epoch_2$"):
            open_it(tmp_path)
    mark_latest(tmp_path / "any_name")
    with pytest.raises(CheckpointError, match=r"such as .*any_name$"):
        open_weights(tmp_path)
    for name in ("any_name", "best_accuracy_epoch_2"):
        shutil.rmtree(tmp_path / name)
    with pytest.raises(CheckpointError, match="is not a complete checkpoint"):
        open_weights(tmp_path)


def test_a_plain_pickle(tmp_path: Path) -> None:
    (tmp_path / "weights.pth").write_bytes(pickle.dumps({"w": 1}))
    with pytest.raises(CheckpointError, match="it is damaged, or was not written by torch.save"):
        read(tmp_path / "weights.pth")


# Hugging Face


def sharded(folder: Path, suffix: str = "safetensors") -> State:
    state = {name: torch.randn(4, 3) for name in "abc"} | {"d": torch.arange(3)}
    parts = {"1": ["a", "c"], "2": ["b", "d"]}
    for number, names in parts.items():
        part, path = {name: state[name] for name in names}, folder / f"model-{number}.{suffix}"
        save_file(part, path) if suffix == "safetensors" else torch.save(part, path)
    weight_map = {name: f"model-{number}.{suffix}" for number, names in parts.items() for name in names}
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / f"model.{suffix}.index.json").write_text(json.dumps(index))
    return state


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize("as_folder", [True, False])
def test_an_index_of_several_files(tmp_path: Path, suffix: str, as_folder: bool) -> None:
    state = sharded(tmp_path, suffix)
    same(read(tmp_path if as_folder else tmp_path / f"model.{suffix}.index.json"), state)


@pytest.mark.parametrize("save", [save_file, torch.save])
def test_a_folder_with_one_file(tmp_path: Path, save: Any) -> None:
    save({"w": torch.ones(2)}, tmp_path / ("model.safetensors" if save is save_file else "pytorch_model.bin"))
    same(read(tmp_path), {"w": torch.ones(2)})


def test_what_transformers_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # which Transformers sets
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    expected = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}  # tied
    same(read(tmp_path), expected)


def test_the_cache_of_the_hub_links_to_its_files(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--x" / "snapshots" / "123", tmp_path / "models--x" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    state = sharded(snapshot)
    for file in list(snapshot.iterdir()):
        file.rename(blobs / file.name)
        file.symlink_to(Path("../../blobs") / file.name)
    same(read(snapshot), state)


@pytest.mark.parametrize(
    "index, says",
    [
        (
            {"weight_map": {"a": "model-1.safetensors", "b": "model-1.safetensors"}},
            "b is in model-1.safetensors, which",
        ),
        ({"weight_map": {"a": "model-3.safetensors"}}, "model-3.safetensors: is missing"),
        ({"weight_map": {"a": 3}}, "is no index of weights at weight_map.a"),
        ({}, "is no index of weights at weight_map"),
        ([], "is no index of weights at its beginning, Input should be a valid dictionary"),
    ],
)
def test_an_index_that_is_wrong(tmp_path: Path, index: Any, says: str) -> None:
    sharded(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path)
    assert says in str(caught.value)
    assert "_Index" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_several_indices(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / "other.safetensors.index.json").write_text("{}")
    with pytest.raises(
        CheckpointError, match="has several indices, give one of them: model.safetensors.index.json, other"
    ):
        read(tmp_path)


def test_an_index_beside_a_file_of_whole_weights(tmp_path: Path) -> None:
    sharded(tmp_path)
    save_file({"weight": torch.ones(1)}, tmp_path / "model.safetensors")  # transformers would read this one
    with pytest.raises(
        CheckpointError, match=r"has model\.safetensors and model\.safetensors\.index\.json, which may be of different"
    ):
        read(tmp_path)
    assert read(tmp_path / "model.safetensors").keys() == {"weight"}
    assert read(tmp_path / "model.safetensors.index.json").keys() != {"weight"}


def test_a_folder_with_nothing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a complete checkpoint, it has no manifest.json"):
        open_weights(tmp_path)
    with pytest.raises(CheckpointError, match="nothing: does not exist"):
        open_weights(tmp_path / "nothing")


# Memory

MEASURE = """
import sys
from pathlib import Path
import torch
from flextrain.core.checkpoint import FlatShard, open_weights

def status(key):
    line = next(line for line in open("/proc/self/status") if line.startswith(key))
    return int(line.split()[1]) / 1024

def load_part(path, part):
    source = open_weights(path)
    numel = {key: info.shape[0] * info.shape[1] // part for key, info in source.tensors.items()}
    source.load({k: FlatShard(torch.empty(numel[k]), i.shape, numel[k]) for k, i in source.tensors.items()})

load_part(sys.argv[1], 2)
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = status("VmRSS")
load_part(sys.argv[2], 12)
print(status("VmHWM") - before)
"""


@pytest.mark.processes
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are measured as Linux does")
@pytest.mark.parametrize(
    "form", ["zip", *(pytest.param(form, marks=pytest.mark.full) for form in ("safetensors", "index"))]
)
def test_a_process_reads_its_part(tmp_path: Path, form: str) -> None:
    """A twelfth of 96 MiB needs 8 MiB, and the pages of the file that it lies in."""
    for name, shape in (("small", (4, 4)), ("large", (2048, 1024))):
        state = {f"w{i}": torch.full(shape, float(i)) for i in range(12)}
        folder = tmp_path / name
        folder.mkdir()
        if form == "zip":
            torch.save(state, folder / "pytorch_model.bin")
        elif form == "safetensors":
            save_file(state, folder / "model.safetensors")
        else:
            for key, tensor in state.items():
                save_file({key: tensor}, folder / f"{key}.safetensors")
            weight_map = {key: f"{key}.safetensors" for key in state}
            (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    arguments = [sys.executable, "-c", MEASURE, str(tmp_path / "small"), str(tmp_path / "large")]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    grown = float(done.stdout)
    print(f"{form}: {grown:.1f} MiB")
    assert grown < 40  # a kernel that reads ahead maps more than was asked for


def test_parts_without_their_index_are_named(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(
        CheckpointError, match="has model-00001-of-00002.safetensors, and no model.safetensors.index.json"
    ):
        open_weights(tmp_path)
