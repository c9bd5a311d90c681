"""Tensor parallelism with ordinary tensors between column- and row-wise modules: less overhead than DTensors throughout.

It is right only for models that read the number of their heads off the width that they see. Others compute something else
without an error, for example where a joint projection is cut. Therefore the first micro-batch runs in both ways.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ....core.base.errors import StrategyError
from ....core.base.trees import tree_map_only
from ....core.torch_compat.torch_private import has_values, tree_flatten
from ..axis import own_random_numbers
from ..first_batch import differentiated, differing, trying
from .operations import backward_within
from .styles import Style, input_dim

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
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, styles: Mapping[str, Style]) -> None:
        self._model, self._mesh = model, mesh
        self.is_exact = False
        """Whether DTensors are passed on between modules, as without this class."""
        self._planned: set[str] = set()  # parameters
        self._open: list[str] = []  # modules whose divided outputs no row-wise module has taken yet
        self._seen: list[tuple[str, Tensor]] | None = None
        for name, style in styles.items():
            module = model.get_submodule(name)
            whole = _divided_inputs(module) if style.sums else None
            for key, parameter in [*module.named_parameters(recurse=False)]:
                layout = style.placement(module, key, parameter)
                placed = distribute_tensor(parameter.detach(), mesh, [layout], src_data_rank=None)
                self._planned.add(f"{name}.{key}")
                self._replace(parameter, nn.Parameter(placed, requires_grad=parameter.requires_grad))
            module.register_forward_pre_hook(partial(self._enter, name, whole), with_kwargs=True)
            module.register_forward_hook(partial(self._leave, name, style))

    def _replace(self, parameter: nn.Parameter, by: nn.Parameter) -> None:
        for module in self._model.modules():  # of several that share it too
            for key, found in [*module.named_parameters(recurse=False, remove_duplicate=False)]:
                if found is parameter:
                    setattr(module, key, by)

    def _enter(self, name: str, whole: int | None, module: nn.Module, args: Any, kwargs: Any) -> Any:
        def enter(tensor: Tensor) -> Tensor:
            if not isinstance(tensor, DTensor) and tensor.ndim:
                is_shard = whole is not None and tensor.shape[-1] * self._mesh.size() == whole
                layout = Shard(tensor.ndim - 1) if is_shard else Replicate()
                tensor = cast(Tensor, DTensor.from_local(tensor, self._mesh, (layout,), run_check=False))
            if self._seen is not None and whole is not None and isinstance(tensor, DTensor):
                # Beside what it returns, in which a weight that was initialised with zeros shows nothing.
                self._seen.append((f"the input of {name}", _whole(tensor)))
            return tensor

        return tree_map_only(Tensor, enter, args), tree_map_only(Tensor, enter, kwargs)

    def _leave(self, name: str, style: Style, module: nn.Module, args: Any, output: Any) -> Any:
        gathers = style.sums or style.outputs is not None or isinstance(module, nn.MultiheadAttention)

        def leave(tensor: DTensor) -> Tensor:
            if gathers:
                tensor = tensor.redistribute(placements=(Replicate(),))
                if self._seen is not None and tensor.is_floating_point():
                    self._seen.append((name, tensor.to_local().detach()))
            return tensor if self.is_exact else tensor.to_local()

        if style.sums:
            self._open.clear()
        elif not gathers:
            self._open.append(name)
        return tree_map_only(DTensor, leave, output)

    @property
    def have_values(self) -> bool:
        """Whether there is something to compare."""
        return all(map(has_values, self._model.parameters()))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context for forward and backward, in which processes drop different elements of what they have shards of."""
        with _RandomApart(self._mesh, lambda: bool(self._open) and not self.is_exact):
            yield

    def verify(self, compute: Callable[[], Any], exactly: Callable[[], AbstractContextManager[Any]]) -> None:
        """Compute the first batch with DTensors throughout too, and compare what planned modules return, and gradients.

        Args:
            compute: calls the model; in training the first tensor that it returns is the loss.
            exactly: makes the context in which a model of DTensors computes.

        Raises:
            StrategyError: on every process, if they differ, or if a part of the model has shards where it needs all.
        """
        found: list[list[tuple[str, Tensor]]] = []
        gradients: list[dict[str, Tensor]] = []
        try:
            for self.is_exact in (True, False):
                self._seen, self._open = [], []
                with trying(self._model), exactly() if self.is_exact else self.running():
                    outputs = [each for each in tree_flatten(compute())[0] if isinstance(each, Tensor)]
                    if torch.is_grad_enabled():
                        gradients.append(differentiated(self._model, outputs[0]))
                tensors = [each for each in outputs if each.is_floating_point()]
                found.append([*self._seen, *(("the output", _whole(each)) for each in tensors)])
        except Exception as error:  # shapes that do not fit raise anything
            if self.is_exact:
                raise
            reason = " ".join(str(error).split())
            raise StrategyError(f"{_ADVICE} shards do not fit the model: {reason}") from error
        finally:
            self._seen, self.is_exact = None, False
        if self._open:
            raise StrategyError(
                f'{_ADVICE} no row-wise module takes the shard that {self._open[-1]} returns; make it "colwise_gather_output"'
            )
        for (name, expected), (_, local) in zip(*found, strict=True):
            allowed = _TOLERANCE.get(expected.element_size(), 1e-3) * float(expected.abs().max())
            if expected.shape != local.shape or not float((expected - local).abs().max()) <= allowed:
                raise StrategyError(f"{_ADVICE} {name} is computed differently from one device")
        if gradients:
            exact, local = gradients
            for name in [
                name for name in exact if name not in self._planned
            ]:  # in both ways, the gradient of what a process has of its inputs
                torch.distributed.all_reduce(exact[name].copy_(local[name]), group=self._mesh.get_group())
                exact[name] /= self._mesh.size()
            parameter = next(self._model.parameters())
            wrong = differing(local, exact, parameter.dtype, parameter.device)
            if wrong is not None:
                raise StrategyError(
                    f"{_ADVICE} the gradient of {wrong[0]} differs by {wrong[1]:.1e} of its size from that of one device"
                )


