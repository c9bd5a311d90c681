"""What is done with torch_npu's fused optimizers, inside workers that find the simulated device and the real sources."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flextrain import AmpOptimWrapper, ApexOptimWrapper, OptimWrapper
from flextrain.optim.adapters import EQUIVALENTS
from flextrain.testing.conformance_checks import Decay, batches, one_each
from flextrain.testing.differences import relative_difference
from flextrain.testing.sessions import load, run, save, started, whole_model, whole_state

NPU = dict(type="NPUStrategy")
UPDATES = 12
SETTINGS: dict[str, dict[str, Any]] = {
    "NpuFusedAdadelta": dict(lr=1.0, weight_decay=0.01),
    "NpuFusedAdam": dict(lr=1e-3, weight_decay=0.01, amsgrad=True),
    "NpuFusedAdamP": dict(lr=3e-3),
    "NpuFusedAdamW": dict(lr=1e-3, weight_decay=0.1),
    "NpuFusedBertAdam": dict(lr=3e-3, warmup=0.5, t_total=40),
    "NpuFusedLamb": dict(lr=3e-3, weight_decay=0.01),
    "NpuFusedRMSprop": dict(lr=1e-3, momentum=0.9, centered=True),
    "NpuFusedRMSpropTF": dict(lr=1e-3, momentum=0.9),
    "NpuFusedSGD": dict(lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
}
CLIP = dict(max_norm=0.3)
PARAMWISE = dict(bias_lr_mult=2.0)
# Name -> (wrapper, its arguments).
RECIPES: dict[str, tuple[Callable[..., OptimWrapper], dict[str, Any]]] = {
    "float32": (OptimWrapper, {}),
    "float32, clipped, two groups": (OptimWrapper, dict(clip_grad=CLIP, paramwise_cfg=PARAMWISE)),
    "float32, clipped by value": (OptimWrapper, dict(clip_grad=dict(type="value", clip_value=0.01))),
    "float32, accumulated": (OptimWrapper, dict(accumulative_counts=3)),
    "bfloat16 autocast": (AmpOptimWrapper, dict(dtype="bfloat16", clip_grad=CLIP)),
    "float16 autocast, scaled": (AmpOptimWrapper, dict(dtype="float16", loss_scale=dict(init_scale=256.0))),
    "Apex's O1": (ApexOptimWrapper, dict(opt_level="O1", loss_scale=128.0, clip_grad=CLIP)),
    "float16 autocast, scaled, clipped": (AmpOptimWrapper, dict(dtype="float16", loss_scale=128.0, clip_grad=CLIP)),
}

IN_TWO_PROCESSES = ("float32, clipped, two groups", "bfloat16 autocast", "float16 autocast, scaled")


def optim(name: str, recipe: str = "float32", **settings: Any) -> OptimWrapper:
    """A wrapper around one of the optimizers, of torch or torch_npu, with the settings of the fused one."""
    fused = next((fused for fused, twin in EQUIVALENTS.items() if twin == name), name)
    kind, arguments = RECIPES[recipe]
    return kind(dict(type=name, **{**SETTINGS[fused], **settings}), **arguments)


def windows(recipe: str) -> list[Any]:
    """Global micro-batches by update."""
    if "accumulated" in recipe:
        micro = batches(3 * UPDATES)
        return [micro[i : i + 3] for i in range(0, len(micro), 3)]
    return one_each(batches(UPDATES))


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference of any weight of two models; relative where weights are larger than 1."""
    assert found.keys() == expected.keys()
    return max(relative_difference(found[key], expected[key], scale=1.0) for key in expected)


def gap_to_twin(name: str, recipe: str) -> float:
    """How far the weights of the fused optimizer are from its twin's after training, both through NPUStrategy."""
    weights = []
    for kind in (name, EQUIVALENTS[name]):
        with started(NPU, optim(kind, recipe)) as session:
            assert session.strategy.device.type == "npu"
            run(session, windows(recipe), [Decay(session.optim)])
            weights.append(whole_model(session.strategy))
    return difference(*weights)


def facts(name: str) -> tuple[str, str, str]:
    """Where the class comes from, its signature, and the scaler and clipping that its wrapper uses."""
    import torch_npu.optim

    found = getattr(torch_npu.optim, name)
    parameters = list(inspect.signature(found).parameters.values())[1:]
    shown = [
        f"{p.name}={'required' if type(p.default).__name__ == '_RequiredParameter' else repr(p.default)}"
        for p in parameters
    ]
    with started(NPU, optim(name, "float16 autocast, scaled")) as session:
        scaler = type(session.optim._scaler._scaler).__module__  # type: ignore[attr-defined]
        own = session.optim.adapter.grad_scaler
    assert own is not None
    return inspect.getfile(found), ", ".join(shown), scaler


def trains(name: str) -> list[float]:
    """Losses under an optimizer without twin."""
    with started(NPU, optim(name)) as session:
        return run(session, windows("float32")).trace.losses


def resumes(name: str, folder: Path) -> float:
    """How far training that goes on from a checkpoint, in an optimizer that has stepped, is from going on without it."""
    all_windows, half = windows("float32"), UPDATES // 2
    with started(NPU, optim(name)) as session:
        run(session, all_windows[:half])
        save(session, folder / name)
        run(session, all_windows[half:])
        expected = whole_model(session.strategy)
    with started(NPU, optim(name)) as session:
        run(session, all_windows[3:])
        load(session, folder / name)
        run(session, all_windows[half:])
        return difference(whole_model(session.strategy), expected)


