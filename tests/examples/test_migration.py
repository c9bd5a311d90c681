"""Each script of examples/migration/ trains what the script in the other library's interface trains."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from .conftest import RunExample

PEERS = {"mmengine": "mmengine", "lightning": "lightning", "hugging_face": "accelerate", "accelerate": "accelerate"}
"""Pages of docs/migration, with the package that the original script needs."""


def weights(work_dir: Path) -> dict[str, torch.Tensor]:
    return torch.load(work_dir / "weights.pth", weights_only=True)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=pytest.mark.full if name in ("hugging_face", "mmengine") else ()
        )  # transformers imports for seconds
        for name in PEERS
    ],
)
def test_the_script_trains(run_example: RunExample, tmp_path: Path, name: str) -> None:
    if name == "hugging_face":
        pytest.importorskip("transformers")
    done = run_example(f"migration/{name}_flextrain.py", "--epochs", "1")
    assert "Epoch(train) [1]" in done.stdout
    assert weights(tmp_path / "work_dirs" / f"{name}_flextrain")


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("name", PEERS)
def test_the_scripts_train_the_same(run_example: RunExample, tmp_path: Path, name: str) -> None:
    for package in {PEERS[name], "transformers" if name == "hugging_face" else PEERS[name]}:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed, pip install flextrain[bench]")
    run_example(f"migration/{name}_original.py", "--epochs", "2")
    run_example(f"migration/{name}_flextrain.py", "--epochs", "2")
    original, ours = (weights(tmp_path / "work_dirs" / f"{name}_{which}") for which in ("original", "flextrain"))
    assert original.keys() == ours.keys()
    for key, value in original.items():
        torch.testing.assert_close(ours[key], value, rtol=0, atol=1e-5, msg=key)


@pytest.mark.full
@pytest.mark.distributed
def test_the_script_trains_in_two_processes(run_example: RunExample, tmp_path: Path) -> None:
    done = run_example("migration/lightning_flextrain.py", "--epochs", "1", processes=2)
    assert "DDPStrategy on 2 processes" in done.stdout
    assert done.stdout.count("\naccuracy ") == 1
