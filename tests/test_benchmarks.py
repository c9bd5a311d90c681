"""The benchmarks run, and what they count (rather than time) is as promised."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def made(name: str, folder: Path, *flags: str) -> tuple[dict[str, Any], str]:
    """The figures of a benchmark in short form, and its table."""
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / f"{name}.py"), *flags, "--out", str(folder)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr
    picture = folder / f"{name}.png"
    assert not picture.exists() or picture.stat().st_size > 0
    return json.loads((folder / f"{name}.json").read_text()), (folder / f"{name}.md").read_text()


def loaded(name: str) -> Any:
    """A benchmark as a module."""
    spec = importlib.util.spec_from_file_location(f"{name}_benchmark", BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.slow
def test_loop_overhead(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    flags = ("--rounds", "1", "--iterations", "80", "--skip-imports", "--only", "flextrain")
    report, table = made("loop_overhead", tmp_path, *flags)
    by_hand, flextrain = report["loops"]
    assert by_hand["reads_per_iteration"] == 0
    # A log line every ten iterations, and at most one read for each: lines of a fast loop are read together.
    assert 0 < flextrain["reads_per_iteration"] <= 0.1
    assert {"added_us", "added_us_stream", "added_us_accumulate"} <= flextrain.keys()
    assert "| flextrain |" in table
    assert (tmp_path / "loop_overhead.png").exists()


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.slow
def test_oversight(tmp_path: Path) -> None:
    report, table = made("oversight", tmp_path, "--rounds", "1", "--iterations", "20")
    rows = report["strategies"]
    assert [(row["name"], row["processes"]) for row in rows] == [("single", 1), ("ddp", 2), ("fsdp", 2)]
    assert all(row["with_us"] > 0 and row["without_us"] > 0 for row in rows)
    assert "| ddp | 2 |" in table


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.distributed
def test_checkpoint(tmp_path: Path) -> None:
    """A save takes next to no memory, and an asynchronous one what this process writes."""
    pytest.importorskip("matplotlib")
    flags = ("--rounds", "1", "--megabytes", "180", "--only", "fsdp", "--folder", str(tmp_path))
    report, table = made("checkpoint", tmp_path, *flags)
    rows = {row["name"]: row for row in report["rows"]}
    assert rows.keys() == {"flextrain", "raw DCP", "torch.save on rank 0"}
    ours, part = rows["flextrain"], report["state_bytes"] / 2
    assert ours["save_bytes"] < 0.1 * part
    assert 0.9 * part < ours["stall_bytes"] < 1.1 * part
    assert report["state_bytes"] < ours["disk_bytes"] < 1.01 * report["state_bytes"]
    assert "| fsdp x2 | flextrain |" in table
    assert (tmp_path / "checkpoint.png").exists()


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.deepspeed
@pytest.mark.distributed
@pytest.mark.usefixtures("async_io")
def test_offloading(tmp_path: Path) -> None:
    """State in files takes less memory, whose pages are the process's own, and trains the same."""
    flags = ("--layers", "12", "--updates", "2", "--folder", str(tmp_path))
    report, table = made("offloading", tmp_path, *flags)
    memory, both = report["layouts"]["memory"], report["layouts"]["both in files"]
    assert both["losses"] == memory["losses"]
    for part in ("training", "save"):
        assert both[part][0] < 0.8 * memory[part][0]
    assert "| both in files |" in table


