"""State that lies in files goes into the one format and comes back: to and from every other strategy, and in the background."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flextrain.core.base.errors import CheckpointError
from flextrain.core.checkpoint import Checkpoint
from flextrain.core.checkpoint.save import save_in_background
from flextrain.optim import AmpOptimWrapper, OptimWrapper
from flextrain.testing import WorkerGroup
from flextrain.testing.differences import FLOAT32_TOLERANCE, same_tensors
from flextrain.testing.sessions import load, started, whole_state

from ..conftest import WorkerFactory
from ..swapping import Wide, allow_small_files, on_files, swap_files
from .test_matrix import DONE, MORE, OPTIMIZERS, STRATEGIES, Everything, Saved, begin_and_save, resume, updates, wrapper

pytest.importorskip("deepspeed", reason="needs pip install flextrain[deepspeed]")
pytestmark = [
    pytest.mark.deepspeed,
    pytest.mark.full,
    pytest.mark.distributed,
    pytest.mark.usefixtures("async_io"),
]

BOTH = dict(sub_group_size=300)
BF16 = AmpOptimWrapper(OPTIMIZERS["adamw"], dtype="bfloat16")


def files(folder: Path, **options: Any) -> dict[str, Any]:
    return on_files(folder, zero_optimization=BOTH, **options)


def begin(strategy: dict[str, Any], optim: OptimWrapper, path: Path) -> Saved:
    allow_small_files()
    return begin_and_save(strategy, optim, path)


def go_on(strategy: dict[str, Any], optim: OptimWrapper, saved: Saved, tolerance: float) -> tuple[float, float]:
    allow_small_files()
    return resume(strategy, optim, saved, tolerance)


PAIRS = [
    (("files", 2), ("single", 1)),
    (("files", 2), ("fsdp", 2)),
    (("files", 2), ("zero2", 2)),
    (("files", 2), ("zero3", 2)),
    (("files", 2), ("files", 1)),
    (("files", 1), ("files", 2)),
    (("single", 1), ("files", 2)),
    (("fsdp", 2), ("files", 2)),
    (("zero2", 2), ("files", 2)),
    (("zero3", 3), ("files", 2)),
    (("files", 2), ("files", 2)),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("before", "after"), PAIRS, ids=lambda layout: "x".join(map(str, layout)))
def test_saved_under_one_resumed_under_another(
    tmp_path: Path, workers: WorkerFactory, before: tuple[str, int], after: tuple[str, int], optimizer: str
) -> None:
    swap = tmp_path / "swap"
    swap.mkdir()
    strategies = {**STRATEGIES, "files": files(swap)}
    saved = workers(before[1]).run(begin, strategies[before[0]], wrapper(optimizer), tmp_path / "c")[0]
    tolerance = 0.0 if before == after else FLOAT32_TOLERANCE
    workers(after[1]).run(go_on, strategies[after[0]], wrapper(optimizer), saved, tolerance)
    assert not list(swap.iterdir())


def test_masters_in_files_are_what_is_saved(tmp_path: Path, workers: WorkerFactory) -> None:
    swap = tmp_path / "swap"
    swap.mkdir()
    saved = workers(2).run(begin, files(swap), BF16, tmp_path / "c")[0]
    weights = [
        v for k, v in saved.state.items() if k.startswith("model.") and v.dtype is torch.float32 and v.numel() > 1
    ]
    assert weights
    assert not any(torch.equal(value.bfloat16().float(), value) for value in weights)
    workers(2).run(go_on, files(swap), BF16, saved, 0.0)


def in_the_background(strategy: dict[str, Any], path: Path) -> None:
    """What is saved is the state at the call, although training goes on while it is written."""
    allow_small_files()
    with started(strategy, wrapper("adamw"), Everything) as session:
        updates(session, 0, DONE)
        expected = whole_state(session.strategy)
        pending = save_in_background(path, {**session.strategy.state(), "optim.wrapper": {}})
        updates(session, DONE, DONE + MORE)
        pending.wait()
        assert not torch.equal(whole_state(session.strategy)["model.probe"], expected["model.probe"])
        load(session, path)
        same_tensors(whole_state(session.strategy), expected, "what was loaded")


def test_a_save_in_the_background_has_the_state_at_the_call(workers2: WorkerGroup, tmp_path: Path) -> None:
    swap = tmp_path / "swap"
    swap.mkdir()
    workers2.run(in_the_background, files(swap), tmp_path / "c")


def failing_load(strategy: dict[str, Any], path: Path) -> None:
    """A load that fails leaves the optimizer's state in the files as it is."""
    allow_small_files()
    with started(strategy, wrapper("adamw"), Everything) as session:
        updates(session, 0, 3)
        before = whole_state(session.strategy)
        checkpoint = Checkpoint.open(path)
        template = session.strategy.template(checkpoint.saved)
        names = [name for name in template if name.startswith("optim.state.") and name.endswith("exp_avg")]
        assert names
        checkpoint.load(template)
        now = whole_state(session.strategy)
        same_tensors(
            *({k: s[k] for k in before if k.startswith("optim.state.")} for s in (now, before)), "what was there"
        )
        with pytest.raises(CheckpointError, match="the checkpoint's is SGD"):
            session.strategy.load({**template, f"optim.group.{names[0][12:-8]}.optimizer": "SGD"})


