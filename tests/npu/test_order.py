"""Whoever uses memory waits for the stream that used it before: on the simulated device, which says so, and in the library.

A copy to or from page-locked memory is made late, at once or at random; what is computed must not depend on it.
"""

from __future__ import annotations
import __future__

import copy
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import flextrain
from flextrain.core.checkpoint import Checkpoint, Staging, save_in_background
from flextrain.core.checkpoint import save as saving
from flextrain.core.device import accelerator
from flextrain.core.device import device as devices
from flextrain.core.device.device import HostBuffer, host_slices, to_device
from flextrain.strategies import offloading
from flextrain.strategies.mesh.context.attention import Ring
from flextrain.strategies.mesh.pipeline.pipeline_engine import Transfers
from flextrain.testing.loop import train as train_windows

from ..mesh.parity import RECIPES, data, started
from .training import make_runner, train

pytestmark = [pytest.mark.npu, pytest.mark.distributed]


# The device


def numbers() -> Tensor:
    return torch.arange(4.0, device="npu")


def reads_too_early(side: Any) -> None:
    with torch.npu.stream(side):
        numbers().sum()
    x = numbers()
    with torch.npu.stream(side):
        x.sum()


def writes_what_is_read(side: Any) -> None:
    x = numbers()
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        x.sum()
    x.zero_()


def reads_what_is_uploaded(side: Any) -> None:
    with torch.npu.stream(side):
        x = torch.ones(4).pin_memory().to("npu", non_blocking=True)
    x.sum()


def frees_what_is_used(side: Any) -> None:
    with torch.npu.stream(side):
        x = numbers()
    torch.npu.current_stream().wait_stream(side)
    x.sum()
    del x
    with torch.npu.stream(side):
        numbers()


WRONG: dict[Callable[[Any], None], str] = {
    reads_too_early: "aten::sum on stream * touches memory that aten::arange on the default stream writes",
    writes_what_is_read: "aten::zero_ on the default stream touches memory that aten::sum on stream * reads",
    reads_what_is_uploaded: "aten::sum on the default stream touches memory that an upload on stream * writes",
    frees_what_is_used: "aten::arange on stream * touches memory that aten::sum on the default stream used until it was freed",
}


def errors() -> list[str]:
    found = []
    for function in WRONG:
        with pytest.raises(RuntimeError) as error:
            function(torch.npu.Stream())
        found.append(re.sub(r"stream \d+", "stream *", str(error.value).partition("\n")[0]))
        torch.npu.synchronize()
    return found


def test_work_that_does_not_wait_is_told(npu1: Any) -> None:
    (found,) = npu1.run(errors)
    for error, expected in zip(found, WRONG.values(), strict=True):
        assert error.startswith(f"npu: {expected}")


def waits_and_keeps() -> list[float]:
    """What is right: a stream, an event and the host wait, memory is kept until another stream has used it."""
    side, found = torch.npu.Stream(), []
    x = numbers()
    side.wait_stream(torch.npu.current_stream())
    with side:
        y = x + 1
        event = side.record_event()
    torch.npu.current_stream().wait_event(event)
    found.append(y.sum())
    y.record_stream(torch.npu.current_stream())
    del y
    with torch.npu.stream(side):
        z = numbers()
    side.synchronize()
    found.append((z + x).sum())
    return [float(value) for value in found]


def test_work_that_waits_is_done(npu1: Any) -> None:
    assert npu1.run(waits_and_keeps) == [[10.0, 12.0]]


# The library


def uploaded() -> list[Tensor]:
    """Batches of page-locked memory, used and freed."""
    return [to_device(torch.full((8,), float(n)).pin_memory(), torch.device("npu", 0)).sum() for n in range(6)]


def downloaded() -> list[Tensor]:
    """Copies of a buffer that is used again before anybody has read it, of tensors of the device and of the host."""
    buffer = HostBuffer()
    buffer.copy([numbers(), numbers()])
    copies = buffer.copy([torch.full((4,), 7.0), numbers() + 1])
    buffer.wait()
    return [one.clone() for one in copies]


