"""Checkpoints built to attack: each is refused in one line, nothing in them is executed, no memory is taken for them."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import shutil
import struct
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from flextrain import CheckpointError
from flextrain.core.checkpoint import (
    Checkpoint,
    directory,
    export_weights,
    find_latest,
    is_checkpoint,
    match_weights,
    open_weights,
    save_checkpoint,
)
from flextrain.core.checkpoint.foreign import deepspeed
from flextrain.core.checkpoint.untrusted import MAX_JSON_BYTES

from ..formats import in_format_1

SHARD = "rank-00000.safetensors"
TERABYTE = 2**40


class Payload:
    """Is pickled as a call of os.system that leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch '{self.mark}'",)


@pytest.fixture
def payload(tmp_path: Path) -> Iterator[Payload]:
    """A payload; in the end it must not have been executed."""
    payload = Payload(tmp_path / "executed")
    pickle.loads(pickle.dumps(payload))  # it would work
    payload.mark.unlink()
    yield payload
    assert not payload.mark.exists(), "stored code was executed"


def status_mib(key: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) / 1024


@pytest.fixture(autouse=True)
def _little_memory() -> Iterator[None]:
    """No test may touch more than 100 MiB."""
    reset = Path("/proc/self/clear_refs")
    if not reset.exists():
        yield
        return
    reset.write_text("5")
    before = status_mib("VmRSS")
    yield
    assert status_mib("VmHWM") - before < 100


def refused(path: Path, *says: str) -> None:
    """Reading is refused by whatever reads weights, in one line."""
    for read in (open_all, lambda path: export_weights(path, path.with_name("out.safetensors"), replace=True)):
        with pytest.raises(CheckpointError) as caught:
            read(path)
        message = str(caught.value)
        assert "\n" not in message
        assert len(message) < 1000
        assert any(part in message for part in says), message


def open_all(path: Path) -> None:
    source = open_weights(path)
    source.load({key: torch.empty(info.shape, dtype=info.dtype) for key, info in source.tensors.items()})


# Pickles


PLACES: dict[str, Callable[[Any], Any]] = {
    "alone": lambda bad: bad,
    "beside": lambda bad: {"state_dict": {"w": torch.ones(1)}, "meta": bad},
    "a weight": lambda bad: {"w": torch.ones(1), "v": bad},
    "deep": lambda bad: {"state_dict": {"w": torch.ones(1)}, "a": [{"b": (1, {2: [bad]})}]},
}
FORMATS: dict[str, dict[str, Any]] = {
    "zip": {},
    "zip, protocol 4": {"pickle_protocol": 4},
    "old": {"_use_new_zipfile_serialization": False},
    "old, protocol 4": {"_use_new_zipfile_serialization": False, "pickle_protocol": 4},
}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("place", PLACES)
def test_a_payload_in_a_pth(tmp_path: Path, payload: Payload, place: str, form: str) -> None:
    torch.save(PLACES[place](payload), tmp_path / "w.pth", **FORMATS[form])
    refused(tmp_path / "w.pth", "it holds posix.system, and loading that would execute code; save the state dict alone")


def as_attribute(payload: Payload) -> Any:
    tensor = torch.ones(1)
    tensor.note = payload  # type: ignore[attr-defined]
    return {"w": tensor}


def as_hook(payload: Payload) -> Any:
    class WithHooks:
        def __reduce__(self) -> Any:
            storage = torch.ones(1).storage()
            return torch._utils._rebuild_tensor_v2, (storage, 0, (1,), (1,), False, payload)

    return {"w": WithHooks()}


def by_eval(payload: Payload) -> Any:
    class Evaluated:
        def __reduce__(self) -> Any:
            return eval, (f"__import__('os').system('touch {payload.mark}')",)

    return {"w": torch.ones(1), "x": Evaluated()}


