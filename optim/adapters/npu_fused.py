"""torch_npu's fused optimizers: registration by name, checks, gradients, and checkpoints of torch's equivalents.

At the first update they move all parameters, gradients and states into one block of memory each. They do not see a
parameter or gradient that leaves its block afterwards; this is the reason for most of the errors raised here.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ...core.errors import ConfigError, StrategyError
from ...core.registry import OPTIMIZERS
from .equivalent import EquivalentAdapter

EQUIVALENTS = {
    "NpuFusedAdadelta": "Adadelta",
    "NpuFusedAdam": "Adam",
    "NpuFusedAdamW": "AdamW",
    "NpuFusedRMSprop": "RMSprop",
    "NpuFusedSGD": "SGD",
}
"""The fused optimizers that compute the same as one of torch's, with its name."""

NEAREST = {
    "NpuFusedAdamP": "AdamW",
    "NpuFusedBertAdam": "AdamW",
    "NpuFusedLamb": "AdamW",
    "NpuFusedRMSpropTF": "RMSprop",
}
"""The other fused optimizers, with the most similar one of torch's."""

_USUAL_FORMATS = (-1, 0, 1, 2, 27, 30)
"""torch_npu's numbers of the layouts without padding."""

_NAMES = sorted({**EQUIVALENTS, **NEAREST})
_BASE = "NpuFusedOptimizerBase"


def alternative(name: str) -> str:
    """Return the advice at the end of a message: which of torch's optimizers to choose instead."""
    if name in EQUIVALENTS:
        return f'choose "{EQUIVALENTS[name]}", which computes the same'
    return f'choose "{NEAREST.get(name, "AdamW")}", which comes nearest'


def register_optimizers() -> None:
    """Add the nine fused optimizers to the registry, by name."""
    OPTIMIZERS.add_lookup(_find, lambda: _NAMES)


def _find(name: str) -> Callable[..., Any] | None:
    if name not in _NAMES:
        return None
    if importlib.util.find_spec("torch_npu") is None:
        raise ConfigError(
            f'optimizer "{name}": is torch_npu\'s, which is not installed; {alternative(name)}, or install torch_npu'
        )
    try:
        return getattr(importlib.import_module("torch_npu.optim"), name)  # type: ignore[no-any-return]
    except (ImportError, OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f'optimizer "{name}": torch_npu is installed and cannot be imported ({reason}); {alternative(name)}, or see '
            "`flextrain doctor`"
        ) from error


def is_fused(optimizer: Optimizer) -> bool:
    """Return whether it is a fused optimizer; decided by name, so that torch_npu need not be imported."""
    return any(kind.__name__ == _BASE for kind in type(optimizer).__mro__)