def sliced() -> list[Tensor]:
    """Slices that go through two buffers, of tensors that change as soon as they were asked for."""
    tensors, found = [torch.full((16,), float(n), device="npu") for n in range(6)], []
    with patch.object(devices, "_SLICE_BYTES", 64):
        for number, one in host_slices(tensors):
            tensors[number].zero_()
            found.append(one.clone())
    return found


def saved() -> list[Tensor]:
    """Tensors that change while they are saved in the background, twice through the same memory."""
    staging, found, weights = Staging(), [], torch.arange(1000.0, device="npu")
    with TemporaryDirectory() as folder:
        for number in range(2):
            pending = save_in_background(Path(folder) / f"iter_{number}", {"weights": weights}, staging=staging)
            weights.add_(1)
            target = {"weights": torch.empty(1000)}
            Checkpoint.open(pending.wait()).load(target)
            found.append(target["weights"])
    return found


def activations() -> list[Tensor]:
    """Gradients with activations on the host, after a forward pass of which nobody asks for the gradients."""
    from flextrain import SingleDeviceStrategy
    from tests.strategies.test_selective import SIZE, Layers

    torch.manual_seed(0)
    options: Any = dict(offload=True, recompute=False)
    strategy = SingleDeviceStrategy(device="npu", activation_checkpointing=options)
    model, _ = strategy.setup(copy.deepcopy(Layers()))
    x = torch.arange(2.0 * 8 * SIZE).sin().reshape(2, 8, SIZE).to("npu")
    with patch.object(offloading, "LEAST", 64):
        for _ in range(2):
            model(x)
            model(x).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def trained() -> list[Tensor]:
    """Losses of a run, and the averages that it saves in the background."""
    hooks = dict(checkpoint=dict(interval=4, by_epoch=False, async_save=True, max_keep_ckpts=1))
    with TemporaryDirectory() as folder:
        runner = make_runner(
            Path(folder), dict(type="NPUStrategy"), 1, default_hooks=hooks, custom_hooks=[dict(type="EMAHook")]
        )
        runner.train()
        checkpoint = Checkpoint.open(next(Path(folder).glob("iter_*")))
        found = {key: torch.empty(info.shape, dtype=info.dtype) for key, info in checkpoint.tensors.items()}
        checkpoint.load(found)
        runner.strategy.leave()
    return [found[key] for key in sorted(found)]


def of_host_parameters() -> list[Tensor]:
    """Losses with parameters on the host, which torch's FSDP moves."""
    strategy = dict(type="FSDPStrategy", device="npu", wrap=["Sequential"], cpu_offload=True)
    with TemporaryDirectory() as folder:
        losses, _ = train(Path(folder), strategy, train_cfg=dict(max_epochs=1))
    return [torch.tensor(losses)]


def of_mesh(**axes: Any) -> list[Tensor]:
    """Losses on a mesh."""
    with started(dict(type="MeshStrategy", **axes), "plain", RECIPES["accumulate-clip"]) as session:
        windows = data("plain", RECIPES["accumulate-clip"], 3)
        return [torch.tensor(train_windows(session.strategy, session.model, session.optim, windows).losses)]


def of_stages() -> list[Tensor]:
    return of_mesh(pp=2)


def of_ring() -> list[Tensor]:
    return of_mesh(cp=2, cp_kind="ring")


SCENARIOS: Mapping[str, Callable[[], list[Tensor]]] = {
    each.__name__: each
    for each in (uploaded, downloaded, sliced, saved, activations, trained, of_host_parameters, of_stages, of_ring)
}
OF_TWO = {"of_stages", "of_ring"}
ARRIVALS = [("at once", 0), ("late", 0), *(("random", seed) for seed in range(3))]


def outcomes(scenario: str) -> list[bool]:
    """For each way to arrive, whether the bits are those of the first one."""
    import torch_npu

    found = []
    try:
        for arrival in ARRIVALS:
            torch_npu.arrive(*arrival)
            found.append([one.cpu() for one in SCENARIOS[scenario]()])
    finally:
        torch_npu.arrive("late")
        torch.npu.synchronize()
    assert found[0]
    return [all(torch.equal(a, b) for a, b in zip(each, found[0], strict=True)) for each in found]


