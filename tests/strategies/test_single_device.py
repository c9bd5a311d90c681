"""What every strategy does, seen on one device: its life, its state, and what it refuses."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flextrain.core.base.errors import CheckpointError, ConfigError, LaunchError, StrategyError
from flextrain.core.base.registry import OPTIMIZERS
from flextrain.core.checkpoint import Checkpoint, save_checkpoint
from flextrain.core.device.device import DEVICES
from flextrain.optim import AmpOptimWrapper, OptimWrapper, OptimWrapperDict
from flextrain.strategies import SingleDeviceStrategy, Strategy
from flextrain.strategies.parts import aliases
from flextrain.testing.models import Mlp

ADAM = dict(type="Adam", lr=0.01)


class Net(nn.Module):
    """Tied weights, a frozen parameter, one that is not used, and two kinds of buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(2))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.embed(x)) + self.frozen).logsumexp(1).mean()  # type: ignore[no-any-return]


X = torch.tensor([0, 1, 2, 4])


def prepared(model: nn.Module | None = None, optim: Any = ADAM, **options: Any) -> tuple[Strategy, Any, Any]:
    strategy = SingleDeviceStrategy(device="cpu", **options)
    torch.manual_seed(0)
    optim = OptimWrapper(optim) if isinstance(optim, dict) else optim
    called, optim = strategy.setup(model or Net(), optim)
    return strategy, called, optim


def step(model: Any, optim: OptimWrapper, times: int = 1) -> list[float]:
    losses = []
    for _ in range(times):
        loss = model(X)
        optim.update_params(loss)
        losses.append(loss.item())
    return losses


# Life


def test_facts() -> None:
    model = Net()
    strategy, called, optim = prepared(model)
    assert called is strategy.module is model
    assert (strategy.topology.rank, strategy.topology.world_size, strategy.topology.shard) == (0, 1, (0, 1))
    assert strategy.device == torch.device("cpu")
    assert strategy.optim is optim
    assert str(strategy.precision_report()) == "compute float32, parameters float32, gradients float32"


def test_setup_is_called_once() -> None:
    strategy, _, _ = prepared()
    with pytest.raises(
        StrategyError, match="^SingleDeviceStrategy: setup was called before, a strategy serves one model$"
    ):
        strategy.setup(Net())


def test_without_setup_there_is_no_module() -> None:
    strategy = SingleDeviceStrategy(device="cpu")
    with pytest.raises(StrategyError, match=r"^SingleDeviceStrategy: no model yet, call setup\(model, optim\) first$"):
        _ = strategy.module


def test_teardown_may_be_called_again_and_frees_the_strategy() -> None:
    strategy, _, _ = prepared()
    strategy.leave()
    strategy.leave()
    with pytest.raises(StrategyError, match="no model yet"):
        _ = strategy.module
    strategy.setup(Net())
    strategy.leave()


def test_evaluation_needs_no_optimizer() -> None:
    strategy, _, optim = prepared(optim=None)
    assert optim is None
    assert {key.split(".")[0] for key in strategy.state()} == {"model"}
    template = strategy.template(strategy.state())
    strategy.load(template | {"optim.group.head.weight.lr": 0.1})


def test_gradients_of_before_are_not_in_the_first_update() -> None:
    """Strategies that make parameters anew have none of them."""
    model = Net()
    model(torch.tensor([0, 1, 2])).backward()
    strategy = SingleDeviceStrategy(device="cpu")
    strategy.setup(model, OptimWrapper(ADAM))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # With an address that is none, rank 0 does not wait for rank 1, which does not exist.
    for name, value in dict(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR="x..x", MASTER_PORT="1").items():
        monkeypatch.setenv(name, value)
    message = '"SingleDeviceStrategy" runs in one process and 2 were started, choose "DDPStrategy" or start one'
    with pytest.raises(StrategyError, match=message):
        SingleDeviceStrategy(device="cpu").join()


