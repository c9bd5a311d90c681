"""Directories of torch.distributed.checkpoint as sources of weights: what other programs write, damage, and attacks."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from flextrain import CheckpointError
from flextrain.core.checkpoint import match_weights, open_weights, without_prefix
from flextrain.core.checkpoint.foreign.dcp import read_index
from flextrain.core.checkpoint.load import reading

State = dict[str, Tensor]


def some_state() -> State:
    torch.manual_seed(0)
    return {
        "a.weight": torch.randn(7, 5),
        "a.bias": torch.randn(7).bfloat16(),
        "scale": torch.arange(6.0).to(torch.float8_e4m3fn),
        "steps": torch.tensor(3),
        "turned": torch.arange(6.0).view(2, 3).t(),
        "none": torch.empty(0, 4),
    }


def save(state: dict[str, Any], folder: Path, **options: Any) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, **options))
    return folder


def read(path: Path) -> State:
    source = open_weights(path)
    with reading(source) as reader:
        return {key.removeprefix("model."): reader.read(key) for key in source.entries}


def same(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype is tensor.dtype
        assert torch.equal(found[name].float(), tensor.float()), name


@pytest.mark.parametrize(
    "options", [{}, dict(thread_count=2), dict(single_file_per_rank=False), dict(sync_files=False)], ids=str
)
def test_files_of_plain_torch(tmp_path: Path, options: dict[str, Any]) -> None:
    same(read(save(some_state(), tmp_path / "dcp", **options)), some_state())


def test_files_in_the_format_of_safetensors(tmp_path: Path) -> None:
    filesystem = pytest.importorskip("torch.distributed.checkpoint.filesystem")
    if not hasattr(filesystem, "SerializationFormat"):
        pytest.skip("this version of torch writes no safetensors there")
    state = {name: tensor.contiguous() for name, tensor in some_state().items()}
    path = save({**state, "note": 3}, tmp_path / "dcp", serialization_format=filesystem.SerializationFormat.SAFETENSORS)
    same(read(path), state)
    (path / "__0_0.distcp").write_bytes((path / "__0_0.distcp").read_bytes()[:-20])
    with pytest.raises(CheckpointError, match="is damaged, its header is not valid"):
        read(path)


def test_an_index_without_flattened_names(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    state = some_state()
    planner = DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(state, checkpoint_id=tmp_path / "dcp", planner=planner)
    same(read(tmp_path / "dcp"), state)


def test_nothing_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save({"model": some_state(), "note": [1, "x"]}, tmp_path / "dcp")

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("unpickled")

    monkeypatch.setattr(pickle, "load", never)
    monkeypatch.setattr(pickle, "loads", never)
    monkeypatch.setattr(pickle, "Unpickler", never)
    monkeypatch.setattr(torch, "load", never)
    same(read(folder), {f"model.{name}": tensor for name, tensor in some_state().items()})


# The names


OPTIMIZER = {"state": {"a.weight": {"exp_avg": torch.ones(7, 5)}}, "param_groups": [{"lr": 0.1}]}
LAYOUTS: dict[str, Callable[[State], dict[str, Any]]] = {
    "bare": lambda state: dict(state),
    "model": lambda state: {"model": state, "optimizer": OPTIMIZER},
    "titan": lambda state: {**state, "optimizer": OPTIMIZER, "train_state": {"step": 3}, "lr_scheduler": {"x": 1}},
    "app": lambda state: {"app": {"model": state, "optim": OPTIMIZER}},
    "state_dict": lambda state: {"state_dict": state, "optimizer_0": OPTIMIZER},
    "own word": lambda state: {"net": state, "opt": OPTIMIZER},
    "ddp": lambda state: {"model": {f"module.{name}": tensor for name, tensor in state.items()}},
    "compiled": lambda state: {f"_orig_mod.{name}": tensor for name, tensor in state.items()},
    "fsdp": lambda state: {"model": {f"_fsdp_wrapped_module.{name}": tensor for name, tensor in state.items()}},
}
SAYS = {
    "bare": None,
    "model": '"model." is removed from the names of its weights; not loaded: optimizer (2 entries)',
    "titan": "not loaded: optimizer (2 entries), train_state, lr_scheduler",
    "app": '"app.model." is removed from the names of its weights; not loaded: app (2 entries)',
    "state_dict": '"state_dict." is removed from the names of its weights; not loaded: optimizer_0 (2 entries)',
    "own word": '"net." is removed from the names of its weights; not loaded: opt (2 entries)',
    "ddp": '"model.module." is removed from the names of its weights',
    "compiled": '"_orig_mod." is removed from the names of its weights',
    "fsdp": '"model." and "_fsdp_wrapped_module." is removed from the names of its weights',
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_names_of_scripts_and_trainers(tmp_path: Path, layout: str) -> None:
    path = save(LAYOUTS[layout](some_state()), tmp_path / "dcp")
    source, line = without_prefix(open_weights(path), some_state())
    assert {key.removeprefix("model.") for key in source.entries} == some_state().keys()
    expected = SAYS[layout]
    assert line == (expected and f"{path} (torch.distributed.checkpoint): {expected}")


def test_a_models_own_module_called_model_is_kept(tmp_path: Path) -> None:
    own = {f"model.{name}": tensor for name, tensor in some_state().items()}
    path = save(own, tmp_path / "dcp")
    source, line = without_prefix(open_weights(path), own)
    assert {key.removeprefix("model.") for key in source.entries} == own.keys()
    assert line is None


def test_a_models_own_module_called_optimizer_is_kept(tmp_path: Path) -> None:
    own = {"optimizer.weight": torch.ones(2), "a": torch.ones(1)}
    source, _ = without_prefix(open_weights(save({"model": own}, tmp_path / "dcp")), own)
    assert source.entries.keys() == {"model.optimizer.weight", "model.a"}


def test_two_models_are_not_chosen_from(tmp_path: Path) -> None:
    path = save({"one": some_state(), "two": some_state()}, tmp_path / "dcp")
    source, line = without_prefix(open_weights(path), some_state())
    assert {key.split(".")[1] for key in source.entries} == {"one", "two"}
    assert line is None


def test_the_model_is_preferred_to_its_averages(tmp_path: Path) -> None:
    path = save({"ema": some_state(), "model": some_state()}, tmp_path / "dcp")
    source, line = without_prefix(open_weights(path), some_state())
    assert source.entries.keys() >= {f"model.{name}" for name in some_state()}
    assert line is not None
    assert '"model." is removed' in line
    assert "not loaded: ema (6 entries)" in line


@pytest.mark.parametrize("compiled_first", [True, False])
def test_of_two_tensors_that_get_one_name_the_other_is_told(tmp_path: Path, compiled_first: bool) -> None:
    names = ["_orig_mod.a", "a"] if compiled_first else ["a", "_orig_mod.a"]
    torch.save({name: torch.full((1,), float(name == "a")) for name in (*names, "b")}, tmp_path / "weights.pth")
    source, line = without_prefix(open_weights(tmp_path / "weights.pth"), ["a", "b"])
    source.load({"model.a": (found := torch.zeros(1))})
    assert found.item() == 1.0
    assert line == f"{tmp_path / 'weights.pth'} (torch.save): not loaded: _orig_mod"


def test_a_weight_of_the_model_beside_the_prefix_is_found(tmp_path: Path) -> None:
    path = save({"model.a": torch.ones(1), "model.b": torch.ones(1), "head": torch.ones(1)}, tmp_path / "dcp")
    source, _ = without_prefix(open_weights(path), ["a", "b", "head"])
    assert source.entries.keys() == {"model.a", "model.b", "model.head"}


# Folders


def test_a_subfolder_of_accelerate(tmp_path: Path) -> None:
    save({"model": some_state()}, tmp_path / "saved" / "pytorch_model_fsdp_0")
    save({"optimizer": OPTIMIZER}, tmp_path / "saved" / "optimizer_0")
    assert read(tmp_path / "saved").keys() == {f"model.{name}" for name in some_state()}


def test_a_file_of_lightning(tmp_path: Path) -> None:
    weights = {f"model.{name}": tensor for name, tensor in some_state().items()}
    content = {"epoch": 1, "pytorch-lightning_version": "2.6.0", "state_dict": weights, "hyper_parameters": {"lr": 0.1}}
    torch.save(
        {**content, "callbacks": {"ModelCheckpoint{'monitor': None}": {"best": torch.tensor(1.0)}}}, tmp_path / "a.ckpt"
    )
    source, line = without_prefix(open_weights(tmp_path / "a.ckpt"), some_state())
    assert {key.removeprefix("model.") for key in source.entries} == some_state().keys()
    assert line == (
        f'{tmp_path / "a.ckpt"} (Lightning): "model." is removed from the names of its weights; '
        "not loaded: epoch, hyper_parameters, callbacks"
    )


@pytest.mark.full
def test_what_lightnings_trainer_writes(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self, lr: float = 0.1) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.model = torch.nn.Linear(3, 1)

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            return self.model(batch).mean()  # type: ignore[no-any-return]

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)

    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer = lightning.Trainer(accelerator="cpu", devices=1, max_steps=2, default_root_dir=tmp_path, **quiet)
    module = Module()
    trainer.fit(module, torch.utils.data.DataLoader(torch.ones(4, 3), batch_size=2))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    source, line = without_prefix(open_weights(tmp_path / "a.ckpt"), ["weight", "bias"])
    assert line is not None
    assert "hyper_parameters" in line or "more" in line
    with reading(source) as reader:
        assert torch.equal(reader.read("model.weight"), module.model.weight)


@pytest.mark.full
@pytest.mark.parametrize("safe", [True, False])
def test_what_accelerate_writes(tmp_path: Path, safe: bool) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model = torch.nn.Linear(3, 2)
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.save_state(tmp_path / "saved", safe_serialization=safe)
    source, line = without_prefix(open_weights(tmp_path / "saved"), ["weight", "bias"])
    assert line is not None
    assert "(Accelerate): not loaded: optimizer" in line
    with reading(source) as reader:
        assert torch.equal(reader.read("model.weight"), model.weight)


# Damage and attacks


class Payload:
    def __reduce__(self) -> tuple[Any, ...]:
        import os

        return os.system, ("touch PWNED",)


def rewritten(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    """Change the index by unpickling it, as only a test may."""

    def damage(folder: Path) -> None:
        with (folder / ".metadata").open("rb") as file:
            index = pickle.load(file)
        replaced = change(index)
        (folder / ".metadata").write_bytes(pickle.dumps(index if replaced is None else replaced))

    return damage


def first_item(index: Any) -> Any:
    return next(info for key, info in index.storage_data.items() if key.fqn == "a.weight")


def cut(name: str, to: int) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:to])


def replace(old: bytes, new: bytes) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        data = (folder / ".metadata").read_bytes()
        assert len(old) == len(new)
        assert old in data
        (folder / ".metadata").write_bytes(data.replace(old, new))

    return damage


def chunk_of(index: Any) -> Any:
    return index.state_dict_metadata["a.weight"].chunks[0]


def nested(depth: int) -> Any:
    value: Any = ()
    for _ in range(depth):
        value = (value, value)
    return value


WRONG: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no index": (
        lambda f: (f / ".metadata").unlink(),
        "has files of torch.distributed.checkpoint but no .metadata, which",
    ),
    "an empty index": (lambda f: (f / ".metadata").write_bytes(b""), ".metadata: is damaged, or no index of torch"),
    "half an index": (cut(".metadata", 300), ".metadata: is damaged, or no index of torch"),
    "text as an index": (lambda f: (f / ".metadata").write_text("{}"), ".metadata: is damaged, or no index of torch"),
    "another pickle": (lambda f: (f / ".metadata").write_bytes(pickle.dumps({"a": 1})), "it holds no Metadata"),
    "a payload": (
        lambda f: (f / ".metadata").write_bytes(pickle.dumps(Payload())),
        "it holds posix.system, which no index of torch.distributed.checkpoint has",
    ),
    "a payload in planner_data": (
        rewritten(lambda index: setattr(index, "planner_data", Payload())),
        "it holds posix.system, which no index of torch.distributed.checkpoint has",
    ),
    "an evil class": (
        replace(b"torch.distributed.checkpoint.filesystem", b"subprocess.aaaaaaaaaaaaaaaaaaaaaaaaaaaa"),
        "which no index of torch.distributed.checkpoint has",
    ),
    "a file elsewhere": (
        rewritten(lambda index: setattr(first_item(index), "relative_path", "../x.distcp")),
        "names '../x.distcp', which is not a file in its folder",
    ),
    "a missing file": (lambda f: (f / "__0_0.distcp").unlink(), "__0_0.distcp: is missing, .metadata names it"),
    "a short file": (cut("__0_0.distcp", 2000), "__0_0.distcp: is damaged, it has 2000 bytes, and "),
    "another offset": (rewritten(lambda index: setattr(first_item(index), "offset", 7)), "it is damaged, or was not"),
    "a negative offset": (
        rewritten(lambda index: setattr(first_item(index), "offset", -1)),
        "a number of bytes that is",
    ),
    "a chunk outside": (
        rewritten(lambda index: setattr(chunk_of(index), "sizes", torch.Size((9, 5)))),
        "a.weight is damaged, a chunk lies outside of it",
    ),
    "a chunk too few": (
        rewritten(lambda index: setattr(chunk_of(index), "sizes", torch.Size((6, 5)))),
        "a.weight is damaged, its chunks are not all there",
    ),
    "another shape": (
        rewritten(lambda index: setattr(index.state_dict_metadata["a.weight"], "size", torch.Size((7,)))),
        "a chunk of a.weight has another number of dimensions",
    ),
    "a shape beyond memory": (
        rewritten(lambda index: setattr(index.state_dict_metadata["a.weight"], "size", (2**61, 2**61))),
        "it has more elements than any memory",
    ),
    "a shape of nested tuples": (
        rewritten(lambda index: setattr(index.state_dict_metadata["a.weight"], "size", nested(60))),
        "a size that is none",
    ),
    "another dtype": (
        rewritten(lambda index: setattr(index.state_dict_metadata["a.weight"].properties, "dtype", torch.float64)),
        "it has another dtype of a.weight@0,0 than the index",
    ),
    "no bytes": (
        rewritten(lambda index: index.storage_data.clear()),
        "says nothing of where a.weight at [0, 0] is",
    ),
    "compressed": (
        rewritten(lambda index: setattr(first_item(index), "transform_descriptors", ["stream.zstd/1"])),
        "a.weight is stored with stream.zstd/1, and only tensors as they are can be read",
    ),
    "a new version": (
        rewritten(lambda index: setattr(index, "version", "2.0.0")),
        "is of version 2.0.0, and version 1",
    ),
    "an index of each process": (
        lambda f: (f / ".metadata").rename(f / "__0.metadata"),
        "has an index for each process (__0.metadata)",
    ),
    "a name that is a tuple": (
        rewritten(lambda index: index.state_dict_metadata.update({5: index.state_dict_metadata["a.weight"]})),
        "a name that is no text",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    monkeypatch.chdir(tmp_path)
    folder = save(some_state(), tmp_path / "dcp")
    damage, says = WRONG[wrong]
    damage(folder)
    with pytest.raises(CheckpointError) as caught:
        read(folder)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(folder))
    assert not (tmp_path / "PWNED").exists()


def test_a_payload_in_the_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = save({"a.weight": torch.ones(7, 5)}, tmp_path / "dcp")
    torch.save(Payload(), folder / "__0_0.distcp")
    size = (folder / "__0_0.distcp").stat().st_size
    rewritten(lambda index: vars(first_item(index)).update(offset=0, length=size))(folder)
    with pytest.raises(CheckpointError, match="it holds posix.system, and loading that would execute code"):
        read(folder)
    assert not (tmp_path / "PWNED").exists()


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp"])
def test_one_file_of_a_folder(tmp_path: Path, file: str) -> None:
    folder = save(some_state(), tmp_path / "dcp")
    with pytest.raises(
        CheckpointError, match=f"is one file of a directory of torch.distributed.checkpoint, give {folder}"
    ):
        open_weights(folder / file)


def test_names_and_shapes_that_do_not_fit(tmp_path: Path) -> None:
    state = {**some_state(), "a.weigth": torch.ones(1), "steps": torch.ones(3)}
    del state["a.weight"]
    source = open_weights(save({"model": state}, tmp_path / "dcp"))
    source, _ = without_prefix(source, some_state())
    _, fits, report = match_weights(source, {f"model.{name}": tensor for name, tensor in some_state().items()}, {})
    assert "missing a.weight (like a.weigth); unexpected a.weigth (like a.weight)" in str(report)
    assert "other shape steps (file (3,), model ())" in str(report)
    assert fits.keys() == {"model.a.bias", "model.scale", "model.turned", "model.none"}


def test_a_folder_of_several(tmp_path: Path) -> None:
    for step in (10, 20):
        save(some_state(), tmp_path / f"step-{step}")
    with pytest.raises(CheckpointError, match="holds other checkpoints, give one of them: step-10, step-20"):
        open_weights(tmp_path)


def test_an_index_of_any_bytes_raises_or_is_read(tmp_path: Path) -> None:
    folder = save(some_state(), tmp_path / "dcp")
    good = (folder / ".metadata").read_bytes()
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        changed = bytearray(good)
        for _ in range(3):
            at, to = (int(torch.randint(limit, (), generator=generator)) for limit in (len(good), 256))
            changed[at] = to
        (folder / ".metadata").write_bytes(changed)
        with suppress(CheckpointError):  # any other error is raised
            read_index(folder / ".metadata")