# Those of two processes are in the daily tests by the removals below.
@pytest.mark.parametrize(
    "scenario", [pytest.param(name, marks=[pytest.mark.full] if name in OF_TWO else []) for name in SCENARIOS]
)
def test_bits_do_not_depend_on_when_copies_arrive(npu1: Any, npu2: Any, scenario: str) -> None:
    for same in (npu2 if scenario in OF_TWO else npu1).run(outcomes, scenario):
        assert all(same), same


# What waits, with a scenario that fails without it


Wait = tuple[Any, str, int, str]  # function, a statement's beginning, which of several, scenario
WAITS: list[Wait] = [
    (accelerator.upload, "current.wait_stream", 0, "uploaded"),
    (accelerator.upload, "copy.record_stream", 0, "uploaded"),
    (HostBuffer.copy, "self.wait()", 0, "downloaded"),
    (HostBuffer.copy, "self._arrival = ", 0, "downloaded"),
    (HostBuffer.wait, "self._arrival.synchronize", 0, "downloaded"),
    (host_slices, "buffers[number % 2 - 1].wait", 0, "sliced"),
    (saving._Save._write, "self._staging.memory.wait", 0, "saved"),
    (offloading._Memory._copy, "self._stream.wait_stream", 0, "activations"),
    (offloading._Memory._copy, "self._event = ", 0, "activations"),
    (offloading._Memory._wait, "torch.accelerator.current_stream(self._device).wait_event", 0, "activations"),
    (offloading._Memory.settle, "self._wait()", 0, "activations"),
    (offloading._Memory.on_device, "self._wait()", 0, "activations"),
    (offloading._Memory.__del__, "self._there.record_stream", 0, "activations"),
    (Transfers.receive, "work.wait()", 0, "of_stages"),
    (Ring.send_on, "work.wait()", 0, "of_ring"),
]


@contextmanager
def without(function: Any, beginning: str, which: int) -> Iterator[None]:
    """A context in which a statement of one line is left out of a function."""
    lines = textwrap.dedent(inspect.getsource(function)).splitlines()
    found = [number for number, line in enumerate(lines) if line.strip().startswith(beginning)]
    line = lines[found[which]]
    lines[found[which]] = line[: len(line) - len(line.lstrip())] + "pass"
    names: dict[str, Any] = {}
    flags = __future__.annotations.compiler_flag
    exec(compile("\n".join(lines), function.__code__.co_filename, "exec", flags), function.__globals__, names)
    before = function.__code__
    function.__code__ = names[function.__name__].__code__
    try:
        yield
    finally:
        function.__code__ = before


def fails_without(number: int) -> str:
    """In a worker: how the scenario fails; empty if it does not."""
    *place, scenario = WAITS[number]
    with without(*place):
        try:
            return "" if all(outcomes(scenario)) else "other bits"
        except RuntimeError as error:
            return str(error).partition("\n")[0]


@pytest.mark.parametrize("number", range(len(WAITS)), ids=[f"{each[0].__qualname__} {each[1]}" for each in WAITS])
def test_nothing_that_waits_is_left_out(npu1: Any, npu2: Any, number: int) -> None:
    for found in (npu2 if WAITS[number][-1] in OF_TWO else npu1).run(fails_without, number):
        assert found == "other bits" or "does not wait" in found


def test_every_stream_that_waits_has_a_scenario() -> None:
    words = re.compile(r"\.(record_stream|wait_stream|wait_event)\(")
    root = Path(flextrain.__file__).parent.parent
    found = sum(len(words.findall(path.read_text())) for part in ("core", "optim", "strategies", "runner", "flextrain")
                for path in (root / part).rglob("*.py"))  # fmt: skip
    assert found == sum(bool(re.search(r"record_stream|wait_stream|wait_event", each[1])) for each in WAITS)
