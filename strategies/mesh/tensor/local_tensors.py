"""Tensor parallelism with ordinary tensors between column- and row-wise modules: less overhead than DTensors throughout.

It is right only for models that read the number of their heads off the width that they see. Others compute something else
without an error, for example where a joint projection is cut. Therefore the first micro-batch runs in both ways.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import TorchFunctionMode

from ....core.base.errors import StrategyError
from ....core.base.trees import tree_map_only
from ....core.comm.collectives import add_up
from ....core.model.logits import is_deferred
from ....core.torch_compat.dtensor_private import gradient_of, local_tensor
from ....core.torch_compat.torch_private import (
    has_values,
    is_fake,
    repeating_in,
    tables_of,
    tree_flatten,
    version_of,
    without_function_modes,
)
from ..axis import own_random_numbers, replace_forward
from ..first_batch import differentiated, differing, trying
from .operations import backward_within, check_lookup, keeps_graph_of_backward
from .styles import Style, divided_inputs, makes_shards, of_some_dtensors

_RANDOM = {
    functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d, functional.alpha_dropout,
    functional.feature_alpha_dropout, functional.scaled_dot_product_attention, functional.rrelu, functional.gumbel_softmax,
    torch.rand_like, torch.randn_like, torch.bernoulli,
}  # fmt: skip
# Of the largest value of an output, by the bytes of an element: what rounding may change, and a wrong cut exceeds by far.
_TOLERANCE = {8: 1e-9, 4: 1e-3, 2: 5e-2}


class LocalTensors:
    """The planned modules of a model, whose parameters are DTensors, and whose inputs and outputs are not.

    Args:
        model: parameters without a style stay as they are.
        mesh: of one dimension.
        styles: by name of the module.
        but: names of modules whose outputs are DTensors all the same, until a row-wise module takes them.
    """

    def __init__(
        self, model: nn.Module, mesh: DeviceMesh, styles: Mapping[str, Style], but: Collection[str] = ()
    ) -> None:
        self._model, self._has_dtensors = model, bool(but)
        self.mesh, self.group, self.size = mesh, mesh.get_group(), mesh.size()
        self.is_exact = False
        """Whether DTensors are passed on between modules, as without this class."""
        self.seen: _Seen | None = None
        """What planned modules take and return, while it is compared."""
        self.open: list[str] = []
        """Modules whose divided outputs no row-wise module has taken yet."""
        self.alone: frozenset[str] = frozenset()
        """Column-wise modules that shared what they took with no other one in the first batch: each adds up its gradient itself."""
        self._taken: tuple[Tensor, int, Tensor, str] | None = None
        for name, style in styles.items():
            module = model.get_submodule(name)
            if style.local:  # as without a style: all of it on every process, unless another axis divides it
                continue
            kind = _LocalLinear if _is_torchs_linear(module) and name not in but and style.outputs is None else _Planned
            replace_forward(module, partial(kind, self, name, style, module, name in but))
            for key, parameter in [*module.named_parameters(recurse=False)]:
                layout = style.placement(module, key, parameter)
                placed = distribute_tensor(parameter.detach(), mesh, [layout], src_data_rank=None)
                self._replace(parameter, nn.Parameter(placed, requires_grad=parameter.requires_grad))

    def _replace(self, parameter: nn.Parameter, by: nn.Parameter) -> None:
        for module in self._model.modules():  # of several that share it too
            for key, found in [*module.named_parameters(recurse=False, remove_duplicate=False)]:
                if found is parameter:
                    setattr(module, key, by)

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalTensors:
        return self  # a copy of a model has no other processes

    def taken(self, tensor: Tensor, name: str) -> Tensor:
        """Return the tensor for a column-wise module, whose gradient is added over the processes once for all that take it."""
        if not tensor.requires_grad or not torch.is_grad_enabled():
            return tensor
        known, version = self._taken, version_of(tensor)
        if known is None or known[0] is not tensor or known[1] != version:
            self._taken = known = (tensor, version, _Taken.apply(tensor, self), name)
        elif self.seen is not None:
            self.seen.sharing |= {name, known[3]}
        if self.seen is not None:
            self.seen.taking.add(name)
        return known[2]

    def add_up(self, gradient: Tensor) -> Tensor:
        """Add a gradient over the processes, in place: only modules of the plan have made it."""
        with without_function_modes():
            return add_up(gradient, self.group)

    def close(self) -> None:
        """Note that a row-wise module has taken what was divided."""
        self.open.clear()
        self._taken = None

    @property
    def have_values(self) -> bool:
        """Whether there is something to compare."""
        return all(map(has_values, self._model.parameters()))

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return the contexts of a forward that backward repeats, and of its repetition, which may end anywhere."""
        return nullcontext(), _Repetition(self, [*self.open])

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context for forward and backward, in which processes drop different elements of what they have shards of."""
        apart = _RandomApart(self.mesh, lambda: bool(self.open) and not self.is_exact)
        try:
            with apart, repeating_in(self._contexts), of_some_dtensors() if self._has_dtensors else nullcontext():
                yield
        finally:
            self._taken = None

    def verify(self, compute: Callable[[], Any]) -> None:
        """Compute the first batch with DTensors throughout too, and compare what planned modules return, and gradients.

        Args:
            compute: calls the model; in training the first tensor that it returns is the loss.

        Raises:
            StrategyError: on every process, if they differ, or if a part of the model has shards where it needs all.
        """
        seen, alone, self.alone = _Seen(), self.alone, frozenset()
        gradients: list[dict[str, Tensor]] = []
        try:
            for self.is_exact in (True, False):
                self.seen, self.open = seen, []
                with trying(self._model), of_some_dtensors() if self.is_exact else self.running():
                    outputs = [each for each in tree_flatten(compute())[0] if isinstance(each, Tensor)]
                    for each in outputs:
                        if each.is_floating_point():
                            seen.add("the output", _whole(each))
                    self.seen, seen.is_again = None, True  # backward may compute some once more
                    if torch.is_grad_enabled():
                        gradients.append(differentiated(self._model, outputs[0]))
        except Exception as error:  # shapes that do not fit raise anything
            if self.is_exact:
                raise
            reason = " ".join(str(error).split())
            raise StrategyError(f"{LOCAL_ADVICE} shards do not fit the model: {reason}") from error
        finally:
            self.seen, self.is_exact = None, False
        if self.open:
            raise StrategyError(
                f'{LOCAL_ADVICE} no row-wise module takes the shard that {self.open[-1]} returns; make it "colwise_gather_output"'
            )
        if (name := seen.differing()) is not None:
            raise StrategyError(f"{LOCAL_ADVICE} {name} is computed differently from one device")
        if gradients:
            exact, local = gradients
            parameter = next(self._model.parameters())
            # Autocast and FSDP compute in another dtype than that of parameters.
            dtype = min(seen.dtypes, key=lambda one: one.itemsize, default=parameter.dtype)
            wrong = differing(local, exact, dtype, parameter.device)
            if wrong is not None:
                raise StrategyError(
                    f"{LOCAL_ADVICE} the gradient of {wrong[0]} differs by {wrong[1]:.1e} of its size from that of one device"
                )
        # Without gradients nothing is added up, and what training has found stays.
        self.alone = frozenset(seen.taking - seen.sharing) if gradients else alone


class _Seen:
    """What modules take and return in a forward, and how far it differs when they are called again in the same order.

    The first waits in the host's memory: of all layers, and whole, it may be more than backward needs.
    """

    def __init__(self) -> None:
        self.is_again = False
        """Whether what is added is compared with what was added before."""
        self.dtypes: set[torch.dtype] = set()
        """Of what was added first."""
        self.taking: set[str] = set()
        """Column-wise modules that took an ordinary tensor which needs a gradient."""
        self.sharing: set[str] = set()
        """Those of them that took the same tensor as another one."""
        self._before: deque[tuple[str, Tensor]] = deque()
        self._compared: list[tuple[str, int, Tensor | None]] = []

    @torch.no_grad()
    def add(self, name: str, tensor: Tensor) -> None:
        """Note a tensor that all processes have, whole."""
        tensor = tensor.detach()
        if not self.is_again:
            self.dtypes.add(tensor.dtype)
            self._before.append((name, tensor.to("cpu", copy=True)))  # the model may change it in place
            return
        if not self._before or self._before[0][1].shape != tensor.shape:
            self._compared.append((name, 0, None))
            return
        _, waiting = self._before.popleft()
        expected = waiting.to(tensor.device)
        figures = torch.stack([(expected - tensor).abs().max().float(), expected.abs().max().float()])
        self._compared.append((name, expected.element_size(), figures))

    def differing(self) -> str | None:
        """Return the name of the first tensor that was another one the second time; None if all were the same."""
        for name, size, figures in self._compared:
            difference, largest = (math.inf, 0.0) if figures is None else figures.tolist()
            if not difference <= _TOLERANCE.get(size, 1e-3) * largest:
                return name
        return self._before[0][0] if self._before else None


class _Repetition(AbstractContextManager[None]):
    """The repetition of a forward, which begins with the shards that no row-wise module had taken when the forward began."""

    def __init__(self, local: LocalTensors, open: list[str]) -> None:
        self._local, self._at_start, self._outside = local, open, open

    def __enter__(self) -> None:
        self._outside, self._local.open = self._local.open, [*self._at_start]

    def __exit__(self, *_: object) -> None:
        self._local.open = self._outside


# What takes the place of the forward of a planned module.


class _Planned:
    """Computes with DTensors, of ordinary tensors that it takes and returns.

    Args:
        local: what all planned modules share.
        name, style: of the module.
        gives_dtensors: what it returns stays a DTensor.
        forward: the module's own.
    """

    def __init__(
        self, local: LocalTensors, name: str, style: Style, module: nn.Module, gives_dtensors: bool,
        forward: Callable[..., Any],
    ) -> None:  # fmt: skip
        self._local, self._name, self._style, self._module, self._forward = local, name, style, module, forward
        self._gives_dtensors = gives_dtensors
        self._whole, self._makes_shards = divided_inputs(style, module), makes_shards(style, module)
        self._gathers = style.sums or style.outputs is not None or isinstance(module, nn.MultiheadAttention)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self._forward(*tree_map_only(Tensor, self._enter, args), **tree_map_only(Tensor, self._enter, kwargs))
        if self._style.sums:
            self._local.close()
        elif self._makes_shards and not self._gives_dtensors:
            self._local.open.append(self._name)
        return tree_map_only(DTensor, self._leave, output)

    def _enter(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor) and tensor.ndim:
            layout = Shard(tensor.ndim - 1) if self._is_shard(tensor) else Replicate()
            tensor = cast(Tensor, DTensor.from_local(tensor, self._local.mesh, (layout,), run_check=False))
        if self._local.seen is not None and self._whole is not None and isinstance(tensor, DTensor):
            # Beside what it returns, in which a weight that was initialised with zeros shows nothing.
            self._local.seen.add(f"the input of {self._name}", _whole(tensor))
        return tensor

    def _is_shard(self, tensor: Tensor) -> bool:
        return self._whole is not None and tensor.shape[-1] * self._local.size == self._whole

    def _leave(self, tensor: DTensor) -> Tensor:
        if self._gathers:
            tensor = tensor.redistribute(placements=(Replicate(),))
            if self._local.seen is not None and tensor.is_floating_point():
                self._local.seen.add(self._name, tensor.to_local())
        return tensor if self._local.is_exact or (self._gives_dtensors and not self._gathers) else tensor.to_local()


def _is_torchs_linear(module: nn.Module) -> bool:
    own = module.parameters(recurse=False)
    ordinary = all(type(each) in (Tensor, nn.Parameter) or is_fake(each) for each in own)
    return ordinary and type(module).forward is nn.Linear.forward and not is_parametrized(module)


class _LocalLinear(_Planned):
    """A Linear of ordinary tensors: DTensor takes several times as long as the arithmetic of small ones."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._own, _ = tables_of(self._module)
        """The module's parameters; its attributes take several times as long."""

    def __call__(self, input: Tensor) -> Any:
        # A compiler knows what DTensors do in a graph.
        if not self._local.is_exact and not isinstance(input, DTensor) and not torch.compiler.is_compiling():
            with without_function_modes():
                if not self._style.sums:
                    return self._by_columns(input)
                if self._is_shard(input):
                    return self._by_rows(input)
        return super().__call__(input)

    def _by_columns(self, input: Tensor) -> Tensor:
        local, own = self._local, self._own
        local.open.append(self._name)
        if self._name in local.alone:  # one function of autograd less
            return _linear(input, own["weight"], own["bias"], None, local)
        return _linear(local.taken(input, self._name), own["weight"], own["bias"], None, None)

    def _by_rows(self, input: Tensor) -> Tensor:
        local, own = self._local, self._own
        if local.seen is not None:
            shard = DTensor.from_local(input.detach(), local.mesh, (Shard(input.ndim - 1),), run_check=False)
            local.seen.add(f"the input of {self._name}", _whole(shard))
        output = _linear(input, own["weight"], own["bias"], local.group, None)
        if local.seen is not None:
            local.seen.add(self._name, output)
        local.close()
        return output


