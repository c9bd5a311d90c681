"""Resuming with verify=False: checksums of files with tensors are not compared, and the log says so."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from flextrain.core.base.errors import CheckpointError

from ..runner.training import Net, Samples, make_runner

SAVED = Path(__file__).parent / "data" / "format_1_run"


def resume(folder: Path, **options: Any) -> None:
    make_runner(
        folder,
        model=dict(type=Net, dropout=0.0),
        train_dataloader=dict(batch_size=8, dataset=Samples(24), collate_fn="default_collate"),
        optim_wrapper=dict(optimizer=dict(type="AdamW", lr=0.01)),
        train_cfg=dict(by_epoch=True, max_epochs=2),
        resume=options,
        log_level="INFO",
    ).train()


def test_what_is_not_compared_is_told(tmp_path: Path) -> None:
    path = Path(shutil.copytree(SAVED, tmp_path / "saved"))
    shard = path / "rank-00001.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1  # a bit of a tensor
    shard.write_bytes(content)
    with pytest.raises(CheckpointError, match="rank-00001.safetensors: is damaged, its checksum is"):
        resume(tmp_path / "compared", path=path)
    resume(tmp_path / "not compared", path=path, verify=False)
    (log,) = (tmp_path / "not compared").rglob("*.log")
    assert "verify=False, the checksums of 2 files with tensors (0.000 GiB) are not compared" in log.read_text()
    values = path / "values.json"
    values.write_bytes(values.read_bytes()[:-1] + b" ")
    with pytest.raises(CheckpointError, match="values.json: is damaged, its checksum is"):
        resume(tmp_path / "values", path=path, verify=False)
