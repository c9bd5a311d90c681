"""Styles: what tensor parallelism does with the parameters, inputs and outputs of a module; a plan names them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.placement_types import Placement

from ....core.base.errors import ConfigError, StrategyError
from ....core.base.registry import Registry
from ....core.base.trees import map_tensors, tree_map_only
from ....core.model.logits import Logits
from ....core.model.weight_layout import inputs_come_first
from ....core.torch_compat.dtensor_private import (
    computes_strided_shards,
    local_tensor,
    strided_shard,
    using_in_place,
)
from ....core.torch_compat.torch_private import version_of
from ...sharding import FLOAT8_WIDTHS, computes_in_float8
from ..axis import replace_forward
from .operations import DTensorFunctions, as_replicated

STYLES = Registry("plan style", locations=(), lists_names=True)
"""Styles by the names that torch and transformers use. A class from elsewhere registers here, or is an entry point."""


class Style:
    """How a module is divided over the processes of an axis; the base class divides nothing.

    Subclass it and register the class in ``STYLES`` for another style. Parameters become DTensors, from which torch
    derives the layouts of activations. Therefore a style decides how fast a module is, and not what it computes.

    Attributes:
        inputs: layout of the tensors that the module is called with; None: as they come.
        outputs: layout of what it returns; None: as torch derives it.
        sums: what it returns are sums over the processes, which are reduced at once: to all of it, or with
            ``sequence_parallel`` to the process's shard of dimension 1. ``outputs`` means nothing then.
        local: forward computes with ordinary tensors, the whole of everything on every process; for operations that
            DTensor has not.
    """

    inputs: ClassVar[Placement | None] = None
    outputs: ClassVar[Placement | None] = None
    sums: ClassVar[bool] = False
    local: ClassVar[bool] = False

    def placement(self, module: nn.Module, name: str, parameter: Tensor) -> Placement:
        """Return the layout of a parameter of ``module`` itself.

        Args:
            name: its name in the module, such as "weight".
            parameter: of any device, also meta.
        """
        return Replicate()

    def unfit(self, module: nn.Module, parameter: Tensor, placement: Placement, size: int) -> str | None:
        """Return why a parameter cannot have this layout over ``size`` processes; None if it can."""
        return None


@STYLES.register_module(name=["replicate", "replicated", "replicated_with_grad_allreduce"])
class Replicated(Style):
    """Every process has all of the parameters; gradients need no option, DTensor knows which of them are sums."""


@STYLES.register_module(name="experts")
class Experts(Style):
    """Every process has all experts of a stack, unless expert parallelism has divided them."""

    local = True


@STYLES.register_module(name="colwise")
class Colwise(Style):
    """Each process computes some of the output features."""

    inputs = Replicate()

    def placement(self, module: nn.Module, name: str, parameter: Tensor) -> Placement:
        """See Style."""
        return Shard(output_dim(module, parameter)) if parameter.ndim else Replicate()


@STYLES.register_module(name=["colwise_gather_output", "colwise_rep", "embedding_colwise"])
class GatheredColwise(Colwise):
    """As "colwise", and every process gets all output features."""

    outputs = Replicate()


@STYLES.register_module(name=["rowwise", "rowwise_split_input", "rowwise_rep", "embedding_rowwise"])
class Rowwise(Style):
    """Each process has the weights of some input features, or of some entries of an embedding."""

    sums = True

    def placement(self, module: nn.Module, name: str, parameter: Tensor) -> Placement:
        """See Style; a bias is added once, to the sum."""
        return Shard(input_dim(module, parameter)) if parameter.ndim > 1 else Replicate()


class _Packed(Style):
    """A parameter that is several matrices of one size, one after the other; each process has a shard of each.

    Args:
        count: number of matrices.
    """

    def __init__(self, count: int = 2) -> None:
        self.count = count

    def unfit(self, module: nn.Module, parameter: Tensor, placement: Placement, size: int) -> str | None:
        """See Style; uneven shards of several matrices have no layout that torch knows."""
        dim = getattr(placement, "dim", None)
        if dim is not None and not computes_strided_shards():
            return f"{self.count} matrices in one are divided in a way that torch {torch.__version__} computes wrongly; take torch 2.15"
        if dim is None or parameter.shape[dim] % (self.count * size) == 0:
            return None
        return f"{parameter.shape[dim]} features are not {self.count} matrices that tp={size} divides"


@STYLES.register_module(name="packed_colwise")
class PackedColwise(_Packed):
    """As "colwise", for several matrices in one: "packed_colwise:3" for a projection to queries, keys and values."""

    inputs = Replicate()

    def placement(self, module: nn.Module, name: str, parameter: Tensor) -> Placement:
        """See Style."""
        return strided_shard(output_dim(module, parameter), self.count) if parameter.ndim else Replicate()


@STYLES.register_module(name="packed_rowwise")
class PackedRowwise(_Packed):
    """As "rowwise", for input features that are several features of one size, one after the other."""

    sums = True

    def placement(self, module: nn.Module, name: str, parameter: Tensor) -> Placement:
        """See Style."""
        return strided_shard(input_dim(module, parameter), self.count) if parameter.ndim > 1 else Replicate()


@STYLES.register_module(name=["sequence", "sequence_parallel"])
class Sequence(Style):
    """Each process computes a shard of dimension 1, the positions of a sequence, with all of the parameters."""

    inputs = Shard(1)
    outputs = Shard(1)


def style_of(text: str, where: str) -> Style:
    """Return the style that a plan names, such as "colwise", or "packed_colwise:3" with its argument.

    Args:
        where: the rule of the plan, for messages.

    Raises:
        ConfigError: there is no such style, or it does not take this argument.
    """
    name, colon, argument = text.partition(":")
    made: Any = STYLES.resolve(name, where)
    if not colon:
        return cast(Style, made())
    if not (isinstance(made, type) and issubclass(made, _Packed)):
        raise ConfigError(f'{where}: "{text}" is not allowed, {name} takes no number; give "{name}"')
    if not argument.isdecimal() or int(argument) < 2:
        raise ConfigError(f'{where}: "{text}" is not allowed, give the number of matrices, as in "{name}:3"')
    return made(int(argument))


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def output_dim(module: nn.Module, parameter: Tensor) -> int:
    """Return the dimension of a parameter that is the module's output features."""
    if parameter.ndim == 1:
        return 0
    return _first_dim(module, parameter) + inputs_come_first(module)


