"""With round_up=False each sample of an epoch is trained on once, and training equals that of one process."""

from __future__ import annotations

import contextlib
from collections import Counter
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from flextrain import ConfigError
from flextrain.runner import EpochBasedTrainLoop
from flextrain.runner.hooks import Hook

from .training import DDP, FSDP, Samples, SaveEvery, Stop, StopAt, Watch, data_workers, make_runner, whole_state, zero

pytestmark = pytest.mark.usefixtures("quick")

ADAMW = dict(type="AdamW", lr=0.02, weight_decay=0.1)


class Plain(nn.Module):
    """The mean over the samples of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, index: Tensor, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        logits = self.net(x)
        return {"loss": functional.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}


class Weighted(Plain):
    """The mean over items: samples have one or two, and one of them none."""

    def forward(self, index: Tensor, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        items = items_of(index).to(x)
        losses = functional.cross_entropy(self.net(x), y, reduction="none")
        return {"loss": (losses * items).sum() / items.sum()}

    def loss_weight(self, data_batch: Any) -> Any:
        return items_of(data_batch["index"]).sum()


def items_of(index: Tensor) -> Tensor:
    return (index != 4) * (1 + index % 2)


class Seen(Watch):
    """What counts of what was trained on, and the norms of the gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []
        self.fillers = 0
        self.outputs: list[dict[str, float]] = []

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        window = data_batch if isinstance(data_batch, list) else [data_batch]
        filler = runner.train_loop.ends_with_filler
        self.fillers += filler
        if filler:
            assert len(window[-1]["index"]) == 1, "a filler is one sample"
        super().before_train_iter(runner, batch_idx, window[:-1] if filler else window)

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        super().after_train_iter(runner, batch_idx, data_batch, outputs)
        self.norms.append(float(outputs.get("grad_norm", 0.0)))  # an update without items is skipped
        self.outputs.append({name: float(value) for name, value in outputs.items()})


def run(
    folder: str | Path,
    length: int,
    batch_size: int,
    accumulate: int = 1,
    until: int | None = None,
    resume: bool = False,
    loader: dict[str, Any] | None = None,
    workers: int = 0,
    **changes: Any,
) -> dict[str, Any]:
    """Train for two epochs, or up to a crash after the update ``until``, whose checkpoint is there."""
    seen = Seen()
    hooks = [seen, SaveEvery({until}), StopAt(until)] if until else [seen]
    settings: dict[str, Any] = dict(
        model=Plain,
        train_dataloader=dict(
            batch_size=batch_size, dataset=Samples(length), sampler=dict(type="DefaultSampler", round_up=False),
            collate_fn="default_collate", **data_workers(workers),
        ) | (loader or {}),
        optim_wrapper=dict(optimizer=ADAMW, accumulative_counts=accumulate, clip_grad=dict(max_norm=0.5)),
        train_cfg=dict(max_epochs=2), resume=resume, param_scheduler=dict(type="LinearLR", start_factor=0.1, end=2),
        custom_hooks=hooks,
    )  # fmt: skip
    runner = make_runner(folder, **{**settings, **changes})
    with contextlib.suppress(Stop):
        runner.train()
    state = whole_state(runner)
    shard = runner.strategy.topology.shard
    place = (runner.epoch, runner.iter, runner.max_iters)
    runner.strategy.leave()
    return {
        "state": {key: value for key, value in state.items() if isinstance(value, Tensor)},
        "losses": [float(loss) for loss in seen.losses],
        "norms": seen.norms,
        "trained": seen.trained,
        "fillers": seen.fillers,
        "outputs": seen.outputs,
        "rates": seen.rates,
        "place": place,
        "shard": shard,
    }


