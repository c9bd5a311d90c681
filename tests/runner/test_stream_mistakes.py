"""Wrong configurations of streams: one line each, with the key, what was given, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flextrain.core.base.errors import FlexTrainError

from .test_elastic import setting
from .training import make_runner

LINES = dict(type="JsonlFiles", paths="lines.jsonl")
TOKENS = dict(type="TokenFiles", paths="tokens.bin")
WHERE = "train_dataloader.dataset"


def packed(**options: Any) -> dict[str, Any]:
    return {"type": "PackedTokens", "source": TOKENS, "length": 4, **options}


def mixed(weights: Any, **options: Any) -> dict[str, Any]:
    return dict(type="Mixture", sources=[LINES, LINES], weights=weights, **options)


def negative(line: int) -> list[int]:
    return [-line, line]


ROWS: dict[str, tuple[Any, str]] = {
    "type": (dict(type="JsonFiles", paths="lines.jsonl"), f'{WHERE}.type: "JsonFiles" is no known dataset, did you mean "JsonlFiles"?'),
    "key": ({**LINES, "path": "x"}, f'{WHERE}.path: unknown key, did you mean "paths"?'),
    "no paths": (dict(type="JsonlFiles"), f"{WHERE}.paths: missing"),
    "no file": ({**LINES, "paths": "line.jsonl"}, f'{WHERE}.paths: no file matches "line.jsonl", did you mean lines.jsonl?'),
    "empty text": ({**LINES, "paths": ""}, f"{WHERE}.paths: an empty text is not allowed"),
    "lines as tokens": ({**TOKENS, "paths": "lines.jsonl"}, f"{WHERE}.paths: lines.jsonl has no token numbers, by its name"),
    "end that is nowhere": ({**TOKENS, "end_token": 999}, f"{WHERE}.end_token: 999 is nowhere in 1 file"),
    "negative tokens": (packed(source=dict(type="JsonlFiles", paths="lines.jsonl", transform=negative)), "document 0 of JsonlFiles has token -1, it must be 0 or more"),
    "index nowhere": ({**LINES, "index_dir": "/proc/x"}, "index_dir: /proc/x is no folder and cannot be made"),
    "a file for a dataset": ("lines.jsonl", f'{WHERE}: "lines.jsonl" is a file, give dict(type="JsonlFiles", paths="lines.jsonl")'),
    "empty list": ({**LINES, "paths": []}, f"{WHERE}.paths: [] is not allowed, give a path, a pattern, or a list"),
    "number for a path": ({**LINES, "paths": [3]}, f"{WHERE}.paths: 3 is not allowed, give a path or a pattern"),
    "URL": ({**LINES, "paths": "s3://bucket/a.jsonl"}, f'{WHERE}.paths: "s3://bucket/a.jsonl" is a URL'),
    "same shard twice": ({**LINES, "paths": ["lines.jsonl", "*.jsonl"]}, f"{WHERE}.paths: names lines.jsonl twice"),
    "folder without files": ({**LINES, "paths": "empty"}, f"{WHERE}.paths: the folder empty has no file *.jsonl or *.ndjson"),
    "only empty shards": ({**LINES, "paths": "nothing.jsonl"}, f"{WHERE}.paths: the 1 files have no samples"),
    "block of no samples": ({**LINES, "local_shuffle": 0}, f"{WHERE}.local_shuffle: 0 is not allowed, give"),
    "transform": ({**LINES, "transform": "no_such_function"}, f'{WHERE}.transform: "no_such_function" is no known function'),
    "transform without type": ({**LINES, "transform": dict(by=2)}, f"{WHERE}.transform: {{'by': 2}} is not allowed, give a function"),
    "dtype": ({**TOKENS, "dtype": "float32"}, f'{WHERE}.dtype: "float32" is not allowed, choose'),
    "odd size": ({**TOKENS, "dtype": "uint32"}, "tokens.bin: 22 bytes are no multiple of 4, the size of uint32"),
    "vocabulary over uint16": ({**TOKENS, "vocab_size": 70_000}, f"{WHERE}.vocab_size: 70000 is more than the 65536 tokens"),
    "end token outside": ({**TOKENS, "end_token": 65_536}, f"{WHERE}.end_token: 65536 is no token of the files"),
    "two ends": ({**TOKENS, "end_token": 0, "ends": ".npy"}, f"{WHERE}.ends: end_token is given too"),
    "ends missing": ({**TOKENS, "ends": ".ends.npy"}, f"{WHERE}.ends: tokens.bin.ends.npy is missing"),
    "negative header": ({**TOKENS, "skip_bytes": -1}, f"{WHERE}.skip_bytes: -1 is not allowed"),
    "length 0": (packed(length=0), f"{WHERE}.length: 0 is not allowed, give"),
    "length missing": (dict(type="PackedTokens", source=TOKENS), f"{WHERE}.length: missing"),
    "longer than everything": (packed(length=12), f"{WHERE}.length: 12 is more than the 11 tokens of all documents"),
    "labels": (packed(labels="shifted"), f'{WHERE}.labels: "shifted" is not allowed, choose "same" or "next"'),
    "padding without a token": (packed(last="pad"), f'{WHERE}.pad_token: missing, last="pad" needs it'),
    "token without padding": (packed(pad_token=0), f'{WHERE}.pad_token: has no effect with last="drop"'),
    "token outside": (packed(end_token=9, vocab_size=8), f"{WHERE}.end_token: 9 is not allowed, give a token from 0 to 7"),
    "the same end twice": (packed(source={**TOKENS, "end_token": 0}, end_token=0), f"{WHERE}.end_token: 0 ends the documents of {WHERE}.source already"),
    "the same end twice in a mixture": (
        packed(source=dict(type="Mixture", sources=[TOKENS, {**TOKENS, "end_token": 0}]), end_token=0),
        f"{WHERE}.end_token: 0 ends the documents of {WHERE}.source.sources[1] already",
    ),
    "source of another type": (packed(source=dict(type="TokenFile", paths="x")), f'{WHERE}.source.type: "TokenFile" is no known dataset, did you mean "TokenFiles"?'),
    "option of the source": (packed(source={**TOKENS, "eos": 0}), f"{WHERE}.source.eos: unknown key"),
    "text for tokens": (packed(source=LINES), "document 0 of JsonlFiles is no list of token numbers but int"),
    "texts for tokens": (packed(source=[{"text": "a"}] * 4), 'document 0 of list has no "input_ids", it has text; give the source a transform that tokenizes'),
    "weight 0": (mixed([1, 0]), f"{WHERE}.weights[1]: 0 is not allowed, give a number above 0; leave the source out"),
    "negative weight": (mixed([-1.0, 2.0]), f"{WHERE}.weights[0]: -1.0 is not allowed"),
    "weight NaN": (mixed([1.0, float("nan")]), f"{WHERE}.weights[1]: nan is not allowed"),
    "infinite weight": (mixed([float("inf"), 1.0]), f"{WHERE}.weights[0]: inf is not allowed"),
    "weights for fewer": (mixed([1.0]), f"{WHERE}.weights: 1 weight for 2 sources"),
    "no sources": (dict(type="Mixture", sources=[]), f"{WHERE}.sources: [] is not allowed"),
    "empty source": (dict(type="Mixture", sources=[LINES, []]), f"{WHERE}.sources[1]: list is empty"),
    "type in a mixture": (dict(type="Mixture", sources=[dict(type="Jsonl", paths="x")]), f'{WHERE}.sources[0].type: "Jsonl" is no known dataset'),
    "pass of 0 samples": (mixed(None, num_samples=0), f"{WHERE}.num_samples: 0 is not allowed"),
    "columns": (dict(type="ParquetFiles", paths="rows.parquet", columns=["ids"]), f'{WHERE}.columns: "ids" is no column, did you mean "id"?'),
    "no columns": (dict(type="ParquetFiles", paths="rows.parquet", columns=[]), f"{WHERE}.columns: [] is not allowed"),
    "no cache": (dict(type="ParquetFiles", paths="rows.parquet", cached=0), f"{WHERE}.cached: 0 is not allowed"),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with files that are right, in which the test runs."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (tmp_path / "lines.jsonl").write_text("1\n2\n3\n")
    (tmp_path / "nothing.jsonl").touch()
    (tmp_path / "empty").mkdir()
    np.arange(11, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    parquet.write_table(pyarrow.table({"id": [1, 2]}), tmp_path / "rows.parquet")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def line_of(build: Callable[[], Any]) -> str:
    with pytest.raises(FlexTrainError) as error:
        build()
    return str(error.value)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("row", ROWS)
def test_one_line(row: str, folder: Path) -> None:
    cfg, start = ROWS[row]
    given = setting(4, 2)
    given["train_dataloader"]["dataset"] = cfg
    line = line_of(lambda: make_runner(str(folder / "run"), **given).train())
    assert line.startswith(start), line
    assert "\n" not in line