@pytest.mark.parametrize("kind", [kind for kind, spec in DEVICES.items() if not spec.is_available()])
def test_an_absent_device_raises(kind: str) -> None:
    with pytest.raises(StrategyError, match=f'strategy.device: "{kind}" is not usable on this machine'):
        SingleDeviceStrategy(device=kind).setup(Net())


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(devise="cpu"), 'strategy.devise: unknown key, did you mean "device"?'),
        (dict(device=0), "strategy.device: 0 is not allowed, give a string"),
        (dict(timeout_s="1"), 'strategy.timeout_s: "1" is not allowed, give a number'),
        (dict(timeout_s=0), "strategy.timeout_s: 0 is not allowed, "),
        (dict(compile="yes"), 'strategy.compile: "yes" is not allowed, give True or False or a dict'),
        (dict(compile=dict(mod="reduce-overhead")), 'strategy.compile.mod: unknown key, did you mean "mode"?'),
        (dict(activation_checkpointing="attn"), 'strategy.activation_checkpointing: "attn" is not allowed, '),
        (dict(activation_checkpointing=dict(policy="matmul")), 'strategy.activation_checkpointing.policy: "matmul" is no known function, did you mean "matmuls"?'),
        (dict(activation_checkpointing=dict(policy="model")), 'strategy.activation_checkpointing.policy: "model" is no policy, give activation_checkpointing="model" alone'),
        (dict(activation_checkpointing=dict(every=0)), "strategy.activation_checkpointing.every: 0 is not allowed, "),
        (dict(activation_checkpointing=dict(clases=["A"])), 'strategy.activation_checkpointing.clases: unknown key, did you mean "classes"?'),
        (dict(activation_checkpointing=dict(classes=["A"], check_fn=callable)), "strategy.activation_checkpointing.check_fn: give either"),
        (dict(static_graph=True), "strategy.static_graph: unknown key"),
    ],
)  # fmt: skip
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SingleDeviceStrategy(**options)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "options, device, error, message",
    [
        (dict(device="cud"), None, ConfigError, 'strategy.device: "cud" is not allowed'),
        (dict(launcher="torchrun"), None, ConfigError, 'launcher: "torchrun" is not allowed'),
        (dict(launcher="pytorch"), None, LaunchError, "launcher: environment variable RANK is not set"),
        (dict(activation_checkpointing=dict(classes=["Liner"])), "cpu", ConfigError, 'strategy.activation_checkpointing.classes: no submodule is a "Liner", did you mean "Linear"?'),
        (dict(activation_checkpointing=dict(check_fn=lambda m: False)), "cpu", ConfigError, "strategy.activation_checkpointing.check_fn: accepts no submodule"),
        (dict(activation_checkpointing="matmuls"), "cpu", ConfigError, "strategy.activation_checkpointing.classes: missing, Net has no repeated blocks"),
    ],
)  # fmt: skip
def test_what_setup_finds_out(options: dict[str, Any], device: str | None, error: type, message: str) -> None:
    with pytest.raises(error) as caught:
        SingleDeviceStrategy(**{"device": device or "cpu", **options}).setup(Net())
    assert str(caught.value).startswith(message)


# Precision


def test_precision_is_a_promise() -> None:
    half = Net().half()
    with pytest.raises(
        StrategyError, match=r"^precision: parameters under autocast must be torch.float32 and are torch"
    ):
        SingleDeviceStrategy(device="cpu").setup(half, AmpOptimWrapper(ADAM, dtype="bfloat16"))


def test_autocast_is_the_precisions() -> None:
    strategy, model, _ = prepared(nn.Linear(2, 2), AmpOptimWrapper(ADAM, dtype="bfloat16"))
    with strategy.autocast():
        assert model(torch.ones(1, 2)).dtype is torch.bfloat16
    strategy, model, _ = prepared(nn.Linear(2, 2))
    with strategy.autocast(), strategy.grad_sync(False):
        assert model(torch.ones(1, 2)).dtype is torch.float32


# State


def test_the_settings_of_trained_parameters_count_in_a_group_with_frozen_ones() -> None:
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    strategy, _, optim = prepared(model)
    state = dict(strategy.state())
    state |= {"optim.group.weight.lr": 0.5, "optim.group.bias.lr": 0.25}
    strategy.load(state)
    assert [group["lr"] for group in optim.param_groups] == [0.5]


