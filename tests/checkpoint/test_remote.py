"""Checkpoints in storage that fsspec reaches: in memory, and on a server that speaks S3."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from flextrain.cli import main
from flextrain.core.base.errors import CheckpointError, ConfigError
from flextrain.core.checkpoint import (
    Checkpoint,
    as_path,
    directory,
    find_latest,
    is_checkpoint,
    mark_latest,
    remove_checkpoint,
    save_checkpoint,
)
from flextrain.core.checkpoint.folders import remove_tree
from flextrain.testing import WorkerGroup

from ..runner.training import make_runner, whole_state

pytest.importorskip("upath")


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, str]]:
    """What S3's clients have to be told of a server of this machine, which has a bucket named runs."""
    boto3, moto = pytest.importorskip("boto3"), pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    thread = moto.ThreadedMotoServer(port=0)
    thread.start()
    access = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{thread.get_host_and_port()[1]}",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with pytest.MonkeyPatch.context() as patch:
        _set(patch, access)
        boto3.client("s3").create_bucket(Bucket="runs")
    yield access
    thread.stop()


def _set(patch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for key, value in variables.items():
        patch.setenv(key, value)


@pytest.fixture(params=["memory", "s3"])
def root(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A folder, empty at first."""
    if request.param == "s3":
        _set(monkeypatch, request.getfixturevalue("server"))
        as_path("s3://runs").fs.invalidate_cache()  # type: ignore[attr-defined]
    url = f"{request.param}://runs/a"
    yield url
    remove_tree(as_path(url))


def example(offset: float = 0.0) -> dict[str, Any]:
    return {
        "model.w": torch.arange(24.0).view(2, 3, 4) + offset,
        "model.half": torch.arange(5).to(torch.bfloat16),
        "model.scalar": torch.tensor(3.0),
        "model.empty": torch.empty(0, 3),
        "model.flags": torch.tensor([True, False]),
        "loop": {"iter": 1},
    }


def load_all(path: str) -> dict[str, Tensor]:
    checkpoint = Checkpoint.open(path)
    found = {key: torch.empty(info.shape, dtype=info.dtype) for key, info in checkpoint.tensors.items()}
    checkpoint.load(found)
    return found


def same(found: dict[str, Tensor], expected: dict[str, Any]) -> bool:
    tensors = {key: value for key, value in expected.items() if isinstance(value, Tensor)}
    return found.keys() == tensors.keys() and all(torch.equal(found[key], tensors[key]) for key in tensors)


def test_round_trip(root: str) -> None:
    save_checkpoint(f"{root}/epoch_1", example(), is_latest=True)
    assert is_checkpoint(f"{root}/epoch_1")
    assert str(find_latest(root)) == f"{root}/epoch_1"
    assert same(load_all(f"{root}/epoch_1"), example())
    assert Checkpoint.open(f"{root}/epoch_1").values == {"loop": {"iter": 1}}
    remove_checkpoint(f"{root}/epoch_1")
    assert not is_checkpoint(f"{root}/epoch_1")
    assert not as_path(f"{root}/epoch_1").exists()


def test_the_commands_take_urls(root: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: str) -> tuple[int, Any]:
        status = main(["checkpoint", *arguments, "--json"])
        return status, json.loads(capsys.readouterr().out)

    save_checkpoint(f"{root}/epoch_1", example(), is_latest=True)
    save_checkpoint(f"{root}/epoch_2", example(1.0))
    _, rows = run("ls", root)
    assert [(row["name"], row["iter"], row["latest"]) for row in rows] == [("epoch_1", 1, True), ("epoch_2", 1, False)]
    _, shown = run("show", f"{root}/epoch_1", "model.scalar")
    assert "model.scalar" in json.dumps(shown)
    sound = {"path": f"{root}/epoch_1", "ok": True, "damages": [], "nonfinite": []}
    assert run("verify", f"{root}/epoch_1") == (0, sound)
    status, found = run("diff", f"{root}/epoch_1", f"{root}/epoch_2")
    assert (status, list(found["tensors"])) == (1, ["model.w"])
    run("export", f"{root}/epoch_1", str(tmp_path / "w.safetensors"))
    assert torch.equal(load_file(tmp_path / "w.safetensors")["w"], example()["model.w"])
    shard = as_path(f"{root}/epoch_2/rank-00000.safetensors")
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    status, found = run("verify", f"{root}/epoch_2")
    assert status == 1
    assert "rank-00000.safetensors: is damaged, its checksum is" in found["damages"][0]


def test_one_replaces_another(root: str) -> None:
    save_checkpoint(f"{root}/b", example())
    save_checkpoint(f"{root}/b", example(1.0))
    assert same(load_all(f"{root}/b"), example(1.0))
    assert {path.name for path in as_path(root).iterdir()} == {"b"}


@pytest.mark.parametrize("moved", [0, 1, 2])
def test_a_replacement_that_was_killed_is_carried_on(root: str, moved: int, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(f"{root}/c", example())
    copy, copied = directory._copy, []

    def killed(*paths: Any) -> None:
        if len(copied) == moved:
            raise KeyboardInterrupt
        copied.append(paths)
        copy(*paths)

    with monkeypatch.context() as patch:
        patch.setattr(directory, "_copy", killed)
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(f"{root}/c", example(1.0))
    assert same(load_all(f"{root}/c"), example(1.0))
    assert {path.name for path in as_path(root).iterdir()} == {"c"}


def test_a_save_that_was_killed_is_no_checkpoint(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(directory, "seal", killed)
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(f"{root}/d", example())
    assert not is_checkpoint(f"{root}/d")
    with pytest.raises(CheckpointError, match=r"d: is not a complete checkpoint"):
        Checkpoint.open(f"{root}/d")
    save_checkpoint(f"{root}/d", example())
    assert same(load_all(f"{root}/d"), example())


def test_damage_is_found(root: str) -> None:
    save_checkpoint(f"{root}/e", example())
    shard = as_path(f"{root}/e/rank-00000.safetensors")
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"e/rank-00000.safetensors: is damaged, its checksum is"):
        load_all(f"{root}/e")


def test_latest_names_what_is_there(root: str) -> None:
    save_checkpoint(f"{root}/f", example())
    mark_latest(as_path(f"{root}/f"))
    remove_checkpoint(f"{root}/f")
    with pytest.raises(CheckpointError, match='latest: names "f", which is not a complete checkpoint'):
        find_latest(root)


def test_a_run_saves_there_and_goes_on(root: str, tmp_path: Path) -> None:
    options: dict[str, Any] = dict(default_hooks=dict(checkpoint=dict(interval=1, out_dir=root, max_keep_ckpts=2)))
    expected = make_runner(tmp_path / "whole", train_cfg=dict(max_epochs=4))
    expected.train()
    make_runner(tmp_path / "run", train_cfg=dict(max_epochs=2), **options).train()
    resumed = make_runner(tmp_path / "run", train_cfg=dict(max_epochs=4), resume=True, **options)
    resumed.train()
    assert {path.name for path in as_path(f"{root}/run").iterdir()} == {"epoch_3", "epoch_4", "latest"}
    ours, theirs = (
        {key: value for key, value in whole_state(runner).items() if isinstance(value, Tensor)}
        for runner in (resumed, expected)
    )
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    loaded = make_runner(tmp_path / "loaded", load_from=f"{root}/run/epoch_4", train_cfg=dict(max_epochs=5))
    loaded.train()


def save_sharded(server: dict[str, str], folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        _set(patch, server)
        runner = make_runner(
            folder,
            strategy=dict(type="FSDPStrategy", wrap=["Linear"]),
            train_cfg=dict(max_epochs=1),
            default_hooks=dict(checkpoint=dict(interval=1, out_dir="s3://runs/sharded", async_save=True)),
        )
        runner.train()
        runner.strategy.leave()


@pytest.mark.distributed
def test_two_processes_write_their_parts(
    server: dict[str, str], monkeypatch: pytest.MonkeyPatch, workers2: WorkerGroup, tmp_path: Path
) -> None:
    workers2.run(save_sharded, server, tmp_path / "run")
    _set(monkeypatch, server)
    names = {path.name for path in as_path("s3://runs/sharded/run/epoch_1").iterdir()}
    assert {"rank-00000.safetensors", "rank-00001.safetensors"} < names
    make_runner(tmp_path / "alone", resume="s3://runs/sharded/run/epoch_1", train_cfg=dict(max_epochs=2)).train()


@pytest.fixture
def no_access(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """A URL of a storage that asks for a name and password, which nobody has given."""
    s3fs = pytest.importorskip("s3fs")
    for key in [key for key in os.environ if key.startswith("AWS_")]:
        monkeypatch.delenv(key)
    _set(monkeypatch, {"AWS_EC2_METADATA_DISABLED": "true", "HOME": str(tmp_path)})
    s3fs.S3FileSystem.clear_instance_cache()
    yield "s3://runs/x"
    s3fs.S3FileSystem.clear_instance_cache()


def test_what_the_storage_raises_is_one_line(
    no_access: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    says = "cannot be reached, NoCredentialsError: Unable to locate credentials"
    for read in (find_latest, Checkpoint.open, lambda url: make_runner(tmp_path, load_from=url)):
        with pytest.raises((CheckpointError, ConfigError), match=rf"^{no_access}\S*: {says}$"):
            read(no_access)
    for command in ("ls", "show", "verify"):
        assert main(["checkpoint", command, no_access]) == 2
        assert capsys.readouterr().err == f"flextrain: {no_access}: {says}\n"
    runner = make_runner(tmp_path / "run", default_hooks=dict(checkpoint=dict(out_dir=no_access)))
    with pytest.raises(ConfigError, match=f"^CheckpointHook.out_dir: {no_access}/run: {says}$"):
        runner.train()


def test_a_url_that_cannot_be_reached(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"load_from: |nosuch://x/y: cannot be reached"):
        make_runner(tmp_path, load_from="nosuch://x/y")
    with pytest.raises(ConfigError, match="work_dir: .* is not allowed, logs need a local folder"):
        make_runner("memory://x/y")
