"""Tensors without values, and what refuses to work with them."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from flextrain.core.base.errors import StrategyError
from flextrain.core.comm.agreement import gather_differing, raising_together, roll_call
from flextrain.core.comm.collectives import all_gather_object, broadcast_object
from flextrain.core.torch_compat.torch_private import has_values, is_fake, with_values
from flextrain.plan import rehearsing
from flextrain.plan.rehearsing_private import data_parallel_without_values
from flextrain.strategies.base import Strategy
from flextrain.strategies.config import Needs
from flextrain.strategies.parts import rehearsed

from .conftest import PLANS


def test_a_version_of_torch_that_was_not_checked_is_one_line(monkeypatch):
    monkeypatch.setattr(rehearsing, "CHECKED", ("1.0", "1.1"))
    says = r"^plan: torch \S+ was not checked, figures might be wrong; plan with torch 1\.0"
    with pytest.raises(StrategyError, match=says), rehearsing.rehearsal(0, 2):
        pass
    assert not torch.distributed.is_initialized()


@PLANS
def test_all_other_processes_have_what_this_one_has():
    with rehearsing.rehearsal(1, 4) as found, found.without_values():
        assert (all_gather_object("a"), gather_differing([1])) == (["a"] * 4, [[1]] * 4)
        assert broadcast_object({"of": "rank 0"}) == {"of": "rank 0"}
        assert roll_call("a call", 1.0) is None
        with pytest.raises(StrategyError, match="mine"), raising_together():
            raise StrategyError("mine")
        assert not has_values(torch.ones(2))
        with with_values():
            assert has_values(torch.ones(2))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        own = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.one, self.other = own, own
        nn.init.trunc_normal_(self.one)  # reads values
        self.register_buffer("mean", torch.zeros(2))


def test_a_model_is_built_and_stripped_with_its_ties():
    found = rehearsing.WithoutValues()
    with found.building():
        model = Tied()
    assert all(is_fake(parameter) for parameter in model.parameters())
    assert model.head.weight is model.embed.weight
    assert model.one is model.other
    assert not model.one.requires_grad
    assert not is_fake(model.mean)
    found.strip(model)
    assert is_fake(model.mean)
    assert {name for name, _ in model.named_buffers()} == {"mean"}
    assert not is_fake(nn.Linear(2, 2).weight)


def test_what_needs_real_processes_cannot_be_rehearsed():
    class Threads(Strategy):
        needs = Needs(processes="its ranks are real")

    assert rehearsed(Threads()) is None
    ordinary = Strategy()
    assert rehearsed(ordinary) is ordinary


def test_a_rehearsal_leaves_torchs_data_parallel_as_it_was():
    with data_parallel_without_values():
        pass

    class Own(DistributedDataParallel):
        def __init__(self, module: nn.Module) -> None:
            nn.Module.__init__(self)

    assert isinstance(Own(nn.Linear(1, 1)), DistributedDataParallel)
