"""A target of publish() gets what an export of the model would have, tensor by tensor, under every strategy."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

pytest.importorskip("transformers")

from flextrain import CheckpointError, ConfigError, FlexTrainError, LiveWeights
from flextrain.core.checkpoint import export_weights
from flextrain.testing import WorkerGroup

from .folders import model_of, runner_of, tokens
from .test_export import loaded

LORA = dict(type="LoRA", r=4, target_modules=["q_proj", "v_proj"])


class Kept:
    """Writes what it gets to a folder that from_pretrained loads, and tells what it was told before."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def publish(self, weights: LiveWeights) -> list[tuple[str, tuple[int, ...], str]]:
        self.folder.mkdir()
        save_file(dict(weights), self.folder / "model.safetensors", {"format": "pt"})
        weights.write_configuration(self.folder)
        return [(one.name, one.shape, str(one.dtype)) for one in weights.metadata()]


def tiny(**settings: Any) -> Any:
    torch.manual_seed(0)
    return model_of("llama", **settings)


def published(work_dir: Path, strategy: Any, model: Any = tiny, transforms: Any = None) -> Any:
    """Train, publish and export; return what the target has returned."""
    options = {} if transforms is None else dict(transforms=transforms)
    runner = runner_of(work_dir, dict(type=model), strategy=strategy, lr=0.5, **options)
    runner.train()
    told = runner.publish(Kept(work_dir / "published"))
    runner.export_hugging_face(work_dir / "live")
    if strategy == "single":
        torch.save(logits_of(runner.strategy.module), work_dir / "logits.pt")
    runner.close()
    return told


def logits_of(model: Any) -> torch.Tensor:
    ids = torch.stack([sample["input_ids"] for sample in tokens(4)])
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=ids).logits
    return found


