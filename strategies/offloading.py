"""Activation offloading: what forward saves for backward waits in the memory of the host, and comes back ahead of its use."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ..core.base.tensors import parts_of
from ..core.torch_compat.torch_private import base_of, same_below_autograd, storage_key, version_of

LEAST = 2**20
"""Bytes below which memory stays on the device: a copy of so few takes longer to start than to make."""


def on_host(like: Tensor, pinned: bool) -> Tensor:
    """Return memory of the host for the values of a tensor; who keeps books of it puts another function in this one's place."""
    return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=pinned)


@functools.cache
def _stream_of(device: torch.device) -> Any:
    """The stream of copies of a device; None: copies are made at once."""
    return None if device.type == "cpu" else torch.Stream(device)


def _changed_in_place(shape: torch.Size) -> RuntimeError:
    return RuntimeError(  # as autograd does
        "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of shape "
        f"{list(shape)}, saved by a module whose activations are offloaded"
    )


class _Memory:
    """The memory of saved tensors: on the device, on its way, or on the host. All views of it share it.

    Args:
        source: all of it, one-dimensional.
        version: of the tensor that was saved.
    """

    def __init__(self, source: Tensor, saved: Tensor) -> None:
        # What a node saves of its own result would hold the node, for ever if no backward frees it.
        self._saved: Tensor | None = same_below_autograd(saved)
        self._version = version_of(saved)
        self._changed: torch.Size | None = None
        self._there: Tensor | None = source
        self._stream = _stream_of(source.device)
        self._device = source.device
        self._event: Any = None  # of a copy that nobody has waited for
        self._host = on_host(source, pinned=self._stream is not None)
        self._copy(source, self._host)

    def _copy(self, source: Tensor, target: Tensor) -> None:
        if self._stream is None:
            target.copy_(source)
            return
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            target.copy_(source, non_blocking=True)
            self._event = self._stream.record_event()

    def _wait(self) -> None:
        """Let the device's current stream wait until the copy under way is complete."""
        if self._event is not None:
            torch.accelerator.current_stream(self._device).wait_event(self._event)
            self._event = None

    def _note_change(self) -> None:
        if self._saved is not None and version_of(self._saved) != self._version:
            self._changed = self._saved.shape

    def settle(self) -> None:
        """Let what comes next on the device change the memory."""
        self._wait()
        self._saved = self._there = None

    def let_go(self) -> None:
        """Free the memory on the device; the copy on the host is complete before others write there."""
        self._note_change()
        self.settle()

    def bring_back(self) -> None:
        """Start the copy to the device, if it is not there."""
        if self._there is None:
            self._there = torch.empty(self._host.shape, dtype=self._host.dtype, device=self._device)
            self._copy(self._host, self._there)

    def on_device(self) -> Tensor:
        """All of the memory, one-dimensional."""
        self._note_change()
        if self._changed is not None:
            raise _changed_in_place(self._changed)
        self.bring_back()
        self._wait()
        assert self._there is not None
        return self._there

    def __del__(self) -> None:
        if (
            self._event is not None and self._there is not None
        ):  # otherwise others might write where the copy still does
            self._there.record_stream(self._stream)


class _Call:
    """One call of a module, with what it saved; ``before`` is the call before it, whose backward comes next."""

    def __init__(self, own: set[int], before: _Call | None) -> None:
        self.own = own
        self._before = (lambda: None) if before is None else weakref.ref(before)
        self._memory: dict[tuple[int, int], weakref.ref[_Memory]] = {}
        self._is_coming = False

    def memory_of(self, saved: Tensor) -> _Memory:
        """The memory of a tensor, which is copied once, whatever views of it are saved."""
        key = storage_key(saved), version_of(saved)
        before = self._before()
        known = self._known(key)
        if known is None and before is not None:
            known = before._known(key)
        if known is None:
            count = saved.untyped_storage().nbytes() // saved.itemsize
            known = _Memory(saved.detach().as_strided((count,), (1,), 0), saved)
        self._memory[key] = weakref.ref(known)
        return known

    def _known(self, key: tuple[int, int]) -> _Memory | None:
        found = self._memory.get(key)
        memory = None if found is None else found()
        return memory if memory is not None and memory._saved is not None else None

    def _alive(self) -> Iterator[_Memory]:
        return (memory for found in self._memory.values() if (memory := found()) is not None)

    def let_go(self, later: _Call | None = None) -> None:
        """Free what was saved, but for what a later call saved too."""
        kept = set() if later is None else {*later._alive()}
        for memory in self._alive():
            if memory not in kept:
                memory.let_go()

    def come(self) -> None:
        """Start the copies of this call, and of the one whose backward is next."""
        if self._is_coming:
            return
        self._is_coming = True
        for call in (self, self._before()):
            for memory in call._alive() if call is not None else ():
                memory.bring_back()


