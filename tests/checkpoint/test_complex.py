"""Complex tensors, such as rotary embeddings: saved as pairs, loaded under every strategy, exported, compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from flextrain import CheckpointError, OptimWrapper, StrategyError
from flextrain.cli import main
from flextrain.core.checkpoint import Checkpoint, FlatShard, export_weights, open_weights, save_checkpoint
from flextrain.core.checkpoint.compare import compare, damages
from flextrain.core.checkpoint.save import save_in_background
from flextrain.testing import WorkerGroup
from flextrain.testing.loop import train
from flextrain.testing.models import SmallModel
from flextrain.testing.sessions import load, save, single_device, started, whole_state

DTYPES = [torch.complex32, torch.complex64, torch.complex128]


def spectrum(dtype: torch.dtype = torch.complex64, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    parts = torch.randn(*(shape or (3, 4)), 2, generator=generator, dtype=torch.float64)
    return torch.view_as_complex(parts).to(dtype)


def states(dtype: torch.dtype) -> dict[str, Tensor]:
    whole = spectrum(dtype)
    return {
        "model.whole": whole,
        "model.scalar": spectrum(dtype, 1)[0],
        "model.empty": torch.empty(0, 3, dtype=dtype),
        "model.transposed": whole.t(),
        "model.rows": whole[1:],
        "model.conjugated": whole.conj(),
        "model.negated": whole.conj().imag,  # torch negates it only when it is read
        "model.pairs": torch.randn(3, 2),  # looks like a stored complex tensor, and is none
    }


def same(found: Tensor, expected: Tensor) -> None:
    assert found.dtype is expected.dtype
    expected = expected.resolve_conj().resolve_neg()
    assert found.shape == expected.shape
    assert np.array_equal(*(part.to(torch.complex128).numpy() for part in (found, expected)))


def load_all(path: Path) -> dict[str, Tensor]:
    checkpoint = open_weights(path)
    template = {key: torch.zeros(info.shape, dtype=info.dtype) for key, info in checkpoint.tensors.items()}
    checkpoint.load(template)
    return template


@pytest.mark.parametrize("in_background", [False, True], ids=["now", "in_background"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_round_trip(tmp_path: Path, dtype: torch.dtype, in_background: bool) -> None:
    state = states(dtype)
    if in_background:
        save_in_background(tmp_path / "a", state).wait()
    else:
        save_checkpoint(tmp_path / "a", state)
    found = load_all(tmp_path / "a")
    for key, tensor in state.items():
        same(found[key], tensor)
    assert list(damages(tmp_path / "a")) == []
    # Any reader of safetensors opens the files.
    with safe_open(tmp_path / "a" / "rank-00000.safetensors", framework="pt") as file:
        assert torch.equal(file.get_tensor("model.whole"), torch.view_as_real(state["model.whole"]))


def test_marks_in_files_of_torch_are_read(tmp_path: Path) -> None:
    """torch saves the memory of a conjugated or negated view as it is, and that it is one beside it."""
    for key, tensor in states(torch.complex64).items():
        torch.save({key.removeprefix("model."): tensor}, tmp_path / "a.pth")
        same(load_all(tmp_path / "a.pth")[key], tensor)


def test_complex_values_are_not_loaded_into_real_ones(tmp_path: Path) -> None:
    """torch would drop the imaginary parts."""
    save_checkpoint(tmp_path / "a", {"model.w": spectrum()})
    with pytest.raises(CheckpointError, match=r"a: model.w is complex64, and float32 has no imaginary parts$"):
        Checkpoint.open(tmp_path / "a").load({"model.w": torch.zeros(3, 4)})


def test_slices_and_other_dtypes(tmp_path: Path) -> None:
    """A range of a flattened tensor is written in chunks; a template may be of another dtype, or a slice too."""
    whole = spectrum(torch.complex64, 5, 3)
    path = save_checkpoint(tmp_path / "a", {"model.w": FlatShard(whole.reshape(-1), torch.Size((5, 3)), 0)})
    other = torch.zeros(5, 3, dtype=torch.complex128)
    slice_of_it = FlatShard(torch.zeros(7, dtype=torch.complex64), torch.Size((5, 3)), 4)
    for template in (other, slice_of_it):
        Checkpoint.open(path).load({"model.w": template})
    same(other, whole.to(torch.complex128))
    same(slice_of_it.to_local(), whole.reshape(-1)[4:11])


def test_nan_is_noticed_in_either_part(tmp_path: Path) -> None:
    for number, value in enumerate((complex(1.0, float("nan")), complex(float("inf"), 0.0))):
        weight = spectrum()
        weight[0, 0] = value
        path = save_checkpoint(tmp_path / str(number), {"model.w": weight}, finite={"model.w"})
        assert Checkpoint.open(path).nonfinite == ("model.w",)
    path = save_checkpoint(tmp_path / "good", {"model.w": spectrum()}, finite={"model.w"})
    assert Checkpoint.open(path).nonfinite == ()


def test_compared(tmp_path: Path) -> None:
    one, other = spectrum(), spectrum()
    other[1, 2] += 3j
    paths = [save_checkpoint(tmp_path / name, {"model.w": w}) for name, w in (("a", one), ("b", other))]
    same_one, differing = (compare(*map(Checkpoint.open, pair)) for pair in (paths[:1] * 2, paths))
    assert not same_one
    (found,) = differing.tensors
    assert (found.count, found.dtypes) == (1, ("complex64", "complex64"))
    assert found.absolute == pytest.approx(3.0)


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(save_checkpoint(tmp_path / "a", {"model.w": spectrum()}))
    assert main(["checkpoint", "show", path]) == 0
    assert "complex64" in capsys.readouterr().out
    assert main(["checkpoint", "verify", path]) == 0
    assert main(["checkpoint", "diff", path, path]) == 0


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_exported_to_pth_and_read_again(tmp_path: Path, dtype: torch.dtype) -> None:
    state = {key: tensor for key, tensor in states(dtype).items() if key != "model.pairs"}
    path = save_checkpoint(tmp_path / "a", state)
    export_weights(path, tmp_path / "w.pth")
    theirs = torch.load(tmp_path / "w.pth", weights_only=True)
    torch.save({name: tensor.clone() for name, tensor in theirs.items()}, tmp_path / "by_torch.pth")
    for found in (load_all(tmp_path / "w.pth"), load_all(tmp_path / "by_torch.pth")):
        for key, tensor in state.items():
            same(found[key], tensor)
            same(theirs[key.removeprefix("model.")], tensor)


def test_exported_to_safetensors(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "a", {"model.w": spectrum()})
    export_weights(path, tmp_path / "w.safetensors")
    try:
        with safe_open(tmp_path / "w.safetensors", framework="pt") as file:
            same(file.get_tensor("w"), spectrum())
    except SafetensorError:
        pytest.skip("this version of safetensors has no complex dtype")
    same(load_all(tmp_path / "w.safetensors")["model.w"], spectrum())
    path = save_checkpoint(tmp_path / "b", {"model.w": spectrum(torch.complex128)})
    with pytest.raises(CheckpointError, match=r"w is complex128, .* safetensors has only complex64; export to .pth"):
        export_weights(path, tmp_path / "w2.safetensors")
    assert not (tmp_path / "w2.safetensors").exists()


@pytest.mark.parametrize(
    "metadata", ['["w"', '[["w"]]', "1", '["w", "pairs"]'], ids=["no_json", "no_names", "no_list", "no_pairs"]
)
def test_damaged_names_of_complex_tensors(tmp_path: Path, metadata: str) -> None:
    from flextrain.core.checkpoint.safetensors_file import SafetensorsFile, write_safetensors

    tensors = {"w": torch.ones(3, 2), "pairs": torch.ones(2, 3)}
    file = tmp_path / "x.safetensors"
    described = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    write_safetensors(file, described, tensors.values(), {"complex": metadata})
    with file.open("rb") as opened, pytest.raises(CheckpointError, match="its header is not valid"):
        SafetensorsFile(file, opened)


# Under every strategy


class Rotary(SmallModel):
    """Rotates pairs of features by a complex buffer, as Llama does, and counts in another."""

    turned: Tensor

    def __init__(self) -> None:
        super().__init__()
        angles = torch.arange(4.0)[:, None] * torch.tensor([1.0, 0.1, 0.01])
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))
        self.register_buffer("turned", torch.zeros(3, dtype=torch.complex64))
        self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, self.num_classes)

    def logits(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(self.layer(x).unflatten(-1, (3, 2)).float().contiguous())
        if self.training and torch.is_grad_enabled():
            self.turned += self.turns[1]
        return self.head(torch.view_as_real(pairs * self.turns[2]).flatten(-2).to(x.dtype))  # type: ignore[index,no-any-return]


class Spectral(SmallModel):
    """Has a complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.ones(4, dtype=torch.complex64))
        self.head = nn.Linear(6, self.num_classes)

    def logits(self, x: Tensor) -> Tensor:
        return self.head(torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=6))  # type: ignore[no-any-return]


STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": dict(type="DDPStrategy"),
    "fsdp": dict(type="FSDPStrategy"),
    **{f"zero{n}": dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=n)) for n in (1, 2, 3)},
}


def adamw() -> OptimWrapper:
    return OptimWrapper(dict(type="AdamW", lr=1e-2))


def trained(session: Any, model: type[SmallModel]) -> dict[str, Any]:
    train(session.strategy, session.model, session.optim, [[model.sample(8, seed=n)] for n in range(2)])
    return whole_state(session.strategy)


def saves_and_others_load(strategy: dict[str, Any], model: type[SmallModel], folder: Path) -> None:
    with started(strategy, adamw(), model) as session:
        state = trained(session, model)
        save(session, folder)
    with single_device(adamw(), model) as session:
        own = trained(session, model)
        load(session, folder)
        loaded = whole_state(session.strategy)
    for key, tensor in state.items():
        if isinstance(tensor, Tensor) and tensor.is_complex():
            same(loaded[key], tensor)
            torch.testing.assert_close(tensor, own[key], rtol=1e-4, atol=1e-5)
    with started(strategy, adamw(), model) as session:
        load(session, folder)
        again = whole_state(session.strategy)
    for key, tensor in state.items():
        if isinstance(tensor, Tensor) and tensor.is_complex():
            same(again[key], tensor)


