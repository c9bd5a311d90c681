"""`flextrain checkpoint export --dcp`: what plain torch loads, under several processes, and what is refused."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.torch_version import TorchVersion

from flextrain import CheckpointError, FlexibleRunner
from flextrain.cli import main
from flextrain.core.checkpoint import Checkpoint, export_dcp, export_weights, save_checkpoint
from flextrain.core.checkpoint.load import TensorReader
from flextrain.optim.canonical import torch_items
from flextrain.testing import WorkerGroup

from ..hugging_face.folders import model_of
from ..hugging_face.folders import runner_of as runner_of_transformers

NEEDS_TIES = pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.7", reason="torch 2.6 asks for tied parameters by their last name"
)
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.inner = nn.Linear(5, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mean", torch.arange(5.0))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        hidden = self.frozen(self.inner(self.embed(x))) + self.mean
        return {"loss": nn.functional.cross_entropy(self.head(hidden), y)}


def groups(model: nn.Module) -> list[dict[str, Any]]:
    bias = [p for name, p in model.named_parameters() if name == "inner.bias"]
    rest = [p for name, p in model.named_parameters() if name != "inner.bias" and p.requires_grad]
    return [dict(params=rest), dict(params=bias, weight_decay=0.0)]


def runner_of(folder: Path, epochs: int, **more: Any) -> FlexibleRunner:
    data = [(torch.tensor(i % 7), torch.tensor((i + 1) % 7)) for i in range(14)]
    options = dict(
        model=Net,
        work_dir=folder,
        train_dataloader=dict(
            dataset=data, batch_size=7, sampler=dict(type="DefaultSampler", shuffle=False), collate_fn="default_collate"
        ),
        optim_wrapper=dict(
            optimizer=dict(type="AdamW", lr=0.1, betas=(0.8, 0.9), weight_decay=0.01),
            paramwise_cfg=dict(custom_keys={"inner.bias": dict(decay_mult=0.0)}),
        ),
        train_cfg=dict(max_epochs=epochs),
        log_level="ERROR",
    )
    return FlexibleRunner(**{**options, **more})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    runner_of(folder, 2).train()
    return folder


@pytest.fixture(scope="module")
def checkpoint(run: Path) -> Path:
    return run / "epoch_1"


def weights(checkpoint: Path) -> dict[str, Tensor]:
    export_weights(checkpoint, checkpoint.parent / "whole.pth", replace=True)
    return dict(torch.load(checkpoint.parent / "whole.pth"))


def test_a_script_of_plain_torch_loads_the_weights(checkpoint: Path, tmp_path: Path) -> None:
    files = export_dcp(checkpoint, tmp_path / "dcp")
    assert [file.name for file in files] == ["__0_0.distcp", ".metadata"]
    assert all(file.is_file() for file in files)
    model = Net()
    state = model.state_dict()
    dcp.load(state, checkpoint_id=tmp_path / "dcp")
    expected = weights(checkpoint)
    assert state.keys() == expected.keys()
    for name, tensor in state.items():
        assert torch.equal(tensor, expected[name]), name
    assert model.head.weight is model.embed.weight


def test_under_a_key_and_in_another_dtype(checkpoint: Path, tmp_path: Path) -> None:
    export_dcp(checkpoint, tmp_path / "dcp", key="net", dtype=torch.bfloat16)
    state = {"net": {name: tensor.bfloat16() for name, tensor in Net().state_dict().items()}}
    dcp.load(state, checkpoint_id=tmp_path / "dcp")
    for name, tensor in weights(checkpoint).items():
        assert torch.equal(state["net"][name], tensor.bfloat16())


def sharded(folder: Path) -> dict[str, Tensor]:
    """In each of several processes of plain torch: FSDP2 loads its own parts."""
    model = Net()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    state = get_model_state_dict(model)
    dcp.load({"model": state}, checkpoint_id=folder)
    set_model_state_dict(model, state)
    found = get_model_state_dict(model)
    return {n: (t.full_tensor() if hasattr(t, "full_tensor") else t).clone() for n, t in found.items()}


@pytest.mark.distributed
def test_fsdp_of_plain_torch_loads_the_weights(checkpoint: Path, workers2: WorkerGroup, tmp_path: Path) -> None:
    export_dcp(checkpoint, tmp_path / "dcp", key="model")
    expected = weights(checkpoint)
    for found in workers2.run(sharded, tmp_path / "dcp"):
        for name, tensor in found.items():
            assert torch.equal(tensor, expected[name]), name


@NEEDS_TIES
def test_a_script_of_plain_torch_goes_on_with_the_optimizer(run: Path, checkpoint: Path, tmp_path: Path) -> None:
    export_dcp(checkpoint, tmp_path / "dcp", optimizer=torch_items)
    torch.manual_seed(3)
    model = Net()
    optimizer = torch.optim.AdamW(groups(model), lr=7.0, betas=(0.1, 0.2))
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=FLAT),
    }
    dcp.load(state, checkpoint_id=tmp_path / "dcp")
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=FLAT)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    assert optimizer.param_groups[1]["weight_decay"] == 0.0
    data = [(i % 7, (i + 1) % 7) for i in range(14)]
    for batch in (data[:7], data[7:]):  # the second epoch
        x, y = torch.tensor(batch).T
        model(x, y)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, tensor in weights(run / "epoch_2").items():
        torch.testing.assert_close(model.state_dict()[name], tensor, rtol=1e-6, atol=1e-7)


def continued(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, *, flat: bool) -> torch.optim.Optimizer:
    """What a script of plain torch does with the folder."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
    return optimizer