class _View:
    """A saved tensor whose memory may be on the host."""

    def __init__(self, tensor: Tensor, memory: _Memory, call: _Call) -> None:
        self.memory, self._call = memory, call
        self._place = tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()

    def settle(self) -> _View:
        """Return itself, when the tensor may be changed in place."""
        self.memory.settle()
        return self

    def unpack(self) -> Tensor:
        self._call.come()
        dtype, shape, stride, offset = self._place
        with torch.no_grad():
            return self.memory.on_device().view(dtype).as_strided(shape, stride, offset)


class _Wrapped:
    """A saved tensor that consists of others, such as a DTensor."""

    def __init__(self, tensor: Any, pack: Callable[[Tensor], Any]) -> None:
        names, self._context = tensor.detach().__tensor_flatten__()
        self._type, self._form = type(tensor), (tensor.shape, tensor.stride())
        parts = {name: getattr(tensor, name) for name in names}
        self._inner = {name: pack(part) for name, part in parts.items() if isinstance(part, Tensor)}
        # From torch 2.15 on, a DTensor's mesh is one of them.
        self._others = {name: part for name, part in parts.items() if name not in self._inner}

    def settle(self) -> _Wrapped:
        """Return itself, when the tensor may be changed in place."""
        self._inner = {name: one.settle() for name, one in self._inner.items()}
        return self

    def unpack(self) -> Tensor:
        inner = self._others | {name: unpack(one) for name, one in self._inner.items()}
        found: Tensor = self._type.__tensor_unflatten__(inner, self._context, *self._form)
        return found


class _Stays:
    """A saved tensor that stays where it is."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = tensor, version_of(tensor)

    def settle(self) -> _Stays:
        """Return what stands for a copy, before the tensor is changed in place."""
        return _Stays(self._tensor.clone())

    def unpack(self) -> Tensor:
        if version_of(self._tensor) != self._version:
            raise _changed_in_place(self._tensor.shape)
        return self._tensor


def unpack(packed: Any) -> Tensor:
    """Return the tensor that ``Offloading.pack`` was given."""
    found: Tensor = packed.unpack()
    return found


class Offloading:
    """Moves what modules save for backward to the host.

    The copies run beside the computation, on a stream of their own. The memory of one call is freed at the end of the next one. In
    backward, the copies of the call before start together with the computation of a call. Parameters, buffers and small
    tensors stay.

    Args:
        device: on which the model computes; on the CPU, copies are plain.

    Source: Rajbhandari et al., "ZeRO-Infinity", 2021, section 5.1.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._call: _Call | None = None
        self._last: Any = lambda: None

    def pack(self, tensor: Tensor) -> Any:
        """Return what stands for a saved tensor, for ``unpack``; inside of a call."""
        base = base_of(tensor)
        if self._call is None or isinstance(tensor if base is None else base, nn.Parameter):
            return _Stays(tensor)
        if hasattr(tensor, "__tensor_flatten__"):
            return _Wrapped(tensor, self.pack)
        is_strided = tensor.device.type == self._device.type and tensor.layout is torch.strided
        is_lazy = tensor.is_conj() or tensor.is_neg()  # other values than those of its memory
        if (
            is_lazy
            or not is_strided
            or tensor.untyped_storage().nbytes() < LEAST
            or storage_key(tensor) in self._call.own
        ):
            return _Stays(same_below_autograd(tensor))
        with torch.no_grad():
            return _View(tensor, self._call.memory_of(tensor), self._call)

    @torch.compiler.disable(recursive=False)  # type: ignore[no-untyped-call, untyped-decorator]  # what is inside is compiled by itself
    def call(
        self, forward: Callable[..., Any], module: nn.Module, run: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Return ``run(forward, *args, **kwargs)``; what it saves for backward goes to the host."""
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        own = {storage_key(part) for held in (*module.parameters(), *module.buffers()) for part in parts_of(held)}
        outer, before = self._call, self._last()
        call = self._call = _Call(own, before)
        try:
            with saved_tensors_hooks(self.pack, unpack):
                result = run(forward, *args, **kwargs)
        except BaseException:
            call.let_go()
            raise
        finally:
            self._call = outer
            if before is not None:
                before.let_go(call)
        self._last = weakref.ref(call)
        return result