def input_dim(module: nn.Module, parameter: Tensor) -> int:
    """Return the dimension of a parameter with several that is the module's input features, or entries."""
    return _first_dim(module, parameter) + (not inputs_come_first(module))


def makes_shards(style: Style, module: nn.Module) -> bool:
    """Whether a module returns features of which each process has some."""
    whole = style.sums or style.outputs is not None or isinstance(module, nn.MultiheadAttention)
    return style.inputs is not None and not whole


def divided_inputs(style: Style, module: nn.Module) -> int | None:
    """Return the number of input features of a module that takes a shard of them, and adds up over processes; None: it takes all."""
    if not style.sums or isinstance(module, (nn.MultiheadAttention, nn.Embedding)):
        return None
    weight = next(parameter for parameter in module.parameters(recurse=False) if parameter.ndim > 1)
    return weight.shape[input_dim(module, weight)]


def _first_dim(module: nn.Module, parameter: Tensor) -> int:
    """Return the first of a parameter's two dimensions of features: sizes of a kernel come after them, and others before."""
    return 0 if isinstance(module, _CONVOLUTIONS) else parameter.ndim - 2


# Make a whole model of DTensors: whatever the plan, its results are those of one device.


def check_styles(model: nn.Module, styles: Mapping[str, Style], size: int) -> None:
    """Raise StrategyError if a parameter cannot be divided over ``size`` processes as its style says."""
    for name, style in styles.items():
        for key, parameter in model.get_submodule(name).named_parameters(recurse=False):
            why = style.unfit(
                model.get_submodule(name), parameter, style.placement(model.get_submodule(name), key, parameter), size
            )
            if why is not None:
                raise StrategyError(f"strategy.plan: model.{name}.{key}: its {why}; choose another style or tp")


