"""runner.generate, metrics that use the model, and models that generate to predict: under every strategy as on one device."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flextrain import BaseMetric, ConfigError, FlexibleRunner, Hook, OptimWrapper
from flextrain.core.base.errors import StrategyError
from flextrain.core.base.registry import STRATEGIES
from flextrain.runner.loops.evaluate import calls_generate
from flextrain.runner.predictions import check_generates, generate
from flextrain.strategies.parts import full_weights
from flextrain.testing import WorkerGroup
from flextrain.testing.loop import alone
from tests.strategies.whole_models import VOCABULARY, batch, language_model

from .training import refuses

pytest.importorskip("transformers")
pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("quick")]

DDP = dict(type="DDPStrategy")
FSDP = dict(type="FSDPStrategy", wrap="blocks")
# transformers initialises a layer again after its parts, which are split by then.
ZERO3 = dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=3, stage3_param_persistence_threshold=0))
TP = dict(type="MeshStrategy", tp=2)
PP = dict(type="MeshStrategy", pp=2)
FULL = pytest.mark.full
OTHERS = [
    FSDP,
    pytest.param(DDP, marks=FULL),
    pytest.param(ZERO3, marks=FULL),
    pytest.param(TP, marks=FULL),
    PP,
]
NAMES = ["fsdp", "ddp", "zero3", "tp2", "pp2"]


class Texts(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __init__(self, count: int) -> None:
        self.ids = torch.randint(3, VOCABULARY, (count, 6), generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


class Continued(BaseMetric):
    """What the model writes after the first tokens of each sample: more for some samples than for others."""

    uses_model = True

    def process(self, data_batch: Mapping[str, Tensor], data_samples: Any) -> None:
        for ids in data_batch["input_ids"]:
            count = 3 + int(ids[0]) % 4
            found = self.model.generate(
                ids[None, :3], attention_mask=torch.ones(1, 3), do_sample=False, max_new_tokens=count
            )
            self.results.append(found[0].tolist())

    def compute_metrics(self, results: list[Any]) -> dict[str, Any]:
        return {"texts": sorted(results)}


class Predicted(BaseMetric):
    """The predictions themselves."""

    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results += [row.tolist() for row in data_samples]

    def compute_metrics(self, results: list[Any]) -> dict[str, Any]:
        return {"texts": sorted(results)}


class Writer(nn.Module):
    """A model as people write it, which generates inside of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.lm = language_model("gpt2", tied=True)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, mode: str = "loss") -> Any:
        return {"loss": self.lm(input_ids=input_ids, labels=labels).loss} if mode == "loss" else self.write(input_ids)

    def write(self, ids: Tensor) -> Tensor:
        found: Tensor = self.lm.generate(  # type: ignore[operator]
            ids[:, :3], attention_mask=torch.ones(len(ids), 3), do_sample=False, min_new_tokens=5, max_new_tokens=5
        )
        return found


def llama() -> nn.Module:
    return language_model("llama")


def make(folder: Path, strategy: dict[str, Any] | None, **changes: Any) -> FlexibleRunner:
    defaults: dict[str, Any] = dict(model=llama, val_evaluator=dict(type=Continued))
    count = 1 if strategy is None else int(os.environ["WORLD_SIZE"]) // (strategy.get("tp", 1) * strategy.get("pp", 1))
    settings: dict[str, Any] = dict(
        work_dir=str(folder / "run"),
        strategy=strategy,
        train_dataloader=dict(
            batch_size=4 // count, dataset=Texts(8), sampler=dict(type="DefaultSampler", shuffle=False),
            collate_fn="default_collate",
        ),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
        train_cfg=dict(by_epoch=False, max_iters=4, val_interval=2),
        val_dataloader=dict(batch_size=2, dataset=Texts(5), collate_fn="default_collate"),
        val_cfg=dict(),
        randomness=dict(seed=0),
        default_hooks=dict(checkpoint=None),
    )  # fmt: skip
    settings |= defaults | changes
    return FlexibleRunner(**{key: value for key, value in settings.items() if value is not None})


