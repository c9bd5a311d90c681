"""The tensors of ZeRO's stage 3 on one rank, by formula, as DeepSpeed 0.19.8 makes them; see ``rehearsed``.

Parameters are gathered for the module that computes, and ahead of it; they stay for a use that is near. Which are gathered
when is recorded in the first update.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...core.rehearsing import announce
from ...core.torch_private import tree_flatten
from .rehearsed_partitions import ZeroState

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
