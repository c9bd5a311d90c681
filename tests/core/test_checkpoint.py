"""The checkpoint directory: what goes in comes out, it is there as a whole or not at all, and damage has a name."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors import safe_open
from torch import Tensor

from flextrain.core.base.errors import CheckpointError
from flextrain.core.base.events import heartbeats
from flextrain.core.checkpoint import (
    Checkpoint,
    complete_ones,
    directory,
    find_latest,
    is_checkpoint,
    mark_latest,
    newest_complete,
    passed_over,
    remove_checkpoint,
    save_checkpoint,
)
from flextrain.core.checkpoint import load as newest
from flextrain.core.checkpoint import save as saving
from flextrain.core.checkpoint.manifest import MANIFEST

SHARD = "rank-00000.safetensors"


def example() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(3, 4, generator=generator)
    return {
        "model.weight": weight,
        "model.tied": weight,
        "model.transposed": torch.randn(4, 3, generator=generator).t(),
        "model.part": torch.randn(6, 2, generator=generator)[1:5:2],
        "model.column": torch.randn(1, 8, generator=generator)[:, 3],  # torch calls it contiguous, and its stride is 8
        "model.scalar": torch.tensor(3.5),
        "model.empty": torch.empty(0, 4),
        "model.mask": torch.tensor([[True], [False]]),
        "model.parameter": torch.nn.Parameter(torch.ones(2)),
        "double": torch.randn(2, generator=generator, dtype=torch.float64),
        "half": torch.randn(5, generator=generator).half(),
        "bfloat": torch.randn(5, generator=generator).bfloat16(),
        "float8": torch.randn(4, generator=generator).to(torch.float8_e4m3fn),
        "int": torch.tensor([[-(2**40)]]),
        "bytes": torch.arange(7, dtype=torch.uint8),
        "values": {"list": [1, 2.5, None, True, "text"], "best": -math.inf},
        "loop": 3,
    }


def tensors_of(state: dict[str, Any]) -> dict[str, Tensor]:
    return {key: value for key, value in state.items() if isinstance(value, Tensor)}


def load_all(path: Path) -> dict[str, Tensor]:
    checkpoint = Checkpoint.open(path)
    template = {key: torch.full(info.shape, 1).to(info.dtype) for key, info in checkpoint.tensors.items()}
    checkpoint.load(template)
    return template


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].dtype is tensor.dtype
        assert torch.equal(found[key].detach().double(), tensor.detach().double()), key


# Round trip


def test_round_trip(tmp_path: Path) -> None:
    state = example()
    path = save_checkpoint(tmp_path / "epoch_1", state, per_rank={"rng": [1, 2]}, written_by={"strategy": "Some"})
    assert path == tmp_path / "epoch_1"
    checkpoint = Checkpoint.open(path)
    assert checkpoint.values == {"values": state["values"], "loop": 3, "rng": [[1, 2]]}
    assert {key: (info.shape, info.dtype) for key, info in checkpoint.tensors.items()} == {
        key: (tuple(tensor.shape), tensor.dtype) for key, tensor in tensors_of(state).items()
    }
    assert checkpoint.saved.keys() == {*state, "rng"}
    same(load_all(path), tensors_of(state))


def test_the_files_are_what_the_documentation_says(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "a", example(), written_by={"strategy": "Some"})
    assert sorted(file.name for file in path.iterdir()) == ["manifest.json", SHARD, "values.json"]
    assert [file.name for file in tmp_path.iterdir()] == ["a"]
    manifest = json.loads((path / "manifest.json").read_text())
    assert (manifest["format"], manifest["version"]) == ("flextrain-checkpoint", 2)
    assert manifest["written_by"]["strategy"] == "Some"
    for name in (SHARD, "values.json"):
        content = (path / name).read_bytes()
        assert manifest["files"][name] == {"size": len(content), "xxh3": xxhash.xxh3_64_hexdigest(content)}
    assert manifest["files"].keys() == {SHARD, "values.json"}
    rest = (path / "manifest.json").read_bytes().partition(b",")[2]
    assert manifest["xxh3"] == xxhash.xxh3_64_hexdigest(rest)
    with safe_open(path / SHARD, framework="pt") as file:  # any reader of safetensors reads it
        assert torch.equal(file.get_tensor("model.weight"), example()["model.weight"])


def test_loading_converts_to_the_dtype_of_the_template_and_fills_views(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "a", {"x": torch.tensor([[1.5, 2.5], [3.5, 4.5]])})
    whole = torch.zeros(2, 4, dtype=torch.float16)
    Checkpoint.open(path).load({"x": whole[:, ::2]})
    assert whole.tolist() == [[1.5, 0, 2.5, 0], [3.5, 0, 4.5, 0]]


def test_parameters_are_filled_in_place(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "a", {"w": torch.ones(2)})
    parameter = torch.nn.Parameter(torch.zeros(2))
    Checkpoint.open(path).load({"w": parameter})
    assert parameter.tolist() == [1.0, 1.0]
    assert parameter.requires_grad


def test_a_column_of_one_row_is_filled_in_place(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "a", {"w": torch.tensor([2.5])})
    table = torch.zeros(1, 3)
    Checkpoint.open(path).load({"w": table[:, 1]})
    assert table.tolist() == [[0.0, 2.5, 0.0]]


def test_only_what_is_asked_for_is_read(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "a", example())
    Checkpoint.open(path).load({})
    scalar = torch.tensor(0.0)
    Checkpoint.open(path).load({"model.scalar": scalar})
    assert scalar.item() == 3.5


def test_values_alone_make_a_checkpoint(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "a", {"loop": 1})
    assert (Checkpoint.open(path).values, Checkpoint.open(path).tensors) == ({"loop": 1}, {})


@pytest.mark.parametrize(
    "template, message",
    [
        ({"nope": torch.empty(1)}, "has no tensor nope"),
        ({"model.weight": torch.empty(4, 3)}, r"model.weight has shape \(3, 4\), shape \(4, 3\) is needed"),
    ],
)
def test_a_template_that_does_not_fit(tmp_path: Path, template: dict[str, Tensor], message: str) -> None:
    path = save_checkpoint(tmp_path / "a", example())
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(path).load(template)


# What cannot be saved


@pytest.mark.parametrize(
    "state, per_rank, culprit",
    [
        ({"hook": {"a": [1, {"b": object()}]}}, {}, "checkpoint.hook.a.1.b (object)"),
        ({"hook": {"a": {1, 2}}}, {}, "checkpoint.hook.a (set)"),
        ({"hook": {"a": torch.ones(1)}}, {}, "checkpoint.hook.a (Tensor)"),
        ({}, {"rng": {"a": b"bytes"}}, "per_rank.rng.a (bytes)"),
        ({}, {"rng": lambda: 0}, "per_rank.rng (function)"),  # which could not even be sent to rank 0
    ],
)
def test_values_that_json_cannot_hold_are_named(
    tmp_path: Path, state: dict[str, Any], per_rank: dict[str, Any], culprit: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        save_checkpoint(tmp_path / "a", state, per_rank=per_rank)
    assert f"on rank 0: {culprit}: cannot be saved, give plain values or tensors" in str(caught.value)
    assert not is_checkpoint(tmp_path / "a")


@pytest.mark.parametrize("key", [1, True, None, (1, 2)])
def test_keys_that_json_would_change_are_named(tmp_path: Path, key: Any) -> None:
    with pytest.raises(CheckpointError) as caught:
        save_checkpoint(tmp_path / "a", {"hook": {"a": [{key: 3}]}})
    assert f"checkpoint.hook.a.0[{key!r}]: cannot be saved, keys have to be text, not " in str(caught.value)
    assert not is_checkpoint(tmp_path / "a")


@pytest.mark.parametrize("bulky, file", [("values", "values.json"), ("tensors", "rank-00000.safetensors")])
def test_what_would_be_too_long_to_read_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bulky: str, file: str
) -> None:
    save_checkpoint(tmp_path / "a", {"model.w": torch.zeros(3)})
    state = {f"model.{i}": torch.ones(1) if bulky == "tensors" else i for i in range(100)}
    monkeypatch.setattr(directory, "MAX_JSON_BYTES", 1000)
    with pytest.raises(CheckpointError, match=f"{file}: would have .* bytes, more than 1000 are not read"):
        save_checkpoint(tmp_path / "a", state)
    assert Checkpoint.open(tmp_path / "a").tensors.keys() == {"model.w"}


def test_an_index_that_would_be_too_long_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "MAX_JSON_BYTES", 1000)
    monkeypatch.setattr(saving, "write_shard", None)
    with pytest.raises(CheckpointError, match=f"{MANIFEST}: would have .* bytes, more than 1000 are not read"):
        save_checkpoint(tmp_path / "a", {"model.w": torch.zeros(3)}, written_by={"strategy": "long" * 250})
    assert not list(tmp_path.iterdir())


def test_tensors_that_safetensors_cannot_hold_are_named(tmp_path: Path) -> None:
    state = {"fine": torch.ones(1), "spectrum": torch.ones(1, dtype=torch.float8_e4m3fnuz)}
    with pytest.raises(CheckpointError, match="spectrum: tensors of torch.float8_e4m3fnuz cannot be saved"):
        save_checkpoint(tmp_path / "a", state)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("name", ["project", "project/notes.txt"])
def test_what_is_no_checkpoint_is_never_replaced(tmp_path: Path, name: str) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "notes.txt").write_text("precious")
    with pytest.raises(CheckpointError, match="notes.txt: is no part of a checkpoint and would be deleted"):
        save_checkpoint(tmp_path / name, example())
    assert (tmp_path / "project" / "notes.txt").read_text() == "precious"


# One name, one complete checkpoint


def test_a_checkpoint_replaces_the_one_of_its_name(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        path = save_checkpoint(tmp_path / "a", {"x": torch.tensor(value), f"only_{value}": 1})
    assert load_all(path)["x"].item() == 2.0
    assert Checkpoint.open(path).values == {"only_2.0": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


def test_a_failed_save_leaves_the_one_that_was_there(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "a", {"x": torch.tensor(1.0)})
    with pytest.raises(CheckpointError):
        save_checkpoint(path, {"x": torch.tensor(2.0), "y": torch.ones(1, dtype=torch.float8_e4m3fnuz)})
    assert load_all(path)["x"].item() == 1.0


def test_a_folder_that_another_run_has_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = directory.begin

    def begun_twice(path: Path) -> Path:
        folder = begin(path)
        shutil.rmtree(folder)  # as a save of another run under the same name does
        return folder

    monkeypatch.setattr(directory, "begin", begun_twice)
    (tmp_path / ".flextrain.lock").write_text("process 7 on moon since 01/02 03:04:05")
    with pytest.raises(CheckpointError) as caught:
        save_checkpoint(tmp_path / "a", {"x": torch.tensor(1.0)})
    assert "was removed while it was written, as another run in the same folder does" in str(caught.value)
    assert "locked by process 7 on moon" in str(caught.value)
    assert "storage" not in str(caught.value)


def test_an_error_of_the_disk_is_a_checkpoint_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(directory, "write_file", full)
    with pytest.raises(CheckpointError, match="a: could not be saved on rank 0: .*No space left on device"):
        save_checkpoint(tmp_path / "a", example())
    assert not (tmp_path / "a").exists()


def test_leftovers_of_a_killed_save_do_no_harm(tmp_path: Path) -> None:
    leftover = directory.temporary(tmp_path / "a")
    leftover.mkdir()
    (leftover / SHARD).write_bytes(b"half of i")
    (leftover / "manifest.json").write_text("{")
    assert not is_checkpoint(tmp_path / "a")
    assert find_latest(tmp_path) is None
    with pytest.raises(CheckpointError, match="a: does not exist"):
        Checkpoint.open(tmp_path / "a")
    path = save_checkpoint(tmp_path / "a", example())
    same(load_all(path), tensors_of(example()))
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


def test_a_half_deleted_checkpoint_is_none_and_is_replaced(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "a", example())
    (path / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="a: is not a complete checkpoint, it has no manifest.json"):
        Checkpoint.open(path)
    save_checkpoint(path, {"loop": 7})
    assert Checkpoint.open(path).values == {"loop": 7}


class KilledError(BaseException):
    pass


def kill_between_renames(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Save over ``path`` and stop after the old checkpoint has given up its name."""
    rename = Path.rename

    def stop(self: Path, target: Path) -> Path:
        if self == directory.temporary(path):
            raise KilledError
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", stop)
        # DCP answers every exception; a process that is killed answers nothing.
        with pytest.raises((KilledError, CheckpointError)):
            save_checkpoint(path, {"loop": 2})
    assert not path.exists()