def check_like_the_export(work_dir: Path, told: list[tuple[str, tuple[int, ...], str]]) -> None:
    found, expected = (load_file(work_dir / name / "model.safetensors") for name in ("published", "live"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert told == [(name, tuple(found[name].shape), str(found[name].dtype)) for name, *_ in told]
    assert len(told) == len(found)
    loaded(work_dir / "published")


@pytest.mark.parametrize("transforms", [None, pytest.param([LORA], id="adapters")])
def test_one_device_publishes_what_it_exports(tmp_path: Path, transforms: Any) -> None:
    check_like_the_export(tmp_path, published(tmp_path, "single", partial(tiny, tie_word_embeddings=True), transforms))
    torch.testing.assert_close(logits_of(loaded(tmp_path / "published")), torch.load(tmp_path / "logits.pt"))


@pytest.mark.distributed
@pytest.mark.parametrize(
    "count, strategy, transforms",
    [
        pytest.param(
            2, dict(type="fsdp", wrap="blocks", exclude_frozen_parameters=True), [LORA], id="fsdp with adapters"
        ),
        pytest.param(2, "ddp", None, id="ddp", marks=pytest.mark.full),
        pytest.param(2, dict(type="fsdp", wrap="blocks"), None, id="fsdp", marks=pytest.mark.full),
        pytest.param(2, dict(type="mesh", tp=2), [LORA], id="tp2 with adapters", marks=pytest.mark.full),
        pytest.param(2, dict(type="mesh", pp=2), [LORA], id="pp2 with adapters", marks=pytest.mark.full),
        pytest.param(2, "zero3", None, id="zero3", marks=[pytest.mark.full, pytest.mark.deepspeed]),
        pytest.param(3, dict(type="fsdp", wrap="blocks"), None, id="fsdp of three", marks=pytest.mark.full),
        pytest.param(4, dict(type="mesh", dp_shard=2, tp=2), None, id="dp2xtp2", marks=pytest.mark.full),
    ],
)
def test_processes_publish_what_they_export(
    workers: Callable[[int], WorkerGroup], tmp_path: Path, count: int, strategy: Any, transforms: Any
) -> None:
    told = workers(count).run(published, tmp_path, strategy, tiny, transforms)
    assert all(one == told[0] for one in told)
    check_like_the_export(tmp_path, told[0])


class Two(nn.Module):
    """Two layers with tied weights, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(96, 4), nn.Linear(4, 96, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("count", torch.tensor(3))

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        return {"loss": self.second(self.first(input_ids)).square().mean()}


def test_a_model_of_the_user_has_its_own_names(tmp_path: Path) -> None:
    runner = runner_of(tmp_path / "run", dict(type=Two), lr=0.5)
    runner.train()
    runner.publish(Kept(tmp_path / "published"))
    runner.close()
    export_weights(tmp_path / "run" / "iter_2", tmp_path / "exported.safetensors")
    found, expected = (
        load_file(tmp_path / "published" / "model.safetensors"),
        load_file(tmp_path / "exported.safetensors"),
    )
    assert found.keys() == expected.keys() == {"first.weight", "second.weight", "count"}
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


class Asking:
    """Looks at buckets, casts, and passes; what it reads changes nothing in the run."""

    def publish(self, weights: LiveWeights) -> Any:
        sizes = [sum(one.nbytes for one in bucket) for bucket in weights.buckets("8KB")]
        (first, *_), *_ = weights.buckets("8KB")
        before = weights.read(first)
        weights.read(first).zero_()
        assert torch.equal(weights.read(first), before)
        return sizes, {str(one.dtype) for one in weights.metadata()}, str(before.dtype)


def test_buckets_have_their_limit(tmp_path: Path) -> None:
    runner = runner_of(tmp_path, dict(type=tiny))
    sizes, kinds, read = runner.publish(Asking(), dtype="bfloat16")
    assert (kinds, read) == ({"torch.bfloat16"}, "torch.bfloat16")
    assert len(sizes) > 2
    assert max(sizes) <= 8000
    assert runner.publish(Asking())[1] == {"torch.float32"}
    runner.close()


def test_what_takes_no_weights_is_refused(tmp_path: Path) -> None:
    runner = runner_of(tmp_path, dict(type=tiny))
    with pytest.raises(ConfigError, match="publish: 'folder' is not allowed, give an object with a method publish"):
        runner.publish("folder")
    for given in ("float8_e4m3fn", torch.float8_e4m3fn):
        with pytest.raises(ConfigError, match="publish: dtype: .*float8_e4m3fn.* is not allowed, choose "):
            runner.publish(Asking(), dtype=given)
    with pytest.raises(CheckpointError, match='size: "much" is not allowed'):
        runner.publish(Sized())
    runner.close()


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    pytest.importorskip("peft", minversion="0.20")  # earlier ones want the quantiser of transformers
    transforms = [dict(type="Quantize", config="Int8WeightOnlyConfig", but=["lm_head"]), LORA]
    runner = runner_of(tmp_path, dict(type=tiny), transforms=transforms, default_hooks=dict(checkpoint=None))
    with pytest.raises(
        CheckpointError, match=r"q_proj.*weight: is quantised \(Int8Tensor\), and quantised weights cannot"
    ):
        runner.publish(Asking())
    runner.close()


class Sized:
    def publish(self, weights: LiveWeights) -> None:
        weights.buckets("much")


class Failing:
    """Fails in the middle, once."""

    def __init__(self) -> None:
        self.fails = True

    def publish(self, weights: LiveWeights) -> int:
        for number, _ in enumerate(weights):
            if self.fails and number == 3:
                raise ConnectionError("the engine is gone")
        return number + 1


class Keeping:
    """Keeps the weights, which nobody can read later, and returns what cannot be sent."""

    def publish(self, weights: LiveWeights) -> Any:
        self.weights = weights
        return lambda: None


def failed(work_dir: Path) -> tuple[str, int, int]:
    """The error, the count of the next try, and the iterations of the training after it."""
    runner = runner_of(work_dir, dict(type=tiny), strategy=dict(type="fsdp", wrap="blocks"))
    target = Failing()
    with pytest.raises((ConnectionError, FlexTrainError)) as error:
        runner.publish(target)
    kept = Keeping()
    with pytest.raises((AttributeError, pickle.PicklingError, FlexTrainError), match="pickle local object"):
        runner.publish(kept)
    if runner.rank == 0:
        with pytest.raises(CheckpointError, match="was asked for too late"):
            next(iter(kept.weights))
    target.fails = False
    count = runner.publish(target)
    runner.train()
    done = runner.iter
    runner.close()
    return f"{type(error.value).__name__}: {error.value}", count, done


class Inside(nn.Module):
    """Publishes in its forward, when FSDP has freed its first layer again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Sequential(nn.Embedding(96, 8)), nn.Linear(8, 96)
        self.publish: Callable[[], None] = lambda: None

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        found = self.first(input_ids)
        self.publish()
        return {"loss": self.second(found).square().mean()}


def published_in_forward(work_dir: Path) -> None:
    runner = runner_of(work_dir, dict(type=Inside), strategy=dict(type="fsdp", wrap=["Sequential"]))
    runner.publish(Asking())
    runner.strategy.module.publish = lambda: runner.publish(Asking())
    with pytest.raises(CheckpointError, match=r"weight: has no values now, call publish\(\) between two updates"):
        runner.train()
    runner.close()


@pytest.mark.distributed
@pytest.mark.full
def test_publishing_in_a_forward_is_refused(workers2: WorkerGroup, tmp_path: Path) -> None:
    workers2.run(published_in_forward, tmp_path)


@pytest.mark.distributed
def test_every_process_learns_of_a_failure_and_may_try_again(workers2: WorkerGroup, tmp_path: Path) -> None:
    first, second = workers2.run(failed, tmp_path)
    assert first[0] == "ConnectionError: the engine is gone"
    assert second[0] == "FlexTrainError: rank 0: ConnectionError('the engine is gone')"
    assert first[1:] == second[1:] == (21, 2)