def _divided_inputs(module: nn.Module) -> int | None:
    """Return the number of input features of a module that adds up over processes; None if it takes whole inputs."""
    if isinstance(module, (nn.MultiheadAttention, nn.Embedding)):
        return None
    weight = next(parameter for parameter in module.parameters(recurse=False) if parameter.ndim > 1)
    return weight.shape[input_dim(module, weight)]


def _whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor, without its graph."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


_ADVICE = 'strategy.tp_kind: "local" is not possible, choose "dtensor":'


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
        return _RandomApart(self._mesh, lambda: self._open)


class _RandomApart(TorchFunctionMode):
    """Context in which random functions draw differently on every process while it has shards of activations."""

    def __init__(self, mesh: DeviceMesh, has_shards: Callable[[], bool]) -> None:
        super().__init__()
        self._has_shards, self._device_type, self._index = has_shards, mesh.device_type, mesh.get_local_rank()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.backward:
            return backward_within(self, *args, **(kwargs or {}))
        if function in _RANDOM and self._has_shards() and _draws(function, args, kwargs or {}):
            with own_random_numbers(self._device_type, self._index):
                return function(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


def _draws(function: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call draws numbers: those of attention and dropout may have a probability of 0."""
    if function is functional.scaled_dot_product_attention:
        return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))
    if not function.__name__.endswith(("dropout", "dropout1d", "dropout2d", "dropout3d")):
        return True
    return bool(kwargs.get("training", args[2] if len(args) > 2 else True))


def check_local(model: nn.Module, styles: Mapping[str, Style], size: int) -> None:
    """Raise StrategyError if a plan cannot be applied with local tensors; before the model is changed."""
    planned = {id(p) for name in styles for p in model.get_submodule(name).parameters(recurse=False)}
    for name, module in model.named_modules():
        style = styles.get(name)
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            where = f"model.{name}.{key}"
            if style is None and id(parameter) in planned:
                raise StrategyError(
                    f"{_ADVICE} {where} is shared with a module of the plan; or give {name} a style too"
                )
            if style is None:
                continue
            layout = style.placement(module, key, parameter)
            dim = getattr(layout, "dim", None)
            if dim is not None and parameter.shape[dim] % size:
                raise StrategyError(
                    f"{_ADVICE} tp={size} does not divide the {parameter.shape[dim]} features of {where}"
                )
        if style is not None and (style.inputs, style.outputs) == (Shard(1), Shard(1)):
            raise StrategyError(f"{_ADVICE} {name} divides sequences")