# DistributedDataParallel sends complex tensors as they are.
needs_complex_gloo = pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.7", reason="gloo of torch 2.6 cannot send complex tensors"
)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("ddp", marks=needs_complex_gloo),
        "fsdp",
        "zero3",
        *(pytest.param(name, marks=pytest.mark.full) for name in ("zero1", "zero2")),
    ],
)
def test_buffers_under_every_strategy(workers2: WorkerGroup, tmp_path: Path, name: str) -> None:
    workers2.run(saves_and_others_load, STRATEGIES[name], Rotary, tmp_path / "epoch_1")


@pytest.mark.distributed
@needs_complex_gloo
def test_a_parameter_under_ddp(workers2: WorkerGroup, tmp_path: Path) -> None:
    workers2.run(saves_and_others_load, STRATEGIES["ddp"], Spectral, tmp_path / "epoch_1")


def is_refused(strategy: dict[str, Any]) -> str:
    with pytest.raises(StrategyError) as caught, started(strategy, adamw(), Spectral):
        pass
    return str(caught.value)


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["fsdp", "zero1", "zero3"])
def test_a_parameter_that_would_be_sharded_is_refused(workers2: WorkerGroup, name: str) -> None:
    says = f"model.filter: is complex64, and {STRATEGIES[name]['type']} shards real parameters only"
    assert all(found.startswith(says) for found in workers2.run(is_refused, STRATEGIES[name]))
