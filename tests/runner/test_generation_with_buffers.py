"""Text of models with running statistics, counters and tied or frozen weights, also amid updates; training goes on the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flextrain import BaseMetric, FlexibleRunner, Hook
from flextrain.testing import WorkerGroup
from flextrain.testing.loop import alone

from .training import DDP, whole, zero

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("quick")]
FULL = pytest.mark.full
TOKENS = 11


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6, momentum=0.7)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.norm(self.linear(x)))


class Walker(nn.Module):
    """Tied and frozen weights, running statistics, a counter of all calls, and a shift that follows the data."""

    calls: Tensor
    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(TOKENS, 6)
        self.layers = nn.Sequential(Layer(), Layer(), Layer(), Layer())
        self.head = nn.Linear(6, TOKENS, bias=False)
        self.head.weight = self.embed.weight
        self.layers[1].linear.requires_grad_(False)  # type: ignore[union-attr]
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("shift", torch.zeros(6), persistent=False)
        self.register_buffer("cache", None)

    def forward(self, ids: Tensor, mode: str = "loss") -> Any:
        logits = self.head(self.layers(self.embed(ids[:, :-1].flatten())))
        loss = nn.functional.cross_entropy(logits, ids[:, 1:].flatten())
        return {"loss": loss} if mode == "loss" else logits

    def generate(self, ids: Tensor, max_new_tokens: int, sample: bool = False) -> Tensor:
        for _ in range(max_new_tokens):
            self.calls += 1
            self.shift.add_(1)
            self.cache = ids.clone()  # stays in no checkpoint
            self.register_buffer("length", torch.tensor(ids.shape[1]))
            logits = self.head(self.layers(self.embed(ids[:, -1])) + 0 * self.shift.to(self.head.weight.dtype))
            new = torch.multinomial(logits.softmax(-1), 1) if sample else logits.argmax(-1, keepdim=True)
            ids = torch.cat([ids, new], 1)
        return torch.cat([ids, self.calls.expand(len(ids), 1)], 1)  # the counter too, which begins at its own value


class Walks(torch.utils.data.Dataset[Tensor]):
    def __init__(self, count: int) -> None:
        start = torch.randint(0, TOKENS, (count, 1), generator=torch.Generator().manual_seed(3))
        self.ids = (start + torch.arange(5) * (1 + start % 3)) % TOKENS

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"ids": self.ids[index]}


class Written(BaseMetric):
    uses_model = True

    def process(self, data_batch: Mapping[str, Tensor], data_samples: Any) -> None:
        self.results += self.model.generate(data_batch["ids"][:, :2], max_new_tokens=5).tolist()

    def compute_metrics(self, results: list[Any]) -> dict[str, Any]:
        return {"texts": sorted(results)}


class Generates(Hook):
    """Generates after every update, differently much on each process, and notes what the buffers were before and after."""

    def __init__(self, asks: bool) -> None:
        self.asks = asks
        self.texts: list[Any] = []
        self.losses: list[float] = []
        self.metrics: list[Any] = []

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Mapping[str, Any] | None = None
    ) -> None:
        assert outputs is not None
        self.losses.append(float(runner.strategy.topology.data.mean(outputs["loss"].clone())))
        if self.asks:
            module = runner.strategy.module
            before = {name: whole(buffer).clone() for name, buffer in module.named_buffers()}
            state = torch.get_rng_state()
            self.texts.append(text_of(runner))
            assert torch.equal(torch.get_rng_state(), state)
            assert dict(module.named_buffers()).keys() == before.keys()
            for name, buffer in module.named_buffers():
                assert torch.equal(whole(buffer), before[name]), name

    def after_val_epoch(self, runner: Any, metrics: dict[str, Any] | None = None) -> None:
        assert metrics is not None
        self.metrics.append(metrics["texts"])


def text_of(runner: FlexibleRunner, by_layer: bool = False) -> list[Any]:
    ids = torch.arange(TOKENS)[: 3 + runner.rank, None]  # batches of different sizes
    greedy = runner.generate(ids, max_new_tokens=6 + runner.rank, by_layer=by_layer)[:3, :7]
    drawn = runner.generate(ids[:3], seed=1, max_new_tokens=6, sample=True, by_layer=by_layer)[:, :-1]
    return [greedy.tolist(), drawn.tolist()]


def make(folder: str, strategy: Any, **changes: Any) -> FlexibleRunner:
    data = dict(
        batch_size=4,
        dataset=Walks(48),
        sampler=dict(type="DefaultSampler", shuffle=False),
        collate_fn="default_collate",
    )
    settings: dict[str, Any] = dict(
        model=Walker,
        work_dir=folder,
        strategy=strategy,
        train_dataloader=data,
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.2), accumulative_counts=2),
        train_cfg=dict(by_epoch=False, max_iters=4, val_interval=2),
        val_dataloader=dict(batch_size=4, dataset=Walks(11), collate_fn="default_collate"),
        val_cfg=dict(),
        val_evaluator=dict(type=Written),
        randomness=dict(seed=0),
        default_hooks=dict(checkpoint=None),
        env_cfg=dict(dry_run=False),
    )
    return FlexibleRunner(**settings | changes)


def trained(folder: str, strategy: Any, asks: bool, with_average: bool = False) -> dict[str, Any]:
    hook = Generates(asks)
    hooks: list[Any] = [hook, *([dict(type="EMAHook", momentum=0.3)] if with_average else [])]
    runner = make(f"{folder}/{asks}", strategy, custom_hooks=hooks)
    runner.train()
    path = runner.save_checkpoint(runner.work_dir, "last")
    found = {"losses": hook.losses, "texts": hook.texts, "metrics": hook.metrics, "path": str(path)}
    found |= {"last": text_of(runner), "by_layer": text_of(runner, by_layer=True)}
    runner.close()
    return found


def loaded(folder: str, path: str) -> list[Any]:
    with alone():
        nothing = dict.fromkeys(
            ("train_dataloader", "train_cfg", "optim_wrapper", "val_dataloader", "val_cfg", "val_evaluator")
        )
        runner = make(folder, None, load_from=path, **nothing)
        found = text_of(runner)
        runner.close()
        return found


STRATEGIES = {
    "ddp": (2, dict(type="DDPStrategy", model_wrapper=dict(broadcast_buffers=False))),
    "ddp that broadcasts": (2, DDP),
    "fsdp": (2, dict(type="FSDPStrategy", wrap="blocks")),
    "zero2": (2, zero(2)),
    "zero3": (2, zero(3, stage3_param_persistence_threshold=0)),
    "pp2 dp2": (4, dict(type="MeshStrategy", pp=2, dp_shard=2, wrap="blocks")),
    "pp2 replicas": (4, dict(type="MeshStrategy", pp=2, dp_replicate=2)),
    "tp2 dp2": (4, dict(type="MeshStrategy", tp=2, dp_shard=2, plan={"layers.*.linear": "colwise_gather_output"})),
}
QUICK = {"ddp"}


@pytest.mark.parametrize("with_average", [False, pytest.param(True, marks=FULL)], ids=["", "ema"])
@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=FULL) for n in STRATEGIES])
def test_replicas_with_different_statistics_write_what_a_checkpoint_of_them_writes(
    workers: Callable[[int], WorkerGroup], tmp_path: Path, name: str, with_average: bool
) -> None:
    count, strategy = STRATEGIES[name]
    asked = workers(count).run(trained, str(tmp_path), strategy, True, with_average)
    undisturbed = workers(count).run(trained, str(tmp_path), strategy, False, with_average)
    for key in ("texts", "metrics", "last", "by_layer"):
        assert all(found[key] == asked[0][key] for found in asked), key
    assert len(asked[0]["texts"]) == 4
    assert asked[0]["texts"][0] != asked[0]["texts"][3]
    for found, other in zip(asked, undisturbed, strict=True):
        assert found["losses"] == other["losses"]
        assert found["metrics"] == other["metrics"]
        assert found["last"] == other["last"] == found["by_layer"]
    (expected,) = workers(1).run(loaded, str(tmp_path / "one"), asked[0]["path"])
    assert asked[0]["last"] == expected


# Between the micro-batches of an update, beside a teacher, and in half precision


class Plain(Walker):
    """Without batch normalisation in training mode, so that one device computes the same."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.norm = nn.LayerNorm(6)  # type: ignore[union-attr,assignment]


