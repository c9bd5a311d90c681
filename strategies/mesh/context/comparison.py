"""Comparison of the first batch with one process that has all positions: what cannot be cut is found before training."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.hooks import RemovableHandle

from ....core.base.errors import StrategyError
from ....core.base.trees import tree_map_only
from ....core.comm import collectives as dist
from ....core.model.base_model import class_name
from ....core.torch_compat.dtensor_private import finish, local_tensor, waited
from ....core.torch_compat.torch_private import TorchDispatchMode, arguments_of, is_mutable, storage_key, tree_flatten
from ...base import EvalStep, TrainStep
from ..experts import Dispatch
from ..first_batch import differentiated, differing, drawn_once, trying
from .attention import SequenceAttention
from .batches import IGNORED, CutBatch, SequenceBatches, TargetNeeds, gather_outputs
from .transformers import Interception, TransformersModel

# MixedPositions: follows positions through the operations of a forward, to find what combines several of them beside
# attention.


_PATTERN = (1, 2, 2, 2, 1, 2, 1, 1, 2, 1, 2, 2, 1, 1, 1, 2)
"""The kind of each position, 1 or 2, in an order that no shift and no reversal repeats."""
_BOTH, _COMPUTED = 3, 4
_COLLECTIVES = ("c10d", "_c10d_functional", "fsdp")
_SENDING = ("allgather", "_allgather", "broadcast", "gather", "scatter")
_MADE = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")
_FILLED = (*_MADE, "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "zero_", "fill_", "rand_like",
           "randn_like", "randint_like", "bernoulli_", "uniform_", "normal_", "exponential_")  # fmt: skip
_COUNTED = ("histc", "bincount", "unique_consecutive", "unique_dim", "_unique2", "_unique", "equal")
_SUMS = ("sum", "mean", "nansum")
_LINEAR = ("add", "sub", "rsub", "neg", "mul", "div", "_to_copy", "clone", "copy", "cat", "stack", "where", "lerp",
           *_SUMS)  # fmt: skip
_ELEMENTWISE = ("_to_copy", "clone", "copy", "native_dropout", "where", "masked_fill", "lift_fresh", "nan_to_num",
                "all_reduce", "allreduce", "wait_tensor", "polar", "complex")  # fmt: skip
_OF_A_DIM = ("argmax", "argmin", "any", "all", "amax", "amin", "aminmax", "count_nonzero")
_COUNTS = ("max", "min", "prod", *_OF_A_DIM, *_SUMS)
_ORDERED = ("sort", "topk", "kthvalue", "mode", "median")
_SCATTERING = ("scatter", "scatter_add", "scatter_reduce", "index_add", "index_put", "index_copy")
_CUT = ("slice", "select", "index", "index_select")
_COPIED = ("_to_copy", "clone", "copy")


class _Followed(NamedTuple):
    """What is known of a storage, which no other gets while something refers to it; its memory goes as always."""

    storage: StorageWeakRef
    kinds: Tensor  # by byte
    keys: dict[str, bool]  # of the batch, whose whole numbers it has, and whether they are as they were there


class MixedPositions(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows which positions the numbers of a forward depend on.

    Positions are of two kinds. Beside each byte of memory stands of which kinds are the positions that it depends on: views
    and changes in place need no rules of their own. What an operation does to them is tried on NaN, where it has no rule.
    A number of both kinds is right on several processes only if it is a sum for the loss: whatever else is done with it is found.
    Counts of what the batch has, by which a loss divides, are no such: they depend on no parameter.

    Args:
        model: for the names of its modules.
        may_cut: whether some positions may be taken now, as losses do that shift labels.

    Attributes:
        found: what combines positions first, with the name of its module; None: nothing so far.
    """

    def __init__(self, model: nn.Module, may_cut: Callable[[], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model, self._may_cut = model, may_cut
        self.found: str | None = None
        self._path: list[str] = []
        self._memory: dict[int, _Followed] = {}
        # Items of ``_Followed.keys``: of what was compared with the label that does not count or given to a loss that does so, and
        # of what chose rows of a table.
        self._targets: set[tuple[str, bool]] = set()
        self._looked_up: set[tuple[str, bool]] = set()
        self._unwritten: dict[int, StorageWeakRef] = {}

    @property
    def targets(self) -> set[str]:
        """Keys of the batch whose values a loss, or the model itself, compares with the label of positions that do not count.

        A model may compare a copy, which the device has for example. Where it makes targets of what it also looks up in a table,
        such as tokens, that label has no place in the batch.
        """
        return {
            key
            for key, is_same in self._targets
            if (key, True) not in self._looked_up and (is_same or (key, False) not in self._looked_up)
        }

    def mark(self, tensor: Tensor, dim: int, key: str | None = None) -> None:
        """Say that a tensor has positions along a dimension, and which entry of the batch it is."""
        kinds = torch.tensor(_PATTERN, dtype=torch.uint8, device=tensor.device)
        own = kinds.repeat(-(-tensor.shape[dim] // len(kinds)))[: tensor.shape[dim]]
        shape = [1] * tensor.ndim
        shape[dim] = -1
        self._write(tensor, own.view(shape).expand(tensor.shape))
        if key is not None and (followed := self._memory.get(self._key(tensor))) is not None:
            followed.keys[key] = True

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context of the forward."""
        handles: list[RemovableHandle] = []
        try:
            for name, module in self._model.named_modules():  # no global hook: other threads call it too
                where = f".{name} ({class_name(module)})" if name else ""
                enter, leave = functools.partial(self._enter, where), self._leave
                handles += module.register_forward_pre_hook(enter, prepend=True), module.register_forward_hook(leave)
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()
            self._memory.clear()
            self._unwritten.clear()

    def _enter(self, where: str, *_: Any) -> None:
        self._path.append(where)

    def _leave(self, *_: Any) -> None:
        self._path.pop()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        space, _, name = func.name().partition("::")
        name = name.partition(".")[0]
        for key in [key for key, (storage, *_) in self._memory.items() if storage.expired()]:  # type: ignore[no-untyped-call]
            del self._memory[key]
        given = arguments_of(func, args, kwargs)
        inputs = [value for value in tree_flatten(list(given.values()))[0] if isinstance(value, Tensor)]
        if given.get("ignore_index") == IGNORED and isinstance(given.get("target"), Tensor):
            self._targets |= self._keys(given["target"]).items()
        elif name in ("eq", "ne") and not isinstance(given["other"], Tensor) and given["other"] == IGNORED:
            self._targets |= self._keys(given["self"]).items()
        elif name == "embedding":
            self._looked_up |= self._keys(given["indices"]).items()
        kinds = {id(tensor): found for tensor in inputs if (found := self._read(tensor)) is not None}
        memory = {self._key(tensor) for tensor in inputs}
        out = func(*args, **kwargs)
        outputs = [value for value in tree_flatten(out)[0] if isinstance(value, Tensor)]
        if space == "c10d" and (name.startswith("alltoall") or (kinds and name.startswith(_SENDING))):
            self._exchange(func, args, kwargs, inputs)
            return out
        changes = is_mutable(func) or space in _COLLECTIVES
        if changes:
            for tensor in (*inputs, *outputs):
                self._unwritten.pop(self._key(tensor), None)
        if not outputs or (space in _COLLECTIVES[1:] and not kinds):
            return out
        if not changes and outputs and all(self._key(output) in memory for output in outputs):
            if kinds and name in _CUT:
                self._check_cut(name, given, outputs[0], kinds)
            return out
        if (
            space == "aten"
            and not changes
            and name not in _FILLED
            and any(self._key(t) in self._unwritten for t in inputs)
        ):
            self._note("a kernel that cannot be followed", "may combine positions of a sequence")
        if name in _MADE and outputs[0].numel():
            self._unwritten[self._key(outputs[0])] = StorageWeakRef(_own(outputs[0]).untyped_storage())  # type: ignore[no-untyped-call]
        if not kinds:
            for output in outputs:
                if (key := self._key(output)) not in memory:
                    self._memory.pop(key, None)
            return out
        name = name.rstrip("_") if changes else name
        after = self._after(func, name, given, inputs, outputs, kinds, args, kwargs)
        if is_computed := any(
            bool((kinds[id(tensor)] & _COMPUTED).any())
            if id(tensor) in kinds
            else tensor.is_floating_point() and tensor.ndim
            for tensor in inputs
        ):
            after = [found | (found != 0) * _COMPUTED for found in after]
        self._judge(name, inputs, outputs, kinds, after, is_computed, "reduction" in given)
        keys: dict[str, bool] = {}
        for tensor in inputs:
            for entry, is_same in self._keys(tensor).items():
                keys[entry] = keys.get(entry, True) and is_same and name in _COPIED
        for output, found in zip(outputs, after, strict=True):
            self._write(output, found)
            self._keys(output).update(keys)
        return out

    # What operations do

    def _after(
        self, func: Any, name: str, given: Mapping[str, Any], inputs: Sequence[Tensor], outputs: Sequence[Tensor],
        kinds: Mapping[int, Tensor], args: Sequence[Any], kwargs: Mapping[str, Any],
    ) -> list[Tensor]:  # fmt: skip
        """Return the kinds of the outputs of an operation."""
        none = [torch.zeros(output.shape, dtype=torch.uint8, device=output.device) for output in outputs]
        if f"{name}_" in _FILLED or name in (*_FILLED, *_COUNTED):
            return none
        if name == "copy":
            return [_join(none[0], _of(given["src"], kinds))]
        if torch.Tag.pointwise in func.tags or name in _ELEMENTWISE:
            found = none[0]
            for tensor in inputs:
                self._check_counted(name, tensor, outputs[0], kinds)
                found = _join(found, _of(tensor, kinds))
            return [
                found if found.shape == output.shape else start for output, start in zip(outputs, none, strict=True)
            ]
        if "reduction" in given and "target" in given:
            of_loss = self._of_loss(name, given, kinds, none)
            if of_loss is not None:
                return of_loss
        if name in _OF_A_DIM:
            return [_any(kinds[id(inputs[0])], given.get("dim"), bool(given.get("keepdim"))) for _ in outputs]
        if name in _ORDERED and given.get("dim") is not None:
            before, dim = kinds[id(inputs[0])], given["dim"]
            # Whole numbers: the same rows in another order, such as by expert.
            if name == "sort" and not inputs[0].is_floating_point():
                return [before.gather(dim, outputs[1].long()), none[1]]
            found = _any(before, dim, True)
            return [(found if start.ndim == found.ndim else found.squeeze(dim)).expand(start.shape) for start in none]
        if name == "nonzero":
            mask = inputs[0].full_tensor() if isinstance(inputs[0], DTensor) else inputs[0]
            own = kinds[id(inputs[0])][mask != 0]
            return [torch.where(own & _BOTH == _BOTH, 0, own)[:, None].expand(none[0].shape)]
        if name in _SCATTERING and not any(id(given.get(key)) in kinds for key in ("self", "src", "source", "values")):
            if name == "scatter":  # all of a row says where in it the number is
                return [_any(kinds[id(given["index"])], given["dim"], True).expand(none[0].shape)]
            return none  # how many go where
        found_all = self._tried(func, outputs, kinds, args, kwargs)
        if name in ("embedding", "gather", "index", "index_select", "take_along_dim"):
            if name in _CUT:
                self._check_cut(name, given, outputs[0], kinds)
            found_all[0] = _join(found_all[0], _of_index(name, given, kinds, outputs[0].ndim))
        return found_all

    def _of_loss(
        self, name: str, given: Mapping[str, Any], kinds: Mapping[int, Tensor], none: list[Tensor]
    ) -> list[Tensor] | None:
        """A loss of pairs of numbers, of which each pair has to be of one position; None: it is of something else."""
        own, target = (_of(given[key], kinds) for key in ("input" if "input" in given else "self", "target"))
        if name.startswith("nll_loss") and own.ndim:
            own = _any(own, 1 if own.ndim > 1 else 0, False)
        if own.shape != target.shape:
            return None
        of_pairs = _join(own, target)
        if _mixes(of_pairs) and not (_mixes(own) or _mixes(target)):
            self._note(name)
        return [
            of_pairs if of_pairs.shape == none[0].shape else _any(of_pairs, None, False),
            *none[1:],
        ]  # then a weight

    def _tried(
        self, func: Any, outputs: Sequence[Tensor], kinds: Mapping[int, Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[Tensor]:  # fmt: skip
        """Find what depends on what by NaN in place of the numbers of one kind, and then of the other."""
        everything = 0
        for found in kinds.values():
            everything |= int(_any(found, None, False))
        after = [torch.zeros(output.shape, dtype=torch.uint8, device=output.device) for output in outputs]
        known = [False] * len(outputs)
        values = arguments_of(func, args, kwargs)
        named = {
            id(value) for key in ("index", "indices", "offs", "offsets") for value in tree_flatten(values.get(key))[0]
        }
        for kind in (1, 2):

            def stand_in(tensor: Tensor, kind: int = kind) -> Tensor:
                own, is_number = kinds.get(id(tensor)), tensor.is_floating_point() or tensor.is_complex()
                if not is_number and (id(tensor) in named or (own is None and tensor is not values.get("self"))):
                    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()
                made = torch.ones(
                    tensor.shape, dtype=tensor.dtype if is_number else torch.float32, device=tensor.device
                )
                return made if own is None else made.masked_fill((own & kind) != 0, torch.nan)

            try:
                result = func(
                    *tree_map_only(Tensor, stand_in, tuple(args)), **tree_map_only(Tensor, stand_in, dict(kwargs))
                )
                if func.namespace == "_c10d_functional":
                    for value in tree_flatten(result)[0]:
                        finish(value)
            except Exception:  # it takes no such numbers, and is taken to combine all that it is given
                known = [False] * len(outputs)
                break
            for i, value in enumerate(v for v in tree_flatten(result)[0] if isinstance(v, Tensor)):
                if value.shape == after[i].shape and (value.is_floating_point() or value.is_complex()):
                    after[i] |= value.isnan().to(torch.uint8) * kind
                    known[i] = True
        for i, output in enumerate(outputs):
            same = next((j for j, is_known in enumerate(known) if is_known and outputs[j].shape == output.shape), None)
            if not known[i]:
                after[i] = after[i] | everything if same is None else after[same]
        return after

    def _exchange(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], inputs: Sequence[Tensor]) -> None:
        """Send the kinds of what tokens are sent to other processes' experts; a collective."""
        made = {id(tensor): _of(tensor, {id(tensor): found} if (found := self._read(tensor)) is not None else {}).contiguous()
                for tensor in inputs}  # fmt: skip
        sent = tree_map_only(Tensor, lambda tensor: made[id(tensor)], (tuple(args), dict(kwargs)))
        result = func(*sent[0], **sent[1])
        if result is not None and hasattr(work := tree_flatten(result)[0][-1], "wait"):
            work.wait()
        for tensor in inputs:
            self._unwritten.pop(self._key(tensor), None)
            self._write(tensor, made[id(tensor)])

    # What is wrong

    def _judge(
        self, name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], kinds: Mapping[int, Tensor], after: list[Tensor],
        is_computed: bool, is_loss: bool,
    ) -> None:  # fmt: skip
        """Note an operation that combines positions, unless it sums numbers for the loss."""
        if not any(map(_mixes, after)):
            return
        numbers = {
            id(tensor) for tensor in inputs if id(tensor) in kinds and bool((kinds[id(tensor)] & _COMPUTED).any())
        }
        sums = {id(tensor) for tensor in inputs if id(tensor) in kinds and _mixes(kinds[id(tensor)])}
        if not sums:
            if name in _COUNTS and not (is_computed and any(t.is_floating_point() for t in inputs if id(t) in kinds)):
                for found in after:
                    found.masked_fill_(found & _BOTH == _BOTH, 0)
            elif name not in _SUMS and not is_loss:
                self._note(name)
        elif not any(output.is_floating_point() or output.is_complex() for output in outputs) and numbers <= sums:
            for found in after:
                found.zero_()
        elif (
            name not in _LINEAR
            or (name == "mul" and len(numbers) > 1)
            or (name == "div" and id(inputs[-1]) in kinds and len(inputs) > 1)
        ):
            self._note(name)

    def _check_counted(self, name: str, tensor: Tensor, output: Tensor, kinds: Mapping[int, Tensor]) -> None:
        """Note numbers that differ between positions and are of none: they are the same on every process."""
        if id(tensor) in kinds or not tensor.ndim or isinstance(tensor, DTensor):
            return
        if not tensor.is_floating_point() and not tensor.is_complex():
            return
        tensor = torch.view_as_real(tensor).sum(-1) if tensor.is_complex() else tensor
        for other in kinds.values():
            for back in range(1, min(tensor.ndim, other.ndim) + 1):
                if (
                    output.shape[-back] == tensor.shape[-back] == other.shape[-back]
                    and bool((other.amax(-back) != other.amin(-back)).any())
                    and bool((tensor.amax(-back) != tensor.amin(-back)).any())
                ):
                    self._note(
                        name, "takes numbers by position that are not the batch's, and each process has other positions"
                    )

    def _check_cut(self, name: str, given: Mapping[str, Any], part: Tensor, kinds: Mapping[int, Tensor]) -> None:
        """Note an operation that takes some positions: which these are in the sequence depends on the process."""
        source = given["self"]
        own = kinds.get(id(source))
        if own is None or part.numel() >= source.numel() or self._may_cut():
            return
        dims = (
            [given["dim"]] if "dim" in given else [at for at, index in enumerate(given["indices"]) if index is not None]
        )
        if len(kinds) > 1 and "dim" not in given:  # chosen by what each position has itself, such as its label
            return
        for dim in dims:
            last = own.amax(dim, keepdim=True)
            if bool((torch.where(own == 0, last, own) != last).any()):  # what is not written yet is of no position
                self._note(name)

    def _note(self, name: str, does: str = "combines positions of a sequence") -> None:
        if self.found is None:
            where = self._path[-1] if self._path else ""
            self.found = f"model{where}: {name} {does}"

    # Memory

    def _key(self, tensor: Tensor) -> int:
        return storage_key(_own(tensor))

    def _keys(self, tensor: Tensor) -> dict[str, bool]:
        """See ``_Followed``; of whole numbers."""
        followed = self._memory.get(self._key(tensor))
        is_number = tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool
        return {} if followed is None or is_number else followed.keys

    def _read(self, tensor: Tensor) -> Tensor | None:
        """Return the kinds of the positions of each number; None: it depends on none."""
        if isinstance(tensor, DTensor):
            found = self._read(_own(tensor))
            if found is None:
                return None
            layout = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
            whole = DTensor.from_local(
                found, tensor.device_mesh, layout, run_check=False, shape=tensor.shape, stride=tensor.stride()
            )
            return whole.full_tensor()
        tensor = _own(tensor)
        if (known := self._memory.get(storage_key(tensor))) is None or not tensor.numel():
            return None
        found = _elements(known.kinds, tensor)[..., 0]
        if tensor.is_complex():
            found = found | _elements(known.kinds, tensor)[..., tensor.itemsize // 2]
        return found.clone() if bool(found.any()) else None

    def _write(self, tensor: Tensor, kinds: Tensor) -> None:
        if isinstance(tensor, DTensor):
            layout = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
            placed = distribute_tensor(kinds.contiguous(), tensor.device_mesh, layout, src_data_rank=None)
            self._write(_own(tensor), placed.to_local())
            return
        tensor = _own(tensor)
        if not tensor.numel():
            return
        key, storage = storage_key(tensor), tensor.untyped_storage()
        if key not in self._memory:
            if not bool(kinds.any()):
                return
            made = torch.zeros(storage.nbytes(), dtype=torch.uint8, device=tensor.device)
            self._memory[key] = _Followed(StorageWeakRef(storage), made, {})  # type: ignore[no-untyped-call]
        _elements(self._memory[key].kinds, tensor).copy_(kinds[..., None].expand(*tensor.shape, tensor.itemsize))


def _own(tensor: Tensor) -> Tensor:
    """What this process has of a tensor, in its memory."""
    return waited(local_tensor(tensor) if isinstance(tensor, DTensor) else tensor)


def _elements(memory: Tensor, tensor: Tensor) -> Tensor:
    """A view of what stands beside the bytes of a tensor: its shape, and the bytes of an element."""
    size = tensor.itemsize
    return memory.as_strided(
        (*tensor.shape, size), (*(step * size for step in tensor.stride()), 1), tensor.storage_offset() * size
    )


def _of(value: Any, kinds: Mapping[int, Tensor]) -> Tensor:
    if isinstance(value, Tensor):
        found = kinds.get(id(value))
        return torch.zeros(value.shape, dtype=torch.uint8, device=value.device) if found is None else found
    return torch.zeros((), dtype=torch.uint8)


def _join(one: Tensor, other: Tensor) -> Tensor:
    return one | other.to(one.device)


def _any(kinds: Tensor, dim: Any, keeps: bool) -> Tensor:
    """The kinds of what depends on all numbers along some dimensions; None: along all."""
    dims = [*range(kinds.ndim)] if dim is None or dim == [] else [dim] if isinstance(dim, int) else [*dim]
    if not dims:
        return kinds
    one, two, four = (((kinds & kind) != 0).to(torch.uint8).amax(dims, keeps) * kind for kind in (1, 2, _COMPUTED))
    return one | two | four


def _mixes(kinds: Tensor) -> bool:
    return bool((kinds & _BOTH == _BOTH).any())


def _of_index(name: str, given: Mapping[str, Any], kinds: Mapping[int, Tensor], ndim: int) -> Tensor:
    """The kinds of the indices that choose, in a shape that broadcasts to what they choose."""
    if name == "gather":
        return _of(given["index"], kinds)
    if name == "embedding":
        return _of(given["indices"], kinds)[..., None]
    if name == "index_select":
        dim = given["dim"] % ndim
        return _of(given["index"], kinds).view([-1 if at == dim else 1 for at in range(ndim)])
    chosen = [(at, index) for at, index in enumerate(given["indices"]) if index is not None]
    found = torch.zeros((), dtype=torch.uint8)
    for _, index in chosen:
        own = _of(index, kinds)
        if index.dtype not in (torch.bool, torch.uint8):
            found = own if not found.ndim else _join(found, own)
    at = chosen[0][0]
    return found.view((1,) * at + tuple(found.shape) + (1,) * (ndim - at - found.ndim)) if found.ndim else found


POSITIONS = 16
"""How many positions of each sequence a process has in the comparison, at most."""
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-5}
"""By the dtype of attention; transformers computes losses and norms in float32. Others have few digits."""
_CAUSE = (
    "something in it sees the positions of one process only: attention that is not scaled_dot_product_attention, positions that "
    "it counts itself, a convolution, or a loss that is no mean over the targets that are not -100"
)
_OF_DOCUMENTS = (
    "with strategy.cp documents whose positions begin again are kept apart, which the model has to do on one device too"
)


class OneProcessComparison:
    """Runs some positions of the first batch on every process alone and on all together, in the mode that the model is in.

    In training the loss and the gradient of every parameter are compared. Before that, positions are followed through the
    operations of forward: what combines them beside attention is found however little it changes, see MixedPositions.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: SequenceBatches,
        attention: SequenceAttention,
        adapted: Sequence[TransformersModel],
        interception: Interception,
        mesh: DeviceMesh,
        is_weighed: bool,
    ) -> None:
        self._model, self._batches, self._attention = model, batches, attention
        self._adapted, self._interception, self._mesh, self._is_weighed = adapted, interception, mesh, is_weighed
        self._has_documents = False
        forwards = (vars(module).get("forward") for module in model.modules())
        # One that is recomputed in backward stands in a partial.
        own = (forward.args[0] if isinstance(forward, functools.partial) else forward for forward in forwards)
        self._dispatches = [each for each in own if isinstance(each, Dispatch)]

    def of_training(self, batch: CutBatch, step: TrainStep) -> None:
        """Compare the loss and its gradients; a collective of all processes.

        Raises:
            StrategyError: they differ, or the model has what cannot be cut.
        """
        whole = self._excerpt(batch)
        cut = self._batches.cut(whole)
        self._interception.losses = []
        self._follow(cut, lambda: step.forward(cut)[0])
        losses, self._interception.losses = self._interception.losses, None
        self._check_calls()
        if cut.get("labels") is not None and any(a.shifts and not a.losses for a in self._adapted):
            raise StrategyError(
                "model: its loss_function is not called for the batch's labels, which cp has shifted for it; compute the loss by it, "
                "or give targets of each position under another key, named in strategy.cp_keys"
            )
        if not self._adapted:
            self._check_losses(losses, cut)
        self._raise_found()
        self._check(whole, cut, step, self._compared, "train")

    def _check(
        self, whole: dict[str, Any], cut: CutBatch, step: Any, compared: Callable[..., str | None], mode: str
    ) -> None:
        """Raise what ``compared`` finds wrong; note what it finds where fewer targets count, as in another batch."""
        if problem := compared(whole, cut, step):
            raise StrategyError(problem)
        targets = self._targets(cut)

        def without_some(of: str | None) -> str | None:
            fewer = self._batches.with_ignored(whole, targets, of)
            problems = dist.all_gather_object(compared(fewer, self._batches.cut(fewer), step))
            return next(filter(None, problems), None)

        kinds = ["sample", "key"][: min(len(targets), 2)]
        needs = [TargetNeeds(problem, targets, kind) for kind in kinds if (problem := without_some(kind))]
        if needs and (problem := without_some(None)):
            needs = [TargetNeeds(problem, targets, None)]
        self._batches.needs[mode] = needs
        if mode == "train":
            self._batches.targets = targets

    def _targets(self, cut: CutBatch) -> list[str]:
        """The keys of targets of which some may not count, on some process; a collective."""
        own = [key for key in cut.dims if key in self._following.targets or key == cut.ignoring]
        return sorted({key for keys in dist.all_gather_object(own) for key in keys})

    def _compared(self, whole: dict[str, Any], cut: CutBatch, step: TrainStep) -> str | None:
        """Return what is wrong with the loss or its gradients, see ``of_training``."""
        factor = cut.factor
        if self._is_weighed:
            weights = torch.tensor([cut.weight], dtype=torch.float64)
            torch.distributed.all_reduce(weights, group=self._mesh.get_group())
            factor = cut.weight * self._mesh.size() / float(weights) if float(weights) else 1.0
        with self._uncut(), trying(self._model) as drawn_of_all:
            expected = step.forward(whole)[0]
            wanted = differentiated(self._model, expected, self._mesh.get_group())
        with self._together(cut), trying(self._model) as drawn:
            loss = step.forward(cut)[0]
            loss = loss * factor if factor else loss.nan_to_num() * 0.0
            gradients = differentiated(self._model, loss, self._mesh.get_group())
        everyones = dist.all_gather_object(drawn, self._mesh.get_group())
        self._check_drawn(whole, step, expected.detach(), drawn_once(drawn_of_all, everyones, cut.size or 1))
        self._note_documents(cut)
        both = torch.stack([loss.detach(), expected.detach()]).double()
        torch.distributed.all_reduce(both, group=self._mesh.get_group())
        value, right = (both / self._mesh.size()).tolist()
        is_known = not any(dist.all_gather_object(right != right))
        found = differing(gradients, wanted, self._attention.dtype, self._attention.device) if is_known else None
        problem = self._difference(abs(value - right), abs(right), f"its loss is {value:.6g} and not {right:.6g}")
        if problem or found is None:
            return problem
        return (
            f"model.{found[0]}: over strategy.cp={self._mesh.size()} processes its gradient differs by {found[1]:.1e} of its size "
            f"from that of one process; {self._cause}"
        )

    def _check_drawn(self, whole: dict[str, Any], step: TrainStep, expected: Tensor, shapes: list[torch.Size]) -> None:
        """Raise on all processes, if one draws numbers that several positions have, and the loss depends on them."""
        found = next(filter(None, dist.all_gather_object(shapes)), None)
        if found is None:
            return
        with self._uncut(), trying(self._model, found):
            other = step.forward(whole)[0]
            differentiated(self._model, other * 0.0)
        matters = not bool((other - expected).abs() <= 1e-6 * expected.abs())
        if any(dist.all_gather_object(matters)):
            raise StrategyError(
                f"model: draws random numbers of shape {tuple(found[0])} in forward, not one for each position, as to leave out a layer for a "
                f"sample; each of strategy.cp={self._mesh.size()} processes would draw others: draw them in the data, and give them "
                "with the batch, or use dp_shard instead"
            )

    def of_evaluation(self, batch: CutBatch, step: EvalStep) -> None:
        """Compare outputs, see ``of_training``."""
        whole = self._excerpt(batch)
        cut = self._batches.cut(whole)
        with torch.no_grad():
            self._follow(cut, lambda: step.predict(cut))
        self._check_calls()
        self._raise_found()
        self._check(whole, cut, step, self._outputs_compared, step.mode)

    def _outputs_compared(self, whole: dict[str, Any], cut: CutBatch, step: EvalStep) -> str | None:
        """Return what is wrong with the outputs."""
        self._note_documents(cut)
        with torch.no_grad(), self._uncut(), trying(self._model):
            expected = step.predict(whole)
        with torch.no_grad(), self._together(cut), trying(self._model):
            found = gather_outputs(step.predict(cut), cut, self._mesh)
        worst = (0.0, 0.0)
        for mine, other in zip(tree_flatten(found)[0], tree_flatten(expected)[0], strict=False):
            if isinstance(mine, Tensor) and isinstance(other, Tensor) and mine.is_floating_point():
                pair = (mine.double() - other.double()).norm().item(), other.double().norm().item()
                worst = max(worst, pair, key=lambda of: of[0] / (of[1] or 1.0))
        difference, scale = dist.all_gather_object(worst, self._mesh.get_group())[0]
        return self._difference(difference, scale, f"its outputs differ by {difference / (scale or 1.0):.1e}")

    def _excerpt(self, batch: CutBatch) -> dict[str, Any]:
        return self._batches.excerpt(batch.whole, POSITIONS * self._mesh.size())

    def _follow(self, cut: CutBatch, run: Callable[[], Any]) -> None:
        self._following = MixedPositions(self._model, self._may_cut)
        for key, dim in cut.dims.items():
            self._following.mark(cut[key], dim, key)
        self._attention.is_apart = True
        try:
            with self._together(cut), trying(self._model):
                for positions in self._attention.positions:
                    self._following.mark(positions, -1)
                with self._following.watching():
                    result = run()
                if torch.is_grad_enabled():
                    differentiated(self._model, result * 0.0)  # FSDP waits for it
        finally:
            self._attention.is_apart = False

    def _note_documents(self, cut: CutBatch) -> None:
        self._has_documents = cut.documents is not None and cut.get("attention_mask") is None
        self._attention.has_documents = any(dist.all_gather_object(self._attention.has_documents))

    def _may_cut(self) -> bool:
        """Whether what runs may take some positions: a loss that shifts labels, and the sending of tokens to experts."""
        return any(adapted.is_in_loss for adapted in self._adapted) or any(each.is_running for each in self._dispatches)

    def _raise_found(self) -> None:
        """Raise on all processes, whichever has found something."""
        found = next(filter(None, dist.all_gather_object(self._following.found)), None)
        if found is not None:
            raise StrategyError(
                f"{found}; with strategy.cp={self._mesh.size()} only attention by scaled_dot_product_attention may, beside the sum or "
                "mean that is the loss; use dp_shard instead"
            )

    @contextmanager
    def _together(self, cut: CutBatch) -> Iterator[None]:
        self._attention.begin(cut)
        self._attention.is_compared = True
        try:
            with self._interception.everywhere():
                yield
        finally:
            self._attention.is_compared = False

    @contextmanager
    def _uncut(self) -> Iterator[None]:
        for adapted in self._adapted:
            adapted.cut(False)
        try:
            yield
        finally:
            for adapted in self._adapted:
                adapted.cut(True)

    def _check_calls(self) -> None:
        if not self._attention.calls:
            raise StrategyError(
                "model: calls neither scaled_dot_product_attention nor transformers' attention interface, strategy.cp needs one of "
                "them; use dp_shard instead"
            )

    def _check_losses(self, losses: list[tuple[str, dict[str, Any]]] | None, cut: CutBatch) -> None:
        own, count = cut.shards.length // cut.shards.count, cut.size or 1
        for name, given in losses or ():
            target = given["target"]
            if not target.is_floating_point() and target.numel() == count * (own - 1):
                raise StrategyError(
                    f"model: its {name} has {own - 1} targets of {own} positions, as if it shifted labels itself; with "
                    "strategy.cp targets are shifted in the batch"
                )
            if self._is_weighed:
                continue
            for key, usual in (("ignore_index", -100), ("reduction", "mean"), ("weight", None)):
                if given.get(key, usual) is not usual and given.get(key, usual) != usual:
                    raise StrategyError(
                        f"model: its {name} has {key}={_short(given[key])}, so that strategy.cp cannot tell how many targets "
                        "count; define loss_weight(data) in the model"
                    )

    @property
    def _cause(self) -> str:
        return _OF_DOCUMENTS if self._has_documents else _CAUSE

    def _difference(self, difference: float, scale: float, what: str) -> str | None:
        """Return what to say of a difference; None if it is not larger than rounding."""
        if scale != scale:  # a mean over nothing
            return None
        tolerance = _TOLERANCE.get(self._attention.dtype, 3e-2)
        if self._attention.device.type != "cpu":  # whose kernels add up in another order for each shape
            tolerance = max(tolerance, 1e-4)
        if difference <= tolerance * max(scale, 1e-3):  # not if it is NaN
            return None
        return f"model: over strategy.cp={self._mesh.size()} processes {what} of one process; {self._cause}"


def _short(value: Any) -> Any:
    return "..." if isinstance(value, (Tensor, Mapping)) else value
