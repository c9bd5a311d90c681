"""An index whose layouts were changed, with a checksum that fits: the same values are loaded, or it is refused in one line."""

from __future__ import annotations

import copy
import json
import math
import os
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flextrain.core.base.errors import CheckpointError
from flextrain.core.base.tensors import DTYPES
from flextrain.core.checkpoint import Checkpoint, FlatShard, directory
from flextrain.core.checkpoint.chunks import Cut, share
from flextrain.core.checkpoint.folders import file_of, name_in_file
from flextrain.core.checkpoint.load import reading
from flextrain.core.checkpoint.manifest import MANIFEST, VALUES, manifest_of
from flextrain.core.checkpoint.save import _kinds, described, write_shard
from flextrain.core.checkpoint.save_plan import (
    Boxes,
    EvenRange,
    Kind,
    Mesh,
    Offer,
    Offered,
    OnMesh,
    PlannedChunk,
    Whole,
    plan_save,
)

WORLD = 4
LINE, GRID = Mesh((WORLD,), None, (1,)), Mesh((2, 2), None, (2, 1))
CROOKED = Mesh((WORLD,), (0, 2, 3, 1), ())
OFFERED = (
    Offered("rows", "F32", (9, 3), OnMesh(0, (Cut(0),))),
    Offered("columns", "F32", (3, 6), OnMesh(0, (Cut(1),))),
    Offered("packed", "BF16", (12, 2), OnMesh(0, (Cut(0, 3),))),
    Offered("both", "F32", (8, 2), OnMesh(1, (Cut(0, 2), Cut(0)))),
    Offered("grid", "F32", (4, 6), OnMesh(1, (Cut(0), Cut(1)))),
    Offered("copies", "F32", (6, 2), OnMesh(1, (None, Cut(0)))),
    Offered("crooked", "I64", (5, 2), OnMesh(2, (Cut(0),))),
    Offered("flat", "F32", (3, 5), EvenRange()),
    Offered("whole", "F32", (2, 3), Whole()),
    Offered("step", "F32", (), Whole()),
    Offered("empty", "F32", (0, 3), Whole()),
)


def offer(rank: int) -> Offer:
    begin, end = share(9, WORLD, rank)
    listed = Offered("listed", "F32", (9, 2), Boxes((((begin, 0), (end - begin, 2)),) if begin < end else ()))
    return Offer((*OFFERED, listed), (LINE, GRID, CROOKED), (0, 0, 0))


def wholes() -> dict[str, Tensor]:
    """The saved tensors; no two elements are equal."""
    found, begin = {}, 1
    for tensor in offer(0).tensors:
        numel = math.prod(tensor.shape)
        values = torch.arange(begin, begin + numel) if tensor.dtype != "BF16" else torch.arange(numel) + 1
        found[tensor.key] = values.to(DTYPES[tensor.dtype]).reshape(tensor.shape)
        begin += numel
    return found


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that four processes would have written."""
    path = tmp_path_factory.mktemp("layouts") / "a"
    path.mkdir()
    offers = [offer(rank) for rank in range(WORLD)]
    kinds = _kinds([(one.digest, one.firsts) for one in offers])
    plan = plan_save([Kind(k.ranks, offers[k.ranks[0]], k.firsts) for k in kinds], WORLD)
    whole, files = wholes(), {VALUES: directory.write_file(path / VALUES, b"{}")}
    for rank in range(WORLD):
        parts = plan.parts_of(rank)
        chunks = (whole[part.key][tuple(slice(o, o + n) for o, n in zip(*part.box, strict=True))] for part in parts)
        files[file_of(rank)] = write_shard(path / file_of(rank), parts, chunks)
    directory.seal(path, manifest_of(plan.tensors, files, {"strategy": "none"}))
    return path


@pytest.fixture(autouse=True)
def _unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    """No machine loses its power here, and there are many indices to write."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(scope="module")
def index(written: Path) -> Any:
    found = json.loads((written / MANIFEST).read_bytes())
    del found["xxh3"]
    return found


def whole_templates(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: torch.full_like(tensor, -7) for key, tensor in tensors.items()}


