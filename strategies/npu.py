"""NPUStrategy: data parallelism on Ascend NPUs, one per process."""

from __future__ import annotations

from typing import Any, Literal

from ..core.base.errors import ConfigError
from ..core.base.registry import STRATEGIES
from ..core.device.device import device_spec
from .config import Needs
from .ddp import DDPConfig, DDPStrategy


class NPUConfig(DDPConfig):
    """Options of NPUStrategy: those of DDPStrategy, and torch_npu's switches. None keeps torch_npu's default."""

    device: Literal["npu"] = "npu"
    """Always "npu"."""
    compile_mode: Literal["binary", "jit"] | None = "binary"
    """Source of the operators: "binary" uses CANN's prebuilt ones, for any shape, as MMEngine does; "jit" compiles each
    operator for the shapes of its inputs."""
    allow_internal_format: bool | None = None
    """Allow operators to store tensors in the device's private layouts."""
    matmul_hf32: bool | None = None
    """Multiply float32 matrices in HF32, which has lower precision."""
    conv_hf32: bool | None = None
    """Compute float32 convolutions in HF32, which has lower precision."""
    options: dict[str, str | int] | None = None
    """Further switches for ``torch.npu.set_option``, such as ``dict(ACL_OP_DEBUG_LEVEL=1)``."""


@STRATEGIES.register_module()
class NPUStrategy(DDPStrategy):
    """Data parallelism with one Ascend NPU per process; one process without launcher has world size 1.

    Processes communicate over HCCL, and over gloo for CPU tensors. FSDPStrategy and DeepSpeedStrategy accept
    ``device="npu"`` too, or detect it.

    Raises:
        StrategyError: torch_npu is not installed, cannot be imported, or finds no device; raised by join.

    Source: https://www.hiascend.com/document, "Ascend Extension for PyTorch"
    """

    Config = NPUConfig
    needs = Needs(
        distributed=True,
        packages={"torch_npu": "pip install 'flextrain[npu]'"},
        device="npu",
        others=("CANN", "an Ascend NPU per process"),
    )
    short_names = {"npu": {}}
    config: NPUConfig

    def join(self) -> None:
        """See Strategy; also sets torch_npu's switches, before anything runs on the device.

        Raises:
            ConfigError: torch_npu refuses one of the options.
        """
        if self._spec is None:
            self._set_switches(device_spec(self.config.device).module)
        super().join()

    def _set_switches(self, npu: Any) -> None:
        config = self.config
        if config.compile_mode is not None:
            npu.set_compile_mode(jit_compile=config.compile_mode == "jit")
        if config.allow_internal_format is not None:
            npu.config.allow_internal_format = config.allow_internal_format
        if config.matmul_hf32 is not None:
            npu.matmul.allow_hf32 = config.matmul_hf32
        if config.conv_hf32 is not None:
            npu.conv.allow_hf32 = config.conv_hf32
        if config.options:
            try:
                npu.set_option(dict(config.options))
            except ValueError as error:
                reason = " ".join(str(error).split())
                raise ConfigError(f"strategy.options: torch_npu refuses it: {reason}") from None
