"""Building a model whose parameters are split among the processes as soon as each layer exists."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...core.comm.agreement import first_difference
from ...core.errors import StrategyError


@contextlib.contextmanager
def split_at_once(deepspeed: Any, keys: dict[str, Any]) -> Iterator[None]:
    """What is built inside has its parameters split, rank 0's values; needs the process group.

    ``keys`` are for float32 even if training is not: masters start from these values, and buffers are not ZeRO's affair.
    """
    # Given as a dtype, float32 would become bfloat16 (0.19.8); from the configuration it stays.
    split = deepspeed.zero.Init(config_dict_or_path=keys)
    alike = _Alike(split)
    with split, _NoWritingIntoNothing():
        try:
            yield
            alike.check("nothing")
        except RuntimeError as error:
            if "self.dim() cannot be 0" not in str(error):
                raise
            # DeepSpeed 0.19.8 sends bytes around, and a scalar cannot be looked at as bytes.
            raise StrategyError(
                "model: DeepSpeed cannot split a parameter without dimensions while the model is built, give it shape "
                "(1,), or strategy.zero_init=False to have the model built whole"
            ) from error


class _Alike:
    """Compares each layer that is built with the others', before its parameters are sent around to be split."""

    def __init__(self, split: Any) -> None:
        self._number = 0
        self._split = split._post_init_method
        split._post_init_method = self._after

    def _after(self, module: nn.Module) -> None:
        own = {
            name: parameter
            for name, parameter in module.named_parameters(recurse=False)
            if not hasattr(parameter, "ds_id")
        }
        if own:
            forms = [f"{name} {'x'.join(map(str, p.shape))} {str(p.dtype)[6:]}" for name, p in own.items()]
            self.check(f"{type(module).__name__} with {', '.join(forms)}")
        self._split(module)

    def check(self, layer: str) -> None:
        """Raise StrategyError if the others build something else."""
        self._number += 1
        if found := first_difference({f"layer {self._number}": layer}):
            raise StrategyError(f"model: {found}; every process has to build the same model")


def restore_linear() -> None:
    """Take back the linear layer that stage 3 leaves in torch for good: it fails under another device's autocast."""
    module: Any = sys.modules.get("deepspeed.runtime.zero.partition_parameters")
    original = getattr(getattr(module, "InsertPostInitMethodToModuleSubClasses", None), "linear_bk", None)
    if original is not None:
        torch.nn.functional.linear = original


class _NoWritingIntoNothing(TorchFunctionMode):
    """Raises where a model initialises parameters of a finished layer: they are split, and nothing would be written."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name.endswith("_") and not name.endswith("__") and name != "requires_grad_":
            target = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
            if target is not None and hasattr(target, "ds_id") and target.numel() == 0:
                raise StrategyError(
                    f"model: its constructor calls {name} on a parameter of a layer that is split already, give "
                    "strategy.zero_init=False to have the model built whole"
                )
        return func(*args, **kwargs)