@pytest.mark.parametrize("flat", [pytest.param(True, id="flat", marks=NEEDS_TIES), pytest.param(False, id="nested")])
@pytest.mark.parametrize("given", ["all", "trained", "two groups"])
def test_scripts_may_give_frozen_parameters_to_their_optimizer(
    checkpoint: Path, tmp_path: Path, flat: bool, given: str
) -> None:
    export_dcp(checkpoint, tmp_path / "dcp", optimizer=torch_items)
    model = Net()
    parameters = dict(model.named_parameters())
    own: list[Any] = [p for p in parameters.values() if given != "trained" or p.requires_grad]
    if given == "two groups":  # frozen ones come first, and torch takes the settings of a group from its first one
        biases = [p for name, p in parameters.items() if name.endswith("bias")]
        own = [
            dict(params=[p for name, p in parameters.items() if name.endswith("weight")][::-1]),
            dict(params=biases, weight_decay=0.3),
        ]
        assert not biases[0].requires_grad
    optimizer = continued(model, torch.optim.AdamW(own, lr=7.0), tmp_path / "dcp", flat=flat)
    saved = Checkpoint.open(checkpoint)
    for name, parameter in parameters.items():
        state = optimizer.state.get(parameter, {})
        assert bool(state) == parameter.requires_grad, name
        for key, value in state.items():
            stored = f"optim.state.{name}.{key}"
            expected = torch.empty_like(value)
            saved.load({stored: expected})
            assert torch.equal(value, expected), stored
    assert [group["lr"] for group in optimizer.param_groups] == [0.1] * len(optimizer.param_groups)
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    assert decays == ([0.01, 0.0] if given == "two groups" else [0.01])


def partly_frozen_llama() -> Any:
    torch.manual_seed(0)
    model = model_of("llama", tie_word_embeddings=True)
    model.model.layers[0].requires_grad_(False)
    return model


def train(folder: Path, strategy: dict[str, Any]) -> None:
    adam = dict(optimizer=dict(type="AdamW", lr=0.01))
    runner = runner_of_transformers(folder, dict(type=partly_frozen_llama), strategy=strategy, optim_wrapper=adam)
    runner.train()
    runner.close()


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.parametrize(
    "strategy",
    [
        dict(type="fsdp", wrap="blocks"),
        pytest.param(dict(type="zero3"), marks=pytest.mark.deepspeed),
        dict(type="mesh", tp=2),
        dict(type="mesh", pp=2),
    ],
    ids=["fsdp", "zero3", "tp2", "pp2"],
)
def test_scripts_load_what_every_strategy_has_saved(
    workers2: WorkerGroup, tmp_path: Path, strategy: dict[str, Any]
) -> None:
    pytest.importorskip("transformers")
    workers2.run(train, tmp_path / "run", strategy)
    saved = Checkpoint.open(tmp_path / "run" / "iter_2")
    export_dcp(saved, tmp_path / "dcp", optimizer=torch_items)
    for flat in (True, False):
        model = partly_frozen_llama()
        optimizer = continued(model, torch.optim.AdamW(model.parameters()), tmp_path / "dcp", flat=flat)
        assert optimizer.param_groups[0]["lr"] == 0.01
        for name, parameter in model.named_parameters():
            assert bool(optimizer.state.get(parameter)) == parameter.requires_grad
            state = {f"optim.state.{name}.{key}": value for key, value in optimizer.state.get(parameter, {}).items()}
            for key, value in {f"model.{name}": parameter.detach(), **state}.items():
                saved.load({key: (expected := torch.empty_like(value))})
                assert torch.equal(value, expected), key