class Seen(Hook):
    """Metrics of every validation, losses, and, if asked to, what is generated in the middle of training."""

    def __init__(self, generates: bool = False) -> None:
        self.metrics: list[Any] = []
        self.losses: list[float] = []
        self.texts: list[Any] = []
        self.generates = generates

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Mapping[str, Any] | None = None
    ) -> None:
        assert outputs is not None
        loss = outputs["loss"].clone()
        self.losses.append(float(runner.strategy.topology.data.mean(loss)))
        if self.generates:
            before = [part.training for part in runner.model.modules()]
            state = torch.get_rng_state()
            self.texts.append(text_of(runner, do_sample=True, seed=3))
            assert [part.training for part in runner.model.modules()] == before
            assert torch.equal(torch.get_rng_state(), state)

    def after_val_epoch(self, runner: Any, metrics: dict[str, Any] | None = None) -> None:
        self.metrics.append(metrics)


def text_of(runner: FlexibleRunner, **options: Any) -> list[list[int]]:
    """What every process gets for one prompt; the second one also asks for more, so that the lengths differ."""
    ids = torch.tensor([[5, 6, 7]])
    options = (
        dict(do_sample=False, max_new_tokens=6 + 3 * runner.rank, min_new_tokens=6, attention_mask=torch.ones_like(ids))
        | options
    )
    found: list[list[int]] = runner.generate(ids, **options)[:, :9].tolist()
    return found


def trained(folder: str, strategy: dict[str, Any] | None, kind: str, generates: bool = False) -> dict[str, Any]:
    """What a run gives: before training, in it, after it."""
    changes: dict[str, Any] = (
        dict(model=llama) if kind == "metric" else dict(model=Writer, val_evaluator=dict(type=Predicted))
    )
    seen = Seen(generates)
    settings = dict(custom_hooks=[seen, dict(type="EMAHook", momentum=0.3)]) | changes
    runner = make(Path(folder), strategy, **settings)
    before = text_of(runner) if kind == "metric" else None
    runner.train()
    after = text_of(runner) if kind == "metric" else None
    runner.close()
    return {"before": before, "after": after, "metrics": seen.metrics, "losses": seen.losses, "texts": seen.texts}


def reference(folder: str, kind: str, generates: bool = False) -> dict[str, Any]:
    with alone():
        return trained(folder, None, kind, generates)


def close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for key in ("before", "after", "metrics", "texts"):
        assert found[key] == expected[key], key
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)


@pytest.mark.parametrize("strategy", OTHERS, ids=NAMES)
def test_a_metric_that_generates_is_that_of_one_device(
    workers1: WorkerGroup, workers2: WorkerGroup, tmp_path: Path, strategy: dict[str, Any]
) -> None:
    (expected,) = workers1.run(reference, str(tmp_path / "one"), "metric", True)
    assert len(expected["metrics"]) == 2
    assert expected["metrics"][0] != expected["metrics"][1]  # it has trained
    assert expected["before"] != expected["after"]
    for found in workers2.run(trained, str(tmp_path / "two"), strategy, "metric", True):
        close(found, expected)
    for found in workers2.run(trained, str(tmp_path / "undisturbed"), strategy, "metric", False):
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)


@pytest.mark.parametrize("strategy", OTHERS, ids=NAMES)
def test_a_model_that_generates_to_predict_is_that_of_one_device(
    workers1: WorkerGroup, workers2: WorkerGroup, tmp_path: Path, strategy: dict[str, Any]
) -> None:
    (expected,) = workers1.run(reference, str(tmp_path / "one"), "predict")
    assert expected["metrics"][0] != expected["metrics"][1]
    for found in workers2.run(trained, str(tmp_path / "two"), strategy, "predict"):
        close(found, expected)


def keeps_gradients(kind: dict[str, Any]) -> None:
    """Generating between two micro-batches, as losses of generated texts do."""
    strategy = STRATEGIES.build(dict(kind), "strategy")
    try:
        strategy.join()
        model, _ = strategy.setup(llama(), OptimWrapper(dict(type="SGD", lr=0.1)))
        model(**batch(strategy.topology.rank)).loss.backward()
        before = {name: local(parameter.grad).clone() for name, parameter in strategy.parameters()}
        ids = torch.tensor([[5, 6, 7]])
        options = dict(do_sample=False, max_new_tokens=3, attention_mask=torch.ones_like(ids))
        generate(strategy, ids, options, seed=None, memory_limit=None, by_layer=False)
        for name, parameter in strategy.parameters():
            assert torch.equal(local(parameter.grad), before[name]), name
    finally:
        strategy.leave()


