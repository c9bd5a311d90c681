"""Hybrid sharding by nodes: how many replicas there are if each node holds one."""

from __future__ import annotations

import itertools
import logging
import socket

from ...core.comm import collectives as dist
from ...core.comm.topology import DataShard
from ...core.errors import StrategyError

_logger = logging.getLogger("flextrain")


def replicas_by_node(data: DataShard) -> int:
    """Return the number of nodes, for a replica on each; a collective.

    Raises:
        StrategyError: the nodes have different numbers of processes, or their ranks alternate.
    """
    names = dist.all_gather_object(socket.gethostname())
    blocks = [len(list(same)) for _, same in itertools.groupby(names)]
    if len(blocks) != len(set(names)) or len(set(blocks)) > 1 or data.count != len(names):
        raise StrategyError(
            f"strategy.model_wrapper.sharding_strategy: needs as many processes on each node, with consecutive ranks and data of "
            f"their own, found {', '.join(map(str, blocks))} on {', '.join(dict.fromkeys(names))}; give strategy.replicate_size"
        )
    _logger.info(f"Hybrid sharding: {len(blocks)} replicas, each over the {blocks[0]} processes of a node")
    return len(blocks)
