"""RehearsedZero: the tensors and collectives of DeepSpeed's engine, by formula, for a rehearsal.

The engine keeps process groups and events in variables of modules and cannot be one rank of many. Here, the same buffers are
made as plain tensors, with the sizes, padding and dtypes that DeepSpeed 0.19.8 gives them, and the collectives are called on
them: gradients of stages 1 and 2 are copied into a bucket, reduced whole, and the own partition is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ...core.base.errors import ConfigError
from ...core.checkpoint.chunks import FlatShard, share
from ...core.device.precision import DTYPES, Precision
from ...core.torch_compat.torch_private import tree_flatten
from ...optim.canonical import GROUP, STATE
from ...optim.wrapper import ClipGrad, OptimWrapper
from ..base import NOTHING, Optim, Strategy
from .config import DeepSpeedConfig, ZeroOptimization
from .engine_config import Request, check_wrapper, resolve
from .half_precision import cast_inputs_and_outputs, check_supported, keep_running_statistics
from .whole_parameters import looks_at_whole

_listeners: list[Callable[[str, Iterable[Tensor]], object]] = []


def announce(kind: str, tensors: Iterable[Tensor]) -> None:
    """Say what the memory of tensors is for, see ``RehearsedZero.tell``."""
    for listen in _listeners:
        listen(kind, tensors)


# The tensors of ZeRO's stages on one rank, by formula, as DeepSpeed 0.19.8 makes them; see ``rehearsed``.


_REDUCED_AT_ONCE = 500_000_000
"""Elements of gradients that stage 0 reduces at a time."""

Updated = tuple[Tensor, Mapping[str, Any], Sequence[nn.Parameter]]
"""A tensor that the optimizer updates, its group, and the parameters that are in it."""


class ZeroState:
    """The base of both: what the engine does at each moment of an update.

    Args:
        zero: the options.
        dtype: of the model.
        sent: dtype of gradients in collectives.
        rank, world_size: of this process.
    """

    def __init__(
        self, zero: ZeroOptimization, dtype: torch.dtype, sent: torch.dtype, rank: int, world_size: int
    ) -> None:
        self.zero, self.dtype, self.sent, self.rank, self.world_size = zero, dtype, sent, rank, world_size
        self.total = 0
        self._updated: list[tuple[Tensor, list[nn.Parameter]]] = []

    @property
    def bucket_size(self) -> int:
        """Elements of gradients that are reduced at a time."""
        return min(int(self.zero.reduce_bucket_size), self.total + self.total % 2)

    def adopt(self, model: nn.Module) -> None:
        """Take a model's parameters over, in the dtype of the model."""
        self.total = sum(parameter.numel() for parameter in model.parameters())

    def shard(self, optimizer: Optimizer) -> None:
        """Replace the parameters of an optimizer by this rank's masters."""
        for group in optimizer.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.requires_grad]
            group["params"] = self.masters_of(trained) if trained else []
            group.pop("param_names", None)
        optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]

    def masters_of(self, parameters: list[nn.Parameter]) -> list[Tensor]:
        """Return what the optimizer updates in place of these parameters of one group."""
        raise NotImplementedError

    def after_backward(self) -> None:
        """Do what the engine does after backward of each micro-batch."""

    def before_update(self) -> None:
        """Give the masters their gradients."""

    def after_update(self) -> None:
        """Give the model the updated weights."""

    def updated(self, optimizer: Optimizer) -> Iterator[Updated]:
        """Yield what the optimizer updates."""
        groups = {id(master): group for group in optimizer.param_groups for master in group["params"]}
        for master, parameters in self._updated:
            yield master, groups[id(master)], parameters

    def _to_dtype(self, parameter: Tensor) -> Tensor:
        return parameter.data.to(self.dtype) if parameter.is_floating_point() else parameter.data

    def _agree(self) -> None:
        """Share a number, as for the norm of gradients."""
        dist.all_reduce(torch.zeros(1))


