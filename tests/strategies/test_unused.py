"""Processes whose samples use different parameters: as on one device with all samples, or refused before the update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import checkpoint

from flextrain.core.base.errors import StrategyError
from flextrain.core.model.base_model import BaseModel
from flextrain.core.torch_compat.torch_private import gradient_hooks
from flextrain.optim import OptimWrapper
from flextrain.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, MeshStrategy
from flextrain.testing import WorkerGroup
from flextrain.testing.loop import evaluate, train, windows
from flextrain.testing.models import Batch, SmallModel
from flextrain.testing.sessions import single_device, started, whole_state

pytestmark = pytest.mark.distributed

# The expert that the samples of rank 0 and those of rank 1 go to, in each micro-batch. The third is idle at first, the last
# is always.
ROUTES = ((0, 1), (1, 0), (0, 0), (1, 1), (2, 0), (1, 2), (0, 1), (2, 2))


class Expert(nn.Sequential):
    """A layer that some samples go through."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 6))


class Mixture(nn.ModuleList):
    """Layers of which each sample goes through one."""

    def forward(self, x: Tensor, route: Tensor) -> Tensor:
        """``x`` with what its layers add."""
        for number, expert in enumerate(self):
            if len(rows := (route == number).nonzero()[:, 0]):
                x = x.index_add(0, rows, expert(x[rows]))
        return x


class Experts(SmallModel):
    """Samples go to one of four layers, of which two are equal in shape; one that no sample goes to does not compute."""

    widths: Sequence[int] = (5, 5, 7, 3)
    dtype = torch.float64

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.experts = Mixture([Expert(width) for width in self.widths])
        self.head = nn.Linear(6, self.num_classes)
        self.to(self.dtype)

    def forward(self, x: Tensor, y: Tensor, route: Tensor, mode: str = "loss") -> Any:
        """See SmallModel."""
        self.route = route
        return super().forward(x.to(self.dtype), y, mode)

    def logits(self, x: Tensor) -> Tensor:
        """See SmallModel."""
        return self.head(self.experts(torch.tanh(self.first(x)), self.route))  # type: ignore[no-any-return]


def batches(routes: Sequence[tuple[int, ...]] = ROUTES) -> list[Batch]:
    found = []
    for seed, route in enumerate(routes):
        batch = SmallModel.sample(4 * len(route), seed)
        found.append({**batch, "route": torch.tensor(route).repeat_interleave(4)})
    return found


def wrapper(accumulate: int = 1, model: Any = None) -> OptimWrapper:
    optimizer = getattr(model, "optimizer", None) or dict(type="AdamW", lr=1e-2, weight_decay=0.1)
    return OptimWrapper(optimizer, accumulate, dict(max_norm=0.5))


def trained(session: Any, accumulate: int) -> tuple[Any, dict[str, Any]]:
    trace = train(session.strategy, session.model, session.optim, windows(batches(), accumulate))
    return trace, whole_state(session.strategy)


def difference(spec: dict[str, Any], accumulate: int, model: Any = Experts, oracle: Any = None) -> float:
    """How far losses, norms, weights and the optimizer's state, all of it in float64, are from those of one device."""
    with single_device(wrapper(accumulate, model), oracle or model) as session:
        expected, state = trained(session, accumulate)
    with started(spec, wrapper(accumulate, model), model) as session:
        found, own = trained(session, accumulate)
    assert own.keys() == state.keys(), own.keys() ^ state.keys()
    pairs = [*zip(found.losses, expected.losses, strict=True), *zip(found.grad_norms, expected.grad_norms, strict=True)]
    pairs += [(own[key], value) for key, value in state.items() if "optim.group" not in key]
    return max(float((torch.as_tensor(a).double() - torch.as_tensor(b).double()).abs().sum()) for a, b in pairs)


class Single(Experts):
    """The same in float32."""

    dtype = torch.float32


class TimesZero(Single):
    """The same, with gradients of zeros where the other has none: as DeepSpeed trains."""

    def logits(self, x: Tensor) -> Tensor:
        """See SmallModel."""
        found = super().logits(x)
        return found + sum(0.0 * expert(x).sum() for expert in self.experts)