def by_getattr(payload: Payload) -> Any:
    class Reached:
        def __reduce__(self) -> Any:
            return Path.touch, (payload.mark,)

    return {"w": torch.ones(1), "x": Reached()}


def by_load(payload: Payload) -> Any:
    inner = payload.mark.with_name("inner.pth")
    torch.save(payload, inner)

    class Loads:
        def __reduce__(self) -> Any:
            return torch.load, (str(inner), None, None)

    return {"w": torch.ones(1), "x": Loads()}


@pytest.mark.parametrize("form", ["zip", "old"])
@pytest.mark.parametrize("make", [as_attribute, as_hook, by_eval, by_getattr, by_load])
def test_other_ways_to_call(tmp_path: Path, payload: Payload, make: Callable[[Payload], Any], form: str) -> None:
    torch.save(make(payload), tmp_path / "w.pth", **FORMATS[form])
    refused(tmp_path / "w.pth", "and loading that would execute code")


@pytest.mark.parametrize("protocol", [0, 1, 2, 5])
@pytest.mark.parametrize("slot", range(5))
def test_every_pickle_of_the_old_format(tmp_path: Path, payload: Payload, slot: int, protocol: int) -> None:
    """Magic number, protocol, facts about the machine, content, keys of what follows."""
    parts: list[Any] = [0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}, {"w": 1}, []]
    parts[slot] = payload
    (tmp_path / "w.pth").write_bytes(b"".join(pickle.dumps(part, protocol=protocol) for part in parts))
    refused(tmp_path / "w.pth", "it holds posix.system", "was not written by torch.save")


def test_opcodes_that_name_classes_in_other_ways(tmp_path: Path, payload: Payload) -> None:
    call = f"touch {payload.mark}"
    programs = {
        "inst": f"(S'{call}'\niposix\nsystem\n.".encode(),
        "obj": f"(cposix\nsystem\nS'{call}'\no.".encode(),
        "stack": b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c" + bytes([len(call)]) + call.encode() + b"\x85R.",
    }
    for name, program in programs.items():
        pickle.loads(program)
        assert payload.mark.exists(), name
        payload.mark.unlink()
        (tmp_path / "w.pth").write_bytes(program)
        refused(tmp_path / "w.pth", "it holds posix.system")
    (tmp_path / "w.pth").write_bytes(b"\x80\x02\x82\x01.")  # the registry of extensions
    refused(tmp_path / "w.pth", "it is damaged, or was not written by torch.save")


def test_the_oldest_format(tmp_path: Path, payload: Payload) -> None:
    with tarfile.open(tmp_path / "w.pth", "w") as archive:
        for name in ("storages", "tensors", "pickle"):
            info = tarfile.TarInfo(name)
            data = pickle.dumps(payload)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    refused(tmp_path / "w.pth", "it is damaged, or was not written by torch.save")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_torchscript(tmp_path: Path) -> None:
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / "w.pth")
    refused(tmp_path / "w.pth", "it is a TorchScript archive, which is code; save the state dict alone")


def test_a_payload_in_the_file_of_an_index(tmp_path: Path, payload: Payload) -> None:
    torch.save({"w": torch.ones(1), "x": payload}, tmp_path / "part.bin")
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"w": "part.bin"}}))
    refused(tmp_path, "part.bin: cannot be read as weights, it holds posix.system")


def test_the_index_of_torchs_own_checkpoints(tmp_path: Path, payload: Payload) -> None:
    folder = tmp_path / "dcp"
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(payload))
    (folder / "__0_0.distcp").write_bytes(pickle.dumps(payload))
    refused(
        folder, ".metadata: cannot be read, it holds posix.system, which no index of torch.distributed.checkpoint has"
    )


def test_pickles_in_a_checkpoint_are_not_looked_at(tmp_path: Path, payload: Payload) -> None:
    path = save_checkpoint(tmp_path / "a", {"model.w": torch.ones(2)})
    for name in (".metadata", "__0_0.distcp", "data.pkl", "rng.pkl"):
        (path / name).write_bytes(pickle.dumps(payload))
    open_all(path)