class WholeParameters(ZeroState):
    """Stages 0 to 2: every rank has all parameters."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._flats: list[_Flat] = []
        self._bucket: Tensor | None = None
        self._waiting: list[nn.Parameter] = []
        self._kept: Tensor | None = None  # gradients of the micro-batch, and of those before it
        self._summed: Tensor | None = None

    def adopt(self, model: nn.Module) -> None:
        """See ZeroState."""
        super().adopt(model)
        for parameter in model.parameters():
            parameter.data = self._to_dtype(parameter)

    def masters_of(self, parameters: list[nn.Parameter]) -> list[Tensor]:
        """See ZeroState."""
        if self.zero.stage > 0:
            flat = _Flat(parameters, self.dtype, self.rank, self.world_size)
            self._flats.append(flat)
            self._updated.append((flat.master, parameters))
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(self._take)  # type: ignore[no-untyped-call]
            return [flat.master]
        masters: list[Tensor] = list(parameters)
        if self.dtype is not torch.float32:
            masters = [parameter.detach().float() for parameter in parameters]
            announce("optimizer_state", masters)
        self._updated += [(master, [own]) for master, own in zip(masters, parameters, strict=True)]
        return masters

    def _take(self, parameter: Any) -> None:
        """Move a gradient to the bucket; reduce the bucket first, if it is full."""
        if self._bucket is None:
            self._bucket = torch.empty(self.bucket_size, dtype=self.dtype)
            announce("communication", [self._bucket])
        if self.zero.stage == 1:  # reduces at the update
            return
        waiting = sum(each.numel() for each in self._waiting)
        if self._waiting and waiting + parameter.numel() > self.bucket_size:
            self._reduce()
            waiting = 0
        if parameter.numel() <= self.bucket_size:
            self._bucket.narrow(0, waiting, parameter.numel()).copy_(parameter.grad.reshape(-1))
            parameter.grad = None
        self._waiting.append(parameter)
        if parameter.numel() > self.bucket_size:
            self._reduce()
            parameter.grad = None

    def _reduce(self) -> None:
        """Reduce the gradients in the bucket, and keep those of parameters of which this rank has a part."""
        if self._waiting:
            sent = torch.empty(sum(each.numel() for each in self._waiting), dtype=self.sent)
            announce("communication", [sent])
            dist.all_reduce(sent)
            self._waiting.clear()
        if self._kept is None:
            self._kept = torch.empty(sum(flat.own for flat in self._flats), dtype=self.dtype)
            announce("gradients", [self._kept])

    def after_backward(self) -> None:
        """See ZeroState; stage 2 reduces what is left, and adds to the gradients of other micro-batches."""
        if self.zero.stage != 2:
            return
        self._reduce()
        self._bucket = None
        if self._summed is None:
            self._summed = self._kept
        self._kept = None

    def before_update(self) -> None:
        """See ZeroState."""
        if self.zero.stage == 0:
            self._reduce_all()
            self._give_whole_gradients()
            return
        if self.zero.stage == 1:
            self._reduce_at_once()
        self._agree()
        for flat in self._flats:
            grad = torch.empty(flat.size, dtype=self.dtype).to(torch.float32)
            announce("gradients", [grad])
            flat.master.grad = grad
        self._summed = None

    def _reduce_all(self) -> None:
        trained = [parameter for _, parameters in self._updated for parameter in parameters]
        for some in _chunked(trained, _REDUCED_AT_ONCE):
            sent = torch.empty(sum(each.numel() for each in some), dtype=self.sent)
            announce("communication", [sent])
            dist.all_reduce(sent)

    def _give_whole_gradients(self) -> None:
        if self.dtype is torch.float32:
            return
        for master, (parameter, *_) in self._updated:
            if parameter.grad is not None:
                master.grad = parameter.grad.float()
                announce("gradients", [master.grad])

    def _reduce_at_once(self) -> None:
        trained = [parameter for flat in self._flats for parameter in flat.parameters]
        for some in _chunked(trained, self.bucket_size):
            sent = torch.empty(sum(each.numel() for each in some), dtype=self.sent)
            announce("communication", [sent])
            dist.all_reduce(sent)
            for parameter in some:  # its gradient is in the bucket
                parameter.grad = None
        self._summed = torch.empty(sum(flat.own for flat in self._flats), dtype=self.dtype)
        announce("gradients", [self._summed])
        self._bucket = None

    def after_update(self) -> None:
        """See ZeroState."""
        if self.zero.stage == 0:
            for master, (parameter, *_) in self._updated if self.dtype is not torch.float32 else ():
                parameter.data.copy_(master)
                parameter.grad = None
            return
        for flat in self._flats:
            flat.master.grad = None
            flat.partition.copy_(flat.master.detach())
            at_once = max(1, int(self.zero.allgather_bucket_size) // self.world_size)
            for begin in range(0, flat.size, at_once):
                length = min(at_once, flat.size - begin)
                # Of the right size; in DeepSpeed, it is a list of parts.
                whole = flat.whole.narrow(0, begin * self.world_size, length * self.world_size)
                dist.all_gather_into_tensor(whole, flat.partition.narrow(0, begin, length))


class _Flat:
    """A group of parameters as one tensor, padded so that ranks share it evenly, and this rank's partition of it.

    Attributes:
        whole, partition: the tensor, which parameters are views of, and this rank's part of it.
        master: float32 copy of the partition.
        size: elements of the partition.
        own: elements of all parameters of which the partition has a part.
    """

    def __init__(self, parameters: list[nn.Parameter], dtype: torch.dtype, rank: int, world_size: int) -> None:
        self.parameters = parameters
        alignment = 2 * world_size
        self.size = -(-sum(parameter.numel() for parameter in parameters) // alignment) * alignment // world_size
        self.whole = torch.empty(self.size * world_size, dtype=dtype)
        self.own = begin = 0
        first, last = rank * self.size, (rank + 1) * self.size
        for parameter in parameters:
            end = begin + parameter.numel()
            parameter.data = self.whole.narrow(0, begin, parameter.numel()).view(parameter.shape)
            self.own += parameter.numel() if begin < last and end > first else 0
            begin = end
        self.partition = self.whole.narrow(0, first, self.size)
        self.master = torch.empty(self.size, dtype=torch.float32).requires_grad_()
        announce("parameters", [self.whole])
        announce("optimizer_state", [self.master])


def _chunked(parameters: Iterable[nn.Parameter], size: int) -> Iterator[list[nn.Parameter]]:
    """Yield parameters together, with at most ``size`` elements, or one that has more."""
    found: list[nn.Parameter] = []
    count = 0
    for parameter in parameters:
        if found and count + parameter.numel() > size:
            yield found
            found, count = [], 0
        found.append(parameter)
        count += parameter.numel()
    if found:
        yield found


# The tensors of ZeRO's stage 3 on one rank, by formula, as DeepSpeed 0.19.8 makes them; see ``rehearsed``.
#
# Parameters are gathered for the module that computes, and ahead of it; they stay for a use that is near. Which are
# gathered when is recorded in the first update.


# DeepSpeed's own defaults, in elements.
_PERSISTENT, _PREFETCHED, _FAR, _SUB_GROUP = 100_000, 50_000_000, 1_000_000_000, 1_000_000_000


class _Sharded:
    """A parameter of which every rank has an even share.

    Attributes:
        parameter: the model's, with its shape; its memory is there only while it is gathered.
        own: this rank's share, padded.
        stays: whether it stays gathered, because it is small.
        users: the modules that compute with it.
    """

    def __init__(self, parameter: nn.Parameter, dtype: torch.dtype, world_size: int) -> None:
        self.parameter, self.numel = parameter, parameter.numel()
        self.share = -(-self.numel // world_size)
        self.stays = self.is_gathered = False
        data = torch.empty(self.share * world_size, dtype=dtype if parameter.is_floating_point() else parameter.dtype)
        self._memory = data.untyped_storage()
        self._size = self._memory.nbytes()
        parameter.data = data.narrow(0, 0, self.numel).view(parameter.shape)
        self._memory.resize_(0)

    def gather(self) -> None:
        """Give the parameter its memory."""
        self.is_gathered = True
        self._memory.resize_(self._size)
        announce("communication", [self.parameter.data])

    def release(self) -> None:
        """Take it."""
        if self.is_gathered and not self.stays:
            self.is_gathered = False
            self._memory.resize_(0)


class ZeroPartitions(ZeroState):
    """Stage 3: every rank has a share of each parameter, and gathers them one module after the other."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        zero = self.zero

        def given(value: float | None, default: int) -> int:
            return default if value is None else int(value)

        self._persistent = given(zero.stage3_param_persistence_threshold, _PERSISTENT)
        self._persistent_in_all = given(zero.stage3_model_persistence_threshold, 2**62)
        self._prefetched = given(zero.stage3_prefetch_bucket_size, _PREFETCHED)
        self._live = given(zero.stage3_max_live_parameters, _FAR)
        self._far = given(zero.stage3_max_reuse_distance, _FAR)
        self._sub_group = given(zero.sub_group_size, _SUB_GROUP)
        self._known: dict[int, _Sharded] = {}
        self._order: list[list[_Sharded]] = []  # what each module of a micro-batch needs, in the order of computation
        self._recorded: list[list[_Sharded]] = []
        self._next = 0  # the first use that nothing was gathered for ahead
        self._missing: dict[nn.Module, int] = {}
        self._waiting: list[_Sharded] = []
        self._gradients: list[Tensor] = []
        self._held: list[Tensor] = []
        self._bucket: Tensor | None = None

    # Set-up

    def adopt(self, model: nn.Module) -> None:
        """See ZeroState."""
        super().adopt(model)
        kept = 0
        for parameter in dict.fromkeys(model.parameters()):
            found = self._known[id(parameter)] = _Sharded(parameter, self.dtype, self.world_size)
            found.stays = found.numel < self._persistent and kept + found.numel <= self._persistent_in_all
            kept += found.numel if found.stays else 0
        frozen = [found for found in self._known.values() if not found.parameter.requires_grad]
        self._frozen = [torch.empty(found.share, dtype=found.parameter.dtype) for found in frozen]
        announce("parameters", self._frozen)
        for module in model.modules():
            own = [*dict.fromkeys(module.parameters(recurse=False))]
            if own:
                module.register_forward_pre_hook(self._before_forward)
                module.register_forward_hook(self._after_forward)
            for parameter in own:
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self._take)  # type: ignore[no-untyped-call]

    def masters_of(self, parameters: list[nn.Parameter]) -> list[Tensor]:
        """See ZeroState; one of each sub-group."""
        masters: list[Tensor] = []
        groups: list[list[nn.Parameter]] = [[]]
        count = 0
        for parameter in parameters:
            groups[-1].append(parameter)
            count += parameter.numel()
            if count >= self._sub_group:
                groups.append([])
                count = 0
        for some in filter(None, groups):
            size = sum(self._known[id(parameter)].share for parameter in some)
            held = torch.empty(size, dtype=self.dtype)
            announce("parameters", [held])
            master = held if self.dtype is torch.float32 else torch.empty(size, dtype=torch.float32)
            announce("optimizer_state", [] if master is held else [master])
            self._gradients.append(torch.zeros(size, dtype=self.dtype))
            announce("gradients", self._gradients[-1:])
            self._held.append(held)
            masters.append(master.detach().requires_grad_())
            self._updated.append((masters[-1], some))
        if self._bucket is None:
            self._bucket = torch.empty(self.bucket_size, dtype=self.sent)
            announce("communication", [self._bucket])
        return masters

    # Gathering

    def _of(self, module: nn.Module) -> list[_Sharded]:
        return [self._known[id(parameter)] for parameter in dict.fromkeys(module.parameters(recurse=False))]

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        self._use(module)

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        self._release(module)
        for leaf in tree_flatten(output)[0]:
            node: Any = leaf.grad_fn if isinstance(leaf, Tensor) else None
            if node is not None:
                node.register_prehook(lambda *_: self._before_backward(module))

    def _before_backward(self, module: nn.Module) -> None:
        if module not in self._missing:
            self._missing[module] = sum(found.parameter.requires_grad for found in self._of(module))
            self._use(module)

    def _use(self, module: nn.Module) -> None:
        needed = self._of(module)
        self._order.append(needed)
        self._gather(needed)
        if self._recorded:
            self._gather_ahead(len(self._order))

    def _gather_ahead(self, step: int) -> None:
        self._next = max(self._next, step)
        live = sum(found.numel for found in self._known.values() if found.is_gathered)
        room, ahead = min(self._live - live, self._prefetched), []
        while self._next < len(self._recorded) and room > 0:
            for found in self._recorded[self._next]:
                if not found.is_gathered and found not in ahead:
                    ahead.append(found)
                    room -= found.numel
            self._next += 1
        self._gather(ahead)

    def _gather(self, several: Iterable[_Sharded]) -> None:
        missing = [found for found in several if not found.is_gathered]
        if not missing:
            return
        size = sum(found.share for found in missing)
        whole = torch.empty(size * self.world_size, dtype=self.dtype) if len(missing) > 1 else None
        own = torch.empty(size, dtype=self.dtype)  # already there, or copied
        missing[0].gather()
        flat = missing[0].parameter.data.new_empty(0) if whole is None else whole
        announce("communication", [flat, own])
        if whole is None:
            whole = torch.empty(0, dtype=self.dtype)
            whole.set_(missing[0].parameter.data.untyped_storage(), 0, (size * self.world_size,))  # type: ignore[call-overload]
        dist.all_gather_into_tensor(whole, own)
        for found in missing[1:]:
            found.gather()

    def _release(self, module: nn.Module) -> None:
        leaving = {id(found): found for found in self._of(module)}
        passed = 0
        for needed in self._recorded[len(self._order) :]:
            if passed >= self._far:
                break
            for found in needed:
                leaving.pop(id(found), None)
                passed += found.numel
        if self._recorded:
            for found in leaving.values():
                found.release()
        else:
            for found in self._of(module):
                found.release()

    # Gradients

    def _take(self, parameter: Any) -> None:
        """Move a gradient to the bucket, reduce the bucket first, if it is full, and release modules that are done."""
        found = self._known[id(parameter)]
        if self._waiting and sum(each.numel for each in self._waiting) + found.numel > self.bucket_size:
            self._reduce()
        self._waiting.append(found)
        if found.numel <= self.bucket_size:
            parameter.grad = None  # it is in the bucket
        for module in [
            each for each in self._missing if any(own is parameter for own in each.parameters(recurse=False))
        ]:
            self._missing[module] -= 1
            if not self._missing[module]:
                self._release(module)

    def _reduce(self) -> None:
        if not self._waiting:
            return
        size = sum(found.share for found in self._waiting)
        sent = torch.empty(size * self.world_size, dtype=self.sent)
        announce("communication", [sent])
        dist.reduce_scatter_tensor(sent.narrow(0, 0, size), sent)
        for found in self._waiting:
            found.parameter.grad = None
        self._waiting.clear()

    def after_backward(self) -> None:
        """See ZeroState."""
        self._reduce()
        for found in self._known.values():
            found.release()
        self._recorded, self._order, self._next = self._order, [], 0
        self._missing.clear()

    # The update

    def before_update(self) -> None:
        """See ZeroState."""
        self._agree()
        for (master, _), kept in zip(self._updated, self._gradients, strict=True):
            master.grad = kept.clone().to(torch.float32)
            announce("gradients", [master.grad])

    def after_update(self) -> None:
        """See ZeroState; parameters that stay gathered are gathered again."""
        for (master, _), held in zip(self._updated, self._held, strict=True):
            master.grad = None
            if self.dtype is not torch.float32:
                held.copy_(master.detach())
        staying = [found for found in self._known.values() if found.stays and found.is_gathered]
        for found in staying:
            whole = torch.empty(found.share * self.world_size, dtype=self.dtype)
            dist.all_gather_into_tensor(whole, torch.empty(found.share, dtype=self.dtype))


