"""All private names of torch that flextrain uses, but for those of DTensors and of FSDP, which are in dtensor_private.

Each entry says what it does, and with which versions of torch it was checked. A test finds private names elsewhere.
"""

from __future__ import annotations

import datetime
import functools
import gc
import importlib
import inspect
import json
import multiprocessing
import re
import signal
import sys
import threading
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _IncompatibleKeys
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.utils.hooks import RemovableHandle

__all__ = ["TorchDispatchMode", "tree_flatten", "tree_map_only", "tree_unflatten"]
# These four (2.6, 2.15) intercept every operation on a tensor, and traverse its arguments.

# Operations on lists of tensors

foreach_clamp_min_ = torch._foreach_clamp_min_  # 2.6, 2.15: documented as beta, with these names
foreach_clamp_max_ = torch._foreach_clamp_max_
foreach_mul_ = torch._foreach_mul_
foreach_lerp_ = torch._foreach_lerp_
foreach_copy_ = torch._foreach_copy_

# Tensors

TO_COPY = torch.ops.aten._to_copy.default
"""The operation that ``Tensor.to`` dispatches. 2.6, 2.15."""

CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
CPU_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
"""The operations of ``scaled_dot_product_attention`` on the CPU. 2.15."""

INITIALIZERS = ("_no_grad_trunc_normal_",)
"""Functions of ``nn.init`` that other packages, such as timm, import by their private names. 2.6, 2.15."""

REBUILD_TENSOR, REBUILD_TENSOR_OF_DTYPE = torch._utils._rebuild_tensor_v2, torch._utils._rebuild_tensor_v3
"""Functions that a ``torch.save`` file names for every tensor. 2.6, 2.15; the format keeps them."""


def fake_mode() -> Any:
    """A mode in which new tensors have a shape, a dtype and a device, but no memory; others may be operands. 2.6, 2.15.

    Outside of the mode, an operation with an operand from it gives another such tensor, and all others compute as usual.
    """
    return _fake_tensor().FakeTensorMode(allow_non_fake_inputs=True)


def fake_mode_of(tensors: Iterable[Tensor]) -> Any:
    """The ``fake_mode`` that is active or that one of the tensors is from, because those of two modes do not mix; or a new one. 2.15."""
    found = importlib.import_module("torch._guards").detect_fake_mode([*tensors])
    return fake_mode() if found is None else found


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor has values: it is not on the meta device, and no fake one, as a compiler traces with. 2.6, 2.15."""
    held = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return not (held.is_meta or is_fake(held))


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor is one of a ``fake_mode``. 2.6, 2.15."""
    return isinstance(tensor, _fake_tensor().FakeTensor)


def with_values() -> AbstractContextManager[Any]:
    """Context in which tensors are made with values, whatever mode is active: for those that only say who is who. 2.6, 2.15."""
    found: AbstractContextManager[Any] = _fake_tensor().unset_fake_temporarily()
    return found


@contextmanager
def apart() -> Iterator[None]:
    """Context of operations that only find something out, and that no mode of others sees, but one of fake tensors. 2.6, 2.15."""
    fake = importlib.import_module("torch._guards").detect_fake_mode()
    with importlib.import_module("torch.utils._python_dispatch")._disable_current_modes(), fake or nullcontext():
        yield


@functools.cache
def _fake_tensor() -> Any:
    return importlib.import_module("torch._subclasses.fake_tensor")