DEEPSPEED: dict[str, Callable[[Any], tuple[Any, Any]]] = {
    "model states": lambda bad: (bad, {}),
    "a weight": lambda bad: ({"module": {"w": bad}, "param_shapes": None}, {}),
    "a client's state": lambda bad: ({"module": {"w": torch.ones(1)}, "param_shapes": None, "client": bad}, {}),
    "optimizer states": lambda bad: ({"module": {"w": torch.ones(1)}, "param_shapes": [{"w": (1,)}]}, bad),
    "the scaler": lambda bad: (
        {"module": {"w": torch.ones(1)}, "param_shapes": [{"w": (1,)}]},
        {"optimizer_state_dict": {"loss_scaler": bad}},
    ),
}


@pytest.mark.parametrize("place", DEEPSPEED)
def test_a_payload_in_a_deepspeed_checkpoint(tmp_path: Path, payload: Payload, place: str) -> None:
    folder = tmp_path / "ds" / "global_step1"
    folder.mkdir(parents=True)
    (folder.parent / "latest").write_text("global_step1")
    model, optimizer = DEEPSPEED[place](payload)
    torch.save(model, folder / "mp_rank_00_model_states.pt")
    torch.save(optimizer, folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    refused(folder.parent, "it holds posix.system, and loading that would execute code")


@pytest.mark.parametrize("content", [{}, {"module": None}, {"module": {"w": 1}, "param_shapes": 3}, [], None, 7])
def test_a_deepspeed_checkpoint_of_nonsense(tmp_path: Path, content: Any) -> None:
    folder = tmp_path / "ds"
    folder.mkdir()
    torch.save(content, folder / "mp_rank_00_model_states.pt")
    torch.save(content, folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    refused(folder, "is no checkpoint of DeepSpeed's ZeRO", "holds no weights of a model")


# Paths


ELSEWHERE = [
    "../secret.safetensors",
    "/etc/passwd",
    "a/../../secret.safetensors",
    "..",
    ".",
    "",
    "a\0b",
    "..\\secret",
    "a\nb",
]


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    save_file({"w": torch.ones(2)}, tmp_path / "secret.safetensors")
    return tmp_path / "secret.safetensors"


@pytest.mark.parametrize("name", ELSEWHERE)
def test_an_index_that_leads_elsewhere(tmp_path: Path, secret: Path, name: str) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    refused(folder, "which is not a file in its folder")


def test_an_index_whose_file_is_a_link(tmp_path: Path, secret: Path) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "part.safetensors").symlink_to(secret)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "part.safetensors"}}))
    refused(folder, f"part.safetensors: is a link to a file outside of {folder}")