def local(tensor: Any) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor  # type: ignore[no-any-return]


@pytest.mark.parametrize("strategy", [FSDP, DDP], ids=["fsdp", "ddp"])
def test_gradients_stay(workers2: WorkerGroup, strategy: dict[str, Any]) -> None:
    workers2.run(keeps_gradients, strategy)


# Calls


def loads_and_generates(folder: str, strategy: dict[str, Any]) -> tuple[Any, Any]:
    """A run that only generates, with weights of a checkpoint; the first process has no inputs."""
    runner = make(Path(folder) / "trained", strategy, val_dataloader=None, val_cfg=None, val_evaluator=None)
    runner.train()
    path = runner.save_checkpoint(runner.work_dir, "last")
    trained = text_of(runner)
    runner.close()
    nothing: dict[str, Any] = dict.fromkeys(
        ("train_dataloader", "train_cfg", "optim_wrapper", "val_dataloader", "val_cfg", "val_evaluator")
    )
    runner = make(Path(folder) / "loaded", strategy, load_from=path, **nothing)
    ids = torch.tensor([[5, 6, 7]])
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)} if runner.rank == 1 else None
    found = runner.generate(
        given, do_sample=False, max_new_tokens=6, min_new_tokens=6, memory_limit="1MiB", by_layer=True
    )
    assert (found is None) == (runner.rank == 0)
    with pytest.raises(ConfigError, match="generate.inputs: is None on every process"):
        runner.generate()
    with pytest.raises(
        ConfigError, match=r"inputs: is None, and input_ids is an argument of its own; .*dict\(input_ids"
    ):
        # On one process alone: the other would wait for it, or leave its inputs out without a word.
        runner.generate(ids) if runner.rank == 0 else runner.generate(input_ids=ids)
    with pytest.raises(StrategyError, match="memory_limit: 10 bytes is not enough"):
        runner.generate(ids, memory_limit=10)
    with pytest.raises(ConfigError, match="generate.input_ids: is given twice"):
        runner.generate({"input_ids": ids}, input_ids=ids)
    runner.close()
    return trained, None if found is None else found.tolist()


@pytest.mark.parametrize("strategy", [FSDP, *(pytest.param(one, marks=FULL) for one in (ZERO3, TP, PP))])
def test_a_run_that_only_generates_has_the_weights_of_load_from(
    workers2: WorkerGroup, tmp_path: Path, strategy: dict[str, Any]
) -> None:
    (trained, _), (_, found) = workers2.run(loads_and_generates, str(tmp_path), strategy)
    assert found == trained


class Asks(BaseMetric):
    """Reads the model where it is not, or without having said so."""

    def __init__(self, early: bool = False) -> None:
        super().__init__()
        if early:
            self.model.eval()

    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.model.eval()

    def compute_metrics(self, results: list[Any]) -> dict[str, Any]:
        return {}


class Says(Asks):
    uses_model = True


class Own(Asks):
    """Has a model of its own, under the same name."""

    def __init__(self) -> None:
        super().__init__()
        self.model: Any = nn.Identity()


def test_a_metric_gets_the_model_in_process_only() -> None:
    with pytest.raises(ConfigError, match=r"Asks reads self\.model, .* set uses_model = True"):
        Asks().process(None, None)
    with pytest.raises(ConfigError, match=r"Says\.model is there in process\(\) only"):
        Says(early=True)
    assert isinstance(Own().model, nn.Identity)
    Own().process(None, None)


WRONG: list[tuple[Any, dict[str, Any], str]] = [
    ([1, 5], {}, 'generate.inputs: is list, give tensors, as tokenizer(texts, return_tensors="pt", padding=True) does'),
    ("one two", {}, "generate.inputs: is str, give tensors"),
    ({"input_ids": [[1, 5]]}, {}, 'generate.inputs["input_ids"]: is list, give tensors'),
    (torch.tensor([1, 5]), {}, "generate.inputs: has shape [2], give (texts, tokens), at least one of each"),
    (torch.ones(0, 3).long(), {}, "generate.inputs: has shape [0, 3], give (texts, tokens)"),
    (torch.ones(1, 3), {}, "generate.inputs: is float32, give token numbers (.long())"),
    (torch.ones(1, 3).long(), dict(seed="0"), "generate.seed: '0' is not allowed, give an integer"),
    (torch.ones(1, 3).long(), dict(by_layer="yes"), "generate.by_layer: 'yes' is not allowed, give True or False"),
]