def arguments_of(operation: Any, args: Iterable[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an operation that a TorchDispatchMode sees, by name, with defaults. 2.6, 2.15."""
    declared = operation._schema.arguments
    given = {argument.name: argument.default_value for argument in declared if argument.has_default_value()}
    return {**given, **dict(zip((argument.name for argument in declared), args, strict=False)), **kwargs}


def is_mutable(operation: Any) -> bool:
    """Whether an operation that a TorchDispatchMode sees changes one of its arguments. 2.6, 2.15."""
    return bool(operation._schema.is_mutable)


def is_functional(operation: Any) -> bool:
    """Whether an operation makes new tensors: it changes no argument, and no result is a view of one. 2.6, 2.15."""
    if getattr(operation, "namespace", "") == "c10d":  # messages, whatever their schemas say
        return False
    schema = getattr(operation, "_schema", None)  # a higher-order operator has none, and is functional
    return schema is None or not (schema.is_mutable or any(result.alias_info is not None for result in schema.returns))


def makes_views(operation: Any) -> bool:
    """Whether all that an operation does is to look at the memory of an argument in another way. 2.6, 2.15."""
    schema = operation._schema
    return not schema.is_mutable and any(result.alias_info is not None for result in schema.returns)


def changed_by(operation: Any, args: Iterable[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that a call of an operation may change in place; of a collective all, it does not say which. 2.6, 2.15."""
    schema = getattr(operation, "_schema", None)
    if getattr(operation, "namespace", "") == "c10d":
        return [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
    if schema is None or not schema.is_mutable:
        return []
    given = arguments_of(operation, args, kwargs)
    names = [one.name for one in schema.arguments if one.alias_info is not None and one.alias_info.is_write]
    return [leaf for leaf in tree_flatten([given.get(name) for name in names])[0] if isinstance(leaf, Tensor)]


def same_below_autograd(tensor: Tensor) -> Tensor:
    """In a TorchDispatchMode: the same values without a graph, which count changes together with ``tensor``. 2.6, 2.15."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def wrapper_subclass(cls: type[Tensor], shape: Iterable[int], like: Tensor) -> Any:
    """A tensor of class ``cls`` without memory of its own. 2.6, 2.15."""
    return Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=like.dtype, device=like.device)


def storage_key(tensor: Tensor) -> int:
    """Key of a tensor's memory: the same for all views of it, unique while the memory lives. 2.6, 2.15.

    ``data_ptr`` cannot be the key, because it is 0 for every tensor on the meta device.
    """
    return int(tensor.untyped_storage()._cdata)


is_view = Tensor._is_view
"""Whether a tensor is a view, whose values change with those of another tensor. 2.6, 2.15."""


def base_of(tensor: Tensor) -> Tensor | None:
    """The tensor that this one is a view of. 2.6, 2.15."""
    return tensor._base


without_function_modes = torch._C.DisableTorchFunction
"""Context in which functions of torch, and attributes of tensors, are not shown to modes, which take as long as they do. 2.6, 2.15."""


def version_of(tensor: Tensor) -> int:
    """How often a tensor was changed in place; ``.data`` and NumPy change it uncounted. 2.6, 2.15."""
    return tensor._version


# Devices


def has_kernel(operation: str, device_type: str) -> bool:
    """Whether an operation has a kernel of its own for a type of device, by its name such as "aten::add.Tensor". 2.6, 2.15."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(operation, torch._C._dispatch_key_for_device(device_type))


def set_allocator(settings: str) -> None:
    """Set the allocator of CUDA, as PYTORCH_CUDA_ALLOC_CONF would. 2.6, 2.15."""
    torch.cuda.memory._set_allocator_settings(settings)  # type: ignore[no-untyped-call, unused-ignore]


# Modules

NORM_BASE = nn.modules.batchnorm._NormBase
"""Base class of batch and instance normalisation, which may have running statistics. 2.6, 2.15."""

BATCH_NORM_BASE = nn.modules.batchnorm._BatchNorm
"""Base class of the layers that normalise over the samples of a batch. 2.6, 2.15."""

LOADING_METHODS = ("_load_from_state_dict", "load_state_dict")
"""Methods of a module that load a state dict; the first is documented for overriding. 2.6, 2.15."""


def is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile`` was applied to a module or a part of it, in place or not, or CUDA graphs of one are recorded. 2.6, 2.15."""
    for part in module.modules():
        if (
            part._compiled_call_impl is not None
            or "_orig_mod" in part._modules
            or ("forward" in part.__dict__ and is_recorded(part))
        ):
            return True
    return False


def is_recorded(module: nn.Module) -> bool:
    """Whether ``torch.cuda.make_graphed_callables``, or a function made after it, has recorded a module. 2.6, 2.15."""
    return "make_graphed" in getattr(module.__dict__.get("forward"), "__qualname__", "")


def is_compiled_wrapper(module: nn.Module) -> bool:
    """Whether a module is what ``torch.compile`` has returned for another one, which it holds. 2.6, 2.15."""
    return "_orig_mod" in module._modules


def apply_to_tensors(module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Replace every parameter and buffer in the way of ``Module.to``, so that FSDP sees the new memory. 2.6, 2.15."""
    module._apply(function)  # type: ignore[no-untyped-call]


def call_loaded_hooks(module: nn.Module) -> None:
    """Call the module's load_state_dict post-hooks, with no missing and no unexpected keys. 2.6, 2.15."""
    for hook in module._load_state_dict_post_hooks.values():
        hook(module, _IncompatibleKeys([], []))


def tables_of(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """The dicts in which a module keeps its parameters and its submodules. 2.6, 2.15."""
    return module._parameters, module._modules


gradient_state = attrgetter("requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks")
"""Whether a parameter is trained, and the two dicts of hooks that backward calls for it, None if there was none. 2.6, 2.15."""


def gradient_hooks(parameter: Tensor) -> int:
    """The number of hooks that backward calls for a parameter, but for flextrain's own, which look on. 2.6, 2.15."""
    if not parameter._backward_hooks and not parameter._post_accumulate_grad_hooks:
        return 0
    return _of_users(parameter._backward_hooks) + _of_users(parameter._post_accumulate_grad_hooks)


def hooks_after_accumulating(parameter: Tensor) -> int:
    """The number of those that it calls when it has written the gradient. 2.6, 2.15."""
    return _of_users(parameter._post_accumulate_grad_hooks)


def _of_users(hooks: Mapping[int, Any] | None) -> int:
    package = __name__.partition(".")[0]
    return sum(
        (getattr(hook, "__module__", None) or "").partition(".")[0] != package for hook in (hooks or {}).values()
    )


def copy_gradient_hooks(source: Tensor, target: Tensor) -> None:
    """Register the hooks that backward calls for a parameter for another one too. 2.6, 2.15."""
    for hook in (source._backward_hooks or {}).values():
        target.register_hook(hook)  # type: ignore[no-untyped-call]
    for hook in (source._post_accumulate_grad_hooks or {}).values():
        target.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def keep_gradient_hooks(tensor: Tensor) -> None:
    """Let backward call the hooks that a tensor had before ``torch.utils.swap_tensors``, which leaves them behind. 2.6, 2.15."""
    tensor._backward_hooks = tensor._backward_hooks  # the same dicts, which handles know
    if tensor._post_accumulate_grad_hooks is not None:
        tensor._post_accumulate_grad_hooks = tensor._post_accumulate_grad_hooks


def call_first(tensor: Tensor, hook: Callable[[Tensor], Tensor]) -> RemovableHandle:
    """Register a gradient hook that is called before those that a tensor has. 2.6, 2.15."""
    handle: RemovableHandle = tensor.register_hook(hook)  # type: ignore[no-untyped-call]
    hooks = cast(dict[int, Any], tensor._backward_hooks)
    for key in [key for key in hooks if key != handle.id]:  # the same dict, which handles know
        hooks[key] = hooks.pop(key)
    return handle


class _Postponed:
    """A gradient hook of a user's that backward does not call; it stays where its handle finds it."""

    def __init__(self, hook: Callable[[Tensor], Any]) -> None:
        self.hook = hook

    def __call__(self, *_: Any) -> None:
        pass


def users_gradient_hooks(parameter: Tensor) -> list[Any]:
    """The hooks that ``gradient_hooks`` counts. 2.6, 2.15."""
    tables = (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
    return [hook for table in tables for hook in (table or {}).values() if _of_users({0: hook})]


def postpone_gradient_hooks(
    parameter: Tensor, which: Iterable[Any]
) -> tuple[Callable[[], list[Any]], Callable[[], list[Any]]]:
    """Let backward pass by some of the hooks that a parameter has. 2.6, 2.15.

    Args:
        which: from ``users_gradient_hooks``; engines have hooks too.

    Returns:
        What returns those of ``register_hook`` that were not removed since, and the same for those that follow accumulation.
    """
    own = {id(hook) for hook in which}
    tables = [parameter._backward_hooks or {}, parameter._post_accumulate_grad_hooks or {}]
    for table in tables:
        for key, hook in table.items():
            if id(hook) in own:
                table[key] = _Postponed(hook)
    before, after = (
        lambda table=table: [one.hook for one in [*table.values()] if isinstance(one, _Postponed)] for table in tables
    )
    return before, after


def resume_gradient_hooks(parameter: Tensor) -> None:
    """Let backward call again what ``postpone_gradient_hooks`` has let it pass by. 2.6, 2.15."""
    for table in (parameter._backward_hooks or {}, parameter._post_accumulate_grad_hooks or {}):
        for key, hook in table.items():
            if isinstance(hook, _Postponed):
                table[key] = hook.hook


def leave_to_others(model: nn.Module, left: Iterable[nn.Parameter]) -> None:
    """Let DistributedDataParallel take no notice of some parameters of a model. 2.6, 2.15."""
    own = set(left)
    names = [name for name, p in model.named_parameters(remove_duplicate=False) if p in own]
    # torch puts the names of the model's own parameters together with a dot before them in one of two places.
    names += [f".{name}" for name in names if "." not in name]
    cast(Any, nn.parallel.DistributedDataParallel)._set_params_and_buffers_to_ignore_for_model(model, names)


def has_loading_hooks(module: nn.Module) -> bool:
    """Whether the module has load_state_dict pre-hooks. 2.6, 2.15."""
    return bool(module._load_state_dict_pre_hooks)


def calls_before_forward(module: nn.Module, hook: Callable[..., Any]) -> bool:
    """Whether a module has a forward pre-hook. 2.6, 2.15."""
    return hook in module._forward_pre_hooks.values()


class DeviceFollower(nn.Module):
    """A module without parameters that knows its device, because every ``.to()`` moves a probe tensor. 2.6, 2.15.

    Attributes:
        device: its device; initially the CPU.
    """

    def __init__(self) -> None:
        super().__init__()
        self.device = torch.device("cpu")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DeviceFollower:
        self.device = fn(torch.empty(0, device=self.device)).device
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self


# Loading data

LOADER_ITERATOR = _BaseDataLoaderIter
"""Base class of a DataLoader's iterators. 2.6, 2.15."""

KEPT_ITERATOR, INITIALIZED = "_iterator", "_DataLoader__initialized"
"""Attributes of a DataLoader: what it keeps its persistent workers in between epochs, None if it has none; and whether it is built,
which hooks of mmdetection set to False where workers are to begin anew with changed data. 2.6, 2.15."""

MAKE_ITERATOR = "_get_iterator"
"""Method with which a DataLoader makes its iterator. 2.6, 2.15."""


def end_kept_workers(loader: Any) -> None:
    """End the workers that ``loader`` keeps between epochs; it makes new ones if it is read again. 2.6, 2.15."""
    iterator = getattr(loader, KEPT_ITERATOR, None)
    if iterator is not None:
        setattr(loader, KEPT_ITERATOR, None)
        iterator._shutdown_workers()


def end_loader_workers() -> None:
    """End the workers that data loaders of this process keep between epochs; those loaders cannot be used again. 2.6, 2.15.

    The garbage collector would first close the queue in which an iterator tells a worker to end, and would then wait for
    the five seconds after which each worker looks around.
    """
    # They are daemons. All objects are looked at only if there are some, because that takes most of a tenth of a second.
    if any(child.daemon for child in multiprocessing.active_children()):
        for found in gc.get_objects():
            if issubclass(type(found), LOADER_ITERATOR) and hasattr(found, "_shutdown_workers"):
                found._shutdown_workers()


def awaited_worker(iterator: Any) -> tuple[int, int] | None:
    """Number and process of the worker whose batch a DataLoader's iterator gives next; None if no worker has it. 2.6, 2.15."""
    found = getattr(iterator, "_task_info", {}).get(getattr(iterator, "_rcvd_idx", None))
    if found is None or len(found) != 1:
        return None
    pid = iterator._workers[found[0]].pid
    return None if pid is None else (found[0], pid)


# Several processes


def default_store() -> Any:
    """The store of the default process group. 2.6, 2.15."""
    return dist.distributed_c10d._get_default_store()


def process_groups() -> list[Any]:
    """The process groups that this process is in, in the order in which they were made. 2.6, 2.15."""
    return list(dist.distributed_c10d._world.pg_map)


def set_time_limit(group: Any, seconds: float) -> None:
    """Let messages of a group fail after ``seconds``, where its back end knows of a limit. 2.6, 2.15."""
    if _HAS_TIME_LIMIT.isdisjoint(re.split("[:,]", dist.get_backend_config(group))):
        return
    set_timeout = getattr(dist.distributed_c10d, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    set_timeout(datetime.timedelta(seconds=seconds), group)


_HAS_TIME_LIMIT = {"gloo", "nccl", "hccl", "xccl"}


def nccl_options(most_blocks: int, timeout: datetime.timedelta | None) -> Any:
    """Options of a group whose messages take at most so many thread blocks by NCCL. 2.6, 2.15.

    The time limit is that given to ``new_group``; torch warns if the options have another.
    """
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = most_blocks
    if timeout is not None:
        options._timeout = timeout
    return options


def last_collective() -> str:
    """The last collective that this process began, from torch's flight recorder, as ``all_reduce number 41``. 2.6, 2.15.

    Empty if nothing is recorded: TORCH_FR_BUFFER_SIZE (TORCH_NCCL_TRACE_BUFFER_SIZE before torch 2.9) turns the recorder
    on for NCCL, and since torch 2.9 or so for gloo.
    """
    c10d = importlib.import_module("torch._C._distributed_c10d")
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(c10d, name, None)
        try:
            entries = [] if dump is None else json.loads(dump(True, False)).get("entries", [])
        except (RuntimeError, ValueError):  # the recorder of a back end that this build lacks
            continue
        if entries:
            last = entries[-1]
            name = str(last.get("profiling_name", "")).rpartition(":")[2]
            return f"{name} number {last.get('collective_seq_id', '')}".strip()
    return ""


def compiles(module: str, function: str) -> bool:
    """Whether a function of torch's, while it is on the stack, is compiling a model. 2.6, 2.15.

    Most frames of torch._dynamo and torch._inductor do not tell: compiled code runs below them, and so does what is
    exempt from compiling, such as all hooks of FSDP. Inductor may compile a backward alone, without Dynamo.
    """
    return module == "torch._dynamo.convert_frame" or (module, function) == (
        "torch._inductor.compile_fx",
        "fx_codegen_and_compile",
    )


@contextmanager
def repeating_in(
    contexts: Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]],
) -> Iterator[None]:
    """Context in which ``torch.utils.checkpoint.checkpoint`` has other contexts by default, for forward and its repetition.

    They are inside of those that are the default already. A TorchFunctionMode is not active in backward, where forward is repeated.
    With ``use_reentrant=True`` torch raises ValueError because it cannot honour the contexts. They are a keyword with a
    default. 2.6, 2.15.
    """
    defaults = cast(Any, inspect.unwrap(torch.utils.checkpoint.checkpoint)).__kwdefaults__
    before = defaults["context_fn"]

    def inside() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        (forward, repetition), own = before(), contexts()
        return Both(forward, own[0]), Both(repetition, own[1])

    defaults["context_fn"] = contexts if before is torch.utils.checkpoint.noop_context_fn else inside
    try:
        yield
    finally:
        defaults["context_fn"] = before


class Both(AbstractContextManager[None]):
    """Two contexts as one, which is entered again where backward repeats a forward once more."""

    def __init__(self, outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> None:
        self._contexts = outer, inner
        self._open = ExitStack()

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for context in self._contexts:
                stack.enter_context(context)
            self._open = stack.pop_all()

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)


def tells_steps(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer calls its step hooks; one that does not call Optimizer's constructor may call none. 2.6, 2.15."""
    return bool(getattr(type(optimizer).step, "hooked", False))


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step of an optimizer calls hooks, but for flextrain's own: the optimizer's, or those of all optimizers. 2.6, 2.15."""
    own = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    return any(
        hooks and _of_users(hooks) for hooks in (*own, _global_optimizer_pre_hooks, _global_optimizer_post_hooks)
    )


def in_backward() -> bool:
    """Whether autograd runs backward in this thread, which may compute a forward again. 2.6, 2.15."""
    return bool(torch._C._current_graph_task_id() != -1)


def contexts_of_repetition() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]] | None:
    """New contexts of forward and its repetition, inside of ``repeating_in``; None outside. 2.6, 2.15."""
    given = cast(Any, inspect.unwrap(torch.utils.checkpoint.checkpoint)).__kwdefaults__["context_fn"]
    return None if given is torch.utils.checkpoint.noop_context_fn else given()


class GroupedGradScaler(GradScaler):
    """A GradScaler for gradients of several layouts; torch's takes one layout in its call. 2.6, 2.15.

    Args:
        groups: returns the parameters of an optimizer in groups whose gradients have the same layout.
        arguments: those of GradScaler.
    """

    def __init__(self, groups: Callable[[Any], list[list[Tensor]]], *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._groups = groups
        self.agree: Callable[[Tensor], Tensor] | None = None
        """Combines ``found_inf`` of several processes, also of those without a gradient."""

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        groups = self._groups(optimizer)
        for group in groups:
            part = cast(Any, SimpleNamespace(param_groups=[{"params": group}]))
            for found in super()._unscale_grads_(part, inv_scale, found_inf, allow_fp16).values():
                found_inf = torch.maximum(found_inf, found.to(found_inf.device))
        if self.agree is not None:
            found_inf = self.agree(found_inf)
        return {found_inf.device: found_inf} if groups or self.agree is not None else {}

    def _maybe_opt_step(self, optimizer: Any, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As torch's, which reads ``found_inf``; where that has no values, the update is made."""
        if all(map(has_values, optimizer_state["found_inf_per_device"].values())):
            return super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)
        return optimizer.step(*args, **kwargs)


def check_reduced(wrapped: nn.Module) -> None:
    """Raise torch's RuntimeError if a backward of a DistributedDataParallel has left gradients unreduced. 2.6, 2.15.

    Torch itself raises it in the next forward, when an update was made with them.
    """
    cast(Any, wrapped)._check_reducer_finalized()


# Compiling


class _WithoutCompiling(AbstractContextManager[None]):
    """Simulated ranks are threads, and the stance is the process's: the last one that leaves puts back what the first one found."""

    def __init__(self) -> None:
        self._lock, self._inside, self._stance = threading.Lock(), 0, cast(Any, None)

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._stance = torch.compiler.set_stance("force_eager")
            self._inside += 1

    def __exit__(self, *error: Any) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._stance.__exit__(*error)


_WITHOUT_COMPILING = _WithoutCompiling()


def without_compiling() -> AbstractContextManager[None]:
    """Context in which compiled models run as they are; the compiler is not even imported for it. 2.6, 2.15."""
    return _WITHOUT_COMPILING if "torch._dynamo" in sys.modules else nullcontext()


def build_folder(name: str) -> Path:
    """The folder in which ``torch.utils.cpp_extension`` compiles the extension ``name``. 2.6, 2.15.

    It is below TORCH_EXTENSIONS_DIR, or below torch's folder for this version of Python and this build of torch.
    """
    return Path(importlib.import_module("torch.utils.cpp_extension")._get_build_directory(name, verbose=False))


def build_lock_is_advisory() -> bool:
    """Whether ``torch.utils.cpp_extension`` locks a build folder with flock; otherwise by the file ``lock``. 2.6, 2.15.

    With flock the file stays for good and does not mean that a process compiles.
    """
    return hasattr(importlib.import_module("torch.utils.cpp_extension"), "FileLock")


def is_compile_error(error: BaseException) -> bool:
    """Whether an error, or what caused it, comes from the compiler, by the module of its class. 2.6, 2.15."""
    names = ("torch._dynamo", "torch._inductor", "torch._functorch")
    return type(error).__module__.startswith(names) or "torch._dynamo" in str(type(error.__cause__))


# torchrun


class WatchesAgent(Protocol):
    """What `watched_agent` tells."""

    def starting(self, group: Any) -> None:
        """Workers are about to start; ``group`` is the agent's WorkerGroup."""

    def looked(self, exits: Mapping[int, int] | None) -> None:
        """The agent has looked at its workers; ``exits`` are the statuses of those that failed, by rank, else None."""

    def may_restart(self) -> bool:
        """After a failure: whether the agent may restart the workers, if it has restarts left."""

    def signals_wait(self) -> AbstractContextManager[None]:
        """Around the end of the workers."""

    def leaves(self) -> str:
        """After a failure: why this machine leaves the job, which goes on with the others; empty if it does not."""


@contextmanager
def watched_agent(watcher: WatchesAgent) -> Iterator[None]:
    """Let agents that ``torch.distributed.run`` makes in this block tell ``watcher`` what they do. 2.6, 2.15.

    torch's own events come too late to prevent a restart, and a restart of torch's does not heed ``--shutdown-timeout``.
    """
    from torch.distributed.elastic.multiprocessing import SignalException

    launcher: Any = importlib.import_module("torch.distributed.launcher.api")
    torchs: Any = launcher.LocalElasticAgent

    class Agent(torchs):  # type: ignore[misc]
        def _start_workers(self, worker_group: Any) -> Any:
            watcher.starting(worker_group)
            return super()._start_workers(worker_group)

        def _monitor_workers(self, worker_group: Any) -> Any:
            result = super()._monitor_workers(worker_group)
            has_failed = result.state.name in ("FAILED", "UNHEALTHY")
            failures = sorted(result.failures.items(), key=lambda item: item[1].timestamp)
            watcher.looked({rank: failure.exitcode for rank, failure in failures} if has_failed else None)
            if has_failed and (why := watcher.leaves()):
                raise SignalException(why, signal.SIGTERM)  # only then is the rendezvous not closed for the others
            if has_failed and not watcher.may_restart():
                self._remaining_restarts = 0
            return result

        def _shutdown(self, *arguments: Any, **named: Any) -> None:
            if hasattr(self, "_shutdown_timeout"):  # torch 2.6 has no such option
                named.setdefault("timeout", self._shutdown_timeout)
            with watcher.signals_wait():
                super()._shutdown(*arguments, **named)

    launcher.LocalElasticAgent = Agent
    try:
        yield
    finally:
        launcher.LocalElasticAgent = torchs


# Marks: states of torch's generator on the CPU that stand for a state which is not computed yet. The layout of a state is private:
# the seed (8 bytes), three counters (16 bytes), the 624 words (8 bytes each), a spare normal number. It was checked with torch 2.6
# and 2.15. A mark has the state's seed, and words that no seeding gives.

_WORDS = slice(24, 24 + 8 * 5)
_NAME = (0x9E3779B9, 0x7F4A7C15, 0xBF58476D, 0x1CE4E5B9)


def marked(state: Tensor, number: int) -> Tensor:
    """Return mark ``number``, below 2**32, of a state."""
    mark = state.numpy().copy()
    mark[_WORDS] = np.array((*_NAME, number), dtype=np.uint64).view(np.uint8)
    return torch.from_numpy(mark)


def mark_of(state: Tensor) -> int | None:
    """Return the number of a mark; None: it is an ordinary state."""
    words = state.numpy()[_WORDS]
    found = tuple(np.frombuffer(words.tobytes(), dtype=np.uint64).tolist())
    return int(found[-1]) if found[:-1] == _NAME else None


# Private names of torch for a copy of a model's modules, whose tensors take no memory until they are filled.
# The dicts of ``nn.Module`` were checked with torch 2.6 to 2.15.


_VALUES = (bool, int, float, str, type(None))
_LARGEST = 10_000  # elements of a container in which modules are looked for; larger ones are vocabularies and the like
_DEPTH = 4  # of containers and objects inside of each other
COMPILED = "_compiled_call_impl"
_WEAK = "_flat_weight_refs"  # a recurrent layer's to its parameters; None: it has none


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers, also those that are not persistent, each under the first of its names."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def copy_modules(model: nn.Module, shape_of: Callable[[Tensor], Sequence[int]]) -> nn.Module:
    """Return a copy of the modules, with tensors on the meta device that nothing is computed for."""
    known: dict[int, Any] = {}
    for module in model.modules():
        known[id(module)] = object.__new__(type(module))
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in known:
                known[id(parameter)] = nn.Parameter(_without_memory(parameter, shape_of), requires_grad=False)
        for buffer in module.buffers(recurse=False):
            if id(buffer) not in known:
                known[id(buffer)] = _without_memory(buffer, shape_of)
    for module in model.modules():
        own = vars(known[id(module)])
        for key, value in vars(module).items():
            if key.startswith("_") and isinstance(value, dict) and _is_of_module(key):
                own[key] = type(value)((name, _mapped(one, known, _DEPTH)) for name, one in value.items())
            elif key == "_non_persistent_buffers_set":
                own[key] = set(value)
            elif key == _WEAK:
                own[key] = [None] * len(value)  # the model's would lead to its parameters
            else:
                own[key] = None if key == COMPILED else _mapped(value, known, _DEPTH)
    found: nn.Module = known[id(model)]
    return found


def _is_of_module(key: str) -> bool:
    return key in ("_modules", "_parameters", "_buffers") or key.endswith(
        ("_hooks", "_hooks_with_kwargs", "_always_called")
    )


def _without_memory(tensor: Tensor, shape_of: Callable[[Tensor], Sequence[int]]) -> Tensor:
    return torch.empty(tuple(shape_of(tensor)), dtype=tensor.dtype, device="meta")


def _mapped(value: Any, known: dict[int, Any], depth: int) -> Any:
    """Return a value with the copies of all modules and tensors that are in it; the value itself if there are none."""
    if id(value) in known:
        return known[id(value)]
    if isinstance(value, (*_VALUES, Tensor, nn.Module, type, types.ModuleType)) or depth == 0:
        return value
    inner = functools.partial(_mapped, known=known, depth=depth - 1)
    kind = type(value)
    if kind in (list, tuple, set, dict, OrderedDict):
        if len(value) > _LARGEST:
            return value
        if isinstance(value, dict):
            pairs = [(key, inner(one)) for key, one in value.items()]
            changed = any(one is not value[key] for key, one in pairs)
            return kind(pairs) if changed else value
        parts = [inner(one) for one in value]
        changed = any(new is not old for new, old in zip(parts, value, strict=True))
        return kind(parts) if changed else value
    if kind is types.MethodType:
        owner = inner(value.__self__)
        return value if owner is value.__self__ else types.MethodType(value.__func__, owner)
    if kind is functools.partial:
        parts = inner([value.func, *value.args])
        words = inner(value.keywords)
        if parts[0] is value.func and words is value.keywords and all(map(_same, parts[1:], value.args)):
            return value
        return functools.partial(parts[0], *parts[1:], **words)
    if kind is types.FunctionType:
        return _function(value, inner)
    return _object(value, known, inner)


def _same(one: Any, other: Any) -> bool:
    return one is other


def _function(function: types.FunctionType, inner: Callable[[Any], Any]) -> types.FunctionType:
    """Return a function whose closure has the copies."""
    cells = function.__closure__ or ()
    try:
        found = [cell.cell_contents for cell in cells]
    except ValueError:  # a cell that nothing was written to yet
        return function
    parts = [inner(one) for one in found]
    if all(map(_same, parts, found)):
        return function
    closure = tuple(types.CellType(part) for part in parts)
    made = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, closure
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _object(value: Any, known: dict[int, Any], inner: Callable[[Any], Any]) -> Any:
    """Return an object of the user's whose attributes have the copies."""
    attributes = getattr(value, "__dict__", None)
    if not isinstance(attributes, dict) or type(value).__module__.partition(".")[0] in ("torch", "builtins"):
        return value
    known[id(value)] = value  # objects may have each other
    mapped = {key: inner(one) for key, one in attributes.items()}
    if all(mapped[key] is one for key, one in attributes.items()):
        del known[id(value)]
        return value
    made = object.__new__(type(value))
    made.__dict__.update(mapped)
    known[id(value)] = made
    return made


def replace_tensor(model: nn.Module, tensor: Tensor, by: Tensor | None) -> None:
    """Put another tensor, or None, in the place of a parameter or buffer, in every module that has it."""
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for key, one in held.items():
                if one is tensor:
                    held[key] = by  # type: ignore[assignment]


@contextmanager
def swappable(model: nn.Module) -> Iterator[None]:
    """Context in which ``torch.utils.swap_tensors`` takes parameters of recurrent layers, which have weak references to them. 2.6, 2.15."""
    layers = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    for layer in layers:
        setattr(layer, _WEAK, [])
    try:
        yield
    finally:
        for layer in layers:
            layer._init_flat_weights()


def take_buffers(model: nn.Module) -> Callable[[], None]:
    """Return a function that gives all modules the buffers that they have now, also those that are None."""
    taken = [
        (module, dict(module._buffers), set(module._non_persistent_buffers_set))
        for module in model.modules()
        if not isinstance(module, torch.jit.ScriptModule)
    ]

    def give_back() -> None:
        for module, buffers, passing in taken:
            if {key: id(one) for key, one in module._buffers.items()} != {key: id(one) for key, one in buffers.items()}:
                module._buffers.clear()
                module._buffers.update(buffers)
                module._non_persistent_buffers_set = passing

    return give_back


def after_backward(function: Callable[[], None]) -> None:
    """Call ``function`` at the end of the backward that is running, before what is registered later. 2.6, 2.15."""
    torch.autograd.Variable._execution_engine.queue_callback(function)
