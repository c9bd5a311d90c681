"""`flextrain checkpoint`: what it says, for people and for machines, and its exit status."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from flextrain.cli import main
from flextrain.commands.output import human_size
from flextrain.core.checkpoint import Checkpoint, directory, mark_latest, save_checkpoint
from flextrain.core.checkpoint.compare import compare, difference_of

from ..runner.training import make_runner
from .test_export import trained

Capture = pytest.CaptureFixture[str]


def run(capsys: Capture, *arguments: object, status: int = 0) -> str:
    assert main(["checkpoint", *map(str, arguments)]) == status
    captured = capsys.readouterr()
    assert not captured.err
    return captured.out


def said_no(capsys: Capture, *arguments: object) -> str:
    """What is said when a command cannot do what it is asked for."""
    assert main(["checkpoint", *map(str, arguments)]) == 2
    out, error = capsys.readouterr()
    assert not out
    assert error.count("\n") == 1
    return error


def run_json(capsys: Capture, *arguments: object, status: int = 0) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(run(capsys, *arguments, "--json", status=status), parse_constant=refuse)


def state(**changes: Any) -> dict[str, Any]:
    return {
        "model.weight": torch.arange(6.0).view(2, 3),
        "model.bias": torch.zeros(3),
        "optim.state.weight.exp_avg": torch.ones(2, 3),
        "other": torch.tensor(1),
        "loop": {"epoch": 1, "iter": 7},
        "best": -math.inf,
        **changes,
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return save_checkpoint(tmp_path / "a", state(), written_by={"strategy": "Some"})


# ls


def test_ls_of_a_run(tmp_path: Path, capsys: Capture) -> None:
    trained(tmp_path, default_hooks=dict(checkpoint=dict(interval=1)))
    capsys.readouterr()
    first, second = run_json(capsys, "ls", tmp_path)
    assert (first["name"], first["epoch"], first["iter"], first["latest"]) == ("epoch_1", 1, 2, False)
    assert (second["name"], second["epoch"], second["iter"], second["latest"]) == ("epoch_2", 2, 4, True)
    assert (second["strategy"], second["processes"], second["damage"]) == ("SingleDeviceStrategy", 1, None)
    assert second["bytes"] == sum(file.stat().st_size for file in (tmp_path / "epoch_2").iterdir())
    text = run(capsys, "ls", tmp_path)
    line = next(line for line in text.splitlines() if "epoch_2" in line)
    assert all(word in line for word in ("SingleDeviceStrategy", "latest", "kB", second["time"].replace("T", " ")))


def test_ls_marks_the_best_and_the_damaged(tmp_path: Path, path: Path, capsys: Capture) -> None:
    save_checkpoint(tmp_path / "best_loss_epoch_1", {"loop": 3})
    (tmp_path / "no_checkpoint").mkdir()
    (tmp_path / ".hidden.tmp").mkdir()
    mark_latest(path)
    (path / "values.json").write_text("")
    rows = {row["name"]: row for row in run_json(capsys, "ls", tmp_path)}
    assert rows.keys() == {"a", "best_loss_epoch_1"}
    assert rows["best_loss_epoch_1"]["best"]
    assert rows["best_loss_epoch_1"]["time"]
    assert "values.json: has 0 bytes instead of" in rows["a"]["damage"]
    assert "values.json: has 0 bytes instead of" in run(capsys, "ls", tmp_path)


def test_ls_of_nothing(tmp_path: Path, capsys: Capture) -> None:
    assert "has no checkpoints" in run(capsys, "ls", tmp_path)
    assert run_json(capsys, "ls", tmp_path) == []


@pytest.mark.parametrize("arguments", [["ls"], ["show"], ["verify"], ["export", "w.pth"], ["diff", "other"]])
def test_what_is_not_there(tmp_path: Path, capsys: Capture, arguments: list[str]) -> None:
    command, *rest = arguments
    assert f"{tmp_path / 'nowhere'}: does not exist" in said_no(capsys, command, tmp_path / "nowhere", *rest)


def test_ls_of_a_checkpoint_and_of_a_file(path: Path, capsys: Capture) -> None:
    assert f"{path}: is a checkpoint itself, use flextrain checkpoint show" in said_no(capsys, "ls", path)
    assert "values.json: is a file, give a work directory" in said_no(capsys, "ls", path / "values.json")


# show


def test_show(path: Path, capsys: Capture) -> None:
    found = run_json(capsys, "show", path)
    assert found["tensors"]["model.weight"] == {"shape": [2, 3], "dtype": "float32", "bytes": 24, "chunks": 1}
    assert found["totals"] == {
        "model": {"tensors": 2, "elements": 9, "bytes": 36},
        "optimizer": {"tensors": 1, "elements": 6, "bytes": 24},
        "other": {"tensors": 1, "elements": 1, "bytes": 8},
    }
    assert found["values"] == {"loop": {"epoch": 1, "iter": 7}, "best": "-inf"}
    text = run(capsys, "show", path)
    assert all(
        word in text for word in ("model.weight", "2 x 3", "float32", "24 bytes", "optimizer", "scalar", '"iter": 7')
    )


def test_long_names_are_shown_whole(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in dict(FORCE_COLOR="1", TERM="dumb").items():
        monkeypatch.setenv(name, value)
    path = save_checkpoint(tmp_path / "a", {"model." + "x" * 90: torch.ones(1)})
    assert run(capsys, "show", path, "x").count("x") >= 90


def test_names_are_not_broken_in_a_pipe(tmp_path: Path, capsys: Capture) -> None:
    name = "model." + "x" * 200
    assert f"\n{name} " in run(capsys, "show", save_checkpoint(tmp_path / "a", {name: torch.ones(1)}))


def test_show_what_is_not_there(path: Path, capsys: Capture) -> None:
    assert main(["checkpoint", "show", str(path), "model.wieght"]) == 2
    assert capsys.readouterr().err.endswith(
        f'show: "model.wieght" matches no key of {path}, did you mean "model.weight"?\n'
    )
    assert run_json(capsys, "show", path, "model.wieght")["tensors"] == {}


def test_a_run_directory_in_place_of_a_checkpoint(path: Path, capsys: Capture) -> None:
    mark_latest(path)
    assert main(["checkpoint", "show", str(path.parent)]) == 2
    assert capsys.readouterr().err.endswith(f"a folder of checkpoints, give one of them, such as {path}\n")


@pytest.mark.parametrize("command", [["show"], ["verify"], ["export", "w.pth"], ["diff", "other"]])
def test_the_file_latest_in_place_of_a_checkpoint(path: Path, capsys: Capture, command: list[str]) -> None:
    mark_latest(path)
    name, *rest = command
    said = said_no(capsys, name, path.parent / "latest", *rest)
    assert f"latest: is no checkpoint, but the name of one, give {path}" in said


@pytest.mark.parametrize("pattern, keys", [("*.bias", ["model.bias"]), ("exp_avg", ["optim.state.weight.exp_avg"])])
def test_show_what_matches(path: Path, capsys: Capture, pattern: str, keys: list[str]) -> None:
    found = run_json(capsys, "show", path, pattern)
    assert list(found["tensors"]) == keys
    assert found["values"] == {}
    text = run(capsys, "show", path, pattern)
    assert keys[0] in text
    assert "model.weight" not in text


def test_show_a_file_of_weights(tmp_path: Path, capsys: Capture) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pth")
    assert list(run_json(capsys, "show", tmp_path / "w.pth")["tensors"]) == ["model.w"]


# verify


def test_verify(path: Path, capsys: Capture) -> None:
    assert run_json(capsys, "verify", path) == {"path": str(path), "ok": True, "damages": [], "nonfinite": []}
    assert "is complete" in run(capsys, "verify", path)


def rename_tensor(path: Path) -> None:
    file = path / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes().replace(b"model.bias", b"model.bAis"))


def flip_a_bit(path: Path) -> None:
    content = bytearray((path / "rank-00000.safetensors").read_bytes())
    content[-1] ^= 1
    (path / "rank-00000.safetensors").write_bytes(content)


def other_shape(path: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["tensors"]["model.weight"]["shape"] = [3, 2]
    del manifest["xxh3"]
    directory.seal(path, json.dumps(manifest).encode())


@pytest.mark.parametrize(
    "damage, says",
    [
        (rename_tensor, "rank-00000.safetensors"),
        (flip_a_bit, "rank-00000.safetensors: is damaged, its checksum is"),
        (other_shape, "rank-00000.safetensors: model.weight is F32 (2, 3) instead of F32 (3, 2)"),
        (lambda path: (path / "rank-00000.safetensors").write_bytes(b"x"), "rank-00000.safetensors: has 1 bytes instead"),
        (lambda path: (path / "values.json").unlink(), "values.json: is missing"),
    ],
)  # fmt: skip
def test_verify_names_what_is_damaged(path: Path, capsys: Capture, damage: Any, says: str) -> None:
    damage(path)
    found = run_json(capsys, "verify", path, status=1)
    assert not found["ok"]
    assert says in found["damages"][0]
    text = run(capsys, "verify", path, status=1)
    assert says in text
    assert "is damaged" in text


def test_verify_what_is_no_checkpoint(tmp_path: Path, capsys: Capture) -> None:
    mark_latest(save_checkpoint(tmp_path / "a", state()))
    for options in ([], ["--json"]):
        error = said_no(capsys, "verify", tmp_path, *options)
        assert error.endswith(f"a folder of checkpoints, give one of them, such as {tmp_path / 'a'}\n")
    (tmp_path / "w.pth").touch()
    assert "w.pth: is not a complete checkpoint" in said_no(capsys, "verify", tmp_path / "w.pth")


# export


def test_export(tmp_path: Path, path: Path, capsys: Capture) -> None:
    out = tmp_path / "w.safetensors"
    written = run_json(capsys, "export", path, out, "--dtype", "bfloat16")
    assert written == [{"path": str(out), "bytes": out.stat().st_size}]
    assert load_file(out)["weight"].dtype is torch.bfloat16
    text = run(capsys, "export", path, tmp_path / "folder", "--max-shard-size", "24")
    assert "model-00001-of-00002.safetensors" in text
    assert "model.safetensors.index.json" in text


def test_export_replaces_nothing_unless_it_is_told_to(tmp_path: Path, path: Path, capsys: Capture) -> None:
    out = tmp_path / "w.safetensors"
    out.write_text("mine")
    assert "w.safetensors: is there already, give another name, or replace=True (--force)" in said_no(
        capsys, "export", path, out
    )
    assert out.read_text() == "mine"
    run(capsys, "export", path, out, "--force")
    assert load_file(out).keys() == {"weight", "bias"}


def test_damage_is_not_exported_or_compared(tmp_path: Path, path: Path, capsys: Capture) -> None:
    flip_a_bit(path)
    for arguments in (["export", path, tmp_path / "w.pth"], ["diff", path, path]):
        assert main(["checkpoint", *map(str, arguments)]) == 2
        assert "rank-00000.safetensors: is damaged, its checksum is" in capsys.readouterr().err
    assert not (tmp_path / "w.pth").exists()


def test_export_says_what_cannot_be(tmp_path: Path, path: Path, capsys: Capture) -> None:
    assert main(["checkpoint", "export", str(path), str(tmp_path / "w.pth"), "--averaged"]) == 2
    error = capsys.readouterr().err
    assert "holds no averaged weights" in error
    assert error.count("\n") == 1


# diff


def test_diff_of_the_same(path: Path, tmp_path: Path, capsys: Capture) -> None:
    assert "all 7 are equal" in run(capsys, "diff", path, path)
    found = run_json(capsys, "diff", path, path)
    assert found == {"equal": 7, "only_a": [], "only_b": [], "tensors": {}, "values": {}}


def test_diff_of_equal_runs(tmp_path: Path, capsys: Capture) -> None:
    """Times and folders differ between runs of equal numbers; they are compared if it is asked for."""
    for name in "ab":
        make_runner(
            tmp_path / name, train_cfg=dict(max_epochs=1), default_hooks=dict(checkpoint=dict(interval=1))
        ).train()
    paths = (tmp_path / "a" / "epoch_1", tmp_path / "b" / "epoch_1")
    text = run(capsys, "diff", *paths)
    assert "are equal" in text
    assert "not compared: when, where and how fast" in text
    assert "message_hub.info.last_ckpt" in run_json(capsys, "diff", *paths, "--all", status=1)["values"]
    assert "message_hub.info.last_ckpt" in run_json(capsys, "diff", *paths, "last_ckpt", status=1)["values"]


def test_diff(tmp_path: Path, path: Path, capsys: Capture) -> None:
    weight = torch.arange(6.0).view(2, 3)
    weight[1, 2] = 4.0
    changed = state(**{"model.weight": weight, "model.bias": torch.zeros(4), "new": 1})
    changed |= {"optim.state.weight.exp_avg": torch.ones(2, 3).half(), "loop": {"epoch": 1, "iter": 8}}
    del changed["other"]
    other = save_checkpoint(tmp_path / "b", changed)
    found = run_json(capsys, "diff", path, other, status=1)
    assert (found["only_a"], found["only_b"]) == (["other"], ["new"])
    assert found["values"] == {"loop.iter": [7, 8]}
    assert found["tensors"] == {
        "model.weight": {
            "shapes": [[2, 3], [2, 3]],
            "dtypes": ["float32", "float32"],
            "absolute": 1.0,
            "relative": 0.2,
            "count": 1,
        },
        "model.bias": {
            "shapes": [[3], [4]],
            "dtypes": ["float32", "float32"],
            "absolute": None,
            "relative": None,
            "count": None,
        },
        "optim.state.weight.exp_avg": {
            "shapes": [[2, 3], [2, 3]],
            "dtypes": ["float32", "float16"],
            "absolute": 0.0,
            "relative": 0.0,
            "count": 0,
        },
    }
    assert found["equal"] == 2
    text = run(capsys, "diff", path, other, status=1)
    assert all(word in text for word in ("1 of 6", "0.2", "3 | 4", "float32 | float16", "loop.iter", "6 differ, 2 are"))


def test_diff_of_a_part_and_of_what_matches(path: Path, tmp_path: Path, capsys: Capture) -> None:
    changed = state(
        **{"model.bias": torch.ones(3), "model.new": torch.zeros(1), "optim.state.weight.exp_avg": torch.zeros(2, 3)}
    )
    other = save_checkpoint(tmp_path / "b", {**changed, "loop": {"epoch": 2, "iter": 7}})

    def seen(*options: str) -> tuple[list[str], list[str], list[str], int]:
        found = run_json(capsys, "diff", path, other, *options, status=1)
        return list(found["tensors"]), found["only_b"], list(found["values"]), found["equal"]

    assert seen("--part", "model") == (["model.bias"], ["model.new"], [], 1)
    assert seen("--part", "optimizer") == (["optim.state.weight.exp_avg"], [], [], 0)
    assert seen("*.bias") == (["model.bias"], [], [], 0)
    assert seen("loop") == ([], [], ["loop.epoch"], 1)
    assert "all 1 are equal" in run(capsys, "diff", path, other, "weight", "--part", "model")
    assert f'"model.bais" matches no key of {path} or {other}, did you mean "model.bias"?' in said_no(
        capsys, "diff", path, other, "model.bais"
    )


def test_diff_of_what_is_not_there(path: Path, capsys: Capture) -> None:
    assert main(["checkpoint", "diff", str(path), "nothing"]) == 2
    assert "nothing: does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(
    "a, b, expected",
    [
        ([1.0, math.nan, math.inf], [1.0, math.nan, math.inf], (0.0, 0.0, 0)),
        ([1.0, 2.0], [1.0, math.nan], (math.inf, math.inf, 1)),
        ([math.inf, 2.0], [-math.inf, 3.0], (math.inf, math.inf, 2)),
        ([0.0, 100.0], [0.1, 101.0], (1.0, 1.0, 2)),
        ([], [], (0.0, 0.0, 0)),
    ],
)
def test_differences_of_values(a: list[float], b: list[float], expected: tuple[float, float, int]) -> None:
    assert difference_of(torch.tensor(a).double(), torch.tensor(b).double()) == pytest.approx(expected)


def test_differences_of_integers_are_exact() -> None:
    assert difference_of(torch.tensor([2**60]), torch.tensor([2**60 + 1]))[2] == 1
    assert difference_of(torch.tensor([True]), torch.tensor([False])) == (1.0, 1.0, 1)


def test_values_are_compared_by_path(tmp_path: Path) -> None:
    one = save_checkpoint(tmp_path / "a", {"a": {"": [{"b": 1, "c": math.nan}]}, "e": {}, "f": [1, 2]})
    other = save_checkpoint(tmp_path / "b", {"a": {"": [{"b": 1.0, "c": math.nan}]}, "e": {}, "f": [1, 3]})
    found = compare(Checkpoint.open(one), Checkpoint.open(other))
    assert found.values == {"a.0.b": (1, 1.0), "f": ([1, 2], [1, 3])}
    assert found.equal == 2


@pytest.mark.parametrize(
    "size, text",
    [(999, "999 bytes"), (1000, "1.0 kB"), (1_500_000, "1.5 MB"), (10**9, "1.0 GB"), (5 * 10**15, "5000.0 TB")],
)
def test_sizes(size: int, text: str) -> None:
    assert human_size(size) == text