def test_a_template_does_not_change_the_state(workers2: WorkerGroup, tmp_path: Path) -> None:
    swap = tmp_path / "swap"
    swap.mkdir()
    workers2.run(begin, files(swap), wrapper("adamw"), tmp_path / "c")
    workers2.run(failing_load, files(swap), tmp_path / "c")
    assert not list(swap.iterdir())


# With the runner: averaged weights, evaluation, frozen layers, a failure


def runner_in(folder: Path, strategy: dict[str, Any], epochs: int, hooks: list[Any], **options: Any) -> Any:
    from flextrain import FlexibleRunner

    return FlexibleRunner(
        model=Wide,
        work_dir=str(folder),
        strategy=strategy,
        optim_wrapper=dict(type="OptimWrapper", optimizer=OPTIMIZERS["adamw"], clip_grad=dict(max_norm=0.5)),
        train_dataloader=dict(batch_size=4, dataset=Samples(), collate_fn=dict(type="default_collate")),
        val_dataloader=dict(batch_size=4, dataset=Samples(), collate_fn=dict(type="default_collate")),
        val_cfg=dict(),
        val_evaluator=dict(type=Share),
        train_cfg=dict(max_epochs=epochs, val_interval=1),
        custom_hooks=[dict(type="EMAHook", momentum=0.1), *hooks],
        log_level="ERROR",
        randomness=dict(seed=1),
        env_cfg=dict(nonfinite="skip"),
        **options,
    )


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x = torch.randn(6, generator=torch.Generator().manual_seed(index))
        return {"x": x, "y": (x.sum() > 0).long()}


def share_metric() -> Any:
    from flextrain import BaseMetric

    class Share(BaseMetric):
        """The number of samples for which each class was predicted."""

        def process(self, data_batch: Any, data_samples: Any) -> None:
            self.results += [int(sample) for sample in data_samples[0].flatten()]

        def compute_metrics(self, results: list[int]) -> dict[str, float]:
            return {f"class_{i}": float(results.count(i)) for i in range(5)}

    return Share


Share = share_metric()


def train_in_parts(folder: Path, memory: dict[str, Any], strategy: dict[str, Any], swap: Path) -> None:
    """In memory at once, and in files one epoch and then two more: the same state, averages and metrics, bit for bit."""
    allow_small_files()
    states, metrics, averages = [], [], []
    for name, spec, parts in (("memory", memory, [3]), ("files", strategy, [1, 3])):
        for number, epochs in enumerate(parts):
            checkpoints = dict(checkpoint=dict(type="CheckpointHook", interval=1, async_save=True))
            runner = runner_in(folder / name, spec, epochs, [], resume=number > 0, default_hooks=checkpoints)
            runner.train()
            if name == "files":
                assert swap_files(swap).keys() == {"optimizer", "float32params"}
            if epochs < 3:
                runner.strategy.leave()
        states.append(whole_state(runner.strategy))
        metrics.append(dict(runner.val()))
        checkpoint = Checkpoint.open(folder / name / "epoch_3")
        target = {key: torch.empty(info.shape) for key, info in checkpoint.tensors.items() if "averaged" in key}
        checkpoint.load(target)
        averages.append(target)
        runner.strategy.leave()
    same_tensors(states[1], states[0], "final state")
    same_tensors(averages[1], averages[0], "averages")
    assert averages[0]
    assert metrics[1] == metrics[0]


def test_a_run_with_averages_and_validation_goes_on(workers2: WorkerGroup, tmp_path: Path) -> None:
    swap = tmp_path / "swap"
    swap.mkdir()
    memory = dict(
        type="DeepSpeedStrategy", device="cpu", zero_optimization=dict(stage=3, offload_optimizer=dict(device="cpu"))
    )
    workers2.run(train_in_parts, tmp_path, memory, on_files(swap), swap)
    assert not list(swap.iterdir())


def train_until_failure(folder: Path, swap: Path) -> None:
    from flextrain import Hook

    class Fails(Hook):
        def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
            if runner.iter == 2:
                raise RuntimeError("out of luck")

    allow_small_files()
    runner = runner_in(folder, on_files(swap), 1, [Fails()])
    with pytest.raises(RuntimeError, match="out of luck"):
        runner.train()
    runner.strategy.leave()


def test_a_run_that_fails_leaves_no_files(workers2: WorkerGroup, tmp_path: Path) -> None:
    swap = tmp_path / "swap"
    swap.mkdir()
    workers2.run(train_until_failure, tmp_path / "w", swap)
    assert not list(swap.iterdir())
