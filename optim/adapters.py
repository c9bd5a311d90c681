"""OptimizerAdapter: the operations on an optimizer that torch's interface lacks: clipping, scaling, checkpoint form."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..core.base.errors import CheckpointError, ConfigError, StrategyError
from ..core.base.registry import OPTIMIZERS
from ..core.torch_compat.torch_private import without_function_modes

if TYPE_CHECKING:
    from .local_shards import LocalShards

OF_OTHERS = "of_others"
"""Setting of a group of parameters that the other optimizer of an optimizer of matrices updates."""
_INNER = "/"  # separates the attribute that holds an inner optimizer from the key of its state
# torch's own only; other classes, subclasses of these included, are tried on small parameters (see trial.py).
_ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in (
        "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD", "SparseAdam",
    )
)  # fmt: skip
NOTHING = nullcontext()


class OptimizerAdapter:
    """Adapter of torch's own optimizers, which need nothing more; subclasses adapt other families.

    Args:
        optimizer: the built optimizer.
        where: the configuration key of its wrapper, for messages.
    """

    owns_gradients = False
    """Whether it keeps gradients in its own memory, so that ``parameter.grad`` must not be replaced."""

    def __init__(self, optimizer: Optimizer, where: str) -> None:
        self.optimizer = optimizer
        self.where = where
        self._size: list[int] = []
        self._shards: LocalShards | None = None

    @property
    def is_elementwise(self) -> bool:
        """Whether it is known to update every element of a parameter independently, so that it can train shards."""
        return type(self.optimizer) in _ELEMENTWISE

    @property
    def takes_shards(self) -> bool:
        """Whether it is known to give shards of parameters the updates of whole ones, so that no trial is needed."""
        return self.is_elementwise

    @property
    def name(self) -> str:
        """The optimizer's name in checkpoints: that of torch's equivalent optimizer, if there is one."""
        return type(self.optimizer).__name__

    def optimizer_of(self, group: Mapping[str, Any]) -> Optimizer:
        """Return the optimizer that updates a group; not this one, if it has another for some of its groups."""
        return self.optimizer

    def name_of(self, group: Mapping[str, Any]) -> str:
        """Return the name in checkpoints of the optimizer of a group."""
        optimizer = self.optimizer_of(group)
        return self.name if optimizer is self.optimizer else type(optimizer).__name__

    def looks_at_whole(self, group: Mapping[str, Any]) -> bool:
        """Return whether it updates the parameters of a group as wholes, which their owners get from those that hold shards."""
        return False

    @property
    def steps_in_parts(self) -> bool:
        """Whether an update calls ``step()`` several times, with tensors that stand in for some of the parameters."""
        return False

    def keeps_state_of(self, parameter: Tensor) -> bool:
        """Return whether this process has state of a parameter that it has a shard of."""
        return True

    def empty_state(self, parameter: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """Return an empty tensor for state that is laid out in another way than the parameter; None if it is not."""
        return None

    def state_at_owner(self, parameter: Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state of a parameter that a checkpoint filled, on the device where this process updates the parameter."""
        return dict(state)

    def check(self, model: nn.Module) -> None:
        """Raise StrategyError if it cannot train the parameters of ``model`` on their device and in their layout."""

    def stepping(self) -> AbstractContextManager[None]:
        """Context of ``optimizer.step()``, in which an elementwise optimizer has local shards in place of DTensors."""
        groups = self.optimizer.param_groups
        if (size := [len(group["params"]) for group in groups]) != self._size:
            parameters = (parameter for group in groups for parameter in group["params"])
            self._size, self._shards = size, None
            if any(isinstance(one, DTensor) for one in parameters):
                from .local_shards import LocalShards  # a script on one device does without it

                self._shards = LocalShards(self.optimizer, type(self.optimizer) in _ELEMENTWISE)
        return NOTHING if self._shards is None else self._shards.step()

    @contextmanager
    def only(self, group: dict[str, Any]) -> Iterator[None]:
        """Context in which the optimizer has one of its groups; under ZeRO it steps one after the other."""
        groups = self.optimizer.param_groups
        self.optimizer.param_groups = [group]
        try:
            yield
        finally:
            self.optimizer.param_groups = groups

    def begin_update(self) -> None:
        """Prepare the gradients of an update; raise StrategyError if the optimizer cannot use them."""

    def zero_grad(self) -> None:
        """Drop the gradients, or set them to zero where the optimizer keeps them."""
        optimizer = self.optimizer
        if type(optimizer).zero_grad is not Optimizer.zero_grad:  # an override may reset more than the gradients
            optimizer.zero_grad()
            return
        # The same as Optimizer.zero_grad, without its profiler entry, which takes longer than the work.
        with NOTHING if self._shards is None else without_function_modes():  # DTensors are asked for nothing else then
            for parameter in chain.from_iterable(group["params"] for group in optimizer.param_groups):
                parameter.grad = None

    def clip(self, max_norm: float, norm_type: float) -> Tensor | None:
        """Clip by the total norm; return the norm before, 0-dim on the device, or None if it has no own clipping."""
        return None

    @property
    def grad_scaler(self) -> Callable[..., GradScaler] | None:
        """The optimizer's own class of loss scaler, or None."""
        return None

    def state_of(self, parameter: Tensor) -> Mapping[str, Any]:
        """Return the optimizer state of a parameter, in the form of checkpoints."""
        state: Mapping[str, Any] = self.optimizer.state.get(parameter, {})
        inner = {
            f"{name}{_INNER}{key}": value
            for name, optimizer in self._inner().items()
            for key, value in optimizer.state.get(parameter, {}).items()
        }
        return {**state, **inner} if inner else state

    def _inner(self) -> dict[str, Optimizer]:
        """Return the inner optimizers with their own state, as in SAM and Lookahead, by attribute."""
        own = self.optimizer
        found = {name: value for name, value in vars(own).items() if isinstance(value, Optimizer) and value is not own}
        return {name: value for name, value in found.items() if value.state is not own.state}

    def hyper_parameters_of(self, group: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the hyper-parameters of a group, in the form of checkpoints."""
        return group

    def own_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Convert a checkpoint's state of a parameter to the optimizer's own form; the inverse of ``state_of``."""
        return state

    def own_hyper_parameters(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Convert a checkpoint's hyper-parameters to the optimizer's own form; the inverse of ``hyper_parameters_of``.

        Raises:
            CheckpointError: the optimizer does not support one of them.
        """
        return settings

    def load(self, packed: dict[str, Any]) -> None:
        """Continue from the optimizer's ``state_dict``, also in the middle of training."""
        optimizer, inner = self.optimizer, self._inner()
        groups = [group["params"] for group in optimizer.param_groups]
        sharing = [one for one in inner.values() if one.param_groups is optimizer.param_groups]
        states = packed["state"]
        optimizer.load_state_dict({**packed, "state": {number: without_inner(kept) for number, kept in states.items()}})
        for one in sharing:  # keep sharing, so that it sees what schedulers set
            one.param_groups = optimizer.param_groups
        numbers = (number for group in packed["param_groups"] for number in group["params"])
        for parameter, number in zip((p for group in groups for p in group), numbers, strict=True):
            if not self.is_elementwise:  # torch's own have all state in the parameter's dtype
                _keep_as_saved(optimizer.state.get(parameter, {}), states.get(number, {}))
            self.load_inner(parameter, states.get(number, {}))

    def load_inner(self, parameter: Tensor, state: Mapping[str, Any]) -> None:
        """Load the inner optimizers' part of a parameter's state."""
        for name, optimizer in self._inner().items():
            prefix = f"{name}{_INNER}"
            kept = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
            optimizer.state.pop(parameter, None)
            if kept:
                optimizer.state[parameter] = kept


def _keep_as_saved(live: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Undo what torch's ``load_state_dict`` changes: it casts all state to the parameter's dtype, and replaces text."""
    for key in live.keys() & saved.keys():
        value, now = saved[key], live[key]
        if isinstance(value, Tensor) and isinstance(now, Tensor) and value.dtype != now.dtype and key != "step":
            live[key] = value.to(now.device)
        elif isinstance(value, str):
            live[key] = value


def without_inner(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's state of a parameter without the inner optimizers' part."""
    return {key: value for key, value in state.items() if _INNER not in key}


# EquivalentAdapter: checkpoints of an optimizer that computes the same as one in torch.optim, its equivalent.


class EquivalentAdapter(OptimizerAdapter):
    """Saves state and settings in the form of the equivalent in torch.optim: each can resume from the other's checkpoint.

    The number of updates is a plain number in the optimizer, and a 0-dim float32 tensor in checkpoints, as in the equivalent.
    """

    @property
    def kind(self) -> str:
        """The optimizer's own name."""
        return type(self.optimizer).__name__

    @property
    def equivalent(self) -> str | None:
        """The name of the equivalent optimizer in torch.optim, or None."""
        return None

    @property
    def is_elementwise(self) -> bool:
        """See OptimizerAdapter; true if it has an equivalent, since all of these are elementwise."""
        return self.equivalent is not None or super().is_elementwise

    @property
    def name(self) -> str:
        """See OptimizerAdapter."""
        return self.equivalent or self.kind

    def can_set(self, key: str) -> bool:
        """Return whether this optimizer has the equivalent's setting ``key``."""
        return key in self.optimizer.param_groups[0]

    def steps(self, parameter: Tensor, of_state: int) -> int:
        """Return the number of updates of a parameter, given the number in its state."""
        return of_state

    def state_of(self, parameter: Tensor) -> Mapping[str, Any]:
        """See OptimizerAdapter."""
        state = dict(self.optimizer.state.get(parameter, {}))
        if "step" in state:
            state["step"] = torch.tensor(float(self.steps(parameter, state["step"])))
        return state

    def hyper_parameters_of(self, group: Mapping[str, Any]) -> Mapping[str, Any]:
        """See OptimizerAdapter."""
        return {**_defaults(self.equivalent), **group}

    def own_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """See OptimizerAdapter."""
        return {key: int(value) if key == "step" else value for key, value in state.items()}

    def own_hyper_parameters(self, settings: dict[str, Any]) -> dict[str, Any]:
        """See OptimizerAdapter."""
        settings = dict(settings)
        for key, default in _defaults(self.equivalent).items():
            if key in settings and not self.can_set(key):
                value = settings.pop(key)
                if value != default:
                    raise CheckpointError(
                        f"optimizer: the checkpoint's {self.name} has {key}={value}, which {self.kind} cannot do; "
                        f'choose "{self.name}"'
                    )
        return settings


@functools.cache
def _defaults(equivalent: str | None) -> dict[str, Any]:
    """Return the default settings of an optimizer in torch.optim."""
    if equivalent is None:
        return {}
    return dict(getattr(torch.optim, equivalent)([nn.Parameter(torch.zeros(()))], lr=1.0).defaults)


# Adapter of DeepSpeed's FusedAdam and DeepSpeedCPUAdam: their checkpoints are those of torch's AdamW and Adam.


_NAMES = ("FusedAdam", "DeepSpeedCPUAdam")


def is_deepspeed_adam(kind: type) -> bool:
    """Return whether it is one of the two classes; decided by name, because importing DeepSpeed takes seconds."""
    return kind.__name__ in _NAMES and kind.__module__.startswith("deepspeed.")


class DeepSpeedAdamAdapter(EquivalentAdapter):
    """Equivalent to AdamW or, if the decay is added to the gradients, Adam; without bias correction to neither."""

    optimizer: Any  # the class is DeepSpeed's, which mypy does not see

    @property
    def equivalent(self) -> str | None:
        """See EquivalentAdapter."""
        if not all(group["bias_correction"] for group in self.optimizer.param_groups):
            return None
        return "AdamW" if self.optimizer.adam_w_mode else "Adam"

    @property
    def is_elementwise(self) -> bool:
        """See OptimizerAdapter; true without bias correction too."""
        return True

    def can_set(self, key: str) -> bool:
        """See EquivalentAdapter; DeepSpeedCPUAdam has a setting amsgrad, but ignores it."""
        return key != "amsgrad" and super().can_set(key)

    def steps(self, parameter: Tensor, of_state: int) -> int:
        """See EquivalentAdapter; FusedAdam counts the updates of a group in the state of its last parameter only."""
        if self.kind != "FusedAdam":
            return of_state
        state = self.optimizer.state
        for group in self.optimizer.param_groups:
            if any(parameter is own for own in group["params"]):
                return max(int(state[own]["step"]) for own in group["params"] if "step" in state.get(own, {}))
        return of_state  # ZeRO stage 3 adds a parameter to its group only during its update

    def hyper_parameters_of(self, group: Mapping[str, Any]) -> Mapping[str, Any]:
        """See OptimizerAdapter."""
        own = (
            {"step", "bias_correction"} if self.equivalent else {"step"}
        )  # FusedAdam's groups have a step that stays 0
        return {key: value for key, value in super().hyper_parameters_of(group).items() if key not in own}


# torch_npu's fused optimizers: registration by name, checks, gradients, and checkpoints of torch's equivalents.
#
# At the first update they move all parameters, gradients and states into one block of memory each. They do not see a
# parameter or gradient that leaves its block afterwards; this is the reason for most of the errors raised here.


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

_NPU_NAMES = sorted({**EQUIVALENTS, **NEAREST})
_BASE = "NpuFusedOptimizerBase"


def alternative(name: str) -> str:
    """Return the advice at the end of a message: which of torch's optimizers to choose instead."""
    if name in EQUIVALENTS:
        return f'choose "{EQUIVALENTS[name]}", which computes the same'
    return f'choose "{NEAREST.get(name, "AdamW")}", which comes nearest'


def register_optimizers() -> None:
    """Add the nine fused optimizers to the registry, by name."""
    OPTIMIZERS.add_lookup(_find, lambda: _NPU_NAMES)


def _find(name: str) -> Callable[..., Any] | None:
    if name not in _NPU_NAMES:
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


def is_fused(kind: type) -> bool:
    """Return whether it is a class of fused optimizers; decided by name, so that torch_npu need not be imported."""
    return any(base.__name__ == _BASE for base in kind.__mro__)


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


# What kind of optimizer a class is.


def has_own_adapter(kind: type) -> bool:
    """Return whether the optimizers of a class need more than torch's interface."""
    return is_fused(kind) or is_deepspeed_adam(kind) or updates_matrices(kind) or wants_whole(kind)


def swaps_weights(optimizer: Optimizer) -> bool:
    """Return whether an optimizer trains other weights than are to be evaluated, and swaps them by ``train()`` and ``eval()``."""
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


def wants_whole(kind: type) -> bool:
    """Return whether a class of optimizers declares that it looks at whole parameters: ``owns_whole = True``."""
    return bool(getattr(kind, "owns_whole", False))


def updates_matrices(kind: type) -> bool:
    """Return whether a class of optimizers updates matrices and leaves other parameters to another optimizer, as Muon does."""
    return bool(getattr(kind, "updates_matrices", False))