class Exits(Experts):
    """The layers one after the other; samples leave after as many as ``route`` says. The first may be at the input."""

    def logits(self, x: Tensor) -> Tensor:
        """See SmallModel."""
        for number, layer in enumerate(self.experts):
            if len(rows := (self.route > number).nonzero()[:, 0]):
                x = x.index_add(0, rows, layer(x[rows]))
        return self.head(self.first(x))  # type: ignore[no-any-return]


class Inner(nn.Module):
    """A unit with a parameter of its own and two units inside, of which it calls one or both, the last at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.first, self.second = nn.Parameter(torch.ones(6)), Expert(4), Expert(5)
        self.second.register_forward_hook(lambda module, args, output: output * 0.5)

    def forward(self, x: Tensor, route: int) -> Tensor:
        """Of ``x``."""
        x = x * self.own
        if route != 1:
            x = self.first(x)
        with torch.set_grad_enabled(torch.is_grad_enabled() and route > 0):
            seen = self.second(x)
        return x + seen if route != 2 else self.first(seen)  # type: ignore[no-any-return]


class InTurn(Experts):
    """Each process calls layers in the order, and as often, as the route of its first sample says."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Inner(), Inner()]).to(self.dtype)

    def logits(self, x: Tensor) -> Tensor:
        """See SmallModel; one device with the samples of two processes computes as each of them."""
        found = []
        for rows, route in zip(x.split(4), self.route[::4].tolist(), strict=True):
            rows = self.first(rows)
            for number in ((0, 1), (1, 0, 0), (1,))[route]:
                rows = rows + self.blocks[number](rows, route)
            found.append(self.experts[route](rows) if route else rows)
        return self.head(torch.cat(found))  # type: ignore[no-any-return]


class Parts(BaseModel):
    """A train_step that calls children: each process by the route of its first sample, one device as each of them."""

    dtype = torch.float64

    def train_step(self, data: Batch, optim_wrapper: Any) -> dict[str, Tensor]:
        """See BaseModel."""
        parts = zip(data["x"].to(self.dtype).split(4), data["route"][::4].tolist(), strict=True)
        self.weight = 4.0 / len(data["x"])
        loss = torch.stack([self.loss(x, route) for x, route in parts]).mean()
        optim_wrapper.update_params(loss)
        return {"loss": loss.detach()}

    def forward(self, x: Tensor, y: Tensor, route: Tensor, mode: str = "tensor") -> Tensor:
        """See BaseModel; the loss."""
        return self.loss(x.to(self.dtype), int(route[0]))

    def loss(self, x: Tensor, route: int) -> Tensor:
        """Of the samples of a process."""
        raise NotImplementedError


class AllButOne(nn.Module):
    """Three layers, of which each process leaves one out, or all."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.last = nn.ModuleList([Expert(5) for _ in range(3)]), nn.Linear(6, 6)

    def forward(self, x: Tensor, left_out: int) -> Tensor:
        """Of ``x``."""
        for number, layer in enumerate(self.layers):
            x = x if left_out in (number, 3) else x + layer(x)
        return self.last(x)  # type: ignore[no-any-return]


class Twice(Parts):
    """Two forwards of one child before one backward; one forward and two backwards, of which each process needs other layers."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.heads, self.both = (kind().to(self.dtype) for kind in (AllButOne, Heads, Both))

    def loss(self, x: Tensor, route: int) -> Tensor:
        """See Parts."""
        (one, two), second = self.both(x), self.heads(x, 2 - route)
        ((one + two).square().mean() * self.weight).backward(retain_graph=True)
        ((one if route else two).sum().sin() * self.weight).backward()
        found: Tensor = self.net(x, (route + 2) % 4).square().mean() + self.net(-x, (route + 1) % 3).square().mean()
        return found + second.square().mean()