def check_float8(model: nn.Module, size: int) -> None:
    """Raise StrategyError if a part of a matrix, of a divided model, has widths that float8 kernels do not multiply."""
    for name, module in model.named_modules():
        if not computes_in_float8(module) or not isinstance(module.weight, DTensor):
            continue
        outputs, inputs = local_tensor(module.weight).shape
        if outputs % FLOAT8_WIDTHS or inputs % FLOAT8_WIDTHS:
            raise StrategyError(
                f"strategy.tp: {size} processes leave model.{name} {inputs} inputs and {outputs} outputs on one, float8 needs multiples "
                f'of {FLOAT8_WIDTHS}; leave it out of Float8Training with but=["{name}"], or choose another tp or plan'
            )


def distribute_model(
    model: nn.Module, mesh: DeviceMesh, styles: Mapping[str, Style], *, sequence: bool = False
) -> None:
    """Replace every parameter and buffer by a DTensor, sharded by the style of its module, replicated without one.

    DTensor derives the layout of every activation, and communicates where an operation needs it. Therefore a plan decides
    how fast a model is, and never what it computes.

    Args:
        styles: by name of the module.
        sequence: outside of divided modules, activations are divided along dimension 1.
    """
    made: dict[int, nn.Parameter] = {}
    for name, module in model.named_modules():
        if any(isinstance(parameter, DTensor) for parameter in module.parameters(recurse=False)):
            continue  # an axis before this one has divided it
        style = styles.get(name) or Style()
        for key, parameter in [*module.named_parameters(recurse=False, remove_duplicate=False)]:
            if id(parameter) not in made:  # a tied one has the style of the first module that has it
                layout = style.placement(module, key, parameter)
                placed = distribute_tensor(parameter.detach(), mesh, [layout], src_data_rank=None)
                made[id(parameter)] = nn.Parameter(placed, requires_grad=parameter.requires_grad)
            setattr(module, key, made[id(parameter)])
        for key, buffer in [*module.named_buffers(recurse=False, remove_duplicate=False)]:
            setattr(module, key, distribute_tensor(buffer, mesh, (Replicate(),), src_data_rank=None))
        if style.local:
            replace_forward(module, partial(_LocalForward, module, mesh))
        inputs = style.inputs
        if inputs is None and isinstance(module, nn.MultiheadAttention):
            inputs = Replicate()  # it views what it has projected in ways that shards of positions do not allow
        if inputs is not None:
            module.register_forward_pre_hook(partial(_lay_out_inputs, inputs), with_kwargs=True)
        if style.sums or isinstance(module, nn.MultiheadAttention):  # whose forward does not call its last projection
            module.register_forward_hook(partial(_reduce, sequence))  # nothing may see a part of a sum
        elif style.outputs is not None:
            module.register_forward_hook(partial(_lay_out_output, style.outputs))


def _laid_out(values: Any, layout: Placement) -> Any:
    dim = getattr(layout, "dim", -1)

    def lay_out(tensor: DTensor) -> DTensor:
        if tensor.ndim <= dim or not tensor.is_floating_point():
            return tensor
        return _gathered_once(tensor) if isinstance(layout, Replicate) else tensor.redistribute(placements=(layout,))

    return tree_map_only(DTensor, lay_out, values)


def _gathered_once(tensor: DTensor) -> DTensor:
    """Return all of a tensor; the same for all modules that take it, such as those of queries, keys and values."""
    if torch.compiler.is_compiling() or tensor.is_inference():  # a graph has no attributes, and the latter no version
        return tensor.redistribute(placements=(Replicate(),))
    version, found = getattr(tensor, _GATHERED, (None, None))
    if found is None or version != version_of(tensor) or found.requires_grad != _has_graph(tensor):
        found = tensor.redistribute(placements=(Replicate(),))
        setattr(tensor, _GATHERED, (version_of(tensor), found))
    return cast(DTensor, found)


_GATHERED = "_flextrain_gathered"


def _has_graph(tensor: Tensor) -> bool:
    return tensor.requires_grad and torch.is_grad_enabled()


def _lay_out_inputs(layout: Placement, module: nn.Module, args: Any, kwargs: Any) -> Any:
    return _laid_out(args, layout), _laid_out(kwargs, layout)


def _lay_out_output(layout: Placement, module: nn.Module, args: Any, output: Any) -> Any:
    return _laid_out(output, layout)


def _reduce(sequence: bool, module: nn.Module, args: Any, output: Any) -> Any:
    def reduce(tensor: DTensor) -> DTensor:
        return tensor.redistribute(placements=(Shard(1) if sequence and tensor.ndim > 2 else Replicate(),))

    return tree_map_only(DTensor, reduce, output)