class _Taken(torch.autograd.Function):
    """What column-wise modules take: a hook at a view would take three times as long."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, local: LocalTensors) -> Tensor:
        ctx.local = local
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.local.add_up(gradient), None


class _Linear(torch.autograd.Function):
    """``functional.linear`` of this process's part of DTensors.

    The results are added over ``group``, and gradients of the input by ``local``, unless they are None.
    """

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: DTensor, bias: DTensor | None, group: Any, local: LocalTensors | None
    ) -> Tensor:
        ctx.weight, ctx.bias, ctx.local, ctx.dtypes = weight, bias, local, None
        own, added = local_tensor(weight), None if bias is None else local_tensor(bias)
        if torch.is_autocast_enabled(device := input.device.type) and input.dtype != torch.float64:
            ctx.dtypes = input.dtype, own.dtype, None if added is None else added.dtype
            dtype = torch.get_autocast_dtype(device)
            input, own, added = input.to(dtype), own.to(dtype), None if added is None else added.to(dtype)
        ctx.save_for_backward(input, own)
        if group is None:
            return functional.linear(input, own, added)
        found = functional.linear(input, own)
        add_up(found, group)
        return found if added is None else found.add_(added)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        # Where no graph is asked for, which is nearly always, contexts that turn it off only cost time.
        return _gradients_once(ctx, gradient) if torch.is_grad_enabled() else _gradients(ctx, gradient)


def _gradients(ctx: Any, gradient: Tensor) -> Any:
    with without_function_modes():
        input, own = ctx.saved_tensors
        of_input = of_weight = of_bias = None
        needs_input, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        flat = gradient if gradient.ndim == 2 else gradient.reshape(-1, gradient.shape[-1])
        if needs_input:
            of_input = gradient @ own
        if needs_weight:
            of_weight = flat.T @ (input if input.ndim == 2 else input.reshape(-1, input.shape[-1]))
        if needs_bias:
            of_bias = flat.sum(0)
        if ctx.dtypes is not None:
            found = zip((of_input, of_weight, of_bias), ctx.dtypes, strict=True)
            of_input, of_weight, of_bias = (None if one is None else one.to(dtype) for one, dtype in found)
        if of_input is not None and ctx.local is not None:
            ctx.local.add_up(of_input)
        nodes = ctx.next_functions
        if of_weight is not None:
            of_weight = gradient_of(ctx.weight, of_weight, nodes[1][0])
        if of_bias is not None:
            of_bias = gradient_of(ctx.bias, of_bias, nodes[2][0])
        return of_input, of_weight, of_bias, None, None


_gradients_once = once_differentiable(_gradients)
# torch's Function.apply looks for ended transforms of torch.func first, a fifth of the call; live ones are refused in both.
_linear: Callable[..., Tensor] = super(torch.autograd.Function, _Linear).apply


def _whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor, without its graph."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


LOCAL_ADVICE = 'strategy.tp_kind: "local" is not possible, choose "dtensor":'


class OwnPlanShards:
    """Random numbers of a model whose own plan is applied: different on every process where it has shards.

    Args:
        styles: the model's, by name of a module or parameter.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, styles: Mapping[str, str]) -> None:
        self._mesh, self._open = mesh, False
        modules = dict(model.named_modules())
        for name in styles.keys() & modules.keys():
            is_open = styles[name] in ("colwise", "packed_colwise")
            if is_open or styles[name].startswith(("rowwise", "packed_rowwise")):
                modules[name].register_forward_hook(partial(self._note, is_open))

    def _note(self, is_open: bool, module: nn.Module, args: Any, output: Any) -> None:
        self._open = is_open

    def running(self) -> AbstractContextManager[Any]:
        """Return the context for forward and backward."""
        return _OfOwnPlan(self._mesh, lambda: self._open)