@pytest.mark.parametrize("how", ["open", "latest", "save"])
def test_a_replacement_killed_between_its_renames_is_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    path = save_checkpoint(tmp_path / "a", {"loop": 1})
    mark_latest(path)
    kill_between_renames(path, monkeypatch)
    if how == "latest":
        assert find_latest(tmp_path) == path
    if how == "save":  # the old one is there until the new one is complete
        with pytest.raises(CheckpointError):
            save_checkpoint(path, {"x": torch.ones(1, dtype=torch.float8_e4m3fnuz)})
        kill_between_renames(path, monkeypatch)
    assert Checkpoint.open(path).values == {"loop": 1}
    save_checkpoint(path, {"loop": 3})
    assert Checkpoint.open(path).values == {"loop": 3}
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a", "latest"]


def test_another_process_may_be_faster_to_undo_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_checkpoint(tmp_path / "a", {"loop": 1})
    path.rename(directory.replaced(path))
    rename = Path.rename

    def too_late(self: Path, target: Path) -> Path:
        rename(self, target)
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", too_late)
        assert Checkpoint.open(path).values == {"loop": 1}


def test_latest(tmp_path: Path) -> None:
    assert find_latest(tmp_path) is None
    first, second = (save_checkpoint(tmp_path / name, {"loop": 1}) for name in ("a", "b"))
    assert find_latest(tmp_path) is None  # complete, and nobody said that it is the one
    for path in (first, second, first):
        mark_latest(path)
        assert find_latest(tmp_path) == path
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a", "b", "latest"]
    remove_checkpoint(first)
    assert not first.exists()
    with pytest.raises(CheckpointError, match='latest: names "a", which is not a complete checkpoint'):
        find_latest(tmp_path)