def halves(tensors: Mapping[str, Tensor]) -> dict[str, tuple[FlatShard, Tensor]]:
    """The second half of the elements of each tensor as a template, and what belongs there."""
    found = {}
    for key, tensor in tensors.items():
        if tensor.numel() > 1:
            half = tensor.reshape(-1)[tensor.numel() // 2 :]
            found[key] = FlatShard(torch.full_like(half, -7), tuple(tensor.shape), tensor.numel() // 2), half
    return found


def read(path: Path) -> None:
    """Load all tensors in the shapes that the index says, in those that were saved, and parts; compare what is loaded."""
    opened, expected = Checkpoint.open(path), wholes()
    said = {key: torch.full(info.shape, -7, dtype=info.dtype) for key, info in opened.tensors.items()}
    opened.load(said)
    for key, tensor in said.items():
        assert key in expected, key
        assert tensor.dtype == expected[key].dtype, key
        assert torch.equal(tensor, expected[key]) or not tensor.numel(), (key, tensor)
    with reading(opened) as reader:  # as exports do
        for key in opened.entries:
            assert torch.equal(reader.read(key), said[key]), key
    same = whole_templates(expected)
    opened.load(same)
    parts = halves(expected)
    opened.load({key: part for key, (part, _) in parts.items()})
    for key, tensor in expected.items():
        assert torch.equal(same[key], tensor), key
    for key, (part, half) in parts.items():
        assert torch.equal(part.to_local(), half), key


def outcome(path: Path, index: Any) -> str | None:
    """The error that an index gives; None: the same values were loaded."""
    directory.seal(path, json.dumps(index).encode())
    try:
        read(path)
    except CheckpointError as error:
        message = str(error)
        assert "\n" not in message
        assert len(message) < 1000
        assert str(path) in message, message
        return message
    return None


def test_the_whole_one_is_read(written: Path, index: Any) -> None:
    kinds = {kind for layout in index["layouts"] for kind in ("strides", "ranks", "runs", "boxes") if kind in layout}
    assert kinds == {"strides", "ranks", "runs", "boxes"}
    assert outcome(written, index) is None


def test_chunks_of_one_name_are_refused() -> None:
    """The second would lie where the first is said to be."""
    chunk = PlannedChunk("w", ((0,), (2,)), "F32", name_in_file("w", ((0,), (2,)), (4,)))
    whole = PlannedChunk("w@0", ((0,), (4,)), "F32", name_in_file("w@0", ((0,), (4,)), (4,)))
    with pytest.raises(CheckpointError, match="w and w@0: would both be w@0 in a file"):
        described([chunk, whole])
    assert len(described([chunk])) == 1


# One field after the other


def layout(key: str, **fields: Any) -> Callable[[Any], None]:
    """Change the layout of a tensor; None removes a field."""

    def change(index: Any) -> None:
        found = index["layouts"][index["tensors"][key]["layout"]]
        for name, value in fields.items():
            found[name] = value
            if value is None:
                del found[name]

    return change


def tensor(key: str, **fields: Any) -> Callable[[Any], None]:
    return lambda index: index["tensors"][key].update(fields)


def larger(size: int, file: int) -> Callable[[Any], None]:
    """The whole tensor is said to have this many bytes, and its file enough."""

    def change(index: Any) -> None:
        found = index["tensors"]["whole"]
        found["shape"] = [size // 4]
        index["files"][file_of(found["rank"])]["size"] = file

    return change


DAMAGES: list[tuple[Callable[[Any], None], str]] = [
    (tensor("rows", layout=99), "rows has layout 99, which is not listed"),
    (tensor("rows", layout=-1), "rows has layout -1, which is not listed"),
    (tensor("rows", rank=1), "it does not contain rows@0,0"),
    (tensor("rows", rank=-1), "rows is on processes that cannot be"),
    (tensor("rows", rank=10**30), "rows is on processes that cannot be"),
    (tensor("whole", rank=0), "rank-00000.safetensors: is damaged, it does not contain whole"),
    (tensor("rows", shape=[9, 4]), "it has another shape of rows@0,0"),
    (tensor("rows", shape=[9, 2]), "it has another shape of rows@0,0"),
    (tensor("rows", shape=[10, 3]), "it does not contain rows@9,0"),
    (tensor("rows", shape=[9]), "it does not contain rows@0"),
    (tensor("rows", shape=[10**30, 3]), "it has more elements than any memory"),
    (tensor("rows", shape=[-9, 3]), "it has a shape that no tensor has"),
    (tensor("rows", shape=[2**40, 3]), "would hold tensors of"),
    (larger(2**40, 2**40 + 1000), f"bytes instead of {2**40 + 1000}"),
    (tensor("whole", shape=[2**62]), "the files have"),
    (tensor("rows", shape=[0] + [1] * 100), "it has a shape that no tensor has"),
    (tensor("rows", shape="9, 3"), "is damaged at tensors.rows.shape"),
    (tensor("rows", dtype="BF16"), "it has another dtype of rows@0,0"),
    (tensor("rows", dtype="I32"), "it has another dtype of rows@0,0"),
    (tensor("rows", dtype="F7"), "tensors of F7 cannot be read"),
    (tensor("rows", more=1), "is damaged at tensors.rows.more"),
    (tensor("whole", shape=[2, 2]), "it has another shape of whole"),
    (tensor("whole", shape=[6]), "it has another shape of whole"),
    (tensor("step", shape=[1]), "it has another shape of step"),
    (tensor("listed", shape=[8, 2]), "listed is not valid, a chunk lies outside of it"),
    (tensor("listed", shape=[10, 2]), "listed is not valid, its chunks are not all there"),
    (tensor("listed", shape=[18]), "listed is not valid"),
    (tensor("flat", shape=[3, 6]), "flat is not valid, its ranges are not all there"),
    (tensor("flat", shape=[5, 3]), "it has another shape of flat@0,0"),
    (layout("rows", mesh=[2], strides=[1]), "it has another shape of rows@0,0"),
    (layout("rows", mesh=[5], strides=[1]), "rows is in rank-00004.safetensors, which is not listed"),
    (layout("rows", mesh=[0]), "its mesh is not valid"),
    (layout("rows", mesh=[-4]), "its mesh is not valid"),
    (layout("rows", mesh=[10**30]), "its mesh is not valid"),
    (layout("rows", mesh=[2, 2]), "its mesh is not valid"),
    (layout("rows", mesh=[2, 2], strides=[2, 1], cuts=["S0", "S0"]), "it has another shape of rows@3,0"),
    (layout("rows", mesh=4), "is damaged at layouts.0.mesh.mesh"),
    (layout("rows", mesh=None), "is damaged at layouts.0"),
    (layout("rows", strides=[0]), "its mesh has a rank twice"),
    (layout("rows", strides=[-1]), "rows is on processes that cannot be"),
    (layout("rows", strides=[2]), "rows is in rank-00004.safetensors, which is not listed"),
    (layout("rows", strides=[10**30]), "its ranks do not fill the mesh"),
    (layout("rows", strides=[1, 1]), "its mesh needs either strides or ranks"),
    (layout("rows", strides=None), "its mesh needs either strides or ranks"),
    (layout("rows", ranks=[0, 1, 2, 3]), "its mesh needs either strides or ranks"),
    (layout("rows", cuts=["S1"]), "it has another shape of rows@0,0"),
    (layout("rows", cuts=["S2"]), "rows is not valid, its layout cuts a dimension that it does not have"),
    (layout("rows", cuts=["S0/2"]), "it has another shape of rows@0,0"),
    (layout("rows", cuts=["S0/0"]), "rows is not valid, its layout cuts a dimension that it does not have"),
    (layout("rows", cuts=["R"]), "it has a cut that no axis makes"),
    (layout("rows", cuts=["S-1"]), "it has a cut that no axis makes"),
    (layout("rows", cuts=["S0/999999999"]), "it cuts into more pieces than any tensor"),
    (layout("rows", cuts=[]), "its mesh is not valid"),
    (layout("rows", cuts=[0]), "is damaged at layouts.0.mesh.cuts"),
    (layout("crooked", ranks=[0, 2, 3, 3]), "its mesh has a rank twice"),
    (layout("crooked", ranks=[0, 2, 3]), "its ranks do not fill the mesh"),
    (layout("crooked", ranks=[2, 0, 3, 1]), "it does not contain crooked@2,0"),
    (layout("crooked", ranks=[0, 2, 3, 10**30]), "its mesh has a rank that cannot be"),
    (layout("crooked", ranks=[0, 2, 3, "x"]), "is damaged at layouts"),
    (layout("flat", runs=[[0, 3, 4]]), "flat is not valid, its ranges are not all there"),
    (layout("flat", runs=[[0, 3, 5]]), "it has another shape of flat"),
    (layout("flat", runs=[[1, 3, 4], [0, 1, 3]]), "it does not contain flat@"),
    (layout("flat", runs=[[0, -3, 4]]), "it has a range without elements"),
    (layout("flat", runs=[[0, 3, 0]]), "it has a range without elements"),
    (layout("flat", runs=[[0, 10**9, 1]]), "it has more ranges than processes"),
    (layout("flat", runs=[[10**9, 3, 4], [3, 1, 3]]), "it has a range without elements"),
    (layout("flat", runs=[[0, 1, 10**30]]), "flat is not valid, its ranges are not all there"),
    (layout("flat", runs=[[0, 3]]), "is damaged at layouts"),
    (layout("flat", runs=[]), "flat is not valid, its ranges are not all there"),
    (layout("listed", boxes=[[0, [0, 0], [9, 2]]]), "it does not contain listed"),
    (layout("listed", boxes=[[0, [0, 0], [5, 2]], [1, [4, 0], [5, 2]]]), "two of its chunks overlap"),
    (layout("listed", boxes=[[0, [0, 0], [3, 2]], [1, [3, 0], [3, 2]]]), "its chunks are not all there"),
    (layout("listed", boxes=[[0, [0, 0], [3, 2]], [1, [3, 0], [7, 2]]]), "a chunk lies outside of it"),
    (layout("listed", boxes=[[0, [-1, 0], [10, 2]]]), "a chunk lies outside of it"),
    (layout("listed", boxes=[[10**30, [0, 0], [9, 2]]]), "it has a chunk on a process that cannot be"),
    (layout("listed", boxes=[[0, [0], [9, 2]]]), "listed is not valid"),
    (layout("listed", boxes=[[0, [0, 0], [10**30, 2]]]), "a chunk lies outside of it"),
    (layout("listed", runs=[]), "is damaged at layouts"),
    (lambda index: index.update(layouts={}), "is damaged at layouts"),
    (lambda index: index.update(layouts=[]), "which is not listed"),
    (lambda index: index["layouts"].insert(0, 7), "is damaged at layouts.0"),
    (lambda index: index["layouts"].reverse(), "is damaged at "),
    (lambda index: index["tensors"].pop("rows"), "has no tensor rows"),
    (lambda index: index["files"].pop(file_of(3)), "rank-00003.safetensors, which is not listed"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(DAMAGES)), ids=lambda number: f"{number}: {DAMAGES[number][1]}")
def test_each_field_counts(written: Path, index: Any, number: int) -> None:
    change, says = DAMAGES[number]
    changed = copy.deepcopy(index)
    change(changed)
    found = outcome(written, changed)
    assert found is not None
    assert says in found


# Any change


def positions(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of everything inside of a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from positions(item, (*path, key))


NUMBERS = (0, 1, -1, 2, 3, 7, 255, 10**5, 2**31, 2**62, 2**63, 2**64, -(2**63), 10**30)
STRANGE: tuple[Any, ...] = (None, "", "S0", "S1", "S0/2", "x", "3", 0.5, True, [], {}, [[]], [0], [1, 1], {"mesh": []})


def changed_somewhere(index: Any, chance: random.Random, where: list[tuple[Any, ...]]) -> Any:
    """A copy with one or two things changed: another number or type, one removed, doubled, or in another one's place."""
    found = copy.deepcopy(index)
    for _ in range(chance.choice((1, 1, 1, 2))):
        *outer, last = chance.choice(where)
        holder = found
        try:
            for key in outer:
                holder = holder[key]
            value = holder[last]
            kind = chance.randrange(6)
            if kind == 0 and isinstance(value, int):
                holder[last] = chance.choice((value + 1, value - 1, 2 * value, -value, *NUMBERS))
            elif kind == 1:
                holder[last] = chance.choice(STRANGE)
            elif kind == 2:
                del holder[last]
            elif kind == 3 and isinstance(holder, list):
                holder.insert(chance.randrange(len(holder) + 1), copy.deepcopy(value))
            elif kind == 4:
                other = chance.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
                holder[last], holder[other] = holder[other], holder[last]
            else:
                holder[last] = chance.choice(NUMBERS)
        except (KeyError, IndexError, TypeError):  # the first change took it away
            continue
    return found


def fuzz(written: Path, index: Any, seed: int, count: int) -> tuple[int, int]:
    """How many changed indices were read, and how many refused."""
    chance, refused = random.Random(seed), 0
    where = [path for path in positions(index) if path[0] in ("layouts", "tensors")]
    for number in range(count):
        changed = changed_somewhere(index, chance, where)
        try:
            refused += outcome(written, changed) is not None
        except BaseException:
            print(f"seed {seed}, number {number}:", json.dumps(changed))
            raise
    return count - refused, refused


def test_no_change_gives_other_values(written: Path, index: Any) -> None:
    same, refused = fuzz(written, index, 0, 200)
    assert same > 10
    assert refused > 100


@pytest.mark.full
@pytest.mark.parametrize("seed", range(1, 11))
def test_no_change_gives_other_values_long(written: Path, index: Any, seed: int) -> None:
    fuzz(written, index, seed, 2000)
