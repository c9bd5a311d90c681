"""Loops: what comes when, what an iteration is, and what each update is trained on."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from flextrain import ConfigError, FlexibleRunner
from flextrain.runner.hooks import POINTS, Hook

from .training import SGD, At, Samples, Watch, log_lines, make_runner, validation

pytestmark = pytest.mark.usefixtures("quick")


class Recorder(Hook):
    """Writes down every point that it is called at, with (epoch, iter)."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def points(self) -> list[str]:
        return [call[0] for call in self.calls]


def _recording(point: str) -> Any:
    def record(self: Recorder, runner: FlexibleRunner, *args: Any, **kwargs: Any) -> None:
        loop = runner._train_loop
        self.calls.append((point, loop.epoch if loop else 0, loop.iter if loop else 0))

    return record


for _point in POINTS:
    setattr(Recorder, _point, _recording(_point))


def loader(length: int = 26, **options: Any) -> dict[str, Any]:
    return dict(batch_size=4, dataset=Samples(length), collate_fn="default_collate", **options)


def test_the_order_of_everything(tmp_path: Path) -> None:
    """Two epochs of two updates, validation after the second; as in MMEngine."""
    seen = Recorder()
    runner = make_runner(
        tmp_path,
        train_dataloader=loader(8),
        train_cfg=dict(max_epochs=2, val_interval=2),
        **validation(4),
        custom_hooks=[seen],
    )
    runner.train()
    epoch = ["before_train_epoch", *["before_train_iter", "after_train_iter"] * 2, "after_train_epoch"]
    val = ["before_val", "before_val_epoch", "before_val_iter", "after_val_iter", "after_val_epoch", "after_val"]
    assert seen.points() == ["before_run", "before_train", *epoch, *epoch, *val, "after_train", "after_run"]
    # The counters move behind the hooks of what they count.
    at = [
        call for call in seen.calls if call[0] in ("after_train_iter", "after_train_epoch", "before_val", "after_train")
    ]
    assert [call[1:] for call in at] == [(0, 0), (0, 1), (0, 2), (1, 2), (1, 3), (1, 4), (2, 4), (2, 4)]


def test_the_order_in_iterations(tmp_path: Path) -> None:
    """Epoch points come once, as in MMEngine: the whole training is one."""
    seen = Recorder()
    cfg = dict(by_epoch=False, max_iters=3, val_interval=2)
    runner = make_runner(tmp_path, train_dataloader=loader(8), train_cfg=cfg, **validation(4), custom_hooks=[seen])
    runner.train()
    one = ["before_train_iter", "after_train_iter"]
    val = ["before_val", "before_val_epoch", "before_val_iter", "after_val_iter", "after_val_epoch", "after_val"]
    assert seen.points() == [
        "before_run", "before_train", "before_train_epoch", *one, *one, *val, *one, *val, "after_train_epoch",
        "after_train", "after_run",
    ]  # fmt: skip


def test_epochs_in_iterations_are_passes_over_the_data(tmp_path: Path) -> None:
    """Not as in MMEngine, where the whole training is epoch 0 of 1."""
    seen = Recorder()
    cfg = dict(by_epoch=False, max_iters=5)
    runner = make_runner(tmp_path, train_dataloader=loader(8), train_cfg=cfg, custom_hooks=[seen])
    runner.train()
    assert [epoch for point, epoch, _ in seen.calls if point == "before_train_iter"] == [0, 0, 1, 1, 2]
    assert (runner.epoch, runner.max_epochs) == (2, 3)


def test_an_exception_is_told_to_the_hooks(tmp_path: Path) -> None:
    class Fails(nn.Module):
        def forward(self, index: Any, x: Tensor, y: Tensor, mode: str = "loss") -> Any:
            raise KeyboardInterrupt

    seen = Recorder()
    model = Fails()
    model.weight = nn.Parameter(torch.zeros(1))
    with pytest.raises(KeyboardInterrupt):
        make_runner(tmp_path, model=model, custom_hooks=[seen]).train()
    assert seen.points()[-1] == "on_exception"
    assert "after_run" not in seen.points()


