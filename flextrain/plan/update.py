"""Make a few updates of a user's training with the books kept: on real tensors, or as one rank of many in a rehearsal."""

from __future__ import annotations

import copy
import dataclasses
import gc
import itertools
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ..core.base.errors import ConfigError
from ..core.base.tensors import parts_of
from ..core.comm.topology import Topology
from ..core.hugging_face.transformers_private import pretrained_models, taking_sequences_for_whole
from ..core.model.base_model import overrides
from ..core.torch_compat.torch_private import tree_flatten, with_values
from ..optim.wrapper import OptimWrapper
from ..optim.wrapper_dict import OptimWrapperDict
from ..runner.config import check_everything
from ..runner.data.dataloaders import build_dataloader
from ..runner.data.first_batches import example_batch, first_batches
from ..runner.data.user_loaders import batch_size, goes_its_own_way
from ..runner.hooks import DEFAULT_HOOKS
from ..runner.loops.losses import Weighing
from ..runner.loops.step import Stepper
from ..runner.parts import build_model
from ..runner.transforms.apply import transform
from ..runner.transforms.chunked_loss import head_of
from ..strategies.base import Strategy
from ..strategies.parts import note_initialised, pipeline_of, rehearsed
from ..strategies.recomputation import repeated_blocks
from ..user_script import without_workers
from .checkpoint import Share, share_of
from .ledger import EXECUTED, REPEATED, Books, Ledger, Network, are_alike, reckoned
from .plan import PipelineOrder, PlannedJob, RankPlan, Recipe
from .rehearsing import WithoutValues

UPDATES = 2
"""Updates that are made. The first one creates the optimizer's state, the second one is as all others."""
REAL_UPDATES = 3
"""The same on real tensors, where DistributedDataParallel compares the order of gradients in the second one."""
_WIDE = 8
"""Logits of so many times the numbers of what they are made of are worth computing by chunks."""
_UNUSED = (
    *("val_dataloader", "val_cfg", "val_evaluator", "test_dataloader", "test_cfg", "test_evaluator"),
    *("custom_hooks", "visualizer", "log_processor", "compile", "cfg", "param_scheduler", "auto_scale_lr", "env_cfg"),
)
_logger = logging.getLogger("flextrain")


@dataclass
class Facts:
    """What is known of the whole job, see StrategyPlan.

    Attributes:
        stages: one rank of each pipeline stage, in their order; empty without.
        share: what the planned rank saves in a checkpoint.
        source: see StrategyPlan.
    """

    options: dict[str, Any] = field(default_factory=dict)
    axes: dict[str, int] = field(default_factory=dict)
    stages: list[int] = field(default_factory=list)
    pipeline: PipelineOrder | None = None
    whole_parameters: int = 0
    share: Share | None = None
    source: Literal["executed", "formula"] = "executed"
    notes: list[str] = field(default_factory=list)
    recipe: Recipe | None = None


