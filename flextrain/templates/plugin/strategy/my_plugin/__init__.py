"""A strategy: the whole model in every process, and all gradients of an update averaged in one message."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from flextrain import Strategy


class MyPluginStrategy(Strategy):
    """Replace `average` by what yours does; the interface has its own page, docs/strategy_interface.md."""

    short_names = {"my_plugin": {}}
    interface_version = range(2, 3)  # those that it was tried with

    def setup(self, model: Any, optim: Any = None) -> Any:
        model, optim = super().setup(model, optim)
        if optim is not None and self.topology.data.count > 1:
            for wrapper in optim.wrappers.values():
                wrapper.register_step_pre_hook(self.average)
        return model, optim

    def average(self, optim: Any) -> None:
        """Give every process the means over all; a parameter that none has used keeps no gradient."""
        parameters = [p for group in optim.param_groups for p in group["params"] if p.requires_grad]
        sent = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        used = [p.new_tensor([p.grad is not None]) for p in parameters]
        message = torch.cat([tensor.flatten() for tensor in (*sent, *used)])
        dist.all_reduce(message, group=self.topology.data.group)
        *means, shares = (message / self.topology.data.count).split([*(p.numel() for p in parameters), len(parameters)])
        for parameter, mean, share in zip(parameters, means, shares.tolist(), strict=True):
            parameter.grad = mean.view_as(parameter) if share else None
