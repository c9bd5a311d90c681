"""DeepSpeed's own kinds of parallelism: what is passed on trains as one device does, all else is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from flextrain.core.base.errors import ConfigError, StrategyError
from flextrain.optim import OptimWrapper
from flextrain.strategies import DeepSpeedStrategy
from flextrain.testing import WorkerGroup
from flextrain.testing.differences import relative_difference
from flextrain.testing.loop import windows
from flextrain.testing.models import Batch, SmallModel
from flextrain.testing.sessions import run, single_device, started

pytest.importorskip("deepspeed", reason="needs pip install flextrain[deepspeed]")
pytestmark = pytest.mark.deepspeed
UPDATES = 6


class Branches(nn.Module):
    """Two experts, of which every sample uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(13, 13), nn.Linear(13, 13)])

    def forward(self, x: Tensor, choice: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            chosen = (choice == number).nonzero()[:, 0]
            if len(chosen):  # otherwise this process does not call it
                out = out.index_add(0, chosen, torch.tanh(expert(x[chosen])))
        return out


class Sparse(SmallModel):
    """A mixture by the sign of the first feature."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 13), nn.Linear(13, self.num_classes)
        self.mixtures = nn.ModuleList([Branches(), Branches()])

    def logits(self, x: Tensor) -> Tensor:
        """See SmallModel; x is (batch, 6)."""
        choice = (x[:, 0] > 0).long()
        x = torch.tanh(self.first(x))
        for mixture in self.mixtures:
            x = x + mixture(x, choice)
        found: Tensor = self.head(x)
        return found


def batch(seed: int) -> Batch:
    """Samples of which the two processes use different experts."""
    made = Sparse.sample(8, seed=seed)
    made["x"][:4, 0], made["x"][4:, 0] = 1.0, -1.0
    return made


def differences(leaf_module: dict[str, list[str]]) -> list[float]:
    """Of losses, gradient norms and weights, between two processes and one device."""

    def optim() -> OptimWrapper:
        return OptimWrapper(dict(type="SGD", lr=0.5, momentum=0.9), clip_grad=dict(max_norm=0.1))

    # Below the threshold, parameters stay on every process and nothing is gathered.
    zero = dict(stage=3, stage3_param_persistence_threshold=0, leaf_module=leaf_module)
    batches = windows([batch(seed) for seed in range(UPDATES)], 1)
    with single_device(optim(), Sparse) as session:
        expected = run(session, batches)
    with started(dict(type=DeepSpeedStrategy, device="cpu", zero_optimization=zero), optim(), Sparse) as session:
        found = run(session, batches)
    losses = zip(found.trace.losses, expected.trace.losses, strict=True)
    norms = zip(found.trace.grad_norms, expected.trace.grad_norms, strict=True)
    return [
        max(abs(a / b - 1) for a, b in losses),
        max(abs(a / b - 1) for a, b in norms if a is not None and b is not None),
        max(relative_difference(found.weights[-1][name], value) for name, value in expected.weights[-1].items()),
    ]


@pytest.mark.distributed
@pytest.mark.parametrize(
    "leaf_module",
    [
        dict(classes=["Branches"]),
        pytest.param(dict(names=["mixtures.0", "mixtures.1"]), marks=pytest.mark.full),
        pytest.param(dict(name_suffixes=["mixtures.0", ".1"]), marks=pytest.mark.full),
    ],
)
def test_processes_that_use_different_experts(workers2: WorkerGroup, leaf_module: dict[str, list[str]]) -> None:
    for found in workers2.run(differences, leaf_module):
        assert max(found) < 1e-5, found


TP = 'give strategy=dict(type="MeshStrategy", tp=2)'
CP = 'give strategy=dict(type="MeshStrategy", cp=2, cp_kind="ulysses")'
LEAF = "strategy.zero_optimization.leaf_module"
OPTIONS: list[tuple[dict[str, Any], str, str]] = [
    (
        dict(tensor_parallel=dict(autotp_size=4)),
        "strategy.tensor_parallel.autotp_size: 4 is not possible",
        'dict(type="MeshStrategy", tp=4)',
    ),
    (dict(tensor_parallel=dict(tp=dict(tp_size=2))), "strategy.tensor_parallel: {'tp': {'tp_size': 2}} is not", TP),
    (dict(tensor_parallel=dict(autotp_size=0)), "strategy.tensor_parallel.autotp_size: 0 is not", "; leave it out"),
    (
        dict(config=dict(tensor_parallel=dict(autotp_size=2))),
        "strategy.config.tensor_parallel.autotp_size: 2 is not",
        TP,
    ),
    (dict(sequence_parallel_size=2, data_parallel_size=4), "strategy.sequence_parallel_size: 2 is not possible", CP),
    (dict(data_parallel_size=4), "strategy.data_parallel_size: 4 is not possible", "; leave it out"),
    (
        dict(seq_parallel_communication_data_type="fp32"),
        "strategy.seq_parallel_communication_data_type: 'fp32' is not",
        CP,
    ),
    (
        dict(expert_parallel=dict(enabled=True, autoep_size=8)),
        "strategy.expert_parallel.autoep_size: 8 is not possible",
        'dict(type="MeshStrategy", ep=8)',
    ),
    (
        dict(use_data_before_expert_parallelism=True),
        "strategy.use_data_before_expert_parallelism: True is not",
        "out",
    ),
    (
        dict(pipeline=dict(stages=4)),
        "strategy.pipeline.stages: 4 is not possible",
        'dict(type="MeshStrategy", pp=4)',
    ),
    (dict(compile=dict(deepcompile=True)), "strategy.compile.deepcompile: unknown key", ""),
    (
        dict(zero_optimization=dict(stage=2, leaf_module=dict(classes=["Branches"]))),
        f"{LEAF}: has no effect at stage 2",
        "",
    ),
    (
        dict(zero_optimization=dict(stage=3, leaf_module=dict(class_names=["Branches"]))),
        f"{LEAF}.class_names: unknown key",
        "",
    ),
]


@pytest.mark.parametrize("options, start, end", OPTIONS, ids=[row[1][:60] for row in OPTIONS])
def test_options(options: dict[str, Any], start: str, end: str) -> None:
    with pytest.raises(ConfigError) as caught:
        DeepSpeedStrategy(**options)
    assert str(caught.value).startswith(start)
    assert str(caught.value).endswith(end)
    assert "\n" not in str(caught.value)


def refusal(model: nn.Module, **zero: Any) -> str:
    """The error of a model, before anything is started."""
    strategy = DeepSpeedStrategy(device="cpu", zero_optimization=dict(stage=1) | zero)
    with pytest.raises((ConfigError, StrategyError)) as caught:
        strategy.check(model, OptimWrapper(dict(type="SGD", lr=0.1)))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "leaf_module, message",
    [
        (dict(classes=["Branch"]), f'{LEAF}.classes[0]: "Branch" is no class of a module of the model, did you mean "Branches"?'),
        (dict(names=["mixtures.0", "mixture.1"]), f'{LEAF}.names[1]: "mixture.1" is no module of the model, did you mean "mixtures.'),
        (dict(name_suffixes=["expert"]), f'{LEAF}.name_suffixes[0]: "expert" is no module of the model'),
    ],
)  # fmt: skip
def test_leaf_modules_that_the_model_has_not(leaf_module: dict[str, list[str]], message: str) -> None:
    assert refusal(Sparse(), stage=3, leaf_module=leaf_module).startswith(message)


def experts() -> nn.Module:
    from deepspeed.moe.layer import MoE

    return nn.Sequential(nn.Linear(4, 4), MoE(4, nn.Linear(4, 4), num_experts=4, ep_size=2))


def sequences() -> nn.Module:
    from deepspeed.sequence.layer import DistributedAttention

    return nn.ModuleDict({"attention": DistributedAttention(nn.Identity(), object())})


def matrices() -> nn.Module:
    from deepspeed.module_inject.layers import LinearLayer

    class Own(LinearLayer):  # type: ignore[misc]
        def __init__(self) -> None:
            nn.Module.__init__(self)

    return Own()


LAYERS: list[tuple[Callable[[], nn.Module], str, str]] = [
    (experts, "model.1: is DeepSpeed's MoE, but every process would train experts of its own", "ep=2)"),
    (sequences, "model.attention: is DeepSpeed's DistributedAttention, but processes have different samples", CP),
    (matrices, "model: is DeepSpeed's LinearLayer, but it holds a slice of a weight", "tp=2)"),
]


@pytest.mark.parametrize("model, start, end", LAYERS, ids=[row[0].__name__ for row in LAYERS])
def test_layers(model: Callable[[], nn.Module], start: str, end: str) -> None:
    found = refusal(model())
    assert found.startswith(start)
    assert found.endswith(end)


def test_calls_that_divide_every_engine() -> None:
    import deepspeed
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from deepspeed.runtime.tensor_parallel import init_utils

    with (
        mock.patch.object(init_utils, "_TP_MODEL_INIT_ARGS", None),
        mock.patch.object(deepspeed, "set_autotp_mode"),
    ):
        deepspeed.tp_model_init(Sparse(), 2, torch.float32)
        found = refusal(Sparse())
    assert found.startswith(
        "model: deepspeed.tp_model_init() was called, but a slice of each weight is in no checkpoint"
    )
    assert found.endswith(TP)
    with mock.patch.object(parallel_state_sp, "_SEQUENCE_PARALLEL_GROUP", object()):
        assert refusal(Sparse()).startswith("model: DeepSpeed's sequence parallelism was initialised")
