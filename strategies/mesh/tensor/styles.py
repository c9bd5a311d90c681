"""Styles: what tensor parallelism does with the parameters, inputs and outputs of a module; a plan names them."""

from __future__ import annotations

from typing import Any, ClassVar, cast

from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from ....core.dtensor_private import strided_shard
from ....core.errors import ConfigError
from ....core.registry import Registry

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


def output_dim(module: nn.Module, parameter: Tensor) -> int:
    """Return the dimension of a parameter that is the module's output features."""
    if parameter.ndim == 1:
        return 0
    if _is_transposed(module):
        return 1
    return 0 if _is_convolution(module) else parameter.ndim - 2


def input_dim(module: nn.Module, parameter: Tensor) -> int:
    """Return the dimension of a parameter with several that is the module's input features, or entries."""
    if _is_transposed(module):
        return 0
    return 1 if _is_convolution(module) else parameter.ndim - 1


def _is_transposed(module: nn.Module) -> bool:
    """Whether a weight is (inputs, outputs): that of an embedding, and of the Conv1D of GPT-2 in transformers."""
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return True
    return any(
        kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.") for kind in type(module).__mro__
    )


def _is_convolution(module: nn.Module) -> bool:
    return isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