@pytest.mark.parametrize("name", ["../a", "/etc", "b/../../a", ""])
def test_latest_names_a_neighbour(tmp_path: Path, name: str) -> None:
    save_checkpoint(tmp_path / "a", {"loop": 1})
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "latest").write_text(name)
    with pytest.raises(CheckpointError, match="latest: "):
        find_latest(tmp_path / "work")


# Damage


def change(**values: Any) -> Callable[[Path], None]:
    """Change the manifest at its top."""

    def damage(path: Path) -> None:
        seal(path, json.loads((path / "manifest.json").read_text()) | values)

    return damage


def seal(path: Path, manifest: dict[str, Any]) -> None:
    """Write a manifest whose checksum is right."""
    directory.seal(path, json.dumps({key: value for key, value in manifest.items() if key != "xxh3"}).encode())


def sealed(damage: Callable[[Path], None]) -> Callable[[Path], None]:
    """With checksums that are right, so that what lies behind them is looked at."""

    def do(path: Path) -> None:
        damage(path)
        manifest = json.loads((path / "manifest.json").read_text())
        manifest["files"] = {name: directory.file_entry(path / name).model_dump() for name in manifest["files"]}
        seal(path, manifest)

    return do


def cut(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).write_bytes((path / name).read_bytes()[:-3]) and None