def test_a_cache_whose_links_leave_it(tmp_path: Path, secret: Path) -> None:
    folder = tmp_path / "models--x" / "snapshots" / "1"
    folder.mkdir(parents=True)
    (folder / "part.safetensors").symlink_to("../../../secret.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "part.safetensors"}}))
    refused(folder, "part.safetensors: is a link to a file outside of")


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["xxh3"]
    change(manifest)
    directory.seal(path, json.dumps(manifest).encode())  # whoever attacks can do that too


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save_checkpoint(tmp_path / "a", {"model.w": torch.arange(6.0).view(3, 2), "loop": {"iter": 1}})


@pytest.mark.parametrize("name", ELSEWHERE)
@pytest.mark.parametrize("where", ["files", "chunk"])
def test_a_manifest_that_leads_elsewhere(checkpoint: Path, secret: Path, name: str, where: str) -> None:
    def change(manifest: Any) -> None:
        if where == "files":
            manifest["files"][name] = {"size": 1, "xxh3": "0" * 16}
        else:
            manifest["tensors"]["model.w"]["chunks"][0]["file"] = name

    if where == "chunk":
        in_format_1(checkpoint)
    edit(checkpoint, change)
    refused(
        checkpoint, "is no name of a file of a checkpoint", "is no name of a shard", "which is not a file in its folder"
    )


@pytest.mark.parametrize("name", [SHARD, "values.json", "manifest.json"])
def test_a_checkpoint_whose_file_is_a_link(tmp_path: Path, checkpoint: Path, name: str) -> None:
    shutil.move(checkpoint / name, tmp_path / "elsewhere")
    (checkpoint / name).symlink_to(tmp_path / "elsewhere")
    refused(checkpoint, f"{name}: is a link to a file outside of {checkpoint}")


def test_a_directory_that_is_a_link_is_read(tmp_path: Path, checkpoint: Path) -> None:
    (tmp_path / "link").symlink_to(checkpoint)
    open_all(tmp_path / "link")


def test_a_deepspeed_file_that_is_a_link(tmp_path: Path) -> None:
    folder = tmp_path / "ds"
    folder.mkdir()
    torch.save({"module": {"w": torch.ones(1)}}, tmp_path / "elsewhere.pt")
    (folder / "mp_rank_00_model_states.pt").symlink_to(tmp_path / "elsewhere.pt")
    refused(folder, "mp_rank_00_model_states.pt: is a link to a file outside of")


@pytest.mark.parametrize("name", ["..", "../a", "/", "a\0", "x" * 10**6])
def test_a_latest_that_leads_elsewhere(tmp_path: Path, checkpoint: Path, name: str) -> None:
    work = checkpoint / "work"  # in a checkpoint, so that ".." is one
    work.mkdir()
    (work / "latest").write_text(name)
    with pytest.raises(CheckpointError) as caught:
        find_latest(work)
    assert len(str(caught.value)) < 5000
    assert deepspeed.find(work) is None
    assert is_checkpoint(work / "..")


# Sizes


def one_terabyte(manifest: Any) -> None:
    entry = manifest["tensors"]["model.w"]
    entry["chunks"][0]["offsets"] = [0]
    entry["shape"] = entry["chunks"][0]["shape"] = [TERABYTE // 4]


def many_small_pieces(manifest: Any) -> None:
    entry = manifest["tensors"]["model.w"]
    chunk = {**entry["chunks"][0], "shape": [1, 2]}
    entry["shape"] = [1000, 2]
    entry["chunks"] = [{**chunk, "offsets": [row, 0]} for row in range(1000)]


def one_terabyte_on_paper(manifest: Any) -> None:
    one_terabyte(manifest)
    manifest["files"][SHARD]["size"] = TERABYTE + 1000


def unlisted(manifest: Any) -> None:
    manifest["files"].pop(SHARD)


def shape(*sizes: int) -> Callable[[Any], None]:
    def change(manifest: Any) -> None:
        manifest["tensors"]["model.w"].update(shape=list(sizes), chunks=[])

    return change


def chunk(**values: Any) -> Callable[[Any], None]:
    return lambda manifest: manifest["tensors"]["model.w"]["chunks"][0].update(values)


def twice(manifest: Any) -> None:
    """The chunks have the right size together, and the second half of the tensor is in none of them."""
    entry = manifest["tensors"]["model.w"]
    entry["shape"] = [6, 2]
    entry["chunks"] *= 2
    manifest["files"][SHARD]["size"] += 24


@pytest.mark.parametrize(
    "change, says",
    [
        (one_terabyte, f"would hold tensors of {TERABYTE}"),
        (many_small_pieces, "would hold tensors of 8000"),
        (one_terabyte_on_paper, f"bytes instead of {TERABYTE + 1000}"),
        (unlisted, f"model.w is in {SHARD}, which is not listed"),
        (twice, "two of its chunks overlap"),
        (shape(0, -1), "it has a shape that no tensor has"),
        (shape(0, *[1] * 100), "it has a shape that no tensor has"),
        (shape(0, 10**30), "it has more elements than any memory"),
        (shape(3, 2), "its chunks are not all there"),
        (chunk(offsets=[1, 0]), "a chunk lies outside of it"),
        (chunk(offsets=[-1, 0]), "a chunk lies outside of it"),
        (chunk(offsets=[0]), "is damaged at tensors.model.w"),
        (chunk(name="other"), "is damaged, it does not contain other"),
    ],
)
def test_a_manifest_of_format_1_that_lies(checkpoint: Path, change: Callable[[Any], None], says: str) -> None:
    edit(in_format_1(checkpoint), change)
    refused(checkpoint, says)


def safetensors(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(*sizes: int, begin: int = 0, end: int = 0) -> Any:
    return {"w": {"dtype": "F32", "shape": list(sizes), "data_offsets": [begin, end]}}


@pytest.mark.parametrize(
    "content",
    [
        safetensors(entry(TERABYTE // 4, end=TERABYTE)),
        safetensors(entry(TERABYTE // 4, end=4), b"1234"),
        safetensors(entry(2**32, 2**32, end=0)),
        safetensors(entry(0, 10**30)),
        safetensors(entry(0, 2**63 - 1, 4)),
        safetensors(entry(0, *[1] * 100)),
        safetensors(entry(-1, end=4), b"1234"),
        safetensors(entry(1, begin=4, end=8), b"12345678"),
        safetensors({"w": {"dtype": "F8_E4M3FNUZ", "shape": [1], "data_offsets": [0, 1]}}, b"1"),
        struct.pack("<Q", TERABYTE) + b"{}",
        struct.pack("<Q", 2**64 - 1) + b"{}",
        safetensors(b"[" * 100_000),
        safetensors(b'{"a":' * 100_000),
        b"",
        b"1234",
    ],
    ids=lambda content: repr(content[:40]),
)
def test_a_safetensors_header_that_lies(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "w.safetensors").write_bytes(content)
    refused(tmp_path / "w.safetensors", "w.safetensors: ")


def torch_zip(path: Path, content: bytes, *, records: dict[str, bytes] | None = None, method: int = 0) -> None:
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/version", b"3\n")
        for name, data in (records or {}).items():
            archive.writestr(f"archive/data/{name}", data)


class Stored:
    """Is pickled as a tensor of one storage, whatever it says of itself."""

    def __init__(self, numel: int, sizes: tuple[Any, ...], strides: tuple[Any, ...], offset: Any = 0) -> None:
        self.numel, self.arguments = numel, (offset, sizes, strides, False, {})

    def __reduce__(self) -> Any:
        return torch._utils._rebuild_tensor_v2, (Memory(self.numel), *self.arguments)


class Memory:
    def __init__(self, numel: int) -> None:
        self.numel = numel


class Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return ("storage", torch.FloatStorage, "0", "cpu", obj.numel) if isinstance(obj, Memory) else None


def pickled(content: Any) -> bytes:
    text = io.BytesIO()
    Pickler(text, protocol=2).dump(content)
    return text.getvalue()


LIES = {
    "a storage": Stored(TERABYTE // 4, (TERABYTE // 4,), (1,)),
    "a shape": Stored(4, (TERABYTE // 4,), (1,)),
    "an expanded one": Stored(4, (TERABYTE // 4,), (0,)),
    "a stride": Stored(4, (2,), (TERABYTE,)),
    "an offset": Stored(4, (2,), (1,), TERABYTE),
    "a negative offset": Stored(4, (2,), (1,), -1),
    "a negative stride": Stored(4, (2,), (-1,)),
    "no numbers": Stored(4, ("x",), (1,)),
    "dimensions": Stored(4, (1,) * 1000, (1,) * 1000),
    "a negative storage": Stored(-1, (0,), (1,)),
}


def old_format(content: bytes, numel: int = 4) -> bytes:
    heads = [pickle.dumps(part, 2) for part in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})]
    return b"".join(heads) + content + pickle.dumps(["0"], 2) + struct.pack("<q", numel) + b"\0" * 16


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("form", ["zip", "old"])
def test_a_pth_that_lies(tmp_path: Path, lie: str, form: str) -> None:
    content = pickled({"w": LIES[lie]})
    if form == "zip":
        torch_zip(tmp_path / "w.pth", content, records={"0": b"\0" * 16})
    else:
        (tmp_path / "w.pth").write_bytes(old_format(content, LIES[lie].__reduce__()[1][0].numel))
    refused(tmp_path / "w.pth", "w.pth: cannot be read as weights, ")


def test_honest_ones_of_this_kind_are_read(tmp_path: Path) -> None:
    content = pickled({"w": Stored(4, (2, 2), (2, 1))})
    torch_zip(tmp_path / "w.pth", content, records={"0": b"\0" * 16})
    open_all(tmp_path / "w.pth")
    (tmp_path / "old.pth").write_bytes(old_format(content))
    open_all(tmp_path / "old.pth")


@pytest.mark.parametrize("what", ["pickle", "tensor"])
def test_a_zip_bomb(tmp_path: Path, what: str) -> None:
    """A gigabyte of zeros takes a megabyte."""
    zeros = b"\0" * 2**26
    content = zeros if what == "pickle" else pickled({"w": Stored(2**24, (2**24,), (1,))})
    with zipfile.ZipFile(tmp_path / "w.pth", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", content)
        if what == "tensor":
            with archive.open("archive/data/0", "w") as record:
                for _ in range(16):
                    record.write(zeros[: 2**22])
    del zeros
    refused(tmp_path / "w.pth", "in it is compressed, which torch.save does not do")


PROGRAMS = {
    "much memory for nothing": b"\x80\x02" + b"\x8e" + struct.pack("<Q", TERABYTE) + b".",
    "a large memo": b"\x80\x02]r\xff\xff\xff\xff.",
    "a hash that never ends": b"\x80\x02)" + b"2\x86" * 200 + b"}2s.",
    "of a set": b"\x80\x04\x8f()" + b"2\x86" * 200 + b"\x90.",
    "of a frozen set": b"\x80\x04()" + b"2\x86" * 200 + b"\x91.",
    "of a dict": b"\x80\x02()" + b"2\x86" * 200 + b"Nd.",
    "an array for nothing": b"\x80\x05\x96" + struct.pack("<Q", 2**28) + b".",
    "a change of a function": b"\x80\x02ctorch.nn.parameter\nParameter\n}X\x04\x00\x00\x00makeNsb.",
    "a call of a list": b"\x80\x02])R.",
    "nothing": b"",
    "no end": b"\x80\x02",
    "an empty stack": b"\x80\x02R.",
    "only a mark": b"\x80\x02(.",
    "a mark that is missing": b"\x80\x02]e.",
    "deep": b"\x80\x02" + b"]" * 10**6 + b"a" * (10**6 - 1) + b".",
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_that_waste(tmp_path: Path, program: str) -> None:
    torch_zip(tmp_path / "w.pth", PROGRAMS[program])
    refused(tmp_path / "w.pth", "w.pth: ")


def test_a_changed_byte_is_found_under_other_names_too(checkpoint: Path) -> None:
    """Which load_from gives to what it reads."""
    content = bytearray((checkpoint / SHARD).read_bytes())
    content[-1] ^= 1
    (checkpoint / SHARD).write_bytes(content)
    source = open_weights(checkpoint)
    renamed, fits, report = match_weights(source, {"model.v": torch.empty(3, 2)}, {}, [("w", "v")])
    assert not report
    with pytest.raises(CheckpointError, match=f"{SHARD}: is damaged, its checksum is"):
        renamed.load(fits)


# JSON


NESTED = "[" * 200_000 + "]" * 200_000


@pytest.mark.parametrize("text", [NESTED, '{"a":' * 200_000, "[1, 2]", "3", "", "\xff", '{"files": 1}', "1" * 10_000])
@pytest.mark.parametrize("name", ["manifest.json", "values.json"])
def test_json_that_is_nonsense(checkpoint: Path, name: str, text: str) -> None:
    if name == "values.json" and text == '{"files": 1}':
        pytest.skip("may stand there")
    (checkpoint / name).write_bytes(text.encode("latin-1"))
    if name != "manifest.json":
        edit(
            checkpoint,
            lambda manifest: manifest["files"].update({name: directory.file_entry(checkpoint / name).model_dump()}),
        )
    refused(checkpoint, f"{name}: is damaged")


@pytest.mark.parametrize("name", ["manifest.json", "values.json"])
def test_json_that_is_huge(checkpoint: Path, name: str) -> None:
    size = MAX_JSON_BYTES + 1
    os.truncate(checkpoint / name, size)  # takes no room on the disk
    if name != "manifest.json":
        edit(
            checkpoint,
            lambda manifest: manifest["files"].update({name: directory.file_entry(checkpoint / name).model_dump()}),
        )
    refused(checkpoint, f"{MAX_JSON_BYTES} bytes, which are not read", f"more than {MAX_JSON_BYTES} are not read")


@pytest.mark.parametrize("text", [NESTED, "{", "[]", '{"weight_map": {"w": 1}}', '{"weight_map": "w"}'])
def test_an_index_of_nonsense(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    refused(tmp_path, "model.safetensors.index.json: is ")


def test_an_index_that_is_huge(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").touch()
    os.truncate(tmp_path / "model.safetensors.index.json", MAX_JSON_BYTES + 1)
    refused(tmp_path, f"more than {MAX_JSON_BYTES} are not read")


def test_names_with_line_breaks(tmp_path: Path, checkpoint: Path) -> None:
    edit(checkpoint, lambda manifest: manifest["tensors"].update({"a\nb" * 1000: 3}))
    refused(checkpoint, "manifest.json: is damaged at tensors.a b")


def test_what_is_honest_is_read(checkpoint: Path) -> None:
    assert Checkpoint.open(checkpoint).values == {"loop": {"iter": 1}}
    open_all(checkpoint)


def damaged(good: bytes, draw: random.Random) -> bytes:
    """The content with a bit flipped, bytes changed, the end cut off, or a part doubled."""
    data, place = bytearray(good), draw.randrange(len(good))
    match draw.randrange(4):
        case 0:
            data[place] ^= 1 << draw.randrange(8)
        case 1:
            for _ in range(8):
                data[draw.randrange(len(data))] = draw.randrange(256)
        case 2:
            del data[place:]
        case _:
            data[place:place] = data[draw.randrange(len(data)) :][: draw.randrange(1, 40)]
    return bytes(data)


@pytest.mark.parametrize("name", ["zip.pth", "old.pth", "w.safetensors"])
def test_files_of_others_with_damage_are_read_or_refused(tmp_path: Path, name: str) -> None:
    """They have no checksums, so that changed numbers are read; nothing else happens than what is meant to."""
    state = {"a": torch.randn(3, 4), "b": torch.arange(5), "c": torch.ones(2).bfloat16()}
    if name == "w.safetensors":
        save_file(state, tmp_path / name)
    else:
        content = {"state_dict": state, "meta": {"x": [1, 2.5, (3, None)]}}
        torch.save(content, tmp_path / name, _use_new_zipfile_serialization=name == "zip.pth")
    good, draw, refusals = (tmp_path / name).read_bytes(), random.Random(0), list[str]()
    for _ in range(200):
        (tmp_path / name).write_bytes(damaged(good, draw))
        try:
            open_all(tmp_path / name)
        except CheckpointError as error:
            refusals.append(str(error))
    assert len(refusals) > 50
    assert not any("\n" in refusal for refusal in refusals)