def test_keys_are_names_in_the_users_model() -> None:
    strategy, model, optim = prepared()
    state = strategy.state()
    parameters = {"embed.weight", "body.0.weight", "body.0.bias", "body.1.weight", "body.1.bias", "body.2.weight", "body.2.bias", "frozen", "unused"}  # fmt: skip
    buffers = {f"body.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    assert {key.removeprefix("model.") for key in state if key.startswith("model.")} == parameters | buffers
    assert not [key for key in state if key.startswith("optim.state")]  # nothing has been created yet
    assert {
        key.removeprefix("optim.group.").rpartition(".")[0] for key in state if key.startswith("optim.group")
    } == parameters - {"frozen"}
    assert state["optim.group.embed.weight.lr"] == 0.01
    assert state["optim.group.embed.weight.optimizer"] == "Adam"
    assert "optim.group.embed.weight.foreach" not in state
    step(model, optim)
    created = {key.removeprefix("optim.state.").rpartition(".")[0] for key in strategy.state() if key.startswith("optim.state")}  # fmt: skip
    assert created == parameters - {"frozen", "unused"}
    assert aliases(strategy) == {"head.weight": "embed.weight"}


def test_state_is_live_and_not_copied() -> None:
    strategy, model, _ = prepared()
    state = strategy.state()
    assert state["model.embed.weight"].data_ptr() == model.embed.weight.data_ptr()
    assert not state["model.embed.weight"].requires_grad
    assert strategy.model_state().keys() == {key[6:] for key in state if key.startswith("model.")}


def through_file(strategy: Strategy, other: Strategy, folder: Path) -> None:
    """Bring the state of one strategy to another as a checkpoint does."""
    checkpoint = Checkpoint.open(save_checkpoint(folder / "a", strategy.state()))
    template = other.template(checkpoint.saved)
    checkpoint.load(template)
    other.load({**checkpoint.values, **template})


OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": dict(lr=0.1, momentum=0.9, nesterov=True),
    "Adam": dict(amsgrad=True),
    "AdamW": dict(betas=(0.8, 0.9)),
    "RMSprop": dict(momentum=0.5, centered=True),
}


# torch's own: those of DeepSpeed and torch_npu need a compiler or a device.
@pytest.mark.parametrize(
    "name", sorted(name for name in set(OPTIMIZERS) - {"LBFGS", "Muon", "SparseAdam"} if hasattr(torch.optim, name))
)
def test_every_optimizer_continues_exactly(tmp_path: Path, name: str) -> None:
    optim = dict(type=name, **OPTIONS.get(name, {}))
    strategy, model, wrapper = prepared(optim=optim)
    step(model, wrapper, times=2)
    wrapper.param_groups[0]["lr"] *= 0.5  # as a scheduler does
    other, twin, twin_wrapper = prepared(optim=optim)
    through_file(strategy, other, tmp_path)
    expected, found = strategy.state(), other.state()
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        same = torch.equal(value, found[key]) if isinstance(value, Tensor) else value == found[key]
        assert same, key
    assert step(twin, twin_wrapper, times=2) == step(model, wrapper, times=2)


def test_groups_are_matched_by_parameter_and_not_by_position(tmp_path: Path) -> None:
    flat = OptimWrapper(dict(type="AdamW", lr=0.01, weight_decay=0.1))
    grouped = OptimWrapper(
        dict(type="AdamW", lr=0.01, weight_decay=0.1), paramwise_cfg=dict(custom_keys={"body": dict(lr_mult=0.1)})
    )
    strategy, model, wrapper = prepared(optim=flat)
    step(model, wrapper)
    other, _, _ = prepared(optim=grouped)
    through_file(strategy, other, tmp_path)
    mine, theirs = strategy.state(), other.state()
    for key in mine:
        if key.startswith("optim.state"):
            assert torch.equal(mine[key], theirs[key]), key
    assert [group["lr"] for group in grouped.param_groups] == [0.01, 0.01]  # what the checkpoint says


def test_a_learning_rate_may_be_a_tensor(tmp_path: Path) -> None:
    optim = lambda: dict(type="Adam", lr=torch.tensor(0.01))  # noqa: E731
    strategy, model, wrapper = prepared(optim=optim())
    step(model, wrapper)
    wrapper.param_groups[0]["lr"].fill_(0.5)
    other, twin, twin_wrapper = prepared(optim=optim())
    through_file(strategy, other, tmp_path)
    lr = twin_wrapper.param_groups[0]["lr"]
    assert isinstance(lr, Tensor)
    assert lr.item() == 0.5
    assert step(twin, twin_wrapper, times=2) == step(model, wrapper, times=2)


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    strategy, model, wrapper = prepared()
    step(model, wrapper)
    other, _, _ = prepared(optim=dict(type="SGD", lr=0.1))
    with pytest.raises(
        CheckpointError, match="^optimizer: the checkpoint's is Adam, the configuration's is SGD; resume with"
    ):
        through_file(strategy, other, tmp_path)


def test_weights_alone_leave_the_optimizer_as_it_is(tmp_path: Path) -> None:
    strategy, model, wrapper = prepared()
    step(model, wrapper)
    moments = {k: v.clone() for k, v in strategy.state().items() if k.startswith("optim.state")}
    weights = {key: value for key, value in prepared()[0].state().items() if key.startswith("model.")}
    template = strategy.template(weights)
    for key, tensor in template.items():
        tensor.copy_(weights[key])
    strategy.load(template)
    state = strategy.state()
    assert all(torch.equal(state[key], value) for key, value in weights.items())
    assert all(torch.equal(state[key], value) for key, value in moments.items())