class Training:
    """The updates of a user's training, without a runner.

    Args:
        given: the runner's arguments, with the strategy to use.
        job: what is planned.
        rehearsal: None: on real tensors.
        on_phase: called with what is done next.

    Attributes:
        facts: what is known of the whole job.
    """

    def __init__(
        self,
        given: Mapping[str, Any],
        job: PlannedJob,
        rehearsal: WithoutValues | None = None,
        on_phase: Callable[[str], object] = lambda phase: None,
    ) -> None:
        left_out = dict.fromkeys((*_UNUSED, "default_hooks"), None)
        self._given = {**given, **left_out, "default_hooks": dict.fromkeys(DEFAULT_HOOKS), "resume": False}
        self._job, self._rehearsal, self._on_phase = job, rehearsal, on_phase
        left = ["compile of the script: left out"] if given["compile"] else []
        left += [
            f"custom_hooks of the script: {name_of(hook)} is left out, and so is what it keeps in memory and in checkpoints"
            for hook in given["custom_hooks"] or ()
        ]
        self.facts = Facts(options=values_for_json(given["strategy"]), notes=left)
        checked = check_everything(self._given)
        if not checked.trains or checked.optim_wrapper is None:
            raise ConfigError("train_cfg: missing, a plan needs train_dataloader, train_cfg and optim_wrapper")
        self._transforms = checked.transforms
        self.strategy: Strategy = checked.strategy
        if rehearsal is not None:
            self.strategy = self._rehearsed(checked.strategy)
        self._optim: OptimWrapper | OptimWrapperDict = checked.optim_wrapper

    def run(self) -> RankPlan:
        """Set up and make the updates, and return what they needed."""
        self._on_phase("building the model")
        self.strategy.join()
        topology = self.strategy.topology
        window, model = self._window(), self._model()
        # Before batches are divided, after which what comes first may be anything.
        samples = sum(self._batch_size or samples_in(batch) for batch in window)
        self._note_whole(topology, model)
        self.facts.recipe = self._recipe(topology, model)
        whole = all(_rows_are_whole(batch) for batch in window)
        ledger = Ledger(topology.rank, self._network(topology))
        if (tell := getattr(self.strategy, "tell", None)) is not None:
            tell(ledger.memory.mark)
        with ExitStack() as stack:
            stack.enter_context(ledger)
            stack.enter_context(self._without_values())
            if self._rehearsal is not None and whole:
                stack.enter_context(taking_sequences_for_whole())
            ledger.watch(model)
            self._on_phase("set-up")
            called, optim = self.strategy.setup(model, self._optim)
            assert optim is not None
            if self._rehearsal is not None:
                note_initialised(self.strategy)  # nothing will be loaded
            window = self._stripped(window, model)
            stepper = Stepper(self.strategy, called, optim)
            if self._rehearsal is not None:
                stepper.weighing = _Even.of(self.strategy.module, self.strategy.device, topology)
            ledger.watch(self.strategy.module, [wrapper.optimizer for wrapper in optim.wrappers.values()])
            for wrapper in optim.wrappers.values():
                wrapper.register_step_pre_hook(lambda _: ledger.update())
            called.train()
            gc.collect()  # the layers of other stages are in cycles, which Python would free at some time
            books = self._made(ledger, stepper, window, model)
            found = self._result(books, topology, samples, len(window))
        self._on_phase("checkpoint")
        self.facts.share = share_of(self.strategy, topology)
        return found

    def _made(self, ledger: Ledger, stepper: Stepper, window: list[Any], model: nn.Module) -> Books:
        """Make the updates, and return the books of the last one with the highest peak of all."""

        count = itertools.count(1)

        def made(size: int) -> Books:
            self._on_phase(f"update {next(count)}")
            ledger.begin()
            stepper.train(window[:size])
            return ledger.books()

        given = [dict(batch) if isinstance(batch, dict) else batch for batch in window]
        ledger.memory.mark("inputs", tree_flatten(given)[0])

        if self._is_repetitive(window, model):
            first, *few = [made(size) for size in (EXECUTED[0], *EXECUTED)]
            if (found := reckoned(first, few, len(window))) is not None:
                self.facts.notes.append(
                    f"of the {len(window)} micro-batches of an update, {EXECUTED[-1]} were executed: each of the others adds as "
                    "many operations and bytes as the last one of them, and memory for its inputs and its loss alone"
                )
                return found
        for _ in range(REAL_UPDATES if self._rehearsal is None else UPDATES):
            books = made(len(window))
        return dataclasses.replace(books, peak=ledger.peak)

    def _is_repetitive(self, window: list[Any], model: nn.Module) -> bool:
        """Whether an update has many micro-batches of which most are alike; a pipeline's order depends on their number."""
        return (
            self._rehearsal is not None
            and len(window) >= REPEATED
            and not self.facts.stages
            and isinstance(self._optim, OptimWrapper)
            and not overrides(model, "train_step")
            and are_alike(window)
        )

    def _rehearsed(self, asked: Strategy) -> Strategy:
        found = rehearsed(asked)
        if found is None:
            raise ConfigError(f"strategy.type: {type(asked).__name__} cannot be planned, {asked.needs.processes}")
        if found is not asked:
            self.facts.source = "formula"
            self.facts.notes.append(
                f"memory and collectives of {type(asked).__name__} are by formula, the computation is executed"
            )
            found.example = asked.example
        return found

    def _without_values(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._rehearsal is None else self._rehearsal.without_values()

    def _window(self) -> list[Any]:
        """Return the micro-batches of one update, of the first samples; all processes have the same."""
        loader = build_dataloader(
            without_workers(self._given["train_dataloader"]),
            training=True,
            seed=0,
            shard=(0, 1),
            where="train_dataloader",
            logger=_logger,
        )
        if isinstance(loader, DataLoader):
            names = SimpleNamespace(train_dataloader=loader)
            self.strategy.example = lambda: example_batch(names, ["train_dataloader"])
        self._batch_size = batch_size(loader)
        count = self._optim.accumulate
        if goes_its_own_way(loader):
            batches = [*itertools.islice(loader, count)]
        else:
            with first_batches(loader, count, seed=0, epoch=0, shard=(0, 1)) as read:
                batches = [*itertools.islice(read, count)]
        if not batches:
            raise ConfigError("train_dataloader: gives no batch to plan with")
        return [*itertools.islice(itertools.cycle(batches), count)]

    def _stripped(self, window: list[Any], model: nn.Module) -> list[Any]:
        """Return a window without values; what models of transformers decide by values is decided here."""
        if self._rehearsal is None:
            return window
        if pretrained_models(model):
            window = [{**batch} if isinstance(batch, Mapping) else batch for batch in window]
            for batch in window:
                mask = batch.get("attention_mask") if isinstance(batch, dict) else None
                if isinstance(mask, Tensor) and bool((mask == 1).all()):
                    del batch["attention_mask"]  # as if it were not given
        strategy: Any = self.strategy
        with with_values():  # which samples or positions are whose may depend on values
            window = [strategy.split(batch) for batch in window]
        strategy.split = _as_it_is
        return [self._without_its_values(batch) for batch in window]

    def _without_its_values(self, batch: Any) -> Any:
        assert self._rehearsal is not None
        found = self._rehearsal.copy_of(batch)
        if not isinstance(batch, dict):
            return found
        same = copy.copy(batch)  # what it knows of itself stays
        same.update(found)
        return same

    def _model(self) -> nn.Module:
        model, preprocessor = self._given["model"], self._given["data_preprocessor"]
        if self._rehearsal is None:
            built = build_model(model, preprocessor, self.strategy, for_training=True)
            return transform(built, self._transforms, self.strategy, seed=0)[0]
        building = _Building(self._rehearsal)
        built = build_model(model, preprocessor, building, for_training=True)  # type: ignore[arg-type]
        built, _ = transform(built, self._transforms, building, seed=0)
        self._rehearsal.strip(built)
        return built

    def _note_whole(self, topology: Topology, model: nn.Module) -> None:
        network = self._network(topology)
        self.facts.axes = {**network.axes, **network.overlays} or {"data": topology.world_size}
        self.facts.stages = [] if topology.model is None else dist.get_process_group_ranks(topology.model)
        if network.axes.get("pp", 1) > 1 and (order := pipeline_of(self.strategy)) is not None:
            self.facts.pipeline = PipelineOrder(*order)
        self.facts.whole_parameters = sum(parameter.numel() for parameter in model.parameters())

    def _recipe(self, topology: Topology, model: nn.Module) -> Recipe:
        loader, wrapper = self._given["train_dataloader"], self._given["optim_wrapper"]
        sizes: dict[str, int] = {}
        for block in repeated_blocks(model):
            name = type(block).__name__
            sizes[name] = sizes.get(name, 0) + sum(parameter.numel() for parameter in block.parameters())
        batch_size = loader.get("batch_size") if isinstance(loader, Mapping) else None
        head = head_of(model)
        return Recipe(
            sorted(type(self.strategy).Config.model_fields),
            sorted(sizes, key=lambda name: -sizes[name]),
            topology.data.count,
            self._optim.accumulate,
            batch_size if isinstance(batch_size, int) else None,
            isinstance(wrapper, Mapping) and "optimizer" in wrapper,
            type(self._optim) is OptimWrapper,
            not self._transforms and isinstance(head, nn.Linear) and head.out_features >= _WIDE * head.in_features,
        )

    def _network(self, topology: Topology) -> Network:
        sizes = {axis: size for axis, (_, size) in topology.axes.items()}
        overlays: dict[str, int] = {}
        product = 1
        for axis, size in sizes.items():
            product *= size
            if product > topology.world_size:
                overlays[axis] = size
        return Network(
            topology.world_size,
            self._job.nodes,
            {axis: size for axis, size in sizes.items() if axis not in overlays},
            {axis: size for axis, size in overlays.items() if size > 1},
        )

    def _result(self, books: Books, topology: Topology, samples: int, micro_batches: int) -> RankPlan:
        module = self.strategy.module
        held = [part for parameter in module.parameters() for part in parts_of(parameter)]
        return RankPlan(
            rank=topology.rank,
            index={axis: index for axis, (index, size) in topology.axes.items() if size > 1},
            peak=books.peak,
            between_updates=books.between_updates,
            moments=books.moments,
            traffic=books.as_traffic(),
            work=books.as_work(),
            samples=samples,
            micro_batches=micro_batches,
            parameters=sum(part.numel() for part in held),
            host=books.host,
        )


class _Even(Weighing):
    """Gives micro-batches without values, in which there is nothing to count, the same weight."""

    def weight(self, batch: Any) -> float:
        return 1.0


class _Building:
    """What builds a model without values, as a strategy does in its ``building``."""

    def __init__(self, rehearsal: WithoutValues) -> None:
        self._rehearsal = rehearsal

    def building(self, model: nn.Module | None = None, draws: Tensor | None = None) -> AbstractContextManager[Any]:
        return nullcontext() if model is not None and draws is None else self._rehearsal.building()


def values_for_json(value: Any) -> Any:
    """Return a configuration with strings for what JSON does not have."""
    if isinstance(value, Mapping):
        return {str(key): values_for_json(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [values_for_json(part) for part in value]
    if isinstance(value, type):
        return value.__name__
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)


def name_of(hook: Any) -> str:
    """The name of a hook's class, from the hook or its configuration."""
    kind = (
        hook.get("type", hook) if isinstance(hook, Mapping) else hook if isinstance(hook, (str, type)) else type(hook)
    )
    return str(getattr(kind, "__name__", kind))


def _rows_are_whole(batch: Any) -> bool:
    """Whether the positions of a batch, if it has any, are those of one sequence in each row."""
    positions = batch.get("position_ids") if isinstance(batch, Mapping) else None
    return not isinstance(positions, Tensor) or bool((positions.diff(dim=-1) == 1).all())


def _as_it_is(batch: Any) -> Any:
    return batch


def samples_in(batch: Any) -> int:
    """The number of samples in a batch of which no dataloader says it: the length of the first tensor or list in it.

    A list with anything but tensors and lists is taken for one of samples.
    """
    if isinstance(batch, Mapping):
        batch = [*batch.values()]
    elif isinstance(batch, list) and not all(isinstance(part, (Tensor, list, tuple)) for part in batch):
        return len(batch)
    for part in batch if isinstance(batch, (list, tuple)) else [batch]:
        if isinstance(part, Tensor) and part.ndim:
            return part.shape[0]
        if isinstance(part, (list, tuple)):
            return len(part)
    return 1


def set_seed() -> None:
    """Let all processes of a real run draw the same numbers."""
    torch.manual_seed(0)
