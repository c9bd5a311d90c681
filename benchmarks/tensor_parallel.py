"""Measure the host's time for tensor parallelism: layers that give each other ordinary tensors or DTensors, and updates of DTensors.

    python benchmarks/tensor_parallel.py [--rounds 15] [--iterations 200]

Tensors are tiny, so that the time is the host's: what an accelerator waits for where its kernels are shorter. The process is one of two
in a group that is not there: a collective is called, and returns at once. Linear runs in the strategy's context. Its times are a
layer's of several, divided by columns and rows in turn, whose backward begins once; beside them are the same layers written by hand. An
update is AdamW's of as many parameters as Llama 8B has: plain tensors by torch alone, DTensors through flextrain's wrapper, and by torch
alone. Times are the processor's, of one thread, the median over rounds in which all kinds alternate.
Writes tensor_parallel.{md,json} to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional

from flextrain import OptimWrapper
from flextrain.core.torch_compat.dtensor_private import laid_out_as
from flextrain.strategies.mesh.tensor.local_tensors import LocalTensors
from flextrain.strategies.mesh.tensor.operations import DTensorFunctions
from flextrain.strategies.mesh.tensor.styles import as_replicated, distribute_model, style_of
from flextrain.testing.loop import alone

RESULTS = Path(__file__).parent / "results"
PARAMETERS, SIZE, WIDTH, ROWS, LAYERS, WARM_UP = 291, 8, 8, 4, 16, 3
KINDS = ("plain", "local", "dtensor")
"""Ordinary tensors on one device; the kinds of ``strategy.tp_kind``."""
HAND = "hand"
"""Layers divided by hand, of ordinary tensors: what the messages cost without flextrain."""


@contextmanager
def mesh_of_two() -> Iterator[DeviceMesh]:
    with alone():
        dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
        try:
            yield init_device_mesh("cpu", (2,))
        finally:
            dist.destroy_process_group()


class Case(NamedTuple):
    """What is timed, what comes before it, outside of the context, and the context of an update."""

    run: Callable[[], Any]
    prepare: Callable[[], Any] = lambda: None
    context: Callable[[], AbstractContextManager[Any]] = nullcontext


class _Copied(torch.autograd.Function):
    """What every process has; its gradient is added over the processes."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Summed(torch.autograd.Function):
    """The sum over the processes."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        dist.all_reduce(tensor, group=group)
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class ByColumns(nn.Linear):
    """Divided by hand, as Shoeybi et al. 2019, Megatron-LM, do it: every process computes some of the outputs."""

    group: Any

    def forward(self, input: Tensor) -> Tensor:
        return functional.linear(_Copied.apply(input, self.group), self.weight, self.bias)


class ByRows(nn.Linear):
    """The same; every process takes some of the inputs."""

    group: Any

    def forward(self, input: Tensor) -> Tensor:
        return _Summed.apply(functional.linear(input, self.weight), self.group) + self.bias


def by_hand(mesh: DeviceMesh) -> nn.Sequential:
    """``LAYERS`` layers of ordinary tensors, divided over the mesh by columns and rows in turn."""
    part = WIDTH // mesh.size()
    layers = [ByRows(part, WIDTH) if index % 2 else ByColumns(WIDTH, part) for index in range(LAYERS)]
    for layer in layers:
        layer.group = mesh.get_group()
    return nn.Sequential(*layers)


def linear(kind: str, what: str, mesh: DeviceMesh) -> Case:
    """Forward and backward of several Linear, one after the other, divided by columns and rows in turn."""
    model = by_hand(mesh) if kind == HAND else nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    x, gradient = torch.randn(ROWS, WIDTH, requires_grad=True), torch.randn(ROWS, WIDTH)
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    styles = {str(index): style_of(("colwise", "rowwise")[index % 2], "plan") for index in range(LAYERS)}
    if kind == "local":
        local = LocalTensors(model, mesh, styles)
        # As the first batch, after it was compared: the other process is not there, whose part the comparison would miss.
        local.alone = frozenset(name for name in styles if int(name) % 2 == 0)
        context = local.running
    elif kind == "dtensor":
        distribute_model(model, mesh, styles)
        context = DTensorFunctions
        x, gradient = as_replicated(mesh, (x.detach(), gradient))
        x.requires_grad_()
    given = [x, *model.parameters()]

    def prepare() -> None:
        for tensor in given:
            tensor.grad = None

    return Case(lambda: torch.autograd.backward(model(x), gradient), prepare, context)


def addition(kind: str, what: str, mesh: DeviceMesh) -> Case:
    """A sum of two tensors between layers."""
    x = torch.randn(ROWS, WIDTH)
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    if kind == "local":
        context = LocalTensors(nn.Sequential(), mesh, {}).running
    elif kind == "dtensor":
        x, context = as_replicated(mesh, x), DTensorFunctions
    return Case(lambda: x + x, context=context)


def update(kind: str, how: str, mesh: DeviceMesh) -> Case:
    """An update by AdamW, which drops the gradients."""
    tensors = [torch.randn(SIZE, SIZE) for _ in range(PARAMETERS)]
    if kind != "plain":
        tensors = [distribute_tensor(tensor, mesh, [Shard(0)]) for tensor in tensors]
    model = nn.Module()
    model.weights = nn.ParameterList(map(nn.Parameter, tensors))
    gradients: list[Any] = [torch.ones(SIZE, SIZE) for _ in tensors]
    if kind != "plain":  # as FSDP gives them
        gradients = [laid_out_as(one, torch.ones(SIZE // mesh.size(), SIZE)) for one in model.weights]  # type: ignore[arg-type]
    options: dict[str, Any] = {"lr": 1e-3, how: True}
    wrapper = OptimWrapper({"type": "AdamW", **options})
    wrapper.build(model)
    bare = torch.optim.AdamW(model.parameters(), **options)

    parameters = [*model.parameters()]

    def prepare() -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient

    def by_torch() -> None:
        bare.step()
        bare.zero_grad()

    return Case(wrapper.step if kind == "local" else by_torch, prepare)


CASES: Mapping[str, tuple[Callable[[str, str, DeviceMesh], Case], str, int]] = {
    "add": (addition, "", 1),
    "Linear": (linear, "", 1),
    f"AdamW of {PARAMETERS} parameters, foreach": (update, "foreach", 50),
    f"AdamW of {PARAMETERS} parameters, fused": (update, "fused", 50),
}
"""How each is made, with what, and by what the number of its iterations is divided."""


def timed(case: Case, iterations: int) -> float:
    """Microseconds of an iteration, the median."""
    clock, times = time.process_time_ns, []
    for _ in range(iterations + WARM_UP):
        case.prepare()
        with case.context():
            start = clock()
            case.run()
            times.append(clock() - start)
    return statistics.median(times[WARM_UP:]) / 1000


def measure(rounds: int, iterations: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    rows = []
    with mesh_of_two() as mesh:
        for name, (make, what, divisor) in CASES.items():
            times: dict[str, list[float]] = {kind: [] for kind in (*KINDS, *((HAND,) if make is linear else ()))}
            for _ in range(rounds):
                for kind in times:
                    times[kind].append(timed(make(kind, what, mesh), iterations // divisor))
            layers = LAYERS if make is linear else 1
            row = {kind: statistics.median(found) / layers for kind, found in times.items()}
            rows.append({"name": name, **row})
            print(rows[-1], file=sys.stderr)
    return {"python": platform.python_version(), "torch": torch.__version__, "rounds": rounds, "rows": rows}


def markdown(report: dict[str, Any]) -> str:
    lines = ["| host's time, us | plain tensors | flextrain, ordinary tensors | of plain | DTensors | of plain |"]
    lines.append("| --- | ---: | ---: | ---: | ---: | ---: |")
    for row in report["rows"]:
        plain = row["plain"]
        ours = [f"{row[kind]:,.1f} | {row[kind] / plain:.2f}" for kind in ("local", "dtensor")]
        lines.append(f"| {row['name']} | {plain:,.1f} | {' | '.join(ours)} |")
    (layer,) = (row for row in report["rows"] if HAND in row)
    lines += [
        "",
        f"Linear is forward and backward of one of {LAYERS}, with the call of its collective, which plain tensors do without. Layers of "
        f"ordinary tensors divided by hand, with the same calls, take {layer[HAND]:,.1f} us: flextrain's take {layer['local'] / layer[HAND]:.2f} "
        "times as long. Medians of the processor's time over "
        f"{report['rounds']} rounds, one thread, one process of two, the other one pretended. Python {report['python']}, torch {report['torch']}, on the CPU.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    report = measure(arguments.rounds, arguments.iterations)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "tensor_parallel.json").write_text(json.dumps(report, indent=1) + "\n")
    (arguments.out / "tensor_parallel.md").write_text(markdown(report))
    print(markdown(report))


if __name__ == "__main__":
    main()