def check(parts: list[dict[str, Any]], whole: dict[str, Any], start: int = 0) -> None:
    """Parts of all processes are equal to the updates of one process from number ``start`` on."""
    shards = list({part["shard"]: part for part in parts}.values())
    for part in parts:
        (same,) = (other for other in shards if other["shard"] == part["shard"])
        assert part["trained"] == same["trained"], "those that share a data shard read the same"
    updates = [Counter(chain(*each)) for each in zip(*(part["trained"] for part in shards), strict=True)]
    assert updates == list(map(Counter, whole["trained"][start:]))
    losses = [sum(each) / len(shards) for each in zip(*(part["losses"] for part in shards), strict=True)]
    assert losses == pytest.approx(whole["losses"][start:], rel=1e-5), "the log's loss is the mean over processes"
    for part in parts:
        assert part["norms"] == pytest.approx(whole["norms"][start:], rel=1e-5)
        assert part["rates"] == whole["rates"][start:]
        assert part["place"] == whole["place"]
    for key, value in whole["state"].items():
        for part in parts:
            if key in part["state"]:
                torch.testing.assert_close(
                    part["state"][key], value, rtol=1e-5, atol=1e-6, msg=lambda text, k=key: k + text
                )


def once(epochs: int, length: int) -> Counter[int]:
    return Counter(dict.fromkeys(range(length), epochs))


QUICK = {
    # samples, batch size, accumulation, processes, strategy, model
    (11, 2, 1, 2, "ddp", "plain"),
    (11, 1, 1, 3, "fsdp", "plain"),  # two are left for three processes: one of them has none
    (10, 2, 2, 3, "ddp", "weighted"),  # ten of twelve
    (11, 1, 4, 2, "fsdp", "weighted"),  # three are left: two micro-batches, one of which is a filler
    (2, 1, 1, 3, "ddp", "plain"),  # fewer samples than processes
}
CASES = sorted(
    QUICK
    | {
        (length, size, accumulate, processes, strategy, model)
        for length in (10, 11)
        for size in (1, 2, 3)
        for accumulate in (1, 2)
        for processes in (1, 2, 3, 4)
        for strategy in ("ddp", "fsdp")
        for model in ("plain", "weighted")
    }
)
MODELS = {"plain": Plain, "weighted": Weighted}


@pytest.mark.distributed
@pytest.mark.parametrize(
    "length, size, accumulate, processes, strategy, model",
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.full) for case in CASES],
)
def test_equals_one_process(
    tmp_path: Path,
    workers: Any,
    length: int,
    size: int,
    accumulate: int,
    processes: int,
    strategy: str,
    model: str,
) -> None:
    options: dict[str, Any] = dict(model=MODELS[model])
    whole = run(tmp_path / "whole", length, processes * size * accumulate, **options)
    assert Counter(chain(*whole["trained"])) == once(2, length)
    options["strategy"] = dict(ddp=DDP, fsdp=FSDP)[strategy]
    parts = workers(processes).run(run, str(tmp_path / "parts"), length, size, accumulate, **options)
    check(parts, whole)


ZERO = {f"zero{stage}": zero(stage) for stage in (1, 2, 3)}
PLAN = {"net.0": "colwise", "net.2": "rowwise"}
MESHES = {
    "tp2": dict(type="MeshStrategy", tp=2, plan=PLAN),
    "dp2-tp2": dict(type="MeshStrategy", dp_shard=2, tp=2, plan=PLAN, wrap=["Linear"]),
    "pp2": dict(type="MeshStrategy", pp=2),
    "dp2-pp2": dict(type="MeshStrategy", dp_shard=2, pp=2),
    "hsdp": dict(type="MeshStrategy", dp_replicate=2, dp_shard=2, wrap=["Linear"]),
}
PROCESSES = {"tp2": 2, "pp2": 2}


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("length, size, accumulate", [(11, 2, 1), (11, 1, 2), (13, 1, 4), (10, 3, 2)])
@pytest.mark.parametrize(
    "strategy, processes",
    [
        *(pytest.param(name, n, marks=pytest.mark.deepspeed) for name in ZERO for n in (2, 3)),
        *((name, PROCESSES.get(name, 4)) for name in MESHES),
    ],
)
def test_equals_one_process_under_every_strategy(
    tmp_path: Path, workers: Any, strategy: str, processes: int, length: int, size: int, accumulate: int, model: str
) -> None:
    options: dict[str, Any] = dict(model=MODELS[model], train_cfg=dict(max_epochs=1))
    chosen = {**ZERO, **MESHES}[strategy]
    shards = {"tp2": 1, "dp2-tp2": 2, "pp2": 1, "dp2-pp2": 2}.get(strategy, processes)
    whole = run(tmp_path / "whole", length, shards * size * accumulate, **options)
    parts = workers(processes).run(run, str(tmp_path / "parts"), length, size, accumulate, strategy=chosen, **options)
    check(parts, whole)