def changes_over(name: str, folder: Path, first: str, second: str, first_on: Any = NPU, second_on: Any = NPU) -> float:
    """How far training that one of ``first`` and ``second`` begins and the other ends is from ``name``'s twin alone."""
    all_windows, half = windows("float32"), UPDATES // 2
    with started(NPU, optim(EQUIVALENTS[name])) as session:
        run(session, all_windows)
        expected = whole_model(session.strategy)
    with started(first_on, optim(first)) as session:
        run(session, all_windows[:half])
        save(session, folder / f"{first}-{second}")
    with started(second_on, optim(second)) as session:
        load(session, folder / f"{first}-{second}")
        run(session, all_windows[half:])
        return difference(whole_model(session.strategy), expected)


def keys_and_values(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The canonical state of the fused optimizer and of its twin, without the numbers of the tensors."""
    found = []
    for kind in (name, EQUIVALENTS[name]):
        with started(NPU, optim(kind)) as session:
            run(session, windows("float32")[:2])
            state = whole_state(session.strategy)
        described = {k: (v.dtype, tuple(v.shape)) if isinstance(v, Tensor) else v for k, v in state.items()}
        found.append({key: value for key, value in described.items() if key.startswith("optim.")})
    return found[0], found[1]


class Joined(nn.Module):
    """Two weights that are one matrix in forward: torch makes both gradients parts of one tensor's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.cat([self.first.weight, self.second.weight])
        return nn.functional.linear(x, weight, torch.cat([self.first.bias, self.second.bias]))


def joined(name: str, zero_first: bool = False) -> float:
    """How far the fused optimizer's weights are from its twin's where gradients come as parts of others.

    Args:
        name: of the fused optimizer.
        zero_first: zero the gradients of one layer only, before the first update, as training of parts in turns does.
    """
    weights = []
    for kind in (name, EQUIVALENTS[name]):
        torch.manual_seed(0)
        strategy, model = make_npu(), Joined()
        _, wrapper = strategy.setup(model, optim(kind))
        if zero_first:
            model.second(torch.ones(3, 4, device="npu")).sum().backward()
            wrapper.zero_grad()
        for x in torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(1)).to("npu"):
            wrapper.backward(model(x).square().mean())
            wrapper.step()
        weights.append({key: tensor.cpu() for key, tensor in model.state_dict().items()})
        strategy.leave()
    return difference(*weights)


def refused(
    strategy: Any, wrapper: Any, dtype: torch.dtype = torch.float32, weight: str = "plain", format: int = 2
) -> str:
    """What setting up a small model raises.

    Args:
        strategy, wrapper: their configurations.
        dtype: of the parameters.
        weight: how it lies in memory: "plain", "shared" with others, or "turned", its columns one after the other.
        format: number of the layout that the device gives parameters.
    """
    import torch_npu

    from flextrain.core.base.errors import FlexTrainError
    from flextrain.core.comm import collectives as dist
    from flextrain.optim import build_optim_wrapper
    from flextrain.testing.sessions import make_strategy

    model = nn.Linear(4, 2).to(dtype)
    if weight == "shared":
        model.weight = nn.Parameter(torch.ones(2, 2, 4, device="npu")[0])
    if weight == "turned":
        model.weight = nn.Parameter(torch.ones(4, 2).t())
    plain = torch_npu.get_npu_format
    torch_npu.get_npu_format = lambda tensor: format
    try:
        built = make_strategy(strategy)
        try:
            built.setup(model, build_optim_wrapper(wrapper))
        finally:
            built.leave()
            dist.destroy_process_group()
    except FlexTrainError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        torch_npu.get_npu_format = plain
    return "nothing"


def misuse(name: str, how: str) -> str:
    """What training raises in which gradients are handled outside of the optimizer."""
    from flextrain.core.base.errors import StrategyError

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    late = model[0].bias
    if how == "unfrozen":
        late.requires_grad_(False)
    strategy = make_npu()
    _, wrapper = strategy.setup(model, optim(name))
    try:
        for i in range(3):
            if i == 1 and how in ("unfrozen", "frozen"):
                late.requires_grad_(how == "unfrozen")
            x = torch.ones(3, 4, device="npu")
            output = model[1](x) if how == "unused" else model(x)
            wrapper.backward(output.square().mean())
            if i == 1 and how == "dropped":
                model.zero_grad()
            wrapper.step()
    except StrategyError as error:
        return str(error)
    finally:
        strategy.leave()
    return "nothing"


def make_npu() -> Any:
    from flextrain import NPUStrategy

    return NPUStrategy()


def loads(name: str, folder: Path, **settings: Any) -> str:
    """What a fused optimizer says to a checkpoint of its twin with other settings."""
    from flextrain.core.base.errors import CheckpointError

    with started(
        NPU, optim(EQUIVALENTS.get(name, "AdamW"), **settings) if name in EQUIVALENTS else optim("AdamW")
    ) as session:
        run(session, windows("float32")[:2])
        save(session, folder / "twin")
    try:
        with started(NPU, optim(name)) as session:
            load(session, folder / "twin")
    except CheckpointError as error:
        return str(error)
    return "nothing"
