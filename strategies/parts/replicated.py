"""What several processes hold replicas of, whether these are equal, and who computes with other tokens."""

from __future__ import annotations

from functools import singledispatch

from torch import Tensor, nn

from ...core.comm.replica_check import ReplicaCheck
from ...core.comm.topology import DataShard
from ...optim.canonical import STATE
from ..base import Strategy


@singledispatch
def replicas(strategy: Strategy) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the parameters and the optimizer state of this process, by name, for ``check_replicas``.

    Their types give the layouts, as in ``model_state``; what no other process holds is not compared. The names are
    those of ``state``, and ``module.<name>`` for whole weights that the model computes with beside its master.
    """
    weights, buffers = strategy.model_state(), {name for name, _ in strategy.module.named_buffers()}
    found = {f"model.{name}": tensor for name, tensor in weights.items() if name not in buffers}
    for name, parameter in strategy.parameters():
        master = weights[name]
        is_same = type(master) in (Tensor, nn.Parameter) and master.data_ptr() == parameter.data_ptr()
        if type(parameter) is nn.Parameter and parameter.shape == master.shape and not is_same:
            found[f"module.{name}"] = parameter.detach()
    state = {key: value for key, value in strategy.state().items() if key.startswith(STATE)}
    return found, {key: value for key, value in state.items() if isinstance(value, Tensor)}


def check_replicas(strategy: Strategy) -> dict[str, Tensor]:
    """Compare what several processes hold replicas of, bit for bit; a collective. Every save does it first.

    Compared are ``replicas(strategy)`` with those of all processes that hold the same, and buffers that nothing has
    written since the last check: others, such as running statistics, are each process's own. The host waits once for
    the device.

    Returns:
        The tensors that were compared, by name.

    Raises:
        DivergenceError: on every process, if replicas differ; it names a tensor and the ranks.
    """
    noted = strategy.noted
    noted.replica_check = noted.replica_check or ReplicaCheck()
    return noted.replica_check.check(replicas(strategy), dict(strategy.module.named_buffers()))


def averaged_over(strategy: Strategy) -> DataShard:
    """Return the processes that have the same parameters as this one and other tokens, over which gradients are averaged.

    Those of other shards of the data, and those with other positions of the same sequences. The first call may be a collective.
    """
    return strategy._averaged_over()
