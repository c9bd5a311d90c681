"""Sources in files: every sample by its number, whatever the files look like; damaged files say so in one line."""

from __future__ import annotations

import io
import json
import os
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flextrain import ConfigError
from flextrain.data import ArrowFiles, DataError, JsonlFiles, ParquetFiles, TarFiles, TokenFiles
from flextrain.runner.data.sources import file_source as file_list
from flextrain.runner.data.sources import file_source as index_files
from flextrain.runner.data.sources import jsonl_files
from flextrain.testing import WorkerGroup

Samples = list[dict[str, Any]]


def rows(start: int, stop: int) -> Samples:
    return [
        {"id": number, "text": f"sample {number} é", "ids": list(range(number % 5))} for number in range(start, stop)
    ]


def write_jsonl(path: Path, samples: Samples) -> None:
    path.write_text("".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples), "utf-8")


def write_parquet(path: Path, samples: Samples) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    kinds = arrow.schema([("id", arrow.int64()), ("text", arrow.string()), ("ids", arrow.list_(arrow.int64()))])
    parquet.write_table(arrow.Table.from_pylist(samples, kinds), path, row_group_size=3)


def write_arrow(path: Path, samples: Samples) -> None:
    arrow = pytest.importorskip("pyarrow")
    kinds = arrow.schema([("id", arrow.int64()), ("text", arrow.string()), ("ids", arrow.list_(arrow.int64()))])
    with arrow.ipc.new_file(str(path), kinds) as out:
        for begin in range(0, len(samples), 4):
            out.write_batch(arrow.RecordBatch.from_pylist(samples[begin : begin + 4], kinds))


def write_tar(path: Path, samples: Samples) -> None:
    with tarfile.open(path, "w") as archive:
        for sample in samples:
            for ending, data in (
                ("json", json.dumps(sample).encode()),
                ("cls", str(sample["id"]).encode()),
                ("bin", b"\0"),
            ):
                info = tarfile.TarInfo(f"folder/{sample['id']:05d}.{ending}")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))


def with_lists(sample: Any) -> Any:
    return {name: value.tolist() if hasattr(value, "tolist") else value for name, value in sample.items()}


FORMATS: list[tuple[str, Any, Callable[[Path, Samples], None]]] = [
    ("jsonl", JsonlFiles, write_jsonl),
    ("parquet", ParquetFiles, write_parquet),
    ("arrow", ArrowFiles, write_arrow),
    ("tar", TarFiles, write_tar),
]


@pytest.mark.parametrize("suffix, kind, write", FORMATS, ids=[each[0] for each in FORMATS])
def test_samples_over_shards(tmp_path: Path, suffix: str, kind: Any, write: Any) -> None:
    """Also with an empty shard in the middle, one of a single sample, in another process, and from a folder."""
    for number, (start, stop) in enumerate([(0, 10), (10, 10), (10, 11), (11, 20)]):
        write(tmp_path / f"{number}.{suffix}", rows(start, stop))
    source = kind(str(tmp_path / f"*.{suffix}"))
    assert len(source) == 20
    read = [source[index] for index in range(20)]
    found = [sample["json"] for sample in read] if suffix == "tar" else [with_lists(sample) for sample in read]
    assert found == rows(0, 20)
    if suffix == "tar":
        assert read[12] == {"__key__": "folder/00012", "json": rows(12, 13)[0], "cls": 12, "bin": b"\0"}
    assert str(pickle.loads(pickle.dumps(source))[11]) == str(source[11])
    again = kind(tmp_path)
    assert again.fingerprint == source.fingerprint
    with pytest.raises(IndexError):
        source[20]
    order = source.order_of_pass(3, 1, True)[np.arange(20)].tolist()
    assert sorted(order) == list(range(20)) != order
    assert source.order_of_pass(3, 1, False)[np.arange(20)].tolist() == list(range(20))


