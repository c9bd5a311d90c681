"""Processes that hold different parameters of one copy of a model train, clip, skip and evaluate as one device does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from flextrain import DataShard, Hook, NonFiniteError, SingleDeviceStrategy, Strategy, Topology
from flextrain.strategies.base import EvalStep, TrainStep
from flextrain.testing import WorkerGroup

from .training import SGD, Accuracy, Samples, Watch, make_runner

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("quick")]


class TwoParts(nn.Module):
    """``first`` and ``last``, either of which may be on another process; the head's matrix is tied to the first one's."""

    def __init__(self) -> None:
        super().__init__()
        self.first: Any = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.last: Any = nn.Sequential(nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
        self.last[1].weight = self.first[0].weight

    def forward(self, index: Any, x: Tensor, y: Tensor, mode: str = "tensor") -> Any:
        hidden = x if self.first is None else self.first(x)
        if self.last is None:
            return hidden
        logits = self.last(hidden)
        if mode == "loss":
            return {"loss": functional.cross_entropy(logits.float(), y)}
        return {"index": index, "logits": logits, "y": y}

    def loss_weight(self, data: Any) -> int:
        return len(data["y"])


class Stages(Strategy):
    """Forward of all micro-batches, then backward of all, from stage to stage; half of all processes are first stages."""

    def _arrange(self) -> Topology:
        half = self.topology.world_size // 2
        mesh = init_device_mesh("cpu", (2, half), mesh_dim_names=("pp", "dp"))
        self._stage, part = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
        self._other = (self.topology.rank + half) % self.topology.world_size
        return Topology(
            data=DataShard(part, half, mesh.get_group("dp")),
            reports=self._stage == 1,
            model=mesh.get_group("pp"),
            axes={"pp": (self._stage, 2), "dp": (part, half)},
        )

    def _wrap(self, model: nn.Module) -> nn.Module:
        if self._stage == 0:
            model.last = None
        else:
            model.first = None
        return model

    def setup(self, model: nn.Module, optim: Any = None) -> Any:
        model, optim = super().setup(model, optim)
        optim.register_step_pre_hook(self._add_gradients)
        return model, optim

    def _add_gradients(self, optim: Any) -> None:
        tied = self.module.first[0].weight if self._stage == 0 else self.module.last[1].weight
        dist.all_reduce(tied.grad, group=self.topology.model)
        self.topology.data.average([p.grad for p in self.module.parameters()])

    def run_window(self, window: Sequence[Any], step: TrainStep) -> dict[str, Tensor]:
        hidden, found = [], []
        for i, batch in enumerate(window):
            step.begin(i)
            data = step.prepare(batch)
            if self._stage == 0:
                with self.autocast():
                    hidden.append(self.module(**data))
                dist.send(hidden[-1].detach().float(), self._other)
            else:
                hidden.append(self._received(data["x"]).requires_grad_())
                found.append(step.forward({**batch, "x": hidden[-1]}))
        for i, kept in enumerate(hidden):
            if self._stage == 0:
                kept.backward(self._received(kept).to(kept.dtype))
            else:
                step.backward(found[i][0], i)
                dist.send(kept.grad, self._other)
        loss = step.mean([logs for _, logs in found])["loss"] if found else torch.zeros(())
        return {"loss": dist.all_reduce(loss, group=self.topology.model) or loss}

    def evaluate(self, batch: Any, step: EvalStep) -> Any:
        data = step.prepare(batch)
        if self._stage == 0:
            dist.send(step.predict(batch).detach(), self._other)
            return None
        return step.predict({**batch, "x": self._received(data["x"])})

    def _received(self, like: Tensor) -> Tensor:
        found = torch.empty(like.shape)
        dist.recv(found, self._other)
        return found


class Norms(Hook):
    """Writes down the gradient norms, and whether updates were left out; spoils a gradient of the first part, or of the last."""

    priority = "LOWEST"

    def __init__(self, spoiled: str | None = None, at: int = 2) -> None:
        self.norms: list[float] = []
        self.skipped: list[bool] = []
        self.spoiled, self.at = spoiled, at

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        part = getattr(runner.strategy.module, self.spoiled) if self.spoiled else None
        if part is not None and runner.iter == self.at:
            bias = part[-1].bias
            handle = bias.register_hook(lambda grad: handle.remove() or grad * math.inf)

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        self.skipped.append(runner.optim_wrapper.last_step.skipped)
        if "grad_norm" in outputs:
            self.norms.append(float(outputs["grad_norm"]))


def life(folder: str, strategy: type, processes: int, wrapper: dict[str, Any], **changes: Any) -> dict[str, Any]:
    watch, norms = Watch(), Norms(changes.pop("spoiled", None))
    torch.manual_seed(0)
    runner = make_runner(
        folder,
        model=TwoParts(),
        strategy=dict(type=strategy, device="cpu"),
        train_dataloader=dict(dataset=Samples(22, noisy=True), batch_size=8 // processes, collate_fn="default_collate"),
        optim_wrapper={"optimizer": SGD, "accumulative_counts": 2, **wrapper},
        train_cfg=dict(max_epochs=2),
        val_dataloader=dict(dataset=Samples(11), batch_size=3, collate_fn="default_collate"),
        val_cfg={},
        val_evaluator=dict(type=Accuracy),
        custom_hooks=[watch, norms],
        **changes,
    )
    runner.train()
    metrics = runner.val()
    weights = {name: value.clone() for name, value in runner.strategy.model_state().items()}
    optim: Any = runner.optim_wrapper
    data = runner.strategy.topology.data
    losses = torch.stack([data.mean(loss.clone()) for loss in watch.losses])
    runner.strategy.leave()
    return dict(
        weights=weights,
        losses=losses,
        norms=norms.norms,
        skipped=norms.skipped,
        metrics=metrics,
        state=optim.plain_values(),
    )


def compare(found: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    held: set[str] = set()
    for own in found:
        held |= own["weights"].keys()
        torch.testing.assert_close(own["losses"], expected["losses"])
        assert own["norms"] == pytest.approx(expected["norms"], rel=1e-5)
        assert own["norms"] == found[0]["norms"]
        assert own["skipped"] == expected["skipped"]
        assert own["metrics"] == expected["metrics"]
        assert own["state"] == expected["state"]
        for name, value in own["weights"].items():
            torch.testing.assert_close(value, expected["weights"][name], msg=lambda text, name=name: f"{name}: {text}")
    assert held == expected["weights"].keys()


@pytest.mark.parametrize("norm_type", [2.0, math.inf, pytest.param(3.0, marks=pytest.mark.full)])
def test_two_stages_clip_by_the_norm_of_both(tmp_path: Path, workers2: WorkerGroup, norm_type: float) -> None:
    """The tied matrix counts once; the micro-batches of a window are all forward before any is backward."""
    wrapper = dict(clip_grad=dict(max_norm=0.01, norm_type=norm_type))
    expected = life(str(tmp_path), SingleDeviceStrategy, 1, wrapper)
    assert min(expected["norms"]) > 0.01
    compare(workers2.run(life, str(tmp_path), Stages, 1, wrapper), expected)


def test_two_stages_over_two_parts_of_the_data(tmp_path: Path, workers: Any) -> None:
    wrapper = dict(clip_grad=dict(max_norm=0.01))
    expected = life(str(tmp_path), SingleDeviceStrategy, 1, wrapper)
    found = workers(4).run(life, str(tmp_path), Stages, 2, wrapper)
    for own in found:  # samples of an epoch are drawn alike; the order within a batch differs
        assert own["metrics"]["count"] == 11
    compare(found, expected)


@pytest.mark.parametrize("spoiled", ["first", "last"])
def test_an_overflow_in_one_stage_skips_the_update_in_both(tmp_path: Path, workers2: WorkerGroup, spoiled: str) -> None:
    wrapper = dict(
        type="AmpOptimWrapper", dtype="float16", loss_scale=dict(init_scale=8.0), clip_grad=dict(max_norm=0.01)
    )
    found = workers2.run(life, str(tmp_path), Stages, 1, wrapper, spoiled=spoiled)
    for own in found:
        assert own["skipped"] == [False, False, True, False]
        assert own["state"]["scaler"]["scale"] == 4.0


@pytest.mark.parametrize("spoiled", ["first", pytest.param("last", marks=pytest.mark.full)])
def test_gradients_that_are_not_finite_in_one_stage_are_left_out_in_both(
    tmp_path: Path, workers2: WorkerGroup, spoiled: str
) -> None:
    found = workers2.run(
        life,
        str(tmp_path),
        Stages,
        1,
        dict(clip_grad=dict(max_norm=0.01)),
        spoiled=spoiled,
        env_cfg=dict(nonfinite="skip"),
    )
    for own in found:
        assert own["skipped"] == [False, False, True, False]
        assert all(value.isfinite().all() for value in own["weights"].values())


def raising(folder: str, spoiled: str) -> str:
    with pytest.raises(NonFiniteError) as caught:
        life(
            folder,
            Stages,
            1,
            {},
            spoiled=spoiled,
            env_cfg=dict(nonfinite="raise"),
            default_hooks=dict(logger=dict(interval=1)),
        )
    return str(caught.value)


def test_what_is_not_finite_is_looked_for_along_the_strategys_own_way(tmp_path: Path, workers2: WorkerGroup) -> None:
    first, second = workers2.run(raising, str(tmp_path), "last")
    assert first == second
    assert "Iteration 4: loss is nan" in first
    assert "is the first module in forward with such weights" in first