def test_a_parameter_that_the_checkpoint_lacks_starts_afresh(tmp_path: Path) -> None:
    strategy, model, wrapper = prepared()
    step(model, wrapper)
    state = {key: value for key, value in strategy.state().items() if ".body.2." not in key}
    checkpoint = Checkpoint.open(save_checkpoint(tmp_path / "a", state))
    other, twin, twin_wrapper = prepared()
    step(twin, twin_wrapper)  # moments that belong to nothing in the checkpoint
    template = other.template(checkpoint.saved)
    checkpoint.load(template)
    other.load({**checkpoint.values, **template})
    created = {key for key in other.state() if key.startswith("optim.state")}
    assert created == {key for key in strategy.state() if key.startswith("optim.state") and ".body.2." not in key}
    step(twin, twin_wrapper)


def test_several_optimizers_keep_their_own(tmp_path: Path) -> None:
    def make() -> OptimWrapperDict:
        return OptimWrapperDict(body=OptimWrapper(dict(type="SGD", lr=0.1, momentum=0.9)), embed=OptimWrapper(ADAM))

    strategy, model, several = prepared(optim=make())
    model(X).backward()
    for wrapper in several.values():
        wrapper.step()
    state = strategy.state()
    assert state["optim.group.body.0.weight.optimizer"] == "SGD"
    assert state["optim.group.embed.weight.optimizer"] == "Adam"
    assert "optim.state.body.0.weight.momentum_buffer" in state
    other, _, _ = prepared(optim=make())
    through_file(strategy, other, tmp_path)
    found = other.state()
    assert all(torch.equal(found[k], v) if isinstance(v, Tensor) else found[k] == v for k, v in state.items())


# Activation checkpointing and compilation


@pytest.mark.parametrize(
    "options",
    [
        dict(activation_checkpointing=dict(classes=["Linear"])),
        dict(activation_checkpointing=dict(check_fn=lambda module: isinstance(module, nn.Linear))),
        dict(compile=dict(backend="eager")),
        pytest.param(
            dict(compile=dict(backend="aot_eager"), activation_checkpointing=dict(classes=["Sequential"])),
            marks=pytest.mark.processes,  # torch 2.6 starts the compiler for it
        ),
    ],
    ids=["classes", "check_fn", "compile", "both"],
)
def test_options_change_no_key_and_no_number(options: dict[str, Any]) -> None:
    torch.compiler.reset()
    model = Mlp()
    batch = Mlp.sample(8, 0)
    plain, plain_called, plain_optim = prepared(copy.deepcopy(model))
    other, called, optim = prepared(model, **options)
    for _ in range(2):
        losses = [m(**batch, mode="loss")["loss"] for m in (plain_called, called)]
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6)
        plain_optim.update_params(losses[0])
        optim.update_params(losses[1])
    assert other.state().keys() == plain.state().keys()
    assert list(other.module.state_dict()) == list(plain.module.state_dict())
    torch.compiler.reset()


class Part(nn.Module):
    """Not one of torch's own classes, which torch 2.6 does not compile by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class OwnStep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Part()

    def train_step(self, data: Tensor, optim_wrapper: OptimWrapper) -> dict[str, Tensor]:
        loss = self.net(data).sum()
        optim_wrapper.update_params(loss)
        return {"loss": loss.detach()}


def test_the_parts_of_a_model_with_its_own_step_are_compiled() -> None:
    torch.compiler.reset()
    compiled = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    strategy, model, optim = prepared(OwnStep(), compile=dict(backend=backend))
    model.train_step(torch.ones(1, 2), optim)
    assert len(compiled) == 1
    assert list(strategy.module.state_dict()) == ["net.weight"]
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("arrange", "_arrange"),
        ("run_windw", "run_window"),
        ("_run_window", "run_window"),
        ("wrap", "_wrap"),
        ("splitt", "split"),
    ],
)
def test_a_misspelled_method_is_refused_with_the_nearest_name(name: str, meant: str) -> None:
    def method(self: Any) -> None: ...

    kind = type("Mine", (SingleDeviceStrategy,), {name: method})
    with pytest.raises(ConfigError, match=rf'strategy: Mine.{name} would never be called, did you mean "{meant}"\?'):
        kind()
    kind = type("Both", (SingleDeviceStrategy,), {name: method, meant: getattr(SingleDeviceStrategy, meant).__call__})
    kind()  # a helper of the method that is there


def test_a_method_of_another_name_is_nobody_s_business() -> None:
    type("Mine", (SingleDeviceStrategy,), {"make_mesh": lambda self: None, "_helper": lambda self: None})()
