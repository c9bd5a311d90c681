"""What is NPUStrategy's own: start-up switches, seeds, memory in the log line, statistics over all devices."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from .fetch_torch_npu import SOURCE
from .simulated import python
from .training import make_runner, train, train_on_cpu

pytestmark = [pytest.mark.npu, pytest.mark.distributed]
NPU = dict(type="NPUStrategy")


def switched(arguments: dict[str, Any]) -> list[dict[str, str]]:
    """The device's options when the strategy is built, has begun, and has begun again."""
    from flextrain import NPUStrategy

    options = torch.npu.options  # type: ignore[attr-defined]
    options.clear()
    strategy = NPUStrategy(**arguments)
    seen = [dict(options)]
    strategy.join()
    seen.append(dict(options))
    options.clear()
    strategy.join()
    strategy.leave()
    return [*seen, dict(options)]


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (dict(), {"jitCompile": "disable"}),
        (dict(compile_mode="jit"), {"jitCompile": "enable"}),
        (dict(compile_mode=None), {}),
        (
            dict(allow_internal_format=False, matmul_hf32=True, conv_hf32=False, options=dict(ACL_OP_DEBUG_LEVEL=1)),
            {
                "jitCompile": "disable",
                "ALLOW_INTERNAL_FORMAT": "disable",
                "ALLOW_MATMUL_HF32": "enable",
                "ALLOW_CONV_HF32": "disable",
                "ACL_OP_DEBUG_LEVEL": "1",
            },
        ),
    ],
)
def test_switches_are_set_once_by_join(npu1: Any, arguments: dict[str, Any], expected: dict[str, str]) -> None:
    assert npu1.run(switched, arguments) == [[{}, expected, {}]]


def wrong_option() -> str:
    from flextrain import ConfigError, NPUStrategy

    with pytest.raises(ConfigError) as caught:
        NPUStrategy(options=dict(ACL_OP_DEBUG_LEVEL=7)).join()
    return str(caught.value)


def test_a_value_that_torch_npu_refuses_names_the_key(npu1: Any) -> None:
    said = "strategy.options: torch_npu refuses it: value of ACL_OP_DEBUG_LEVEL should be from 0 to 4 but got 7"
    assert npu1.run(wrong_option) == [said]


def test_what_is_called_is_in_torch_npus_own_sources() -> None:
    source = Path(os.environ.get("TORCH_NPU_SOURCE", SOURCE)) / "npu"
    if not source.is_dir():
        pytest.skip("needs torch_npu's sources: python tests/npu/fetch_torch_npu.py")
    module = ast.parse((source / "__init__.py").read_text())
    names = {target.id: node.value for node in module.body if isinstance(node, ast.Assign) for target in node.targets}
    # docs/devices.md asks the same of any device.
    used = {"is_available", "device_count", "set_device", "synchronize", "empty_cache", "max_memory_allocated"}
    used |= {"get_rng_state", "set_rng_state", "get_amp_supported_dtype", "set_option", "set_compile_mode"}
    assert used <= set(ast.literal_eval(names["__all__"]))
    assert {"config", "matmul", "conv"} <= names.keys()
    parsed = [ast.parse((source / file).read_text()) for file in ("npu_config.py", "utils.py")]
    functions = {node.name: node for tree in parsed for node in tree.body if isinstance(node, ast.FunctionDef)}
    arguments = {name: [argument.arg for argument in node.args.args] for name, node in functions.items()}
    assert arguments["set_option"] == ["option"]
    assert arguments["set_compile_mode"] == ["jit_compile"]
    assert arguments["is_support_inf_nan"] == []
    text = (source / "npu_config.py").read_text()
    assert {'"allow_internal_format"', '"allow_hf32"'} <= set(re.findall(r'if name == ("\w+")', text))


def sums(**options: Any) -> list[tuple[str, float]]:
    """The sum of ones over all processes, on the device and on the CPU."""
    from flextrain import NPUStrategy
    from flextrain.core.comm.collectives import all_reduce

    strategy = NPUStrategy(**options)
    strategy.join()
    found = [all_reduce(torch.ones((), device=device)) for device in (strategy.device, "cpu")]
    strategy.leave()
    return [(tensor.device.type, tensor.item()) for tensor in found]


@pytest.mark.parametrize("backend", [None, "hccl", "npu:hccl"])
def test_processes_talk_about_what_is_on_the_cpu_too(npu2: Any, backend: str | None) -> None:
    assert npu2.run(sums, backend=backend) == [[("npu", 2.0), ("cpu", 2.0)]] * 2


def test_no_device_is_one_error(simulated_npu: Path) -> None:
    program = "from flextrain import NPUStrategy; NPUStrategy().join()"
    done = python("-c", program, ASCEND_RT_VISIBLE_DEVICES="")
    message = 'strategy.device: "npu" is not usable on this machine, no such device was found'
    assert message in done.stderr.splitlines()[-1]


