"""Devices: choosing one, never another one in silence, and moving whatever a batch may be."""

from __future__ import annotations

import dataclasses
import sys
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from flextrain.core.base.errors import ConfigError, StrategyError
from flextrain.core.device import device as library
from flextrain.core.device.accelerator import float32_advice
from flextrain.core.device.device import (
    DEVICES,
    DeviceSpec,
    device_spec,
    memory_mb,
    register_device,
    select_device,
    to_device,
)

META = torch.device("meta")  # a device that every machine has
ABSENT = [kind for kind in ("cuda", "npu", "xpu", "mps") if not DEVICES[kind].is_available()]


# Choosing


def test_cpu_by_name_and_whatever_is_here_without() -> None:
    assert device_spec("cpu").type == "cpu"
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    assert device_spec(None).type == here.type


@pytest.mark.parametrize("kind", ABSENT)
def test_a_device_that_is_not_here_is_not_replaced_by_the_cpu(kind: str) -> None:
    with pytest.raises(StrategyError, match=f'^strategy.device: "{kind}" is not usable on this machine, '):
        device_spec(kind)


@pytest.mark.skipif(hasattr(torch, "npu"), reason="torch_npu is installed")
def test_a_device_that_torch_lacks_names_what_to_install() -> None:
    with pytest.raises(StrategyError, match=r"install torch_npu \(pip install flextrain\[npu\]\) and Ascend's CANN$"):
        device_spec("npu")


@pytest.mark.parametrize(
    "name, message",
    [
        ("cud", 'here: "cud" is not allowed, choose cpu, cuda, npu, xpu or mps, did you mean "cuda"?'),
        ("tpu:0", 'here: "tpu:0" is not allowed, choose cpu, cuda, npu, xpu or mps'),
        ("cuda:1", 'here: "cuda:1" is not allowed, give "cuda", and choose among several by CUDA_VISIBLE_DEVICES'),
        ("npu:1", 'here: "npu:1" is not allowed, give "npu", and choose among several by ASCEND_RT_VISIBLE_DEVICES'),
        ("cpu:0", 'here: "cpu:0" is not allowed, give "cpu"'),
    ],
)
def test_wrong_names(name: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        device_spec(name, "here")
    assert str(caught.value).startswith(message)


class FakeModule:
    """Stands for ``torch.cuda`` on a machine with two devices."""

    current: Any = None
    count = 2

    @classmethod
    def is_available(cls) -> bool:
        return True

    @classmethod
    def device_count(cls) -> int:
        return cls.count

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        cls.current = device


def test_a_process_takes_the_device_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "xpu", FakeModule)
    spec = device_spec("xpu")
    assert select_device(spec, 1) == torch.device("xpu", 1)
    assert FakeModule.current == torch.device("xpu", 1)
    with pytest.raises(StrategyError, match="^strategy.device: local rank 2 has no xpu device, this machine has 2$"):
        select_device(spec, 2)
    monkeypatch.setattr(FakeModule, "count", 1)  # each process is shown its own
    assert select_device(spec, 3) == FakeModule.current == torch.device("xpu", 0)


def test_processes_share_the_cpu() -> None:
    assert select_device(DEVICES["cpu"], 5) == torch.device("cpu")


@pytest.mark.parametrize(
    ("device", "asked", "complete"),
    [
        ("cuda", None, "cpu:gloo,cuda:nccl"),
        ("cuda", "nccl", "cpu:gloo,cuda:nccl"),
        ("cuda", "NCCL", "cpu:gloo,cuda:nccl"),
        ("cuda", "cuda:nccl", "cpu:gloo,cuda:nccl"),
        ("cuda", "cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl"),
        ("cuda", "cuda:nccl, cpu:mpi", "cuda:nccl, cpu:mpi"),
        ("cuda", "gloo", "gloo"),
        ("cuda", "mpi", "mpi"),
        ("npu", None, "cpu:gloo,npu:hccl"),
        ("cpu", None, "gloo"),
        ("npu", "hccl", "cpu:gloo,npu:hccl"),  # torch_npu tells torch of it, at its import
        ("npu", "npu:hccl", "cpu:gloo,npu:hccl"),
        ("xpu", "xccl", "cpu:gloo,xpu:xccl"),
        ("mps", "gloo", "cpu:gloo,mps:gloo"),
        ("cpu", "gloo", "gloo"),
        ("cpu", "newccl", "newccl"),  # unknown to torch too, which then tries it
    ],
)
def test_a_back_end_that_is_asked_for_gets_gloo_beside_it(device: str, asked: str | None, complete: str) -> None:
    assert DEVICES[device].complete_backend(asked) == complete