def test_local_order_of_row_groups(tmp_path: Path) -> None:
    """Row groups move as a whole, four are mixed, and a process never holds more than it may."""
    for number in range(3):
        write_parquet(tmp_path / f"{number}.parquet", rows(20 * number, 20 * number + 20))
    source = ParquetFiles(tmp_path, cached=5)
    groups = [(file, row // 3) for file in range(3) for row in range(20)]
    order = source.order_of_pass(0, 0, True)[np.arange(60)].tolist()
    assert sorted(order) == list(range(60))
    opened = 0
    reads: list[Any] = []
    for index in order:
        before = set(source._groups)
        source[index]
        reads += set(source._groups) - before
        opened = max(opened, len(source._groups))
    assert opened == 5
    assert len(reads) == len(set(groups)) == 21  # each row group is decoded once in a pass
    wild = ParquetFiles(tmp_path, local_shuffle=1).order_of_pass(0, 0, True)[np.arange(60)].tolist()
    assert len({groups[index] for index in wild[:12]}) > 4 >= len({groups[index] for index in order[:10]})
    blocks = ParquetFiles(tmp_path, local_shuffle=7)._block_ends(7).tolist()
    assert blocks[-1] == 60
    assert {end % 20 in (0, 3, 6, 9, 12, 15, 18) for end in blocks} == {True}


def test_columns(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", rows(0, 4))
    write_arrow(tmp_path / "a.arrow", rows(0, 4))
    for kind in (ParquetFiles, ArrowFiles):
        assert kind(tmp_path, columns=["id"])[3] == {"id": 3}
        with pytest.raises(ConfigError, match=r'columns: "txt" is no column, did you mean "text"\?'):
            kind(tmp_path, columns=["txt"])


def test_index_is_made_once_and_again_after_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []
    real = jsonl_files._starts
    monkeypatch.setattr(jsonl_files, "_starts", lambda path: made.append(path) or real(path))
    path = tmp_path / "a.jsonl"
    write_jsonl(path, rows(0, 3))
    assert len(JsonlFiles(path)) == len(JsonlFiles(path)) == 3
    assert len(made) == 1
    first = JsonlFiles(path).fingerprint
    write_jsonl(path, rows(0, 5))
    assert len(JsonlFiles(path)) == 5
    assert len(made) == 2
    assert JsonlFiles(path).fingerprint != first
    index = tmp_path / "a.jsonl.ftindex"
    index.write_bytes(index.read_bytes()[:-8])  # a damaged one is made anew
    assert JsonlFiles(path)[4] == rows(4, 5)[0]
    assert len(made) == 3
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.jsonl", "a.jsonl.ftindex"]
    elsewhere = JsonlFiles(path, index_dir=tmp_path / "indexes")
    assert len(list((tmp_path / "indexes").glob("*-a.jsonl.ftindex"))) == 1
    assert elsewhere.fingerprint == JsonlFiles(path).fingerprint


def test_index_where_nothing_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In the user's cache; without one it is made at every start, which is said."""
    write_jsonl(tmp_path / "a.jsonl", rows(0, 3))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    real = index_files._write

    def refuse(file: Path, *arguments: Any) -> None:
        if file.parent == tmp_path or (tmp_path / "sealed").exists():
            raise PermissionError(13, "Permission denied")
        real(file, *arguments)

    monkeypatch.setattr(index_files, "_write", refuse)
    assert JsonlFiles(tmp_path / "a.jsonl")[2] == rows(2, 3)[0]
    assert len(list((tmp_path / "cache/flextrain/index").glob("*-a.jsonl.ftindex"))) == 1
    (tmp_path / "sealed").touch()
    write_jsonl(tmp_path / "a.jsonl", rows(0, 4))
    made, make = [], jsonl_files._starts
    monkeypatch.setattr(jsonl_files, "_starts", lambda path: made.append(path) or make(path))
    source = JsonlFiles(tmp_path / "a.jsonl")
    assert len(source) == 4
    assert source[3] == rows(3, 4)[0]
    assert caplog.text.count("its index is not kept") == len(made) == 1


def test_two_files_of_one_name(tmp_path: Path) -> None:
    """Each has its own index in the folder of indexes."""
    for folder, count in (("a", 3), ("b", 7)):
        (tmp_path / folder).mkdir()
        write_jsonl(tmp_path / folder / "x.jsonl", rows(0, count))
    source = JsonlFiles([str(tmp_path / "a/x.jsonl"), str(tmp_path / "b/x.jsonl")], index_dir=tmp_path / "index")
    assert [source[index]["id"] for index in range(10)] == [0, 1, 2, 0, 1, 2, 3, 4, 5, 6]
    assert len(list((tmp_path / "index").iterdir())) == 2


def test_lines_of_all_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blank lines, no line end at the end, Windows' line ends, lines over the borders of chunks."""
    monkeypatch.setattr(jsonl_files, "_CHUNK", 7)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\n\n{"a": 1}\r\n  \n\t{"a": 2}\n\n"\xc3\xa9"\n   \n[3]')
    source = JsonlFiles(path)
    assert [source[index] for index in range(len(source))] == [{"a": 1}, {"a": 2}, "é", [3]]


def test_damaged_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": "\xff"}\n{"a": \n')
    source = JsonlFiles(path)
    assert source[0] == {"a": 1}
    with pytest.raises(DataError, match=r"a.jsonl: sample 1: cannot be read, byte 16 of the file is not UTF-8"):
        source[1]
    with pytest.raises(DataError, match=r"a.jsonl: sample 2: cannot be read, the line at byte 20 is no JSON"):
        source[2]
    path.write_bytes(b'{"a": 1}\n')  # after it was indexed
    with pytest.raises(DataError, match="has become shorter since it was indexed"):
        source[2]
    (tmp_path / "b.jsonl").write_bytes(b"\x1f\x8b\x08\x00compressed")
    with pytest.raises(DataError, match=r"b.jsonl: is compressed, .* decompress it"):
        JsonlFiles(tmp_path / "b.jsonl")


def test_truncated_archives(tmp_path: Path) -> None:
    """Wherever the file is cut off in a member, this is said; the zeros at the end may be missing."""
    whole = tmp_path / "a.tar"
    write_tar(whole, rows(0, 4))
    data = whole.read_bytes()
    members = 4 * 3 * 1024  # a block for the header and one for the contents of each
    assert data[members - 1024]
    assert not data[members:].strip(b"\0")
    for size in (members - 1024 + 700, members - 511, members - 1024 + 100, 5 * 1024 + 513, 300):
        cut = tmp_path / f"{size}.tar"
        cut.write_bytes(data[:size])
        with pytest.raises(DataError, match=rf"{size}.tar: is no whole tar archive"):
            TarFiles(cut)
    (tmp_path / "short.tar").write_bytes(data[:members])
    assert len(TarFiles(tmp_path / "short.tar")) == 4
    (tmp_path / "text.tar").write_bytes(b"no archive at all" * 100)
    with pytest.raises(DataError, match="is no whole tar archive"):
        TarFiles(tmp_path / "text.tar")
    with tarfile.open(tmp_path / "twice.tar", "w") as archive:
        for _ in range(2):
            archive.addfile(tarfile.TarInfo("a.txt"), io.BytesIO())
    with pytest.raises(DataError, match="a.txt is there twice"):
        TarFiles(tmp_path / "twice.tar")


def test_a_link_in_an_archive_is_no_sample_that_is_left_out(tmp_path: Path) -> None:
    """Equal files that are linked are packed once by some programs: the second one was missing, silently."""
    (tmp_path / "1.txt").write_text("one")
    (tmp_path / "2.txt").hardlink_to(tmp_path / "1.txt")
    with tarfile.open(tmp_path / "links.tar", "w") as archive:
        for name in ("1.txt", "2.txt"):
            archive.add(tmp_path / name, name)
    with pytest.raises(DataError, match=r"links.tar: is no whole tar archive, 2.txt is a link or no file"):
        TarFiles(tmp_path / "links.tar")


def test_an_archive_behind_the_end_of_another(tmp_path: Path) -> None:
    """As ``cat`` joins them; readers of tar files stop at the first end, and nobody would miss the samples behind it."""
    for number in range(2):
        write_tar(tmp_path / f"{number}.tar", rows(2 * number, 2 * number + 2))
    first, second = ((tmp_path / f"{number}.tar").read_bytes() for number in range(2))
    both = tmp_path / "both.tar"
    both.write_bytes(first + second)
    with pytest.raises(
        DataError,
        match=rf"both.tar: has more behind its end, at byte {len(first)}; give archives that were joined one by one",
    ):
        TarFiles(both)
    both.write_bytes(first + bytes(2**20))
    assert len(TarFiles(both)) == 2


def test_long_names_and_folders_in_archives(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    names = [
        "x" * 150 + "/1.txt",
        "x" * 150 + "/1.seg.txt",
        "é/2.txt",
        "._mac",
        "README",
        "dir.d/3.txt",
        "dir.d/3.json",
    ]
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        folder = tarfile.TarInfo("dir.d")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = 1
            archive.addfile(info, io.BytesIO(b"7"))
    source = TarFiles(path)
    assert [source[index] for index in range(len(source))] == [
        {"__key__": "x" * 150 + "/1", "txt": "7", "seg.txt": "7"},
        {"__key__": "é/2", "txt": "7"},
        {"__key__": "dir.d/3", "txt": "7", "json": 7},
    ]
    assert TarFiles(path, decode=False)[2]["json"] == b"7"


@pytest.mark.parametrize("kind", [ParquetFiles, ArrowFiles])
def test_damaged_tables(tmp_path: Path, kind: Any) -> None:
    pytest.importorskip("pyarrow")
    path = tmp_path / f"a{kind.suffixes[0]}"
    path.write_bytes(b"")
    with pytest.raises(DataError, match=rf"{path.name}: cannot be read, ") as error:
        kind(path)
    assert "\n" not in str(error.value)
    (write_parquet if kind is ParquetFiles else write_arrow)(path, rows(0, 9))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=rf"{path.name}: cannot be read, "):
        kind(path)


def test_a_stream_of_record_batches(tmp_path: Path) -> None:
    """As Hugging Face's datasets keeps its data."""
    arrow = pytest.importorskip("pyarrow")
    batches = [arrow.RecordBatch.from_pylist(rows(at, at + 3)) for at in (0, 3, 6)]
    with arrow.ipc.new_stream(str(tmp_path / "a.arrow"), batches[0].schema) as out:
        for batch in batches:
            out.write_batch(batch)
    source = ArrowFiles(tmp_path / "a.arrow")
    assert [with_lists(source[index]) for index in range(len(source))] == rows(0, 9)


def test_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").touch()
    for kind in (ParquetFiles, ArrowFiles):
        with pytest.raises(ConfigError, match=rf"{kind.__name__}: needs pyarrow, pip install flextrain\[data\]"):
            kind(tmp_path / "a.parquet")


# Token files


def test_documents_of_token_files(tmp_path: Path) -> None:
    first, second = np.array([5, 6, 0, 7, 0, 0, 8], np.uint16), np.array([9, 0], np.uint16)
    first.tofile(tmp_path / "a.bin")
    second.tofile(tmp_path / "b.bin")
    (tmp_path / "c.bin").touch()  # an empty shard
    by_token = TokenFiles(tmp_path, end_token=0)
    documents = [[5, 6, 0], [7, 0], [0], [8], [9, 0]]
    assert [by_token[index]["input_ids"].tolist() for index in range(len(by_token))] == documents
    assert by_token[0]["input_ids"].dtype is torch.int64
    assert by_token.lengths()[:].tolist() == [3, 2, 1, 1, 2]
    assert by_token.lengths()[2:5].tolist() == [1, 1, 2]
    for start in range(10):
        assert by_token.span(start, 9).tolist() == [5, 6, 0, 7, 0, 0, 8, 9, 0][start:] if start < 9 else True
    whole = TokenFiles(tmp_path)
    assert [len(whole[index]["input_ids"]) for index in range(len(whole))] == [7, 2]
    for name, ends in (("a", [3, 7]), ("b", [2]), ("c", [])):
        np.save(tmp_path / f"{name}.bin.ends.npy", np.array(ends, np.int64))
    beside = TokenFiles([str(tmp_path / "a.bin"), str(tmp_path / "b.bin")], ends=".ends.npy")
    assert [beside[index]["input_ids"].tolist() for index in range(3)] == [[5, 6, 0], [7, 0, 0, 8], [9, 0]]
    np.save(tmp_path / "b.bin.ends.npy", np.array([3]))
    with pytest.raises(DataError, match=r"b.bin.ends.npy: its last end is 3, and b.bin has 2 tokens"):
        TokenFiles(tmp_path / "b.bin", ends=".ends.npy")


def test_types_of_token_files(tmp_path: Path) -> None:
    np.array([1, 70_000], np.uint32).tofile(tmp_path / "a.bin")
    np.save(tmp_path / "b.npy", np.array([3, 4], np.uint32))
    assert TokenFiles(tmp_path, dtype="uint32").span(0, 4).tolist() == [1, 70_000, 3, 4]
    (tmp_path / "c.bin").write_bytes(bytes(1024) + np.array([7], np.uint16).tobytes())
    assert TokenFiles(tmp_path / "c.bin", skip_bytes=1024).span(0, 1).tolist() == [7]
    (tmp_path / "odd.bin").write_bytes(b"12345")
    with pytest.raises(DataError, match=r"odd.bin: 5 bytes are no multiple of 2, the size of uint16"):
        TokenFiles(tmp_path / "odd.bin")
    np.save(tmp_path / "floats.npy", np.zeros(3))
    with pytest.raises(DataError, match=r"floats.npy: holds float64 of shape \(3,\)"):
        TokenFiles(tmp_path / "floats.npy")


def test_vocabulary(tmp_path: Path) -> None:
    np.array([1, 2, 50_000], np.uint16).tofile(tmp_path / "a.bin")
    with pytest.raises(ConfigError, match=r"vocab_size: 128256 is more than the 65536 tokens that uint16 of a.bin"):
        TokenFiles(tmp_path / "a.bin", vocab_size=128_256)
    assert len(TokenFiles(tmp_path / "a.bin", vocab_size=65_536)) == 1
    source = TokenFiles(tmp_path / "a.bin", vocab_size=32_000)
    for read in (lambda: source[0], lambda: source.span(1, 3)):
        with pytest.raises(DataError, match=r"a.bin: .*token 50000 at 2 is not below vocab_size=32000"):
            read()


# Files by name


def test_files_that_are_named_twice(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", rows(0, 2))
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "a.jsonl")
    with pytest.raises(ConfigError, match=r"JsonlFiles.paths: names .*a.jsonl twice"):
        JsonlFiles([str(tmp_path / "a.jsonl"), str(tmp_path / "a*.jsonl")])
    with pytest.raises(ConfigError, match=r"names .*link.jsonl and .*a.jsonl, which are one file twice"):
        JsonlFiles(str(tmp_path / "*.jsonl"))


def test_relative_patterns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").mkdir()
    write_jsonl(tmp_path / "x/a.jsonl", rows(0, 2))
    monkeypatch.chdir(tmp_path)
    for paths in ("x", "x/*.jsonl", "**/*.jsonl", Path("x/a.jsonl"), [str(tmp_path / "x/?.jsonl")]):
        assert len(JsonlFiles(paths)) == 2


def test_many_shards_keep_few_files_open(tmp_path: Path) -> None:
    for number in range(140):
        write_jsonl(tmp_path / f"{number:03d}.jsonl", rows(number, number + 1))
    source = JsonlFiles(tmp_path, index_dir=tmp_path / "index")
    before = len(list(Path("/proc/self/fd").iterdir()))
    assert [source[index]["id"] for index in range(140)] == list(range(140))
    assert len(list(Path("/proc/self/fd").iterdir())) - before <= 128


def times_ten(sample: Any, by: int = 10) -> Any:
    return sample["id"] * by


def test_transform(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", rows(0, 3))
    assert JsonlFiles(tmp_path, transform=times_ten)[2] == 20
    assert JsonlFiles(tmp_path, transform=dict(type=times_ten, by=3))[2] == 6
    with pytest.raises(ConfigError, match=r"JsonlFiles.transform: 3 is not allowed, give a function"):
        JsonlFiles(tmp_path, transform=3)


def test_copies_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_jsonl(tmp_path / "a.jsonl", rows(0, 2000))
    write_jsonl(tmp_path / "b.jsonl", rows(0, 2000))
    for name in ("c", "d"):
        (tmp_path / f"{name}.jsonl").touch()  # empty ones are no copies
    JsonlFiles(tmp_path)
    assert [record.getMessage().partition(": ")[0] for record in caplog.records] == [
        f"{tmp_path / 'b.jsonl'} and {tmp_path / 'a.jsonl'} have the same size, beginning and end"
    ]


def test_files_that_change_under_a_run(tmp_path: Path) -> None:
    """A process that opens a file later than others must not read other samples."""
    write_jsonl(tmp_path / "a.jsonl", rows(0, 3))
    source = JsonlFiles(tmp_path)
    write_jsonl(tmp_path / "a.jsonl", rows(0, 9))
    with pytest.raises(DataError, match=r"a.jsonl: has \d+ bytes, it had \d+ when this run began"):
        source[0]


def test_files_that_are_written_again_under_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other contents of the same size are refused, also where neither end of the file shows it; the same ones are not."""
    monkeypatch.setattr(file_list, "_END", 4)
    path = tmp_path / "a.jsonl"
    for before, after in (("1\n2\n3\n", "1\n2\n4\n"), ("10\n2\n30\n40\n", "10\n2222\n40\n")):
        path.write_text(before)
        source = JsonlFiles(path)
        os.utime(path, ns=(1, 1))
        assert source[0] == int(before.split()[0])
        opened_later = JsonlFiles(path)
        path.write_text(after)
        with pytest.raises(DataError, match=r"a.jsonl: has other contents than when this run began; start it again"):
            opened_later[0]


def test_byte_order_marks_and_links_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"a": 1}\n2\n')
    assert [JsonlFiles(tmp_path / "a.jsonl")[index] for index in range(2)] == [{"a": 1}, 2]
    (tmp_path / "b.jsonl").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"JsonlFiles.paths: .*b.jsonl is a link to a file that is not there"):
        JsonlFiles(tmp_path / "b.jsonl")
    with pytest.raises(ConfigError, match=r"index_dir: .*a.jsonl is a file, give a folder"):
        JsonlFiles(tmp_path / "a.jsonl", index_dir=tmp_path / "a.jsonl")


def test_reads_that_give_less_than_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call of the system gives at most 2 GiB."""
    path = tmp_path / "a.jsonl"
    path.write_text(f'"{"x" * 100}"\n2\n')
    source, real = JsonlFiles(path), os.pread
    monkeypatch.setattr(os, "pread", lambda file, size, at: real(file, min(size, 7), at))
    assert source[0] == "x" * 100


def test_columns_with_dots_and_structs(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"a.b": [1, 2], "s": [{"x": 1}, {"x": None}], "f": [[0.5], None]})
    parquet.write_table(table, tmp_path / "a.parquet")
    assert with_lists(ParquetFiles(tmp_path, columns=["a.b", "f"])[0]) == {"a.b": 1, "f": [0.5]}
    assert ParquetFiles(tmp_path)[1] == {"a.b": 2, "s": {"x": None}, "f": None}


def write_index_alone(folder: str) -> tuple[int, int]:
    """On each of several processes at the same time: the samples found, and how often this process made an index."""
    made = 0
    real = jsonl_files._starts

    def counted(path: Path) -> Any:
        nonlocal made
        made += 1
        return real(path)

    jsonl_files._starts = counted
    try:
        return len(JsonlFiles(folder)), made
    finally:
        jsonl_files._starts = real


@pytest.mark.distributed
def test_one_process_makes_the_index(tmp_path: Path, workers2: WorkerGroup) -> None:
    for number in range(30):
        write_jsonl(tmp_path / f"{number}.jsonl", rows(0, 50))
    found = workers2.run(write_index_alone, str(tmp_path))
    assert [count for count, _ in found] == [1500, 1500]
    assert sum(made for _, made in found) == 30


class Opened(torch.utils.data.Dataset[Any]):
    """Says which object the open file of a source is, in the process that reads."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        return id(self.source.opened(0))


@pytest.mark.processes
def test_workers_share_no_open_file(tmp_path: Path) -> None:
    """One that was forked off would move the position of its parent's."""
    write_jsonl(tmp_path / "a.jsonl", rows(0, 3))
    dataset = Opened(JsonlFiles(tmp_path))
    kept = dataset.source.opened(0)  # alive in the worker too, where another file could get its address otherwise
    (there,) = torch.utils.data.DataLoader(dataset, num_workers=1, batch_size=None, multiprocessing_context="fork")
    assert there != id(kept) == dataset[0]