@pytest.mark.parametrize(
    "cfg, when",
    [
        (dict(max_epochs=5), [1, 2, 3, 4, 5]),
        (dict(max_epochs=5, val_interval=2), [2, 4, 5]),
        (dict(max_epochs=5, val_begin=3), [3, 4, 5]),
        (dict(max_epochs=5, val_interval=4, val_begin=5), [5]),
        # MMEngine's rule: the interval of a milestone is in force when that epoch comes next.
        (dict(max_epochs=8, val_interval=4, dynamic_intervals=[(6, 1)]), [4, 5, 6, 7, 8]),
        (dict(max_epochs=8, val_interval=1, dynamic_intervals=[(5, 3), (3, 2)]), [1, 2, 6, 8]),
        (dict(by_epoch=False, max_iters=5, val_interval=2), [2, 4, 5]),
        (dict(by_epoch=False, max_iters=5), [5]),
        (dict(by_epoch=False, max_iters=12, val_interval=5, dynamic_intervals=[(11, 2)]), [5, 10, 12]),
    ],
    ids=str,
)
def test_when_validation_comes(tmp_path: Path, cfg: dict[str, Any], when: list[int]) -> None:
    seen = Recorder()
    make_runner(tmp_path, train_dataloader=loader(4), train_cfg=cfg, **validation(2), custom_hooks=[seen]).train()
    position = 1 if cfg.get("by_epoch", True) else 2
    assert [call[position] for call in seen.calls if call[0] == "before_val"] == when


def test_whole_numbers_may_be_floats(tmp_path: Path) -> None:
    """As in MMEngine's configurations: max_iters=1e5."""
    runner = make_runner(tmp_path, train_cfg=dict(by_epoch=False, max_iters=3.0, val_interval=1e6), **validation())
    runner.train()
    assert (runner.iter, runner.max_iters) == (3, 3)
    assert isinstance(runner.max_iters, int)


def test_when_validation_comes_is_not_ignored_in_silence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen = Recorder()
    make_runner(tmp_path, train_cfg=dict(max_epochs=1, val_interval=2), log_level="INFO", custom_hooks=[seen]).train()
    assert "before_val" not in seen.points()
    assert "train_cfg.val_interval: without effect, there is no validation" in capsys.readouterr().out


def test_training_mode_and_evaluation_mode(tmp_path: Path) -> None:
    class Modes(Hook):
        def __init__(self) -> None:
            self.seen: list[tuple[str, bool, bool]] = []

        def before_iter(
            self, runner: FlexibleRunner, batch_idx: int, data_batch: Any = None, mode: str = "train"
        ) -> None:
            self.seen.append((mode, runner.model.training, torch.is_grad_enabled()))

    for cfg in (dict(max_epochs=2), dict(by_epoch=False, max_iters=4, val_interval=1)):
        modes = Modes()
        runner = make_runner(tmp_path, train_dataloader=loader(8), train_cfg=cfg, **validation(2), custom_hooks=[modes])
        runner.train()
        assert set(modes.seen) == {("train", True, True), ("val", False, False)}
        assert modes.seen[-2:] == [("train", True, True), ("val", False, False)]
        assert torch.is_grad_enabled()


# An iteration is an update


@pytest.mark.parametrize("accumulate, length", [(1, 7), (2, 4), (3, 3), (7, 1), (10, 1)])
def test_counts_are_updates(tmp_path: Path, accumulate: int, length: int) -> None:
    watch = Watch()
    wrapper = dict(optimizer=SGD, accumulative_counts=accumulate)
    runner = make_runner(tmp_path, optim_wrapper=wrapper, train_cfg=dict(max_epochs=2), custom_hooks=[watch])
    runner.train()
    assert (runner.iter, runner.max_iters, runner.train_loop.epoch_length) == (2 * length, 2 * length, length)
    assert [len(samples) for samples in watch.trained][: length - 1] == [4 * accumulate] * (length - 1)
    assert sum(map(len, watch.trained[:length])) == 26