class InTurnTwice(Parts):
    """Two forwards of a child that calls nested units in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Turns().to(self.dtype)

    def loss(self, x: Tensor, route: int) -> Tensor:
        """See Parts."""
        return (self.net(x, route).square() + self.net(-x, (route + 1) % 3).sin()).mean()  # type: ignore[no-any-return]


class Turns(nn.Module):
    """Layers in the order, and as often, as a route says."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Inner(), Inner()])

    def forward(self, x: Tensor, route: int) -> Tensor:
        """Of ``x``."""
        for number in ((0, 1), (1, 0, 0), (1,))[route]:
            x = x + self.blocks[number](x, route)
        return x


class Heads(nn.Module):
    """Two layers, of which each process chooses one, or both."""

    def __init__(self, has_own: bool = False) -> None:
        super().__init__()
        self.one, self.two = Expert(5), Expert(5)
        self.own = nn.Parameter(torch.ones(6)) if has_own else 1.0

    def forward(self, x: Tensor, route: int) -> Tensor:
        """Of ``x``."""
        x = x * self.own
        return (self.one(x) if route < 1 else x) + (self.two(x) if route else x)  # type: ignore[no-any-return]


class Both(Heads):
    """With two results."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Of ``x``."""
        return self.one(x), self.two(x)


class Detector(Parts):
    """Heads of which each process uses some, and of some only in forward."""

    has_own = False

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.heads = AllButOne().to(self.dtype), Heads(self.has_own).to(self.dtype)
        self.other = Heads(self.has_own).to(self.dtype)

    def loss(self, x: Tensor, route: int) -> Tensor:
        """See Parts."""
        x = self.backbone(x, 0)
        found, other = self.heads(x if route else x.detach(), route), self.other(x, 1 - route)
        return x.sin().mean() + found.square().mean() + (other.sum() if route == 1 else 0.0)


class OwnDetector(Detector):
    """The same with a parameter of its own in each child."""

    has_own = True


class Towers(Parts):
    """Two children alike, of which each process calls one."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = (AllButOne().to(self.dtype) for _ in range(2))

    def loss(self, x: Tensor, route: int) -> Tensor:
        """See Parts."""
        return (self.text if route else self.image)(x, -1).square().mean()  # type: ignore[no-any-return]


class EvaluatedTowers(Towers):
    """The same, evaluated only."""


class Owner(AllButOne):
    """With a parameter of its own beside the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor, left_out: int) -> Tensor:
        """See AllButOne."""
        return super().forward(x * self.own, left_out)


class Nested(Single):
    """Layers inside of a module with a parameter of its own, of which the fifth forward of rank 1 leaves one out."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.net = Owner()

    def logits(self, x: Tensor) -> Tensor:
        """See SmallModel."""
        self.calls += 1
        return self.head(self.net(x, -1 if self.calls < 5 or self.route[0] else 1))  # type: ignore[no-any-return]


class Evaluated(Nested):
    """The same, evaluated only."""


class Recomputed(Experts):
    """Recomputes all of the layers together."""

    def logits(self, x: Tensor) -> Tensor:
        """See SmallModel."""
        return self.head(checkpoint(self.experts, self.first(x), self.route, use_reentrant=False))  # type: ignore[no-any-return]


class Sparse(Single):
    """With sparse gradients, whose values lie where autograd has those of a dense table too."""

    optimizer = dict(type="SGD", lr=0.1)

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.table = nn.Embedding(4, 6), nn.Embedding(4, 6, sparse=True)

    def logits(self, x: Tensor) -> Tensor:
        """See SmallModel."""
        return self.head(x + (self.dense(self.route) + self.table(self.route)))  # type: ignore[no-any-return]


class Later(Single):
    """A layer that samples of rank 1 leave out in the fifth forward, the first time that any do."""

    calls = 0

    def logits(self, x: Tensor) -> Tensor:
        """See SmallModel."""
        self.calls += 1
        x = self.experts[0](self.first(x))
        return self.head(self.experts[1](x) if self.calls < 5 or self.route[0] else x)  # type: ignore[no-any-return]


class OwnParts(Single):
    """A module that uses only some of its own parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.eye(6)), nn.Parameter(torch.eye(6))])

    def logits(self, x: Tensor) -> Tensor:
        """See SmallModel."""
        return self.head(x @ self.parts[int(self.route[0]) % 2])  # type: ignore[no-any-return]