def overwrite(name: str, byte: bytes) -> Callable[[Path], None]:
    return lambda path: (path / name).write_bytes(byte * (path / name).stat().st_size) and None


def without_values(path: Path) -> None:
    change(files={SHARD: directory.file_entry(path / SHARD).model_dump()})(path)
    (path / "values.json").unlink()


def newer_without_checksum(path: Path) -> None:
    (path / "manifest.json").write_text('{"parts": {}, "format": "flextrain-checkpoint", "version": 4}')


def outside_file(path: Path) -> None:
    (path.parent.parent / "secret").write_text("abc")
    names = ("../../secret", SHARD, "values.json")
    change(files={name: directory.file_entry(path / name).model_dump() for name in names})(path)


@pytest.mark.parametrize(
    "damage, message",
    [
        (cut(SHARD), f"a/{SHARD}: has [0-9]+ bytes instead of [0-9]+"),
        (cut("values.json"), "a/values.json: has [0-9]+ bytes instead of"),
        (cut("manifest.json"), "a/manifest.json: is damaged, its checksum is not that of its content"),
        (lambda path: directory.seal(path, b"{[}"), "a/manifest.json: is damaged at its beginning, Invalid JSON"),
        (lambda path: (path / SHARD).unlink(), f"a/{SHARD}: is missing"),
        (without_values, "a/manifest.json: is damaged at files, it lacks values.json"),
        (overwrite(SHARD, b"\0"), f"a/{SHARD}: is damaged, its checksum is"),
        (sealed(overwrite(SHARD, b"\0")), f"a/{SHARD}: is damaged"),
        (sealed(overwrite(SHARD, b"\xff")), f"a/{SHARD}: is damaged"),
        (overwrite("values.json", b"x"), "a/values.json: is damaged, its checksum is"),
        (sealed(overwrite("values.json", b"x")), "a/values.json: is damaged"),
        (change(version=3), "was written by a newer flextrain, in version 3 of the format; this one reads up to version 2"),
        (change(version=3, layouts=7, tensors=None, more=[]), "was written by a newer flextrain, in version 3"),
        (newer_without_checksum, "was written by a newer flextrain, in version 4"),
        (change(version=0), "is in version 0 of the format, which does not exist"),
        (change(version="x"), "is damaged at version"),
        (change(format="zip"), 'is of format "zip", this flextrain reads flextrain-checkpoint'),
        (change(unknown=1), "is damaged at unknown"),
        (outside_file, '"../../secret" is no name of a file of a checkpoint'),
    ],
)  # fmt: skip
def test_damage_is_found_and_named(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    path = save_checkpoint(tmp_path / "a", example())
    damage(path)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_all(path)
    assert "\n" not in str(caught.value)


def test_a_file_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="file: is not a complete checkpoint.*are for load_from"):
        Checkpoint.open(tmp_path / "file")