class _LocalForward:
    """Takes the place of a module's forward, which computes with ordinary tensors: all of each."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh, forward: Callable[..., Any]) -> None:
        self._module, self._mesh, self._forward = module, mesh, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors = {
            **dict(self._module.named_parameters(recurse=False)),
            **dict(self._module.named_buffers(recurse=False)),
        }
        with using_in_place(self._module, as_local(tensors)):
            output = self._forward(*as_local(args), **as_local(kwargs))
        return as_replicated(self._mesh, output)


def as_local(values: Any, *, but_shards: bool = False) -> Any:
    """Return ``values`` with the whole of every DTensor.

    Args:
        but_shards: leave those of which processes have shards, such as logits by class, as they are.
    """

    def whole(tensor: DTensor) -> Tensor:
        if but_shards and any(hasattr(placement, "dim") for placement in tensor.placements):
            return tensor
        found: Tensor = tensor.full_tensor()
        return found.clone() if found.ndim == 0 else found  # a loss that is no view may be changed in place

    return map_tensors(DTensor, whole, values)


# Logits of a model of transformers that stay divided by the vocabulary for the model's own loss.


_LEFT = "_flextrain_left_model"  # of a DTensor: True, or all of it, once it was read
_LOOKS = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "ndim", "dtype", "device", "requires_grad", "grad_fn", "is_leaf")),
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.__len__, torch.is_floating_point, torch.numel,
}  # fmt: skip
"""What of a DTensor is as of all of it."""


class DividedLogits:
    """The matrix that makes logits, of which each process has some rows; its model's own plan gathers what it returns.

    Where the model is called with labels, it returns a DTensor, from which the model computes its loss. Whatever reads these
    logits outside of the model gets all of them, see LogitsFunctions. Without labels they are all that is asked for, and gathered.

    Args:
        model: the model whose forward computes the loss.
        head: the matrix.
        mesh: of one dimension.
    """

    def __init__(self, model: nn.Module, head: nn.Module, mesh: DeviceMesh) -> None:
        self._mesh, self._has_loss = mesh, False
        self._signature = inspect.signature(model.forward)
        model.register_forward_pre_hook(self._enter, with_kwargs=True)
        model.register_forward_hook(self._leave)
        head.register_forward_pre_hook(self._spread)
        head.register_forward_hook(self._gather)

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        # It stays for a backward that computes the matrix again.
        self._has_loss = self._signature.bind_partial(*args, **kwargs).arguments.get("labels") is not None

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        output = as_local(output, but_shards=True)
        map_tensors(DTensor, _mark, output)
        return output

    def _spread(self, module: nn.Module, args: Any) -> Any:
        return as_replicated(self._mesh, args)

    def _gather(self, module: nn.Module, args: Any, output: Any) -> Any:
        return output if self._has_loss else as_local(output)


def _mark(tensor: DTensor) -> DTensor:
    setattr(tensor, _LEFT, True)
    return tensor


class LogitsFunctions(DTensorFunctions):
    """Context for a model of ordinary tensors some of which are DTensors, such as logits until they leave it."""

    throughout = False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch."""
        given = [*args, *(kwargs or {}).values()]
        found = [one for each in given for one in (each if isinstance(each, (list, tuple)) else (each,))]
        # What is done with logits by rows is called in here again, on the tensors of some rows.
        if any(isinstance(one, DTensor) for one in found) and function not in _LOOKS and Logits not in types:
            args, kwargs = tree_map_only(DTensor, _whole_if_left, (args, kwargs or {}))
        return super().__torch_function__(function, types, args, kwargs)


@contextmanager
def of_some_dtensors() -> Iterator[None]:
    """Context for a model of ordinary tensors in which a few are DTensors, such as logits."""
    with implicit_replication(), LogitsFunctions():
        yield


def _whole_if_left(tensor: DTensor) -> Tensor:
    found = getattr(tensor, _LEFT, None)
    if found is None:
        return tensor
    if not isinstance(found, Tensor) or found.requires_grad != (tensor.requires_grad and torch.is_grad_enabled()):
        found = tensor.full_tensor()
        setattr(tensor, _LEFT, found)  # for the next who reads them
    return found