def test_a_legend_covers_no_bar(tmp_path: Path) -> None:
    """Whatever the figures are: here every bar is as high as the panel."""
    pytest.importorskip("matplotlib")
    module = loaded("strategies")
    figures = dict(by_hand_ms=100.0, flextrain_ms=100.0, by_hand_mib=1000.0, flextrain_mib=1000.0)
    report = {"strategies": [{"name": name, **figures} for name in ("ddp", "fsdp", "zero3")]}
    figure = module.plot(report, tmp_path / "drawn.png")
    (legend,) = [*figure.legends, *(axes.get_legend() for axes in figure.axes if axes.get_legend())]
    box = legend.get_window_extent()
    assert not any(box.overlaps(bar.get_window_extent()) for axes in figure.axes for bar in axes.patches)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("strategy", "kinds", "faults"), [("ddp", ["kill_one", "kill_all", "slow_storage"], 5), ("fsdp", ["stop_one"], 2)]
)
def test_chaos(tmp_path: Path, strategy: str, kinds: list[str], faults: int) -> None:
    """Training that is disturbed several times ends by itself, with the weights of an undisturbed run."""
    report, table = made("chaos", tmp_path, "--faults", str(faults), "--only", strategy, "--kinds", *kinds)
    (run,) = report["runs"]
    assert (run["faults"], run["restarts"], run["status"]) == (faults, faults, 0)
    assert run["is_equal"]
    assert max(run["repeated"]) <= report["interval"]
    assert run["events"]["restarted"] == faults
    assert f"| {strategy} | 0 | {faults} | {faults} |" in table
    assert f"{faults} restarts, of which 0 without a fault" in table
    assert f"| {kinds[-1]} | {run['kinds'][kinds[-1]]} | {run['kinds'][kinds[-1]]} |" in table


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.distributed
def test_sequence_attention(tmp_path: Path) -> None:
    """A ring calls kernels, with few operations beside them, also with documents."""
    report, table = made("sequence_attention", tmp_path, "--length", "1024", "--only", "ring", "ring, documents")
    assert all(row["forward"] < 40 and row["both"] < 100 and row["ms"] > 0 for row in report["rows"])
    assert "| ring, documents |" in table


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.distributed
def test_mesh_memory(tmp_path: Path) -> None:
    """Sharding over two processes leaves half of what is kept, and less than the whole peak."""
    pytest.importorskip("matplotlib")
    report, table = made("mesh_memory", tmp_path, "--only", "one device", "dp2", "tp2")
    one, sharded, divided = report["layouts"]
    assert sharded["kept_mb"] == pytest.approx(one["kept_mb"] / 2, rel=0.01)
    assert sharded["peak_mb"] < 0.7 * one["peak_mb"]
    assert divided["kept_mb"] < 0.95 * one["kept_mb"]
    assert "| tp2 | 2 |" in table
    assert (tmp_path / "mesh_memory.png").exists()


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.slow
def test_streams(tmp_path: Path) -> None:
    report, table = made("streams", tmp_path, "--rounds", "1", "--trials", "1", "--iterations", "100")
    assert len(report["first"]["rows"]) == 8
    assert len(report["iterations"]) == 4
    assert report["first"]["index_mib"] < 8
    assert "| token file, packed |" in table


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.slow
def test_tensor_parallel(tmp_path: Path) -> None:
    report, table = made("tensor_parallel", tmp_path, "--rounds", "1", "--iterations", "50")
    assert all(row[kind] > 0 for row in report["rows"] for kind in ("plain", "local", "dtensor"))
    assert [row["name"].partition(" ")[0] for row in report["rows"]] == ["add", "Linear", "AdamW", "AdamW"]
    assert "| Linear |" in table


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.distributed
def test_llama(tmp_path: Path) -> None:
    """Every contestant makes its steps, in jobs of two processes; what cannot run is a row that says why."""
    pytest.importorskip("transformers")
    names = ["by-hand", "flextrain-tuned", "flextrain-defaults"]
    flags = ["--processes", "2", "--rounds", "1", "--iterations", "2", "--length", "16", "--no-compile"]
    command = [sys.executable, str(BENCHMARKS / "llama.py"), *flags, "--only", *names, "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (report,) = (json.loads(path.read_text()) for path in tmp_path.glob("llama_*.json"))
    assert list(report["rows"]) == names
    for row in report["rows"].values():
        assert row["tokens_per_s"] == pytest.approx(16 / row["seconds"])
        # 6 N + 12 L H T for 64 wide, 2 layers, 16 tokens; N without the input embedding of 512 words.
        block = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 192 + 2 * 64
        operations = 6 * (2 * block + 64 + 512 * 64) + 12 * 2 * 64 * 16
        assert f"{operations / 1e9:.3g} Gflop per token" in report["what"]


@pytest.mark.processes
@pytest.mark.parametrize(
    "said, reason",
    [
        (r"a\ntorch._inductor.exc.InductorError: no compiler\n\nSet TORCH_LOGS\n\n", "torch._inductor.exc.InductorError: no compiler"),
        (r"killed\n\n", "killed"),
        ("", "ended without a word, exit code 3"),
    ],
    ids=["error", "words", "nothing"],
)  # fmt: skip
def test_llama_without_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, reason: str) -> None:
    """A contestant that fails is a row with its reason; the others have their figures."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nprintf '{said}' >&2\nexit 3\n")
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    module = loaded("llama")
    job = module.Job("tiny", 16, 1, 2, "cpu", is_half=False, compiles=False)
    assert module.measured(["by-hand"], job, rounds=1, processes=1) == {"by-hand": reason}