class Empty(Experts):
    """With a parameter that has no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, 6, dtype=self.dtype))

    def logits(self, x: Tensor) -> Tensor:
        """See SmallModel."""
        return super().logits(x) + self.nothing.sum()


class Penalty(Single):
    """With a loss of a gradient."""

    def logits(self, x: Tensor) -> Tensor:
        """See SmallModel."""
        found: Tensor = self.head(torch.tanh(self.first(x.requires_grad_())))
        return found + torch.autograd.grad(found.sum(), x, create_graph=True)[0].square().sum()


class InStages(FSDPStrategy):
    """Whose processes say that they compute stages of their own."""

    def _stage(self) -> str:
        return f"stage {self.rank}"


FSDP: dict[str, Any] = dict(type=FSDPStrategy, device="cpu")
DDP: dict[str, Any] = dict(type=DDPStrategy, device="cpu")
MESH: dict[str, Any] = dict(type=MeshStrategy, device="cpu")
ZERO: dict[str, Any] = dict(type=DeepSpeedStrategy, device="cpu")
UNITS = dict(wrap=["Expert"])
NEEDS_SPARSE_NORMS = pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.7", reason="torch 2.6 has no norm of sparse gradients"
)


@pytest.mark.parametrize(
    ("spec", "model"),
    [
        pytest.param(FSDP, Experts, id="fsdp"),
        pytest.param(FSDP | UNITS, Experts, id="units"),
        pytest.param(FSDP | dict(wrap=["Expert", "Inner"]), InTurn, id="in turn"),
        pytest.param(FSDP | UNITS, Twice, id="twice"),
        pytest.param(FSDP | UNITS, Detector, id="detector"),
        pytest.param(FSDP | UNITS | dict(prefetch=2), OwnDetector, id="own detector"),
        pytest.param(FSDP | dict(wrap=["Expert", "Inner"]), InTurnTwice, id="nested twice", marks=pytest.mark.full),
        pytest.param(DDP | dict(find_unused_parameters=True), Sparse, id="sparse", marks=NEEDS_SPARSE_NORMS),
        pytest.param(FSDP, Empty, id="empty", marks=pytest.mark.full),
        pytest.param(FSDP | UNITS | dict(prefetch=2), Exits, id="exits", marks=pytest.mark.full),
        pytest.param(MESH | dict(dp_replicate=2), Experts, id="dp_replicate", marks=pytest.mark.full),
        pytest.param(DDP | dict(find_unused_parameters=True), Experts, id="ddp", marks=pytest.mark.full),
        *(
            pytest.param(spec, Exits, id=name, marks=pytest.mark.full)
            for name, spec in {
                "whole": FSDP,
                "reshards": FSDP | UNITS | dict(reshard_after_forward=True),
                "gathered": FSDP | UNITS | dict(reshard_after_forward=False),
                "every": FSDP | UNITS | dict(reduce_every_micro_batch=True),
                "recomputed": FSDP | UNITS | dict(activation_checkpointing=dict(classes=["Expert"])),
                "compiled": FSDP | UNITS | dict(compile=dict(backend="eager")),
                "replicated": MESH | UNITS | dict(dp_replicate=2),
            }.items()
        ),
    ],
)
def test_as_one_device(workers2: WorkerGroup, spec: dict[str, Any], model: Any) -> None:
    for accumulate in (1, 2):
        assert max(workers2.run(difference, spec, accumulate, model)) < (
            1e-12 if model.dtype is torch.float64 else 1e-5
        )


@pytest.mark.deepspeed
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.full), 2, pytest.param(3, marks=pytest.mark.full)])
def test_zero_sends_zeros(workers2: WorkerGroup, stage: int) -> None:
    pytest.importorskip("deepspeed", reason="needs pip install flextrain[deepspeed]")
    leaf = dict(leaf_module=dict(classes=["Mixture"])) if stage == 3 else {}
    spec = ZERO | dict(zero_optimization=dict(stage=stage, reduce_bucket_size=100, **leaf), unused_parameters="zeros")
    for accumulate in (1, 2):
        assert max(workers2.run(difference, spec, accumulate, Single, TimesZero)) < 1e-5


def refused(spec: dict[str, Any], model: Any, frozen_at: int | None = None) -> str:
    """The error of this process, which freezes the first expert on rank 1 after some updates."""
    try:
        with started(spec, wrapper(), model) as session:
            for number, batch in enumerate(batches()):
                if number == frozen_at and session.strategy.topology.rank == 1:
                    session.strategy.module.get_submodule("experts.0").requires_grad_(False)
                if model in (Evaluated, EvaluatedTowers):
                    evaluate(session.strategy, session.model, [batch])
                else:
                    train(session.strategy, session.model, session.optim, [[batch]])
    except (RuntimeError, StrategyError) as error:
        return str(error)
    return "nothing"


def zero(stage: int, model: Any, said: str, **options: Any) -> Any:
    options = dict(stage=stage, **options)
    return pytest.param(ZERO | dict(zero_optimization=options), model, None, said, marks=pytest.mark.deepspeed)


GATHERED = dict(stage3_param_persistence_threshold=0)
OTHER_CHILD = "model: rank 1 calls text in forward 1, where other processes call other modules"
NO_GRADIENT = "model.experts.0.0.weight: rank 1 has no gradient, because it is frozen here in update 3"


@pytest.mark.parametrize(
    ("spec", "model", "frozen_at", "said"),
    [
        pytest.param(FSDP, Experts, 2, NO_GRADIENT, marks=pytest.mark.full),
        (FSDP | UNITS, Experts, 2, NO_GRADIENT),
        (
            FSDP | UNITS | dict(timeout_s=20),  # with torch 2.11 the other process waits so long
            Recomputed,
            None,
            "recomputes it in backward together with other FSDP units, in forward 1, where",
        ),
        (FSDP | UNITS, Towers, None, OTHER_CHILD),
        (FSDP, EvaluatedTowers, None, OTHER_CHILD),
        (FSDP | UNITS | dict(type=InStages), Experts, None, "in forward 1, where other processes call other modules"),
        (DDP, Experts, None, "rank 1 cannot reduce its gradients, the loss does not depend on experts.0.0.weight"),
        (FSDP, Sparse, None, "model.table: has sparse=True, and FSDPStrategy takes dense gradients only"),
        zero(
            3,
            Single,
            "model.experts.0.0: rank 1 calls experts.1.0 in forward 1, where other processes call experts.0.0",
        ),
        zero(3, Later, "model.experts.1.0: rank 1 calls head in forward 5, where other processes call experts.1.0"),
        zero(
            3,
            Later,
            "model.experts.1.0: rank 1 calls head in forward 5, where other processes call experts.1.0",
            **GATHERED,
        ),
        *(
            zero(
                3,
                model,
                "model.net.layers.1.0: rank 1 calls net.layers.2.0 in forward 5, where other processes call net.layers.1.0",
                **GATHERED,
            )
            for model in (Nested, Evaluated)
        ),
        zero(3, OwnParts, "has used it in a micro-batch where other processes differ"),
        zero(2, Sparse, "model.table: has sparse=True, and DeepSpeedStrategy takes dense gradients only"),
        zero(3, Empty, "model.nothing: has no elements, which DeepSpeed cannot gather"),
        zero(3, Penalty, "model: a gradient with create_graph=True goes through weights that DeepSpeed has freed"),
    ],
)
def test_refused(workers2: WorkerGroup, spec: dict[str, Any], model: Any, frozen_at: int | None, said: str) -> None:
    errors = workers2.run(refused, spec, model, frozen_at)
    assert (all if model is Later else any)(said in error for error in errors), errors
    assert "nothing" not in errors


def again() -> int:
    """How many hooks count as the user's when a model with sparse gradients was set up under DDP."""
    with started(DDP, wrapper(1, Sparse), Sparse) as session:
        return sum(gradient_hooks(parameter) for parameter in session.strategy.module.parameters())


def test_hooks_of_ddp_are_not_the_users(workers2: WorkerGroup) -> None:
    assert workers2.run(again) == [0, 0]