class Tokens(nn.Module):
    """A small language model."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.logits = nn.Embedding(7, 8), nn.Embedding(8, 8), nn.Linear(8, 7)

    def forward(self, index: Tensor, ids: Tensor, labels: Tensor, position_ids: Tensor | None = None) -> Any:
        if position_ids is None:
            position_ids = torch.arange(ids.shape[1]).expand_as(ids)
        hidden = (self.words(ids) + self.places(position_ids))[:, None]
        logits = self.logits(functional.scaled_dot_product_attention(hidden, hidden, hidden, is_causal=True)[:, 0])
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def sequences(length: int) -> list[dict[str, Any]]:
    ids = torch.randint(7, (length, 9), generator=torch.Generator().manual_seed(2))
    return [{"index": i, "ids": row[:-1], "labels": row[1:]} for i, row in enumerate(ids)]


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.parametrize("length, size, accumulate", [(11, 2, 1), (13, 1, 4)])
def test_equals_one_process_with_parts_of_sequences(
    tmp_path: Path, workers: Any, length: int, size: int, accumulate: int
) -> None:
    options: dict[str, Any] = dict(model=Tokens, loader=dict(dataset=sequences(length)), train_cfg=dict(max_epochs=1))
    whole = run(tmp_path / "whole", length, 2 * size * accumulate, **options)
    options["strategy"] = dict(
        type="MeshStrategy", cp=2, dp_shard=2, wrap=["Linear"], cp_keys={"ids": 1, "labels": 1, "index": None}
    )  # fmt: skip
    parts = workers(4).run(run, str(tmp_path / "parts"), length, size, accumulate, **options)
    check(parts, whole)


class OwnLoop(EpochBasedTrainLoop):
    """Makes each update itself."""

    def run_iter(self, idx: int, data_batch: Any) -> None:
        self.runner.call_hook("before_train_iter", batch_idx=idx, data_batch=data_batch)
        outputs = self.runner.model.train_step(data_batch, optim_wrapper=self.runner.optim_wrapper)
        self.runner.call_hook("after_train_iter", batch_idx=idx, data_batch=data_batch, outputs=outputs)


def test_a_loop_of_ones_own_counts_by_samples(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", 11, 6)
    check([run(tmp_path / "parts", 11, 3, 2, train_cfg=dict(type=OwnLoop, max_epochs=2))], whole)


@pytest.mark.parametrize("model", MODELS)
def test_micro_batches_of_one_process_count_by_their_samples(tmp_path: Path, model: str) -> None:
    whole = run(tmp_path / "whole", 11, 6, model=MODELS[model])
    part = run(tmp_path / "parts", 11, 3, 2, model=MODELS[model])
    check([part], whole)
    if model == "plain":
        for one, other in zip(part["outputs"], whole["outputs"], strict=True):
            assert one == pytest.approx(other, rel=1e-5), "every figure is a mean over the samples"
        uneven = run(tmp_path / "uneven", 11, 3, 2, loader=dict(sampler="DefaultSampler"))
        assert uneven["losses"] != pytest.approx(whole["losses"], rel=1e-5), "as MMEngine weighs them"


@pytest.mark.distributed
def test_iterations_workers_and_an_update_without_the_last_batches(tmp_path: Path, workers2: Any) -> None:
    iterations: dict[str, Any] = dict(train_cfg=dict(by_epoch=False, max_iters=7), param_scheduler=None)
    whole = run(tmp_path / "whole", 11, 4, **iterations)
    for workers in (0, 2):
        folder = str(tmp_path / f"workers{workers}")
        check(workers2.run(run, folder, 11, 2, strategy=DDP, workers=workers, **iterations), whole)
    whole = run(tmp_path / "dropped", 11, 4, loader=dict(drop_last=True))
    check(workers2.run(run, str(tmp_path / "both"), 11, 2, strategy=DDP, loader=dict(drop_last=True)), whole)


RESUMED = {
    # (processes, batch size, accumulation, up to this update of the run); the global batch stays six
    "fewer": [(3, 2, 1, 3), (2, 3, 1, 5), (1, 3, 2, None)],
    "more": [(1, 6, 1, 1), (2, 3, 1, 2), (3, 1, 2, None)],
}


@pytest.mark.distributed
@pytest.mark.parametrize(
    "plan, strategy, model",
    [
        ("fewer", DDP, "plain"),
        *(
            pytest.param(plan, strategy, model, marks=pytest.mark.full)
            for plan in RESUMED
            for strategy in (DDP, FSDP)
            for model in MODELS
        ),
    ],
)
def test_an_epoch_goes_on_among_other_processes(
    tmp_path: Path, workers: Any, plan: str, strategy: dict[str, Any], model: str
) -> None:
    """13 samples: two updates of six, and one of a single sample."""
    whole = run(tmp_path / "whole", 13, 6, model=MODELS[model])
    done = 0
    for processes, size, accumulate, until in RESUMED[plan]:
        options = dict(model=MODELS[model], until=until, resume=done > 0)
        folder = str(tmp_path / "parts")
        if processes > 1:
            parts = workers(processes).run(run, folder, 13, size, accumulate, strategy=strategy, **options)
        else:
            parts = [run(folder, 13, size, accumulate, **options)]
        if until is None:
            check(parts, whole, done)
        else:
            done = until


@pytest.mark.distributed
def test_it_goes_on_where_a_process_has_nothing_left(tmp_path: Path, workers3: Any) -> None:
    """Two of thirteen samples are left, for three processes with micro-batches of one."""
    whole = run(tmp_path / "whole", 13, 3)
    workers3.run(run, str(tmp_path / "parts"), 13, 1, strategy=FSDP, until=4)
    parts = workers3.run(run, str(tmp_path / "parts"), 13, 1, strategy=FSDP, resume=True)
    check(parts, whole, 4)
    assert [part["fillers"] for part in parts] == [0, 2, 2]
    assert parts[1]["outputs"][0] == {
        "loss": 0.0, "accuracy": 0.0, "grad_norm": pytest.approx(whole["norms"][4], rel=1e-5)
    }  # fmt: skip


class Normalised(Plain):
    def __init__(self, kind: type[nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        self.norm = kind(3)

    def forward(self, index: Tensor, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return super().forward(index, self.norm(x.view(-1, 3, 2)).flatten(1), y)


class Statistics(Hook):
    """Running statistics after each update."""

    def __init__(self) -> None:
        self.seen: list[list[float]] = []

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        norm = runner.strategy.module.norm
        self.seen.append([*norm.running_mean.tolist(), *norm.running_var.tolist(), float(norm.num_batches_tracked)])


def statistics(folder: str) -> list[list[float]]:
    looking = Statistics()
    run(folder, 11, 1, model=Normalised, strategy=FSDP, train_cfg=dict(max_epochs=1), custom_hooks=[looking])
    return looking.seen


@pytest.mark.distributed
def test_a_filler_leaves_running_statistics(tmp_path: Path, workers2: Any) -> None:
    first, second = workers2.run(statistics, str(tmp_path))
    assert first[-1] != first[-2]
    assert second[-1] == second[-2] != second[-3]
    assert [counts[-1] for counts in second] == [1, 2, 3, 4, 5, 5]


class OwnStep(Plain):
    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        losses = self(**data)
        optim_wrapper.update_params(losses["loss"])
        return losses


def refused(folder: str, length: int, batch_size: int, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        run(folder, length, batch_size, **options)
    return str(caught.value)


@pytest.mark.distributed
def test_what_cannot_be_weighed_is_refused(tmp_path: Path, workers2: Any) -> None:
    start = "train_dataloader.sampler.round_up: False "
    end = "; leave round_up out, or give drop_last=True"
    says = workers2.run(refused, str(tmp_path / "step"), 11, 2, model=OwnStep, strategy=DDP)
    assert says == [
        f"{start}gives the last update of an epoch 3 samples in micro-batches of different sizes, and OwnStep defines its own "
        f"train_step, which does not weigh them{end}"
    ] * 2  # fmt: skip
    model = partial(Normalised, nn.SyncBatchNorm)
    says = workers2.run(refused, str(tmp_path / "sync"), 9, 2, model=model, strategy=FSDP)
    assert says == [
        f"{start}leaves a process without a sample where others have one, and the sample that it repeats would count in "
        f"SyncBatchNorm's statistics{end}"
    ] * 2  # fmt: skip