class Interrupted(Plain):
    """Generates between micro-batches, in its own train_step."""

    runner: Any = None
    texts: list[Any] = []

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = nn.Parameter(
            self.head.weight.detach().clone()
        )  # the parts that train_step calls share nothing

    def train_step(self, data: Any, optim_wrapper: Any) -> Any:
        with optim_wrapper.optim_context(self):
            loss = self(**data)["loss"]
        if self.runner is not None:
            self.texts.append(text_of(self.runner))
        optim_wrapper.update_params(loss)
        if self.runner is not None:
            self.texts.append(text_of(self.runner))
        return {"loss": loss}


class Follows(nn.Module):
    """A student and its teacher; the teacher generates."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = Plain(), Plain()
        self.teacher.requires_grad_(False)

    def forward(self, ids: Tensor, mode: str = "loss") -> Any:
        with torch.no_grad():
            wanted = self.teacher(ids, mode="tensor")
        found = self.student(ids)
        found["loss"] = found["loss"] + (self.student(ids, mode="tensor") - wanted).square().mean()
        return found

    def generate(self, ids: Tensor, **options: Any) -> Tensor:
        return torch.cat([self.teacher.generate(ids, **options), self.student.generate(ids, **options)], 1)


def trains(folder: str, strategy: dict[str, Any], kind: str, asks: bool) -> Any:
    hook = Generates(asks)
    hooks: list[Any] = [hook]
    wrapper: dict[str, Any] = dict(optimizer=dict(type="AdamW", lr=0.02), accumulative_counts=3)
    if kind == "teacher":
        hooks.append(dict(type="TeacherHook", student="student", teacher="teacher", momentum=0.2))
    if kind == "bf16":
        wrapper |= dict(type="AmpOptimWrapper", dtype="bfloat16")
    model = {"teacher": Follows, "interrupted": Interrupted, "bf16": Plain}[kind]
    nothing = dict.fromkeys(("val_dataloader", "val_cfg", "val_evaluator"))
    runner = make(f"{folder}/{asks}", strategy, model=model, optim_wrapper=wrapper, custom_hooks=hooks, **nothing)
    Interrupted.runner, Interrupted.texts = runner if asks else None, []
    try:
        runner.train()
    finally:
        Interrupted.runner = None
    weights = {name: local(tensor).clone() for name, tensor in runner.strategy.model_state().items()}
    runner.close()
    return hook.losses, weights, hook.texts, Interrupted.texts


def local(tensor: Any) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[no-any-return]


ZERO2 = zero(2)
ZERO3 = zero(3, stage3_param_persistence_threshold=0)
BLOCKS = dict(type="FSDPStrategy", wrap="blocks")


@pytest.mark.parametrize("kind", ["interrupted", pytest.param("teacher", marks=FULL), pytest.param("bf16", marks=FULL)])
@pytest.mark.parametrize(
    "strategy",
    [BLOCKS, *(pytest.param(s, marks=FULL) for s in (DDP, ZERO2, ZERO3))],
    ids=["fsdp", "ddp", "zero2", "zero3"],
)
def test_training_goes_on_the_same(workers2: WorkerGroup, tmp_path: Path, strategy: dict[str, Any], kind: str) -> None:
    if kind == "interrupted" and strategy in (ZERO2, ZERO3):
        pytest.skip("DeepSpeed's engine trains no model with a train_step of its own")
    asked = workers2.run(trains, str(tmp_path), strategy, kind, True)
    undisturbed = workers2.run(trains, str(tmp_path), strategy, kind, False)
    for found, other in zip(asked, undisturbed, strict=True):
        assert found[0] == other[0]
        for name, weight in other[1].items():
            assert torch.equal(found[1][name], weight), name
    assert asked[0][2:] == asked[1][2:]
    written = asked[0][3] if kind == "interrupted" else asked[0][2]
    assert written[0] != written[-1]
