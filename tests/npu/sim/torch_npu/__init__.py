"""A simulated Ascend NPU for machines without one, under the name of Ascend's package.

With this folder's parent on the path, ``import torch`` finds a device of type "npu" whose memory is the host's and whose
kernels are the CPU's. Nothing can be taken back: use it in a process of its own.

Environment:
    NPU_SIM_DEVICE_COUNT: number of devices; default 2. ASCEND_RT_VISIBLE_DEVICES chooses among them.
    NPU_SIM_TYPE: what torch shall call the device; default "npu".
    TORCH_NPU_SOURCE: folder of Ascend's unpacked ``torch_npu``; ``torch_npu.optim`` and ``torch_npu.npu.amp`` are then its own.

Work that touches memory without waiting for the stream that used it before raises an error, as does freeing memory that another
stream still uses; copies to and from page-locked memory arrive late (``arrive``). It does not show what only hardware does:
running out of memory, time-outs, other rounding.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor
from torch._decomp import decompositions

from . import _library

__version__ = "2.14.0"
device_type = os.environ.get("NPU_SIM_TYPE", "npu")
_sim = _library.load()
_source = os.environ.get("TORCH_NPU_SOURCE")
if _source:
    __path__.append(_source)

torch.utils.rename_privateuse1_backend(device_type)
from . import npu  # noqa: E402 - its events and streams need the name

torch._register_device_module(device_type, npu)
torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)


def watch(function) -> None:
    """Call ``function(what)`` whenever the host waits for the device or takes a value from it; None ends that.

    ``what`` is "item", "copy to host", "blocking copy to device", "size" (a shape depends on values) or "synchronize".
    """
    _sim.watch(function)


def arrive(when: str, seed: int = 0) -> None:
    """Choose when copies between the device and page-locked memory are made of which nobody has seen the end.

    ``when``: "late" (the default: when the host waits for them, or the device uses what came), "at once", or "random".
    """
    _sim.arrive(when, seed)


# Operators that Ascend's optimizers use


def get_npu_format(tensor: Tensor) -> int:
    """The number of the plain layout: there is no other here."""
    return 2


def npu_format_cast(tensor: Tensor, format: int) -> Tensor:
    """The tensor as it is."""
    return tensor


def get_storage_size(tensor: Tensor) -> int:
    """Elements in the tensor's memory."""
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def npu_change_data_ptr(target: Tensor, source: Tensor, offset: int) -> int:
    """Let the memory of ``target`` be that of ``source``, from element ``offset`` on."""
    _sim.change_data_ptr(target, source, offset)
    return 0


def npu_fusion_attention(*args, **kwargs) -> None:
    """A kernel that transformers imports by its name; here is none."""
    raise NotImplementedError("the simulated device has no fused attention")


# Recurrent layers by torch's decompositions: the CPU's kernels are not split into cells.
_aten = torch.library.Library("aten", "IMPL")
for _operator, _implementation in {
    "lstm.input": decompositions.lstm_impl,
    "lstm.data": decompositions.lstm_data_impl,
    "gru.input": decompositions.gru_impl,
    "gru.data": decompositions.gru_impl_data,
}.items():
    for _key in ("AutogradPrivateUse1", "PrivateUse1"):
        _aten.impl(_operator, _implementation, _key)

from . import _sync_batch_norm  # noqa: E402, F401 - registers operators


def _make_group(options, _):
    gloo = dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, timeout=options.timeout)
    return _sim.hccl_over(gloo, list(options.global_ranks_in_group))


dist.Backend.register_backend("hccl", _make_group, extended_api=True, devices=[device_type])
dist.is_hccl_available = lambda: True


def _autoload() -> None:
    """What torch calls at the end of its own import, by the entry point."""