class RehearsedWrapper(OptimWrapper):
    """An OptimWrapper whose optimizer updates what the engine's does; made by ``RehearsedZero``."""

    _zero: ZeroState

    @classmethod
    def of(cls, asked: OptimWrapper) -> RehearsedWrapper:
        """Return a wrapper with the settings of ``asked``, in the precision of the model."""
        wrapper = cls.__new__(cls)
        vars(wrapper).update(vars(asked))
        return wrapper

    @property
    def precision(self) -> Precision:
        """No autocast: the whole model is cast."""
        return Precision()

    def build(self, model: nn.Module) -> None:
        """See OptimWrapper; the optimizer gets this rank's masters in place of the parameters."""
        super().build(model)
        check_supported(self, stage := self._zero.zero.stage)
        if stage and looks_at_whole(self):
            raise ConfigError(
                f"{self.where}.optimizer: {type(self.optimizer).__name__} cannot be planned under ZeRO, whose formulas have no owners of "
                'whole matrices; plan with strategy="fsdp", which shards as much at stage 3'
            )
        self._zero.shard(self.optimizer)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        """See OptimWrapper."""
        super().backward(loss, retain_graph=retain_graph)
        self._zero.after_backward()

    def _unscale(self) -> None:
        self._zero.before_update()

    def _apply(self) -> bool:
        applied = super()._apply()
        self._zero.after_update()
        return applied