class _RandomApart(TorchFunctionMode):
    """Context in which random functions draw differently on every process while it has shards of activations.

    Lookups in divided tables are checked: the model computes on ordinary tensors, but not there.
    """

    def __init__(self, mesh: DeviceMesh, has_shards: Callable[[], bool]) -> None:
        super().__init__()
        self._has_shards, self._device_type, self._index = has_shards, mesh.device_type, mesh.get_local_rank()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.backward:
            return backward_within(self, *args, **(kwargs or {}))
        if function is functional.embedding:
            check_lookup(*args, **(kwargs or {}))
        if function in _RANDOM and self._has_shards() and _draws(function, args, kwargs or {}):
            with own_random_numbers(self._device_type, self._index):
                return function(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


class _OfOwnPlan(_RandomApart):
    """The same for the plan of a model of transformers, whose sums over processes have first derivatives only."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if keeps_graph_of_backward(function, args, kwargs or {}):
            raise StrategyError(
                "model: asks for gradients of gradients (create_graph=True), which the model's own plan computes wrongly; give "
                "strategy.plan"
            )
        return super().__torch_function__(function, types, args, kwargs)


def _draws(function: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call draws numbers: those of attention and dropout may have a probability of 0."""
    if function is functional.scaled_dot_product_attention:
        return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))
    if not function.__name__.endswith(("dropout", "dropout1d", "dropout2d", "dropout3d")):
        return True
    return bool(kwargs.get("training", args[2] if len(args) > 2 else True))


def why_not_local(model: nn.Module, styles: Mapping[str, Style], size: int) -> str:
    """Return why a plan cannot be applied with local tensors, before the model is changed; empty if it can."""
    planned = {id(p) for name in styles for p in model.get_submodule(name).parameters(recurse=False)}
    for name, module in model.named_modules():
        style = styles.get(name)
        if style is not None and is_deferred(module):
            return f"ChunkedLoss computes {name} after its forward"
        if style is not None and is_parametrized(module):
            return f"model.{name} has a parametrization, which makes its weight of parameters elsewhere"
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            where = f"model.{name}.{key}"
            if style is None and id(parameter) in planned:
                return f"{where} is shared with a module of the plan; or give {name} a style too"
            if style is None:
                continue
            layout = style.placement(module, key, parameter)
            dim = getattr(layout, "dim", None)
            if dim is not None and parameter.shape[dim] % size:
                return f"tp={size} does not divide the {parameter.shape[dim]} features of {where}"
        if style is not None and (style.inputs, style.outputs) == (Shard(1), Shard(1)):
            return f"{name} divides sequences"
    return ""