class Unused(Net):
    """A part of it has no gradient in training."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(5, 3)


@NEEDS_TIES
def test_what_had_no_gradient_yet_has_a_state_of_zeros(tmp_path: Path) -> None:
    runner_of(tmp_path / "run", 1, model=Unused).train()
    export_dcp(tmp_path / "run" / "epoch_1", tmp_path / "dcp", optimizer=torch_items)
    model = Unused()
    optimizer = continued(model, torch.optim.AdamW(model.parameters()), tmp_path / "dcp", flat=True)
    assert optimizer.state[model.inner.weight]["step"] == 2
    state = optimizer.state[model.unused.weight]
    assert state["exp_avg"].shape == (3, 5)
    assert not any(value.count_nonzero() for value in state.values())


def test_an_optimizer_before_its_first_update_is_refused(run: Path, tmp_path: Path) -> None:
    source = Checkpoint.open(run / "epoch_1")
    without = {key: entry for key, entry in source.entries.items() if not key.startswith("optim.state.")}
    with pytest.raises(CheckpointError, match="its AdamW has no state before the first update, leave out --optimizer"):
        export_dcp(source.renamed(without), tmp_path / "dcp", optimizer=torch_items)


def test_flextrain_reads_what_it_exports(checkpoint: Path, tmp_path: Path) -> None:
    export_dcp(checkpoint, tmp_path / "dcp", optimizer=torch_items)
    runner = runner_of(
        tmp_path / "run", 1, optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.0)), load_from=tmp_path / "dcp"
    )
    model = runner.train()
    for name, tensor in weights(checkpoint).items():
        assert torch.equal(model.state_dict()[name], tensor), name


def test_one_tensor_at_a_time_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_checkpoint(tmp_path / "big", {f"model.w{i}": torch.full((1000,), float(i)) for i in range(9)})
    given: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    read = TensorReader.read

    def watched(reader: TensorReader, *arguments: Any) -> Tensor:
        tensor = read(reader, *arguments)
        given.append(weakref.ref(tensor))
        alive.append(sum(each() is not None for each in given))
        return tensor

    monkeypatch.setattr(TensorReader, "read", watched)
    export_dcp(path, tmp_path / "dcp")
    assert len(alive) == 9
    assert max(alive) <= 2
    state = {"w5": torch.empty(1000)}
    dcp.load(state, checkpoint_id=tmp_path / "dcp")
    assert state["w5"][0] == 5.0


def test_the_command(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "export", str(checkpoint), str(tmp_path / "dcp"), "--dcp", "--optimizer"]) == 0
    assert ".metadata" in capsys.readouterr().out
    state = {"model": Net().state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "dcp")


def full(folder: Path) -> list[str]:
    (folder / "out").mkdir()
    (folder / "out" / "x").touch()
    return []


def a_file(folder: Path) -> list[str]:
    (folder / "out").touch()
    return []


def test_what_a_kill_has_left_is_replaced(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "dcp" / ".flextrain_export").mkdir(parents=True)
    (tmp_path / "dcp" / ".flextrain_export" / "__0_7.distcp").touch()
    (tmp_path / "dcp" / ".flextrain_export.lock").touch()
    export_dcp(checkpoint, tmp_path / "dcp")
    assert sorted(path.name for path in (tmp_path / "dcp").iterdir()) == [".metadata", "__0_0.distcp"]


def only_weights(folder: Path) -> list[str]:
    torch.save({"w": torch.ones(1)}, folder / "w.pth")
    return ["--optimizer"]


WRONG: dict[str, tuple[Callable[[Path], list[str]], str]] = {
    "a folder with something": (full, "out/x: is there already, give another folder"),
    "a file": (a_file, "out: is a file, give the name of a folder"),
    "a size of shards": (lambda _: ["--max-shard-size", "5GB"], "--max-shard-size has no effect with --dcp"),
    "force": (lambda _: ["--force"], "--force has no effect with --dcp"),
    "the optimizer's key": (
        lambda _: ["--optimizer", "--key", "optimizer"],
        'key: "optimizer" is that of the optimizer',
    ),
    "merged weights": (
        lambda _: ["--optimizer", "--merge"],
        "--optimizer has no effect with --merge, the optimizer has no state of merged weights",
    ),
    "another kind too": (lambda _: ["--hf"], "--hf has no effect with --dcp"),
    "no averages": (lambda _: ["--averaged"], "holds no averaged weights"),
    "weights without an optimizer": (only_weights, "w.pth: holds no state of an optimizer, leave out"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_said_in_one_line(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: str
) -> None:
    prepare, says = WRONG[wrong]
    options = prepare(tmp_path)
    source = tmp_path / "w.pth" if (tmp_path / "w.pth").exists() else checkpoint
    before = sorted(tmp_path.rglob("*"))
    assert main(["checkpoint", "export", str(source), str(tmp_path / "out"), "--dcp", *options]) != 0
    error = capsys.readouterr().err.strip()
    assert says in error
    assert "\n" not in error
    assert sorted(tmp_path.rglob("*")) == before


def test_options_of_dcp_need_it(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "export", str(checkpoint), str(tmp_path / "w.pth"), "--optimizer"]) != 0
    assert "--optimizer has no effect without --dcp" in capsys.readouterr().err


def test_an_optimizer_that_is_not_torchs(checkpoint: Path, tmp_path: Path) -> None:
    source = Checkpoint.open(checkpoint)
    other = source.renamed(source.entries, {**source.values, "optim.group.inner.bias.optimizer": "Lion"})
    with pytest.raises(CheckpointError, match="its optimizer is Lion, and only the state of torch"):
        export_dcp(other, tmp_path / "dcp", optimizer=torch_items)
    assert not list(tmp_path.iterdir())
