"""load_from under every strategy, from every kind of source; checkpoints that DeepSpeed wrote by itself."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from flextrain import CheckpointError, FlexibleRunner
from flextrain.core.checkpoint import open_weights
from flextrain.core.comm import collectives
from flextrain.testing import WorkerGroup
from flextrain.testing.sessions import whole_model

from .test_sources import read, same

State = dict[str, Tensor]
pytestmark = pytest.mark.distributed


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Odd(nn.Module):
    """Sizes that two processes cannot share evenly, a tied weight, frozen ones, buffers of two dtypes."""

    steps: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.blocks = nn.Sequential(Block(5), Block(5))
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.gain = nn.Parameter(torch.ones(1))
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("mean", torch.arange(5.0))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        hidden = self.frozen(self.blocks(self.embedding(x))) * self.gain
        hidden = hidden + self.mean.to(hidden.dtype)
        return {"loss": functional.cross_entropy(self.head(hidden).float(), y)}


def some_weights(seed: int = 5) -> State:
    torch.manual_seed(seed)
    model = Odd()
    model.steps.fill_(seed)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def untied(state: State) -> State:
    return {name: tensor for name, tensor in state.items() if name != "head.weight"}


def runner_of(folder: Path, strategy: dict[str, Any]) -> FlexibleRunner:
    data = torch.utils.data.TensorDataset(torch.arange(7), torch.arange(7))
    return FlexibleRunner(
        model=Odd,
        work_dir=folder,
        strategy=strategy,
        train_dataloader=torch.utils.data.DataLoader(data, batch_size=2),
        optim_wrapper=dict(optimizer=dict(type="AdamW", lr=0.1)),
        train_cfg=dict(max_epochs=1),
        log_level="ERROR",
    )


# Sources


def written(folder: Path) -> dict[str, Path]:
    """The same weights in every form."""
    state = some_weights()
    torch.save(state, folder / "weights.pth")
    torch.save(state, folder / "old.pth", _use_new_zipfile_serialization=False)
    torch.save({"state_dict": state, "meta": {"epoch": 3}}, folder / "mmengine.pth")
    save_file(untied(state), folder / "weights.safetensors")
    folder.joinpath("hf").mkdir()
    names = list(untied(state))
    for number in range(2):
        save_file({name: state[name] for name in names[number::2]}, folder / "hf" / f"part-{number}.safetensors")
    places = {name: f"part-{index % 2}.safetensors" for index, name in enumerate(names)}
    (folder / "hf" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    found = ("weights.pth", "old.pth", "mmengine.pth", "weights.safetensors", "hf")
    return {name: folder / name for name in found}


STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": dict(type="DDPStrategy"),
    "fsdp": dict(type="FSDPStrategy", wrap=["Block"]),
    **{f"zero{stage}": dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=stage)) for stage in range(4)},
}
PARAMETERS = [
    pytest.param(name, marks=[pytest.mark.deepspeed] if name.startswith("zero") else []) for name in STRATEGIES
]


def under(folder: Path, strategy: dict[str, Any], sources: dict[str, Path], other: Path, wrong: Path) -> Any:
    """What each source loads, in a model that held something else before; and what is said of one that does not fit."""
    runner = runner_of(folder, strategy)
    found: dict[str, State] = {}
    for name, path in sources.items():
        runner.load_checkpoint(other, strict=True)
        runner.load_checkpoint(path, strict=True)
        found[name] = {key.removeprefix("model."): tensor for key, tensor in whole_model(runner.strategy).items()}
    with pytest.raises(CheckpointError) as caught:
        runner.load_checkpoint(wrong, strict=True)
    revised = [(r"^encoder\.", ""), ("weigth", "weight")]
    runner.load_checkpoint(wrong, revise_keys=revised)
    partly = {key.removeprefix("model."): tensor for key, tensor in whole_model(runner.strategy).items()}
    runner.strategy.leave()
    return found, str(caught.value), partly


@pytest.mark.parametrize("strategy", PARAMETERS)
def test_every_source_under_every_strategy(workers2: WorkerGroup, tmp_path: Path, strategy: str) -> None:
    if strategy.startswith("zero"):
        pytest.importorskip("deepspeed")
    sources = written(tmp_path)
    torch.save(some_weights(seed=6), tmp_path / "other.pth")
    wrong = {f"encoder.{name}": tensor for name, tensor in some_weights().items()}
    wrong["encoder.gain"] = torch.zeros(4)
    wrong["encoder.frozen.weigth"] = wrong.pop("encoder.frozen.weight")
    torch.save(wrong, tmp_path / "wrong.pth")
    for found, says, partly in workers2.run(
        under, tmp_path / "run", STRATEGIES[strategy], sources, tmp_path / "other.pth", tmp_path / "wrong.pth"
    ):
        assert found.keys() == sources.keys()
        for state in found.values():
            same(state, untied(some_weights()))
        assert "wrong.pth: does not fit the model: missing " in says
        assert "gain (like encoder.gain)" in says
        assert "frozen.bias (like encoder.frozen.bias)" in says
        assert "unexpected encoder." in says
        assert "encoder.embedding.weight (like embedding.weight)" in says
        same(partly, {**untied(some_weights()), "gain": some_weights(6)["gain"]})


# DeepSpeed's own checkpoints


def save_with_deepspeed(folder: Path, stage: int, half: bool) -> None:
    """Train a little and save as DeepSpeed does; what its own tool makes of it goes beside it."""
    import deepspeed
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    from flextrain.strategies.deepspeed.compiling import without_shared_memory
    from flextrain.strategies.deepspeed.engine_internals import forget_process_groups

    with without_shared_memory():
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    torch.manual_seed(3)
    model = Odd()
    many = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    few = [p for p in model.parameters() if p.requires_grad and p.dim() == 1]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": half},
    }
    optimizer = torch.optim.AdamW([dict(params=many), dict(params=few, weight_decay=0.0)], lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for step in range(3):
        x = torch.tensor([0, 1 + step]) + dist.get_rank()
        engine.backward(engine(x, x.flip(0))["loss"])
        engine.step()
    engine.save_checkpoint(str(folder), client_state={"note": [1, "x"]})
    if dist.get_rank() == 0 and stage:
        state = get_fp32_state_dict_from_zero_checkpoint(str(folder))
        torch.save({name: tensor.clone() for name, tensor in state.items()}, folder.with_suffix(".pth"))
    elif dist.get_rank() == 0:
        state = engine.module.state_dict()
        torch.save({name: tensor.clone() for name, tensor in state.items()}, folder.with_suffix(".pth"))
    dist.barrier()
    engine.destroy()
    forget_process_groups()
    collectives.destroy_process_group()


@pytest.fixture(params=[(stage, half) for stage in range(4) for half in (False, True)], ids=str)
def deepspeed_checkpoint(request: pytest.FixtureRequest, workers2: WorkerGroup, tmp_path: Path) -> Path:
    pytest.importorskip("deepspeed")
    workers2.run(save_with_deepspeed, tmp_path / "ds", *request.param)
    return tmp_path / "ds"


@pytest.mark.deepspeed
def test_deepspeeds_checkpoint_as_its_own_tool_reads_it(deepspeed_checkpoint: Path) -> None:
    expected = torch.load(deepspeed_checkpoint.with_suffix(".pth"))
    found = read(deepspeed_checkpoint)
    # Under stage 1 the tool loses what is frozen.
    lost = {"frozen.weight", "frozen.bias"} - expected.keys()
    assert found.keys() - expected.keys() == lost
    assert found.keys() == some_weights().keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name].double(), tensor.double()), name
        if name in dict(Odd().named_parameters()) and "frozen" not in name:
            assert found[name].dtype is tensor.dtype
    tag = deepspeed_checkpoint / (deepspeed_checkpoint / "latest").read_text()
    same(read(tag), found)
    told = open_weights(tag).not_read
    is_half = found["gain"].dtype is torch.bfloat16  # as of stage 0, whose masters have no names
    assert told == (("optimizer (with float32 masters, which have no names there)",) if is_half else ())


def load_foreign(folder: Path, strategy: dict[str, Any], path: Path) -> State:
    runner = runner_of(folder, strategy)
    runner.load_checkpoint(path, strict=True)
    found = {key.removeprefix("model."): tensor for key, tensor in whole_model(runner.strategy).items()}
    runner.strategy.leave()
    return found


@pytest.mark.deepspeed
@pytest.mark.parametrize("stage, strategy", [(2, "zero3"), (3, "fsdp")])
def test_deepspeeds_checkpoint_under_other_strategies(
    workers2: WorkerGroup, tmp_path: Path, stage: int, strategy: str
) -> None:
    pytest.importorskip("deepspeed")
    workers2.run(save_with_deepspeed, tmp_path / "ds", stage, False)
    expected = untied(read(tmp_path / "ds"))
    for found in workers2.run(load_foreign, tmp_path / "run", STRATEGIES[strategy], tmp_path / "ds"):
        same(found, expected)


@pytest.mark.deepspeed
@pytest.mark.parametrize("stage", [2, 3])
def test_a_universal_checkpoint_has_the_same_masters(workers2: WorkerGroup, tmp_path: Path, stage: int) -> None:
    pytest.importorskip("deepspeed")
    from deepspeed.checkpoint import ds_to_universal

    workers2.run(save_with_deepspeed, tmp_path / "ds", stage, True)
    folders = dict(input_folder=str(tmp_path / "ds" / "global_step3"), output_folder=str(tmp_path / "universal"))
    how = dict(num_extract_workers=1, num_merge_workers=1, keep_temp_folder=False, strict=True)
    ds_to_universal.main(argparse.Namespace(**folders, **how, inject_missing_state=True))
    same(read(tmp_path / "universal"), read(tmp_path / "ds"))
    if stage == 2:
        assert open_weights(tmp_path / "ds").not_read == open_weights(tmp_path / "universal").not_read == ()
        shutil.rmtree(tmp_path / "universal" / "zero")
        (line,) = open_weights(tmp_path / "universal").not_read
        assert line == "float32 masters (files of optimizer states are missing)"


def remove(pattern: str) -> Callable[[Path], None]:
    return lambda folder: next(iter(sorted(folder.glob(pattern)))).unlink()


def one_more(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).touch()


@pytest.mark.deepspeed
@pytest.mark.parametrize(
    "damage, says",
    [
        (remove("*/zero_pp_rank_0_*_optim_states.pt"), "has 1 files of optimizer states, 2 were written"),
        (one_more("global_step3/mp_rank_01_model_states.pt"), "belongs to a model split by tensors, layers or experts"),
        (one_more("global_step3/layer_00-model_states.pt"), "belongs to a model split by tensors, layers or experts"),
        (lambda folder: shutil.copy(folder / "latest", next(folder.glob("*/*_optim_states.pt"))), "optim_states.pt: "),
    ],
)
def test_deepspeeds_checkpoint_with_damage(
    workers2: WorkerGroup, tmp_path: Path, damage: Callable[[Path], Any], says: str
) -> None:
    pytest.importorskip("deepspeed")
    workers2.run(save_with_deepspeed, tmp_path / "ds", 2, False)
    damage(tmp_path / "ds")
    with pytest.raises(CheckpointError) as caught:
        open_weights(tmp_path / "ds")
    assert says in str(caught.value)