class RehearsedZero(Strategy):
    """Makes the tensors and collectives of DeepSpeedStrategy with the same options; only in a rehearsal.

    Args:
        asked: options of the DeepSpeedStrategy.

    Raises:
        ConfigError: state is offloaded.
    """

    Config = DeepSpeedConfig
    config: DeepSpeedConfig

    def __init__(self, asked: DeepSpeedConfig) -> None:
        super().__init__()
        self.config = asked
        for part in (asked.zero_optimization.offload_optimizer, asked.zero_optimization.offload_param):
            if part is not None and part.device != "none":
                raise ConfigError(
                    f'strategy.zero_optimization.{part.key}.device: "{part.device}" cannot be planned, memory of the host is '
                    "not counted"
                )
        self._request = Request(torch.float32, 0.0, 1, {})
        self._zero: ZeroState | None = None

    def tell(self, listen: Callable[[str, Iterable[Tensor]], object]) -> None:
        """Let ``listen(kind, tensors)`` know what the memory of tensors is for, which no operation shows."""
        _listeners[:] = [listen]

    def setup(self, model: nn.Module, optim: Optim | None = None) -> tuple[nn.Module, Optim | None]:
        """See Strategy."""
        self.join()
        asked = check_wrapper(optim)
        asked.attach(self.device, self.autocast)
        # float16 has the sizes that it has on an accelerator, where it is possible.
        self._request = resolve(self.config, asked, torch.device("cuda"))
        wrapper = RehearsedWrapper.of(asked)
        wrapper.accumulate = wrapper._size = self._request.accumulate
        if self._request.max_norm and wrapper.clip_grad is None:
            wrapper.clip_grad = ClipGrad(max_norm=self._request.max_norm)
        zero = self.config.zero_optimization
        kind = ZeroPartitions if zero.stage == 3 else WholeParameters
        sent = self.config.communication_data_type
        dtype = self._request.dtype
        wrapper._zero = self._zero = kind(
            zero, dtype, DTYPES[sent] if sent else dtype, self.topology.rank, self.topology.world_size
        )
        return super().setup(model, wrapper)

    def _wrap(self, model: nn.Module) -> nn.Module:
        assert self._zero is not None
        dtype = self._request.dtype
        if dtype is not torch.float32:
            keep_running_statistics(model, dtype)
            cast_inputs_and_outputs(model, dtype, self.config.inputs_to_half)
        self._zero.adopt(model)
        return model

    def _check_precision(self) -> None:
        pass

    def autocast(self) -> AbstractContextManager[None]:
        """See Strategy; none, as under DeepSpeedStrategy."""
        return NOTHING

    def model_state(self) -> dict[str, Tensor]:
        """See Strategy; float32 masters, of which every rank has an even share but at stage 0."""
        return {name: self._offered_as(parameter) for name, parameter in self.parameters()} | self.buffers()

    def _offered_as(self, like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        shape = tuple(getattr(like, "whole_shape", like.shape))
        if self.config.zero_optimization.stage == 0:
            return torch.empty(shape, dtype=dtype, device="meta")
        begin, end = share(math.prod(shape), self.topology.world_size, self.topology.rank)
        return FlatShard(torch.empty(end - begin, dtype=dtype, device="meta"), shape, begin)

    def state(self) -> dict[str, Any]:
        """See Strategy."""
        assert self._zero is not None
        state: dict[str, Any] = dict(self._offered())
        names = {id(parameter): name for name, parameter in self.parameters()}
        for wrapper in self.optim.wrappers.values() if self.optim is not None else ():
            for master, group, parameters in self._zero.updated(wrapper.optimizer):
                settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
                for name, parameter in ((names[id(parameter)], parameter) for parameter in parameters):
                    for key, value in wrapper.optimizer.state.get(master, {}).items():
                        each = isinstance(value, Tensor) and value.shape == master.shape and master.dim()
                        state[f"{STATE}{name}.{key}"] = self._offered_as(parameter, value.dtype) if each else value
                    state |= {f"{GROUP}{name}.{key}": value for key, value in settings.items()}
                    state[f"{GROUP}{name}.optimizer"] = type(wrapper.optimizer).__name__
        return state