def test_a_checkpoint_can_be_moved(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "a", example())
    shutil.move(path, tmp_path / "elsewhere")
    same(load_all(tmp_path / "elsewhere"), tensors_of(example()))
    assert os.fspath(Checkpoint.open(tmp_path / "elsewhere").path).endswith("elsewhere")


@pytest.mark.parametrize("step", ["stat", "read"])
def test_a_checkpoint_that_is_deleted_meanwhile_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    for name in ("a", "b"):
        save_checkpoint(tmp_path / name, example())
        os.utime(tmp_path / name / MANIFEST, (ord(name), ord(name)))
    deleted_after = {"stat": (newest, "is_checkpoint"), "read": (directory, "sibling")}[step]
    real = getattr(*deleted_after)

    def deletes(path: Path, *args: Any) -> Any:
        found = real(path, *args)
        if "b" in path.parts:
            remove_checkpoint(tmp_path / "b")
        return found

    monkeypatch.setattr(*deleted_after, deletes)
    assert newest_complete(tmp_path, lambda _: True) == tmp_path / "a"
    assert passed_over(tmp_path, None) == []
    assert not (tmp_path / "b").exists()
    assert list(complete_ones(tmp_path)) == [tmp_path / "a"]


def test_a_large_file_is_synced_bit_by_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no sync lasts as long as a hang, and every one is followed by a sign of life."""
    seen: list[tuple[int, int]] = []
    sync = os.fsync

    def note(descriptor: int) -> None:
        sync(descriptor)
        seen.append((os.fstat(descriptor).st_size, heartbeats() - before))

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(directory, "_SYNCED_BYTES", 250)
    before = heartbeats()
    entry = directory.write_file(tmp_path / "file", [b"x" * 100] * 7)
    assert seen == [(300, 2), (600, 5), (700, 7)]
    assert entry == directory.file_entry(tmp_path / "file")