def test_hooks_are_given_the_window(tmp_path: Path) -> None:
    class Batches(Hook):
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def after_train_iter(
            self, runner: FlexibleRunner, batch_idx: int, data_batch: Any = None, outputs: Any = None
        ) -> None:
            self.seen.append((batch_idx, data_batch, outputs))

    for accumulate, sizes in ((1, [None] * 7), (3, [3, 3, 1])):
        batches = Batches()
        wrapper = dict(optimizer=SGD, accumulative_counts=accumulate, clip_grad=dict(max_norm=1.0))
        make_runner(tmp_path, optim_wrapper=wrapper, train_cfg=dict(max_epochs=1), custom_hooks=[batches]).train()
        assert [batch_idx for batch_idx, _, _ in batches.seen] == list(range(len(sizes)))
        assert [len(batch) if isinstance(batch, list) else None for _, batch, _ in batches.seen] == sizes
        for _, _, outputs in batches.seen:
            assert set(outputs) == {"loss", "grad_norm"}
            assert all(value.shape == () and not value.requires_grad for value in outputs.values())


class Line(nn.Module):
    """A linear model without dropout; in float64, so that sums may be taken in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 1).double()

    def forward(self, index: Any, x: Tensor, y: Tensor, mode: str = "loss") -> Any:
        return {"loss": ((self.net(x.double()).squeeze(1) - y.double()) ** 2).mean()}


def trained(folder: Path, batch_size: int, accumulate: int, length: int, **changes: Any) -> tuple[Watch, Any]:
    watch = Watch()
    runner = make_runner(
        folder,
        model=Line,
        train_dataloader=loader(length, sampler=dict(type="DefaultSampler", shuffle=False))
        | dict(batch_size=batch_size),
        optim_wrapper=dict(optimizer=SGD, accumulative_counts=accumulate),
        custom_hooks=[watch],
        **{"train_cfg": dict(max_epochs=2), **changes},
    )
    runner.train()
    return watch, runner


def test_accumulation_is_a_larger_batch(tmp_path: Path) -> None:
    small, runner = trained(tmp_path, 3, 4, 24)
    large, expected = trained(tmp_path, 12, 1, 24)
    assert small.trained == large.trained
    assert torch.allclose(torch.stack(small.losses), torch.stack(large.losses), rtol=1e-12)
    assert torch.allclose(runner.model.net.weight, expected.model.net.weight, rtol=1e-12)


def test_the_last_window_of_an_epoch_divides_by_its_own_length(tmp_path: Path) -> None:
    """Ten batches in windows of four: the third update is one of the last two batches (pains 16)."""
    small, runner = trained(tmp_path, 2, 4, 20, train_cfg=dict(max_epochs=1))
    by_hand = Line()
    torch.manual_seed(1)
    by_hand.load_state_dict(make_runner(tmp_path, model=Line).model.state_dict())
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1, momentum=0.9)
    samples = Samples(20)
    for window in (range(8), range(8, 16), range(16, 20)):
        x, y = samples.x[list(window)], samples.y[list(window)]
        loss = by_hand(None, x, y)["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert [len(window) for window in small.trained] == [8, 8, 4]
    assert torch.allclose(runner.model.net.weight, by_hand.net.weight, rtol=1e-12)
    assert torch.allclose(small.losses[-1], loss.detach(), rtol=1e-12)


@pytest.mark.parametrize("scheduler", [
    dict(type="LinearLR", by_epoch=False, end=5),
    dict(type="CosineAnnealingLR", T_max=2),
    dict(type="LinearLR", convert_to_iter_based=True, end=2),
])  # fmt: skip
def test_the_rate_of_an_update_does_not_depend_on_accumulation(tmp_path: Path, scheduler: dict[str, Any]) -> None:
    reference, _ = trained(tmp_path, 12, 1, 36, param_scheduler=scheduler)
    assert len(set(reference.rates)) > 1
    for accumulate in (2, 3, 4):
        assert (
            trained(tmp_path, 12 // accumulate, accumulate, 36, param_scheduler=scheduler)[0].rates == reference.rates
        )


def test_rates_are_scaled_once_where_groups_share_a_tensor(tmp_path: Path) -> None:
    optimizer = dict(type="Adam", lr=torch.tensor(0.1), weight_decay=0.1)
    runner = make_runner(
        tmp_path,
        train_dataloader=loader(),
        optim_wrapper=dict(optimizer=optimizer, paramwise_cfg=dict(bias_decay_mult=0.0), accumulative_counts=2),
        auto_scale_lr=dict(enable=True, base_batch_size=16),
    )
    runner.train()
    assert [float(group["lr"]) for group in runner.optim_wrapper.param_groups] == pytest.approx([0.05] * 2)


@pytest.mark.parametrize("schedule", [dict(type="OneCycleLR", eta_max=0.1, by_epoch=False), "one_cycle"])
def test_rates_that_are_not_scaled_are_told(tmp_path: Path, schedule: Any) -> None:
    scale = dict(enable=True, base_batch_size=16)
    runner = make_runner(tmp_path, param_scheduler=schedule, auto_scale_lr=scale, log_level="WARNING")
    with log_lines() as said:
        runner.train()
    lines = [line for line in said if line.startswith("auto_scale_lr: does not scale OneCycleLR")]
    assert len(lines) == (schedule != "one_cycle")


def test_intervals_count_updates(tmp_path: Path) -> None:
    default_hooks = dict(checkpoint=dict(interval=4, by_epoch=False, save_last=False))
    trained(tmp_path, 3, 2, 27, train_cfg=dict(by_epoch=False, max_iters=9), default_hooks=default_hooks)
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_4", "iter_8"]


# Iteration-based training


def test_the_data_start_anew_when_they_end(tmp_path: Path) -> None:
    watch = Watch()
    cfg = dict(by_epoch=False, max_iters=17)
    runner = make_runner(tmp_path, train_cfg=cfg, custom_hooks=[watch])
    runner.train()
    assert (runner.iter, runner.epoch, runner.max_epochs, runner.train_loop.epoch_length) == (17, 2, 3, 7)
    epochs = [list(chain(*watch.trained[7 * i : 7 * i + 7])) for i in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(26))
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("at, end", [(2, 5), (2, 12), (8, 12)])
def test_a_hook_can_set_another_end(tmp_path: Path, at: int, end: int) -> None:
    """As in MMEngine; a later end was that of another pass over the data, an earlier one was passed over."""

    def set_end(runner: FlexibleRunner, *_: Any, **__: Any) -> None:
        if runner.iter == at:
            runner.train_loop._max_iters = end  # type: ignore[attr-defined]

    watch, watch_whole = Watch(), Watch()
    hooks = [At("after_train_iter", set_end), watch]
    make_runner(tmp_path / "set", train_cfg=dict(by_epoch=False, max_iters=9), custom_hooks=hooks).train()
    whole = make_runner(tmp_path / "whole", train_cfg=dict(by_epoch=False, max_iters=end), custom_hooks=[watch_whole])
    whole.train()
    assert watch.trained == watch_whole.trained


def test_an_infinite_sampler_never_ends(tmp_path: Path) -> None:
    watch = Watch()
    data = loader(10, sampler=dict(type="InfiniteSampler", shuffle=False))
    runner = make_runner(
        tmp_path, train_dataloader=data, train_cfg=dict(by_epoch=False, max_iters=6), custom_hooks=[watch]
    )
    runner.train()
    assert list(chain(*watch.trained)) == [*range(10), *range(10), *range(4)]
    assert (runner.epoch, runner.train_loop.epoch_length) == (0, 6)


class Few(IterableDataset[Any]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        samples = Samples(9)
        return (samples[i] for i in range(self.count))


def test_a_stream_starts_anew_when_it_ends(tmp_path: Path) -> None:
    watch = Watch()
    data = dict(dataset=Few(6), batch_size=4, collate_fn="default_collate")
    cfg = dict(by_epoch=False, max_iters=5)
    make_runner(tmp_path, train_dataloader=data, train_cfg=cfg, custom_hooks=[watch]).train()
    assert watch.trained == [[0, 1, 2, 3], [4, 5], [0, 1, 2, 3], [4, 5], [0, 1, 2, 3]]


@pytest.mark.parametrize(
    "data, cfg, says",
    [
        (
            dict(dataset=Few(3)),
            dict(max_epochs=1),
            "train_cfg.by_epoch: the training data have no end or no length, give",
        ),
        (
            dict(dataset=Few(0)),
            dict(by_epoch=False, max_iters=2),
            "train_dataloader: DataLoader gives no batch, its dataset",
        ),
        (dict(dataset=[]), dict(max_epochs=1), "train_dataloader.dataset: list is empty"),
        (
            dict(dataset=[]),
            dict(by_epoch=False, max_iters=2),
            "train_dataloader.dataset: list is empty",
        ),
        (
            dict(dataset=Samples(3), batch_size=4, drop_last=True),
            dict(max_epochs=1),
            "train_dataloader.batch_size: 4 is more than the 3 samples",
        ),
    ],
    ids=["stream-by-epoch", "stream-by-iteration", "list-by-epoch", "list-by-iteration", "less-than-a-batch"],
)
def test_data_that_cannot_be_trained_on(tmp_path: Path, data: Any, cfg: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=f"^{says}"):
        make_runner(tmp_path, train_dataloader=data, train_cfg=cfg).train()


class StopTraining(Hook):
    def after_train_iter(
        self, runner: FlexibleRunner, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        if runner.iter == 2:
            runner.train_loop.stop_training = True


def test_a_hook_can_stop_training(tmp_path: Path) -> None:
    runner = make_runner(tmp_path, custom_hooks=[dict(type=StopTraining)])
    runner.train()
    assert (runner.epoch, runner.iter) == (1, 7)  # after the epoch, as in MMEngine
    runner = make_runner(tmp_path, train_cfg=dict(by_epoch=False, max_iters=9), custom_hooks=[dict(type=StopTraining)])
    runner.train()
    assert runner.iter == 3


def test_seeds_make_runs_equal(tmp_path: Path) -> None:
    def losses(seed: int) -> list[float]:
        watch = Watch()
        make_runner(tmp_path, randomness=dict(seed=seed), custom_hooks=[watch]).train()
        return [float(loss) for loss in watch.losses]

    assert losses(1) == losses(1) != losses(2)


class Indices(Hook):
    """Writes down ``batch_idx``, and when something is due that happens every 3 inner iterations."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.due: list[int] = []
        self.ends: list[int] = []

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        self.seen.append(batch_idx)
        if self.every_n_inner_iters(batch_idx, 3):
            self.due.append(runner.iter)
        if self.end_of_epoch(runner.train_loop.epoch_length, batch_idx):
            self.ends.append(runner.iter)


def test_batch_idx_counts_from_the_start_of_training_by_iterations(tmp_path: Path) -> None:
    def run(max_iters: int, **cfg: Any) -> tuple[FlexibleRunner, Indices]:
        hook = Indices()
        runner = make_runner(
            tmp_path,
            train_dataloader=dict(dataset=Samples(8), batch_size=2, collate_fn="default_collate"),
            train_cfg=dict(by_epoch=False, max_iters=max_iters),
            custom_hooks=[hook],
            log_level="INFO",
            default_hooks=dict(logger=dict(interval=1), checkpoint=dict(interval=1, by_epoch=False)),
            **cfg,
        )
        runner.train()
        return runner, hook

    _, hook = run(6)
    assert (hook.seen, hook.due, hook.ends) == (list(range(6)), [2, 5], [3])
    again, resumed = run(10, resume=True, log_processor=dict(by_epoch=True))
    assert (resumed.seen, resumed.due, resumed.ends) == ([6, 7, 8, 9], [8], [7])
    lines = (Path(again.log_dir) / f"{again.timestamp}.log").read_text()
    assert all(f"[{i}/4]" in lines.replace(" ", "") for i in (1, 2, 3, 4))
    assert "[7/4]" not in lines.replace(" ", "")
