"""Checks of a strategy's properties, precision, refusals and teardown."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..core.comm import collectives as dist
from ..core.errors import ConfigError, StrategyError
from ..core.registry import STRATEGIES
from ..optim.amp import AmpOptimWrapper
from ..optim.wrapper import OptimWrapper
from ..strategies.base import Strategy
from .check_table import StrategyUnderTest, check
from .checks_training import SAMPLES, Decay, batches, one_each, sgd
from .differences import CheckFailedError, require, same_tensors
from .loop import learning_rates
from .models import Batch, ConformanceNet
from .sessions import Session, run


@check("rank, world size, device and data shards are right, and module is the user's own model")
def facts(tested: StrategyUnderTest) -> None:
    with tested.session(sgd()) as session:
        strategy = session.strategy
        strategy.setup_environment()  # a second call must change nothing
        require(strategy.rank == tested.rank, f"rank is {strategy.rank}, the launcher said {tested.rank}")
        require(
            strategy.world_size == tested.world_size,
            f"world_size is {strategy.world_size}, {tested.world_size} were started",
        )
        require(isinstance(strategy.device, torch.device), f"device is {strategy.device!r}, give a torch.device")
        topology = strategy.topology
        shards = tested.all_gather((*topology.shard, topology.reports))
        count = shards[0][1]
        require(
            all(shard[1] == count for shard in shards) and {index for index, *_ in shards} == set(range(count)),
            f"topology.data is {shards} over the processes: the indices must cover 0 to count - 1",
        )
        require(
            sorted(index for index, _, reports in shards if reports) == list(range(count)),
            f"topology is {shards} over the processes: one process for each part of the data must report",
        )
        module = strategy.module
        require(
            isinstance(module, ConformanceNet), f"module is a {type(module).__name__}, the user's is a ConformanceNet"
        )
        names = {name for name, _ in ConformanceNet().named_parameters()}
        held = set().union(*tested.all_gather({name for name, _ in module.named_parameters()}))
        require(held == names, "module's parameter names are not the user's")
        require(len(session.optim.param_groups) > 0, "the wrapper that setup returned has no param_groups")


@check("float32 is float32, and bfloat16 under AmpOptimWrapper computes in it and keeps float32 weights, as reported")
def precision(tested: StrategyUnderTest) -> None:
    with tested.session(sgd()) as session:
        _require_dtypes(session, compute=torch.float32)
    with tested.session_or_refused(AmpOptimWrapper(dict(type="AdamW", lr=1e-3), dtype="bfloat16")) as session:
        computed: list[torch.dtype] = []
        # A layer in the middle of the model, because the model's outputs may be cast back.
        layer = session.strategy.module.get_submodule("norm")
        handle = layer.register_forward_pre_hook(lambda _, args: computed.append(args[0].dtype))
        run(session, one_each(batches(2)))
        handle.remove()
        _require_dtypes(session, compute=torch.bfloat16)
        inner = session.strategy.module.get_submodule("blocks.0.out")
        require(
            _output_dtype(session, inner) is torch.bfloat16, "a linear layer's output under autocast is not bfloat16"
        )
        state = session.strategy.state_dict()
        for key, value in state.items():
            if isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 0:
                require(value.dtype is torch.float32, f"{key} is stored in {value.dtype}, its truth must be float32")


def _output_dtype(session: Session, layer: torch.nn.Module) -> torch.dtype | None:
    seen: list[torch.dtype] = []
    handle = layer.register_forward_hook(lambda _, args, output: seen.append(output.dtype))
    run(session, one_each(batches(1)))
    handle.remove()
    return seen[0] if seen else None


def _require_dtypes(session: Session, compute: torch.dtype) -> None:
    report = session.strategy.precision_report()
    require(report.compute == (compute,), f"precision_report says compute {report.compute}, {compute} was asked for")
    kept = report.masters or report.parameters
    require(kept == (torch.float32,), f"precision_report says the weights are kept in {kept}, float32 was asked for")


@check("gradients that overflow on one rank skip the update on all, and neither weights nor schedule move")
def overflow(tested: StrategyUnderTest) -> None:
    windows = [[_strained(batch, number == 2)] for number, batch in enumerate(batches(5))]
    wrapper = AmpOptimWrapper(
        dict(type="SGD", lr=0.05, momentum=0.9), dtype="float16", loss_scale=dict(init_scale=256.0),
        clip_grad=dict(max_norm=5.0),
    )  # fmt: skip
    with tested.session_or_refused(wrapper) as session:
        base = learning_rates(session.optim)
        result = run(session, windows, [Decay(session.optim)])
        outcomes = tested.all_gather((result.trace.skipped, learning_rates(session.optim)))
        parts = tested.all_gather(result.weights)
    for rank, (skipped, lrs) in enumerate(outcomes):
        require(
            skipped == [False, False, True, False, False],
            f"rank {rank} reports skipped={skipped}, only update 2 had a gradient that is not finite",
        )
        applied = [lr * 0.8**4 for lr in base]
        same_tensors(
            {"lr": torch.tensor(lrs)},
            {"lr": torch.tensor(applied)},
            f"learning rates of rank {rank} after 4 updates",
            1e-6,
        )
        same_tensors(parts[rank][3], parts[rank][2], f"weights of rank {rank} before and after the skipped update")
        same_tensors(parts[rank][5], parts[0][5], f"final weights of rank {rank} and rank 0")
    moved = any(not torch.equal(parts[0][3][key], parts[0][4][key]) for key in parts[0][3])
    require(moved, "the update after the skipped one did not change the weights")


def _strained(batch: Batch, overflowing: bool) -> Batch:
    """The batch with ``strain`` zero, or infinite for the last sample, which the last rank gets."""
    strain = torch.zeros(SAMPLES)
    if overflowing:
        strain[-1] = torch.inf
    return {**batch, "strain": strain}


@check("impossible requests are refused: unknown options, an optimizer with another model's parameters")
def refusals(tested: StrategyUnderTest) -> None:
    described = isinstance(tested.spec, (str, Mapping)) or (
        isinstance(tested.spec, type) and issubclass(tested.spec, Strategy)
    )
    if described:
        config: dict[str, Any] = dict(tested.spec) if isinstance(tested.spec, Mapping) else {"type": tested.spec}
        try:
            STRATEGIES.build({**config, "no_such_option": 1}, "strategy")
        except ConfigError as error:
            require("no_such_option" in str(error), f"the error about an unknown option does not name it: {error}")
        else:
            raise CheckFailedError("an unknown option was accepted, it must raise ConfigError")
    foreign = OptimWrapper(torch.optim.SGD(ConformanceNet().parameters(), lr=0.1))
    try:
        with tested.session(foreign):
            pass
    except (ConfigError, StrategyError):
        return
    raise CheckFailedError(
        "setup accepted an optimizer that holds another model's parameters, it must raise StrategyError"
    )


@check(
    "after teardown, which may be called twice, no process group, thread, variable or model is left, and a new job can "
    "start"
)
def teardown(tested: StrategyUnderTest) -> None:
    variables, threads = dict(os.environ), set(threading.enumerate())
    models = [weakref.ref(_trained_and_left(tested)) for _ in range(2)]
    gc.collect()
    require(not any(model() for model in models), "the model is still in memory after teardown")
    own = ("MASTER_PORT", "TORCHINDUCTOR_CACHE_DIR")  # set by this kit, and by torch
    changed = sorted(name for name, value in os.environ.items() if variables.get(name) != value and name not in own)
    require(not changed, f"environment variables were left changed: {', '.join(changed)}")
    left = [thread.name for thread in threading.enumerate() if thread not in threads and not thread.daemon]
    require(not left, f"threads were left running: {', '.join(left)}")


def _trained_and_left(tested: StrategyUnderTest) -> nn.Module:
    """A model after a few updates and teardown."""
    module = ConformanceNet()
    strategy = tested.strategy()
    try:
        strategy.setup_environment()
        joined = dist.is_initialized()
        require(joined or tested.world_size == 1, "setup_environment did not join a process group")
        model, optim = strategy.setup(module, sgd())
        assert optim is not None
        run(Session(strategy, model, optim), one_each(batches(3)))  # type: ignore[arg-type]
    finally:
        strategy.teardown()
    require(not dist.is_initialized(), "the process group is still there after teardown")
    strategy.teardown()
    return module