class Dropping(nn.Module):
    """Dropout, so that losses tell which random numbers the device drew."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Dropout(0.5), nn.Linear(32, 10))

    def forward(self, images: Tensor, labels: Tensor, mode: str = "loss") -> Any:
        return {"loss": functional.cross_entropy(self.net(images), labels)}


def seeded(folder: Path) -> dict[str, list[float]]:
    saving = dict(default_hooks=dict(checkpoint=dict(interval=1)))
    one_epoch = dict(train_cfg=dict(by_epoch=True, max_epochs=1))
    losses = {
        "first": train(folder / "a", NPU, model=Dropping)[0],
        "again": train(folder / "b", NPU, model=Dropping)[0],
        "other": train(folder / "c", NPU, model=Dropping, randomness=dict(seed=6))[0],
    }
    begun, _ = train(folder / "d", NPU, model=Dropping, **one_epoch, **saving)
    torch.rand(3, device="npu")  # what else draws meanwhile
    rest, _ = train(folder / "d", NPU, model=Dropping, resume=True, **saving)
    return {**losses, "resumed": begun + rest}


def test_seeds_and_resuming_reach_the_devices_random_numbers(npu1: Any, tmp_path: Path) -> None:
    (losses,) = npu1.run(seeded, tmp_path)
    assert losses["first"] == losses["again"] == losses["resumed"]
    assert losses["first"] != losses["other"]


def logged(folder: Path) -> tuple[str, float]:
    runner = make_runner(folder, NPU, 1, log_level="INFO", default_hooks=dict(checkpoint=None, logger=dict(interval=4)))
    ballast = torch.empty(300 * 2**18, device="npu")  # 300 MiB in float32
    runner.train()
    runner.strategy.leave()
    (log,) = folder.rglob("*.log")
    return log.read_text(), ballast.numel() * 4 / 2**20


def test_the_log_line_has_the_devices_memory(npu1: Any, tmp_path: Path) -> None:
    ((text, ballast),) = npu1.run(logged, tmp_path)
    memory = [int(figure) for figure in re.findall(r"Epoch\(train\).* memory: (\d+)", text)]
    assert memory
    assert all(ballast <= figure < ballast + 20 for figure in memory)


class Normalising(nn.Module):
    """Batch normalisation whose statistics matter."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.Flatten())
        self.head = nn.Linear(144, 10)

    def forward(self, images: Tensor, labels: Tensor, mode: str = "loss") -> Any:
        return {"loss": functional.cross_entropy(self.head(self.features(images)), labels)}


def normalised(folder: Path) -> tuple[list[float], list[float], list[float]]:
    together, _ = train(folder / "sync", dict(**NPU, sync_bn="torch"), model=Normalising)
    apart, _ = train(folder / "own", NPU, model=Normalising)
    return together, apart, train_on_cpu(folder / "cpu", model=Normalising)


@pytest.mark.full
def test_statistics_over_all_devices(npu2: Any, tmp_path: Path) -> None:
    for together, apart, expected in npu2.run(normalised, tmp_path):
        assert together == pytest.approx(expected, rel=1e-4)
        assert apart != pytest.approx(expected, rel=1e-4)


def half(dtype: str, *, bfloat16: bool = True, infinite: bool = True) -> str:
    """What mixed precision says on a chip that may lack bfloat16, or stops at the largest number."""
    from flextrain import AmpOptimWrapper, FlexTrainError, NPUStrategy

    npu = torch.npu  # type: ignore[attr-defined]
    before = npu.get_amp_supported_dtype, npu.utils.is_support_inf_nan
    if not bfloat16:
        npu.get_amp_supported_dtype = lambda: [torch.float16, torch.float32]
    npu.utils.is_support_inf_nan = lambda: infinite
    strategy = NPUStrategy()
    try:
        strategy.setup(nn.Linear(2, 2), AmpOptimWrapper(dict(type="AdamW"), dtype=dtype))
    except FlexTrainError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        npu.get_amp_supported_dtype, npu.utils.is_support_inf_nan = before
        strategy.leave()
    return "nothing"


def test_a_chip_without_bfloat16_does_not_compute_in_float32_in_its_place(npu1: Any) -> None:
    assert npu1.run(half, "float16", bfloat16=False) == npu1.run(half, "bfloat16") == ["nothing"]
    assert npu1.run(half, "bfloat16", bfloat16=False) == [
        "StrategyError: optim_wrapper.dtype: autocast on npu does not compute in torch.bfloat16, choose float16"
    ]


def test_loss_scaling_on_a_chip_whose_overflow_is_no_inf_is_refused(npu1: Any) -> None:
    assert npu1.run(half, "bfloat16", infinite=False) == ["nothing"]
    (said,) = npu1.run(half, "float16", infinite=False)
    assert said == (
        "StrategyError: optim_wrapper.dtype: float16 needs loss scaling, which looks for inf, and this npu stops at the "
        "largest number; set INF_NAN_MODE_ENABLE=1 where the chip has that, or choose one of torch_npu's optimizers "
        "(NpuFusedAdamW, ...), whose scaler asks the chip"
    )