class FusedAdapter(EquivalentAdapter):
    """Adapter of torch_npu's fused optimizers; raises errors where these would fail later or compute silently wrong.

    Clipping and loss scaling are torch_npu's own, over one block of memory. Both wait for the device at each update.
    """

    owns_gradients = True
    optimizer: Any  # the class is torch_npu's, which mypy does not see

    def __init__(self, optimizer: Optimizer, where: str) -> None:
        super().__init__(optimizer, where)
        self._names: dict[int, str] = {}

    @property
    def equivalent(self) -> str | None:
        """See EquivalentAdapter."""
        return EQUIVALENTS.get(self.kind)

    def refuse(self, reason: str) -> StrategyError:
        """Return the error that says why the optimizer cannot be used, and which one to use instead."""
        return StrategyError(f"{self.where}.optimizer: {self.kind} {reason}; {alternative(self.kind)}")

    def check(self, model: nn.Module) -> None:
        """See OptimizerAdapter."""
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        for group in self.optimizer.param_groups:
            if group.get("schedule") == "warmup_cosine":
                raise self.refuse('cannot do schedule="warmup_cosine", in which torch_npu takes the cosine of a number')
            for parameter in group["params"]:
                self._check_parameter(self._name_of(parameter), parameter)
        if getattr(self.optimizer, "use_global_grad_norm", False):
            raise self.refuse("cannot do use_global_grad_norm=True, which calls a method that torch_npu lacks")

    def _check_parameter(self, name: str, parameter: Tensor) -> None:
        if isinstance(parameter, DTensor):
            raise self.refuse(f"needs whole parameters and {name} is sharded")
        if parameter.device.type != "npu":
            raise self.refuse(f"works on npu only and {name} is on {parameter.device.type}")
        if parameter.dtype not in (torch.float32, torch.float16):
            raise self.refuse(f"takes float32 and float16 only and {name} is {parameter.dtype}")
        if not parameter.is_contiguous():
            raise self.refuse(f"takes contiguous parameters only and {name} is not")
        is_usual = importlib.import_module("torch_npu").get_npu_format(parameter) in _USUAL_FORMATS
        if is_usual and not _is_alone(parameter):
            raise self.refuse(f"moves parameters to memory of its own and {name} shares its memory with others")

    def _name_of(self, parameter: Tensor) -> str:
        return self._names.get(id(parameter), f"a parameter of shape {tuple(parameter.shape)}")

    def begin_update(self) -> None:
        """See OptimizerAdapter: every parameter needs a gradient at every update, always in the same memory."""
        if self._is_combined:
            self._check_gradients()
        else:
            self._prepare_gradients()

    @property
    def _is_combined(self) -> bool:
        return bool(self.optimizer.is_params_grads_combined)

    def _prepare_gradients(self) -> None:
        for name, parameter in self._parameters():
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                raise self.refuse(f"needs a gradient of every parameter at the first update and {name} has none")
            self._check_dense(name, parameter.grad)
            if not (parameter.grad.is_contiguous() and _is_alone(parameter.grad)):
                # For example, gradients of weights that were joined by torch.cat are views of one tensor.
                parameter.grad = parameter.grad.clone(memory_format=torch.contiguous_format)

    def _check_gradients(self) -> None:
        parameters = _extents(self.optimizer.get_combined_params())
        gradients = _extents(self.optimizer.get_combined_grads())
        for name, parameter in self._parameters():
            if not parameter.requires_grad:
                if _lies_in(parameter, parameters):
                    raise self.refuse(f"moves all parameters of its first update together and {name} was frozen since")
                continue
            if parameter.grad is not None:
                self._check_dense(name, parameter.grad)
            if parameter.grad is None or not _lies_in(parameter.grad, gradients):
                raise self.refuse(
                    f"knows the gradients of its first update only, and {name} had none then, or it was dropped since "
                    "(by module.zero_grad(), say)"
                )

    def _check_dense(self, name: str, grad: Tensor) -> None:
        if grad.is_sparse:
            raise self.refuse(f"takes no sparse gradients and {name} has one")

    def _parameters(self) -> list[tuple[str, Tensor]]:
        return [(self._name_of(p), p) for group in self.optimizer.param_groups for p in group["params"]]

    def zero_grad(self) -> None:
        """See OptimizerAdapter; before the first update the gradients are dropped, as by torch's optimizers."""
        if self._is_combined:
            self.optimizer.zero_grad()
            return
        # The optimizer's own zero_grad would already combine the gradients, and miss those that come later.
        for _, parameter in self._parameters():
            parameter.grad = None

    def clip(self, max_norm: float, norm_type: float) -> Tensor:
        """See OptimizerAdapter."""
        return self.optimizer.clip_grad_norm_fused_(max_norm, norm_type)  # type: ignore[no-any-return]

    @property
    def grad_scaler(self) -> Callable[..., GradScaler]:
        """See OptimizerAdapter."""
        return importlib.import_module("torch_npu.npu.amp").GradScaler  # type: ignore[no-any-return]

    # Checkpoints

    def steps(self, parameter: Tensor, of_state: int) -> int:
        """See EquivalentAdapter; NpuFusedBertAdam does not increase the number in a parameter's own state."""
        if self.kind != "NpuFusedBertAdam" or not self.optimizer.is_states_combined:
            return of_state
        for index, group in enumerate(self.optimizer.param_groups):
            if any(parameter is own for own in group["params"]):
                by_dtype = self.optimizer.combined_param_states_indexed_by_group[index]
                return int(by_dtype[0 if parameter.dtype is torch.float32 else 1]["step"])
        return of_state

    def load(self, packed: dict[str, Any]) -> None:
        """See OptimizerAdapter."""
        super().load(packed)
        self.optimizer.is_states_combined = False  # otherwise the loaded state would be ignored


def _is_alone(tensor: Tensor) -> bool:
    """Return whether the tensor fills its storage."""
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def _extents(blocks: list[Tensor | None]) -> list[tuple[int, int]]:
    """Return the first address of each block, and the address after its last byte."""
    return [(b.data_ptr(), b.data_ptr() + b.numel() * b.element_size()) for b in blocks if b is not None]


def _lies_in(tensor: Tensor, extents: list[tuple[int, int]]) -> bool:
    return not tensor.numel() or any(begin <= tensor.data_ptr() < end for begin, end in extents)