def test_what_cannot_be_generated_from_is_said_in_one_line(tmp_path: Path) -> None:
    runner = make(tmp_path, None, env_cfg=dict(dry_run=False))
    for inputs, options, line in WRONG:
        with refuses(ConfigError, begins=line):
            runner.generate(inputs, **options)
    with pytest.raises(
        ConfigError, match=r"^full_weights\.ranks: 0 is not allowed, give numbers from 0 to 0 in a list$"
    ):
        full_weights(runner.strategy, ranks=0).__enter__()  # type: ignore[arg-type]
    runner.close()


def test_a_limit_for_nothing_is_refused(tmp_path: Path) -> None:
    runner = make(tmp_path, None, val_evaluator=dict(type=Own), val_cfg=dict(memory_limit="2GiB"))
    with pytest.raises(ConfigError, match=r"^val_cfg\.memory_limit: has no effect, no metric has uses_model = True"):
        runner.val()


class InParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lm = Writer().lm


def test_a_model_without_generate_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r"^generate: Linear has no method generate; define it, or"):
        check_generates(nn.Linear(1, 1))
    with pytest.raises(ConfigError, match=r"InParts has no method generate; its lm has one: def generate\(self"):
        check_generates(InParts())
    check_generates(llama())


class Chooses(Writer):
    def val_step(self, data: Any) -> Any:
        return [self.write(ids) for ids in data["input_ids"]]

    def test_step(self, data: Any) -> Any:
        return self.lm(**data)


class Anchors(nn.Module):
    def generate(self, size: int) -> Tensor:
        return torch.zeros(size)


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.anchors, self.head = Anchors(), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) + self.anchors.generate(3)  # type: ignore[no-any-return]


def test_which_models_generate_to_predict() -> None:
    assert not calls_generate(Detector(), "val")
    assert calls_generate(Writer(), "val")
    assert not calls_generate(llama(), "val")
    assert not calls_generate(InParts(), "val")
    model = Chooses()
    assert calls_generate(model, "val")
    assert not calls_generate(model, "test")


def fails_once(folder: str, strategy: dict[str, Any]) -> None:
    """An evaluation that ends by an error leaves nothing open."""

    class Fails(Continued):
        times = 0

        def process(self, data_batch: Any, data_samples: Any) -> None:
            self.times += 1
            if self.times == 1:
                raise KeyError("once")
            super().process(data_batch, data_samples)

    runner = make(Path(folder), strategy, val_evaluator=Fails())
    with pytest.raises(KeyError, match="once") as caught:
        runner.val()
    assert caught.value is not None  # its traceback still has the frames of the evaluation
    assert runner.val()["texts"]
    runner.close()


def test_an_evaluation_that_fails_closes_the_weights(workers2: WorkerGroup, tmp_path: Path) -> None:
    workers2.run(fails_once, str(tmp_path), FSDP)


@pytest.mark.parametrize(
    ("cfg", "said"),
    [
        (dict(memory_limit="2 GiX"), r'val_cfg\.memory_limit: "2 GiX" is not allowed'),
        (dict(memory_limt="2GiB"), r"memory_limt.*memory_limit"),
        (dict(full_weights="yes"), r'val_cfg\.full_weights: "yes" is not allowed'),
    ],
)
def test_wrong_options_of_an_evaluation(tmp_path: Path, cfg: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        _ = make(tmp_path, None, val_cfg=cfg).val_loop


@FULL
@pytest.mark.parametrize("sizes", [dict(dp_shard=2, tp=2), dict(dp_shard=2, pp=2)], ids=str)
def test_evaluation_under_meshes_of_four(
    workers: Callable[[int], WorkerGroup], workers1: WorkerGroup, tmp_path: Path, sizes: dict[str, int]
) -> None:
    strategy = dict(type="MeshStrategy", wrap="blocks", **sizes)
    for kind in ("metric", "predict"):
        (expected,) = workers1.run(reference, str(tmp_path / f"one {kind}"), kind)
        for found in workers(4).run(trained, str(tmp_path / f"four {kind}"), strategy, kind):
            close(found, expected)
