"""Strategies of which several processes train on the same part of the data, each on a whole copy of the model."""

from __future__ import annotations

from torch.distributed.device_mesh import init_device_mesh

from flextrain import DataShard, DDPStrategy, FSDPStrategy, Strategy, Topology


class Copies(Strategy):
    """Mixed in: two processes beside each other have the same part of the data, and the second of them reports.

    ``apart``: half of all processes lie between them instead.
    """

    apart = False

    def _arrange(self) -> Topology:
        names = ("copy", "data") if self.apart else ("data", "copy")
        half = self.topology.world_size // 2
        mesh = init_device_mesh("cpu", (2, half) if self.apart else (half, 2), mesh_dim_names=names)
        part, copy = mesh.get_local_rank("data"), mesh.get_local_rank("copy")
        return Topology(
            data=DataShard(part, half, mesh.get_group("data")),
            reports=copy == 1,
            axes={"data": (part, half), "copy": (copy, 2)},
        )


class DDPCopies(Copies, DDPStrategy):
    pass


class FSDPCopies(Copies, FSDPStrategy):
    apart = True