def test_a_back_end_for_accelerators_does_not_do_on_the_cpu() -> None:
    with pytest.raises(ConfigError) as caught:
        DEVICES["cpu"].complete_backend("nccl")
    assert str(caught.value) == ('strategy.backend: "nccl" cannot send CPU tensors, choose "gloo" or leave it out')


def test_an_accelerator_that_is_not_in_the_table_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mtia"))
    assert library.accelerator_type() == "cpu"
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    assert library.accelerator_type() == "xpu"


# Devices of others


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installed package that brings a device along; its import leaves a trace."""
    (tmp_path / "torch_toy.py").write_text(
        "import torch\nfrom flextrain.core.device.device import DeviceSpec\n"
        "SPEC = DeviceSpec('toy', 'toyccl', torch.bfloat16, package='torch_toy_runtime')\n"
    )
    (tmp_path / "torch_toy_runtime.py").write_text("import torch\ntorch.toy = __import__('toy_module')\n")
    (tmp_path / "toy_module.py").write_text("def is_available():\n    return True\n")
    info = tmp_path / "torch_toy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-toy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[flextrain.devices]\ntoy = torch_toy:SPEC\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(DEVICES, "_specs", dict(DEVICES._specs))
    monkeypatch.setattr(torch, "toy", None, raising=False)
    monkeypatch.delattr(torch, "toy")
    yield tmp_path
    for name in ("torch_toy", "torch_toy_runtime", "toy_module"):
        sys.modules.pop(name, None)


def test_a_device_of_an_installed_package_is_imported_when_it_is_asked_for(package: Path) -> None:
    assert "toy" in DEVICES
    assert list(DEVICES) == ["cpu", "cuda", "npu", "xpu", "mps", "toy"]
    assert device_spec("cpu").type == "cpu"
    assert "torch_toy" not in sys.modules
    spec = device_spec("toy")
    assert spec == DeviceSpec("toy", "toyccl", torch.bfloat16, package="torch_toy_runtime")
    assert spec.group_backend == "cpu:gloo,toy:toyccl"


def test_an_entry_point_must_lead_to_a_spec_of_its_name(package: Path) -> None:
    (package / "torch_toy.py").write_text("SPEC = 'toy'\n")
    with pytest.raises(ConfigError) as caught:
        device_spec("toy")
    assert str(caught.value) == (
        'entry point "toy" in flextrain.devices: torch_toy:SPEC is \'toy\', it must be a DeviceSpec of type "toy"'
    )


def test_a_package_that_fails_to_import_says_why(package: Path) -> None:
    (package / "torch_toy_runtime.py").write_text("raise ImportError('libtoy.so: cannot open shared object file')\n")
    with pytest.raises(StrategyError) as caught:
        device_spec("toy")
    assert str(caught.value) == (
        'strategy.device: "toy" is not usable on this machine, torch_toy_runtime is installed and cannot be imported '
        "(libtoy.so: cannot open shared object file); `flextrain doctor` says more"
    )


def test_a_package_that_lacks_something_else_is_not_called_missing(package: Path) -> None:
    (package / "torch_toy_runtime.py").write_text("import something_it_needs\n")
    with pytest.raises(ModuleNotFoundError, match="something_it_needs"):
        device_spec("toy")


def test_a_registered_device_without_its_package_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DEVICES, "_specs", dict(DEVICES._specs))
    spec = register_device(DeviceSpec("mlu", "cncl", package="no_such_package.runtime"))
    assert DEVICES["mlu"] is spec
    with pytest.raises(StrategyError, match="not usable on this machine, install no_such_package.runtime$"):
        device_spec("mlu")


# Moving


class Point(NamedTuple):
    x: Tensor
    name: str


Plain = namedtuple("Plain", "x")


@dataclasses.dataclass(frozen=True)
class Sample:
    image: Tensor
    label: str = "cat"
    size: int = dataclasses.field(init=False, default=3)


class Words(UserDict[str, Any]):
    """A batch that is more than its items, as tokenizers give."""

    moved_to: Any = None

    def to(self, device: torch.device) -> Words:
        self.moved_to = device
        return self


def ones() -> Tensor:
    return torch.ones(2)


CONTAINERS = [
    ones(),
    {"a": ones(), "b": [ones(), 3]},
    OrderedDict(a=ones()),
    defaultdict(list, a=ones()),
    UserDict(a=ones()),
    [ones(), "text", None],
    (ones(), (ones(),)),
    Point(ones(), "p"),
    Plain([ones()]),
    Sample(ones()),
    {"nested": [Point(ones(), "p"), {"deep": Sample(ones())}]},
]


def tensors_in(data: Any) -> list[Tensor]:
    if isinstance(data, Tensor):
        return [data]
    if dataclasses.is_dataclass(data):
        data = vars(data)
    values = data.values() if hasattr(data, "values") else data if isinstance(data, (list, tuple)) else ()
    return [tensor for value in values for tensor in tensors_in(value)]


@pytest.mark.parametrize("data", CONTAINERS, ids=lambda data: type(data).__name__)
def test_containers_keep_their_type_and_their_other_values(data: Any) -> None:
    moved = to_device(data, META)
    assert type(moved) is type(data)
    found = tensors_in(moved)
    assert len(found) == len(tensors_in(data)) > 0
    assert {tensor.device for tensor in found} == {META}
    assert {tensor.device.type for tensor in tensors_in(data)} == {"cpu"}


def test_what_is_no_tensor_comes_back_as_it_was() -> None:
    marker = object()
    data = {"text": "a", "number": 3, "none": None, "object": marker, "kind": Words, "tensor": ones()}
    moved = to_device(data, META)
    del moved["tensor"], data["tensor"]
    assert moved == data
    assert to_device(defaultdict(list, a=ones()), META).default_factory is list
    assert to_device(Sample(ones(), "dog"), META).label == "dog"


def test_objects_that_move_themselves_are_asked_to() -> None:
    words = to_device(Words(ids=ones()), META)
    assert words.moved_to == META
    packed = to_device(pack_sequence([torch.ones(3), torch.ones(2)]), META)
    assert packed.data.device == META
    assert packed.batch_sizes.device.type == "cpu"  # which torch insists on
    compiled = SimpleNamespace(to=ones().to)  # has no signature
    assert to_device(compiled, META).device == META


def test_a_tensor_that_is_there_already_is_not_copied() -> None:
    tensor = ones()
    assert to_device([tensor], torch.device("cpu"))[0] is tensor


@pytest.mark.parametrize(
    "target, non_blocking, passed_on", [("meta", True, True), ("meta", False, False), ("cpu", True, False)]
)
def test_copies_to_the_cpu_are_waited_for(
    monkeypatch: pytest.MonkeyPatch, target: str, non_blocking: bool, passed_on: bool
) -> None:
    seen = []
    monkeypatch.setattr(Tensor, "to", lambda self, *args, **kwargs: seen.append(kwargs["non_blocking"]))
    source = ones() if target == "meta" else torch.ones(2, device=META)
    to_device(source, torch.device(target), non_blocking)
    assert seen == [passed_on]


# Memory


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux says it elsewhere too")
def test_memory_of_the_cpu_is_the_peak_of_the_process() -> None:
    status = Path("/proc/self/status").read_text()
    peak_kib = int(status.partition("VmHWM:")[2].split()[0])
    assert memory_mb(torch.device("cpu")) == pytest.approx(peak_kib / 1024, rel=0.05)


@pytest.mark.parametrize(
    ("capability", "precision", "advises"),
    [((8, 0), "highest", True), ((9, 0), "highest", True), ((7, 5), "highest", False), ((9, 0), "high", False)],
)
def test_products_of_float32_matrices_are_advised_to_be_fast(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], precision: str, advises: bool
) -> None:
    """Without a GPU it is pretended that torch has found one of this generation."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", None)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        advice = float32_advice(torch.device("cuda", 0))
    finally:
        torch.set_float32_matmul_precision(before)
    assert bool(advice) is advises
    assert not advice or 'torch.set_float32_matmul_precision("high")' in advice
    assert float32_advice(torch.device("cpu")) is None
