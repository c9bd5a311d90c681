"""Train a user's model on one device and under a strategy, in worker processes, and measure the differences."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from ..core.base.errors import ConfigError, StrategyError
from ..core.base.registry import OPTIM_WRAPPERS
from ..core.comm.collectives import all_gather_object, destroy_process_group
from ..core.device.precision import BATCH_NORM, cast_tensors
from ..core.model.module_state import modes_of
from ..core.random.generators import RandomStream, kept_random_state, torch_states
from ..core.torch_compat.torch_private import tree_flatten
from ..optim.canonical import OWN
from ..runner.data.dataloaders import build_dataloader
from ..runner.data.samplers import tell_epoch
from ..runner.data.user_loaders import goes_its_own_way, name_of
from ..runner.hooks import DEFAULT_HOOKS, Hook
from ..runner.loops.evaluate import calls_generate
from ..runner.runner import FlexibleRunner
from ..strategies.base import Strategy
from ..strategies.build import build_strategy
from ..strategy_options import strategy_options
from ..testing.conformance import not_promised, tolerances
from ..testing.differences import multiple, relative_difference, small_scales
from ..testing.loop import alone, environ
from ..testing.sessions import REFERENCE, whole_state
from ..testing.simulation import simulate
from ..user_script import runner_arguments, without_workers

# Make the same global batches for one process and for several, from the user's own dataloader.


WHERE = "train_dataloader"


def shared_loader(
    cfg: Any,
    *,
    processes: int,
    shard: tuple[int, int],
    one_by_one: bool = False,
    exact: bool = False,
    seed: int,
    logger: logging.Logger,
    where: str = WHERE,
) -> DataLoader[Any]:
    """A loader of global batches, each of ``processes`` configured batches; this process collates its part of each.

    Every process reads all samples, without workers and with the same random numbers, so that augmentation does not depend
    on the process that trains on a sample.

    Args:
        cfg: the runner's ``train_dataloader``, or the one named ``where``.
        shard: (index, count) of the part; (0, 1) is the whole.
        one_by_one: give the configured batches one by one instead, in the order of the processes that would get them.
        exact: give floating-point numbers in float64.

    Raises:
        ConfigError: the data cannot be divided.
    """
    single = build_dataloader(cfg, training=where == WHERE, seed=seed, shard=(0, 1), where=where, logger=logger)
    if goes_its_own_way(single):
        raise ConfigError(
            f"{where}: verify divides the batches of a sampler, and {name_of(single)} makes its own batches"
        )
    if isinstance(single.dataset, IterableDataset):
        raise ConfigError(f"{where}.dataset: verify cannot divide an IterableDataset, give a dataset with a length")
    if single.batch_sampler is None:
        raise ConfigError(f"{where}.batch_size: None makes no batches to divide, give a number")
    size = single.batch_size or getattr(single.batch_sampler, "batch_size", None)
    whole = shard[1] == 1 and not one_by_one
    return DataLoader(
        SameDraws(single.dataset, seed),
        batch_sampler=GlobalBatches(
            single.batch_sampler, processes, one_by_one, size * processes if size and whole else size
        ),
        collate_fn=ShardOf(single.collate_fn, (0, 1) if one_by_one else shard, exact),
    )


class SameDraws(Dataset[Any]):
    """A dataset whose random numbers come from its own stream, which is the same in every process."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self._stream = RandomStream(seed)

    def __getitem__(self, index: Any) -> Any:
        with self._stream:
            return self.dataset[index]

    def __len__(self) -> int:
        return len(self.dataset)

    def set_epoch(self, epoch: int) -> None:
        """Tell the dataset, if it wants to know."""
        tell_epoch(self.dataset, epoch)


class GlobalBatches(Sampler[list[Any]]):
    """Groups of ``count`` batches of another batch sampler, each joined to one batch, or one by one with ``one_by_one``.

    Incomplete groups at the end of an epoch and batches of unequal size are left out: the mean over unequal parts is not
    the mean over the whole.

    Args:
        batch_size: number of samples that one process computes at a time, for the runner's auto_scale_lr.
    """

    def __init__(self, batches: Iterable[list[Any]], count: int, one_by_one: bool, batch_size: int | None) -> None:
        self.batches, self.count, self.one_by_one, self.batch_size = batches, count, one_by_one, batch_size
        # The runner asks the sampler of a batch sampler whether it ends, and gives it the epoch.
        self.sampler = getattr(batches, "sampler", None)

    def set_epoch(self, epoch: int) -> None:
        """Tell the batch sampler, if it wants to know."""
        tell_epoch(self.batches, epoch)

    def __iter__(self) -> Iterator[list[Any]]:
        group: list[list[Any]] = []
        for batch in self.batches:
            group.append(list(batch))
            if len(group) < self.count:
                continue
            if len({len(part) for part in group}) == 1:
                yield from group if self.one_by_one else [[index for part in group for index in part]]
            group = []

    def __len__(self) -> int:
        return len(self.batches) // self.count * (self.count if self.one_by_one else 1)  # type: ignore[arg-type]


class ShardOf:
    """Collates one part of the samples of a global batch."""

    def __init__(self, collate: Callable[[list[Any]], Any], shard: tuple[int, int], exact: bool = False) -> None:
        self.collate, self.shard, self.exact = collate, shard, exact

    def __call__(self, samples: list[Any]) -> Any:
        index, count = self.shard
        size = len(samples) // count
        # Fewer samples than parts are a look at the data, not a global batch.
        part = samples[index * size : (index + 1) * size] if size else samples
        batch = self.collate(part)
        return cast_tensors(batch, torch.float64) if self.exact else batch


# The gradient norm is computed only with clipping; this limit is never reached.
NO_CLIPPING = {"max_norm": 1e30}
# Where gradients overflow depends on how a batch is split: this is far from it, and from where they vanish.
LOSS_SCALE = 256.0
# A larger difference than this is not rounding, and may show how values are related.
TELLING = 1e-3


@dataclass(frozen=True)
class Job:
    """What every process needs to know.

    Attributes:
        strategies: names of all strategies that are compared with the reference.
        folder: where the reference's states are stored, one file per step.
        is_simulated: the processes are threads of one process, which nothing can watch from outside.
    """

    script: str
    strategies: tuple[str, ...]
    arguments: tuple[str, ...]
    processes: int
    steps: int
    device: str
    folder: str
    is_simulated: bool = False


@dataclass
class ProcessTrace:
    """What one process measured.

    Attributes:
        losses: mean over the global batch, after each step.
        skipped: whether the update of each step was left out, because gradients overflowed.
        differences: of every entry of the state, at each step, step 0 being before training.
        hints: by (step, entry), how the value differs, such as by a factor.
        eps: ``torch.finfo(...).eps`` of the coarsest dtype in use.
        parameters: names in the model's order.
        left_out: options of the script's strategy that this one does not take, and what it does not promise, one line each.
        losses_of_parts: of the micro-batches of the first step, if there are several.
        declared: the relative difference that the strategy's class counts as rounding.
        promises: whether the strategy's class promises to train as one device does.
    """

    losses: list[float | None] = field(default_factory=list)
    grad_norms: list[float | None] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    differences: list[dict[str, float]] = field(default_factory=list)
    hints: dict[tuple[int, str], str] = field(default_factory=dict)
    dtype: str = ""
    eps: float = 0.0
    parameters: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    losses_of_parts: list[float] = field(default_factory=list)
    declared: float = 0.0
    promises: bool = True


OF_UPDATES = ("gradients", "losses", "lasting_errors", "accumulation", "clipping", "clipping_by_value")
"""Checks of ``check_strategy`` that compare what ``verify`` compares."""
Way = Literal["usual", "in parts", "exact"]
"""How one device computes a global batch: at once, one process's part after another, or in float64."""


def train_alone(job: Job, way: Way) -> ProcessTrace | None:
    """The reference, trained on a single device by rank 0; or the same batches in another way, compared with it.

    The ways differ only in rounding. None in the other processes, and where a way is not possible: "in parts" for an
    optim_wrapper whose accumulation cannot be changed, "exact" for a model that does not compute in float64, or that shall
    compute in bfloat16 or float16.
    """
    is_first = os.environ["RANK"] == "0"
    # The script runs as under a strategy: its batch size may depend on the number of processes.
    size = environ(WORLD_SIZE=str(job.processes), LOCAL_WORLD_SIZE=str(job.processes))
    with size, runner_arguments(job.script, job.arguments) as given, alone():
        if not is_first:
            return None
        for name in job.strategies:  # the script may register some; a mistyped name must raise at once
            _spec(name, given, job)
        if way == "in parts" and not _is_one_optimizer(given["optim_wrapper"]):
            return None
        strategy = build_strategy(_spec(REFERENCE, given, job))
        reference = None if way == "usual" else Reference(Path(job.folder))
        before = torch.get_default_dtype()
        try:
            trace = _train(job, given, strategy, reference, way)
        except (RuntimeError, TypeError, ValueError):
            if way != "exact":
                raise
            return None  # such as a model with a float32 of its own; the usual way has shown that it trains
        finally:
            torch.set_default_dtype(before)
        return trace if way != "exact" or trace.dtype == "float32" else None


def train_with(job: Job, name: str) -> ProcessTrace | None:
    """Training under a strategy in all processes; each process compares it with the reference."""
    with contextlib.ExitStack() as stack:
        given = stack.enter_context(runner_arguments(job.script, job.arguments))
        spec, left_out = strategy_options(name, given, job.device)
        if spec["type"] is _spec(REFERENCE, given, job)["type"]:
            if os.environ["RANK"] != "0":
                return None
            stack.enter_context(alone())
        strategy = build_strategy(spec)
        reasons, (of_all, by_name) = not_promised(strategy), tolerances(strategy)
        trace = _train(job, given, strategy, Reference(Path(job.folder)))
        trace.left_out = left_out + [f"does not promise {name}: {why}" for name, why in reasons.items()]
        trace.declared = max([of_all, *(by_name[name] for name in OF_UPDATES if name in by_name)])
        trace.promises = not any(name in reasons for name in OF_UPDATES)
        return trace


def train_simulated(job: Job, name: str) -> list[ProcessTrace | None]:
    """Training under a strategy in as many simulated ranks as the job has processes, in this process."""
    # Each rank runs the script again, and draws the same weights as one device only if nothing was drawn before.
    with kept_random_state(torch.device("cpu")), runner_arguments(job.script, job.arguments) as given:
        kind = _spec(name, given, job)["type"]
        if kind is _spec(REFERENCE, given, job)["type"]:
            return [train_with(job, name)]
        if why := getattr(getattr(kind, "needs", None), "processes", ""):
            raise StrategyError(f"cannot be simulated, {why}; give --processes in place of --simulate")
    return simulate(job.processes, train_with, job, name)


def _spec(name: str, given: Mapping[str, Any], job: Job) -> dict[str, Any]:
    return strategy_options(name, given, job.device)[0]


def _train(
    job: Job, given: dict[str, Any], strategy: Strategy, reference: Reference | None, way: Way = "usual"
) -> ProcessTrace:
    trace = ProcessTrace()
    observer = _Observer(job.steps, trace, reference, Path(job.folder), is_exact=way == "exact")
    try:
        strategy.join()
        observer.evaluated = _evaluated_batch(job, given, strategy, trace, way)
        runner = FlexibleRunner(**_arguments(job, given, strategy, observer, way))
        with contextlib.suppress(_EnoughError):
            runner.train()
        if len(trace.losses) < job.steps:
            trace.notes.append(f"The script's training ends after {len(trace.losses)} of {job.steps} steps")
        if reference is None:
            trace.notes += _left_out(given)
    finally:
        strategy.leave()
        destroy_process_group()
    return trace


def _evaluated_batch(job: Job, given: Mapping[str, Any], strategy: Strategy, trace: ProcessTrace, way: Way) -> Any:
    """This process's part of the first global batch of the script's validation data; None if there is none to compare."""
    if given["val_dataloader"] is None:
        return None
    try:
        loader = shared_loader(
            without_workers(given["val_dataloader"]),
            processes=job.processes,
            shard=strategy.topology.shard,
            exact=way == "exact",
            seed=0,
            logger=logging.getLogger("flextrain"),
            where="val_dataloader",
        )
    except ConfigError as error:
        trace.notes.append(f"Evaluation is not compared: {error}")
        return None
    with kept_random_state(torch.device("cpu")):
        torch.manual_seed(0)  # of a sampler that shuffles
        found = next(iter(loader), None)
    if found is None:
        trace.notes.append(f"Evaluation is not compared: val_dataloader has no {job.processes} batches of one size")
    return found


def _arguments(job: Job, given: dict[str, Any], strategy: Strategy, observer: Hook, way: Way) -> dict[str, Any]:
    """The runner's arguments for the user's training: shared batches, and no hooks, logs or checkpoints of the user's."""
    if given["train_dataloader"] is None or given["optim_wrapper"] is None:
        raise ConfigError(
            "train_dataloader: missing, the script's runner must be able to train (train_cfg, optim_wrapper)"
        )
    randomness = dict(given["randomness"] or {})
    seed = randomness["seed"] = randomness.get("seed") or 0
    randomness["diff_rank_seed"] = False
    loader = shared_loader(
        without_workers(given["train_dataloader"]),
        processes=job.processes,
        shard=strategy.topology.shard,
        one_by_one=way == "in parts",
        exact=way == "exact",
        seed=seed,
        logger=logging.getLogger("flextrain"),
    )
    kept = {
        name: given["default_hooks"][name] for name in ("param_scheduler",) if name in (given["default_hooks"] or {})
    }
    validation = {"val_begin": job.steps + 1} if given["val_dataloader"] is not None else {}
    changes = dict(
        strategy=strategy,
        work_dir=str(Path(job.folder) / "work_dir"),
        train_dataloader=dict(loader=loader, shard=False),  # which is divided already
        train_cfg={**given["train_cfg"], **validation},
        optim_wrapper=_optim_wrapper(given["optim_wrapper"], job.processes if way == "in parts" else 1),
        default_hooks={**dict.fromkeys(set(DEFAULT_HOOKS) - {"param_scheduler", "sampler_seed"}), **kept},
        custom_hooks=[observer],
        randomness=randomness,
        resume=False,
    )
    unused = ("test_dataloader", "test_cfg", "test_evaluator", "launcher", "env_cfg", "log_processor", "visualizer")
    merged = {**given, **changes, **dict.fromkeys((*unused, "compile", "cfg", "experiment_name"))}
    return {**merged, "env_cfg": {"preemption": False, "watchdog": False}} if job.is_simulated else merged


def _is_one_optimizer(optim_wrapper: Any) -> bool:
    """Whether it describes one optimizer, whose accumulation and clipping can be changed."""
    return isinstance(optim_wrapper, Mapping) and "optimizer" in optim_wrapper


def _optim_wrapper(given: Any, parts: int) -> Any:
    """``given`` with the norm of gradients computed, and with ``parts`` micro-batches in place of each."""
    if not _is_one_optimizer(given):
        return given
    changed = {**given, "accumulative_counts": given.get("accumulative_counts", 1) * parts}
    kind = OPTIM_WRAPPERS.resolve(given.get("type", "OptimWrapper"), "optim_wrapper.type")
    parameters = inspect.signature(kind).parameters
    clips = "clip_grad" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if given.get("clip_grad") is None and clips:
        changed["clip_grad"] = NO_CLIPPING
    if _scales_by_itself(given):
        changed["loss_scale"] = LOSS_SCALE
    return changed


def _scales_by_itself(given: Any) -> bool:
    """Whether it describes one optimizer with a loss scale that changes in training."""
    scale = given.get("loss_scale") if _is_one_optimizer(given) else 1.0
    return isinstance(scale, (dict, str)) or (scale is None and given.get("dtype") == "float16")


def _left_out(given: Mapping[str, Any]) -> Iterator[str]:
    for key in ("custom_hooks", "compile"):
        if given[key]:
            yield f"{key} of the script: left out in all trainings"
    if _scales_by_itself(given["optim_wrapper"]):
        yield f"Loss scale: fixed at {LOSS_SCALE:g} in all trainings; which updates overflow would depend on how a batch is split"


class Reference:
    """The states of the single-device run, stored in files: together they may be larger than the memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def compare(self, step: int, state: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, str]]:
        """The relative difference of every entry, and hints on how entries differ."""
        # The file comes from our own reference run. It is mapped, so that only what is compared is in memory.
        expected = torch.load(_file(self.folder, step), mmap=True, weights_only=False)
        scales, differences, hints = small_scales(expected), {}, {}
        for key in sorted(expected.keys() | state.keys()):
            if key not in state or key not in expected:
                differences[key] = float("inf")
                hints[key] = ", it is missing" if key in expected else ", one device does not have it"
                continue
            ours, theirs = state[key], expected[key]
            if isinstance(ours, Tensor) and isinstance(theirs, Tensor) and ours.shape == theirs.shape:
                differences[key] = relative_difference(ours, theirs, scales[key])
                if TELLING < differences[key] < float("inf") and key.startswith("optim."):
                    hints[key] = multiple(ours, theirs)
            else:
                differences[key] = _of_values(ours, theirs)
                if differences[key] > TELLING:
                    hints[key] = f", it is {_brief(ours)} and should be {_brief(theirs)}"
        return differences, hints


class _EnoughError(Exception):
    """Ends the training after the last step to compare."""


class _Observer(Hook):
    """Records losses, norms and states. States of the reference are stored, others are compared with them."""

    priority = "VERY_LOW"

    def __init__(
        self, steps: int, trace: ProcessTrace, reference: Reference | None, folder: Path, *, is_exact: bool
    ) -> None:
        self.is_exact = is_exact
        self.steps, self.trace, self.reference, self.folder = steps, trace, reference, folder
        self.evaluated: Any = None
        self._batch_norms: list[nn.Module] = []
        self._mean_of_parts: Callable[[Sequence[dict[str, Tensor]]], dict[str, Tensor]]
        self._random_states: dict[str, Tensor] = {}

    def before_train(self, runner: FlexibleRunner) -> None:
        module, trace = runner.strategy.module, self.trace
        self._batch_norms = [m for m in module.modules() if isinstance(m, BATCH_NORM)]
        dropouts = _without_dropout(module)
        trace.parameters = [name for name, _ in module.named_parameters()]
        trace.dtype, trace.eps = _coarsest(runner.strategy)
        if self.is_exact:
            module.double()
            torch.set_default_dtype(torch.float64)  # for tensors that forward makes
        if dropouts:
            trace.notes.append(f"Dropout: set to 0 in {dropouts} modules, in all trainings")
        if self._batch_norms:
            trace.notes.append(
                f"Batch normalisation: {len(self._batch_norms)} modules use their running statistics, in all trainings; "
                "the statistics of a batch would depend on how it is split"
            )
        self._mean_of_parts = runner.stepper.mean
        vars(runner.stepper)["mean"] = self._note_parts
        self._look(runner)

    def _note_parts(self, parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        if not self.trace.losses:
            self.trace.losses_of_parts = [float(part["loss"]) for part in parts if "loss" in part]
        return self._mean_of_parts(parts)

    def before_train_iter(self, runner: FlexibleRunner, batch_idx: int, data_batch: Any = None) -> None:
        for module in self._batch_norms:
            module.eval()
        self._random_states = torch_states(runner.strategy.device)

    def after_train_iter(
        self,
        runner: FlexibleRunner,
        batch_idx: int,
        data_batch: Any = None,
        outputs: Mapping[str, Any] | None = None,
    ) -> None:
        trace, values = self.trace, outputs or {}
        after = torch_states(runner.strategy.device)
        if not trace.losses and not all(torch.equal(state, after[name]) for name, state in self._random_states.items()):
            trace.notes.append(
                "The model draws random numbers in training, which differ between processes: turn that off in the model, or "
                "expect a difference"
            )
        loss, norm = values.get("loss"), values.get("grad_norm")
        trace.losses.append(None if loss is None else _mean(runner.strategy, loss))
        trace.grad_norms.append(None if norm is None else float(norm))
        trace.skipped.append(bool(getattr(getattr(runner.optim_wrapper, "last_step", None), "skipped", False)))
        self._look(runner)
        if len(trace.losses) >= self.steps:
            raise _EnoughError

    def _look(self, runner: FlexibleRunner) -> None:
        step = len(self.trace.losses)
        # What is the strategy's own has no counterpart on one device.
        state = {key: value for key, value in whole_state(runner.strategy).items() if not key.startswith(OWN)}
        if self.evaluated is not None and step in (1, self.steps):
            state |= self._evaluation(runner)
        if self.reference is None:
            torch.save(state, _file(self.folder, step))
            return
        differences, hints = self.reference.compare(step, state)
        self.trace.differences.append(differences)
        self.trace.hints |= {(step, key): hint for key, hint in hints.items() if hint}

    @torch.no_grad()
    def _evaluation(self, runner: FlexibleRunner) -> dict[str, Tensor]:
        """What the model predicts for the whole of a batch, on every process: floating-point tensors with a row for each sample."""
        topology, count = runner.strategy.topology, _rows(self.evaluated)
        if any(
            all_gather_object(calls_generate(runner.strategy.module, "val"))
        ):  # not every process has all of a model
            self.trace.notes.append(
                "Evaluation is not compared: the model generates, with whole weights on each process"
            )
            self.evaluated = None
            return {}
        back_to_training = modes_of(runner.model)
        runner.model.eval()
        outputs = tree_flatten(runner.stepper.evaluate(self.evaluated, "val"))[0] if count else []
        back_to_training()
        own = [
            each.cpu()
            for each in outputs
            if isinstance(each, Tensor) and each.is_floating_point() and each.shape[:1] == (count,)
        ]
        everyones = all_gather_object((topology.reports, topology.data.index, own))
        parts = [own for _, _, own in sorted((each for each in everyones if each[0]), key=lambda each: each[1])]
        if not parts[0] and self.reference is None:
            self.trace.notes.append(
                "Evaluation is not compared: it gives no floating-point tensor with a row for each sample"
            )
        # Logits may be masked by infinities, whose difference is no number.
        wholes = [torch.cat(same).nan_to_num(0.0, 0.0, 0.0) for same in zip(*parts, strict=True)]
        return {f"evaluation.{i}": whole for i, whole in enumerate(wholes)}


def _rows(batch: Any) -> int:
    """The number of samples of a batch: of rows of its first tensor; 0 if it has none."""
    return next((len(each) for each in tree_flatten(batch)[0] if isinstance(each, Tensor) and each.ndim), 0)


def _mean(strategy: Strategy, loss: Tensor) -> float:
    return float(strategy.topology.data.mean(loss.detach().float().clone()))


def _without_dropout(module: nn.Module) -> int:
    """Set the probability of all dropout to zero; return the number of changed modules."""
    changed = 0
    for part in module.modules():
        for name in _DROPOUT_ATTRIBUTES:
            value = getattr(part, name, None)
            is_dropout = name != "p" or "drop" in type(part).__name__.lower() or "Stochastic" in type(part).__name__
            if is_dropout and isinstance(value, float) and value > 0:
                setattr(part, name, 0.0)
                changed += 1
    return changed


# nn.Dropout and torchvision's StochasticDepth; nn.MultiheadAttention and nn.LSTM; timm's DropPath; transformers.
_DROPOUT_ATTRIBUTES = ("p", "dropout", "drop_prob", "dropout_p", "attention_dropout")


def _coarsest(strategy: Strategy) -> tuple[str, float]:
    report = strategy.precision_report()
    kinds = {kind for kind in (*report.compute, *report.parameters, *report.gradients) if kind.is_floating_point}
    worst = max(kinds, key=lambda kind: torch.finfo(kind).eps, default=torch.float32)
    return str(worst).removeprefix("torch."), torch.finfo(worst).eps


def _of_values(ours: Any, theirs: Any) -> float:
    numbers = (int, float)
    if isinstance(ours, numbers) and isinstance(theirs, numbers):
        return abs(ours - theirs) / max(abs(theirs), 1e-30)
    return 0.0 if type(ours) is type(theirs) and not isinstance(ours, Tensor) and ours == theirs else float("inf")


def _brief(value: Any) -> str:
    return f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


def _file(folder: Path, step: int) -> Path:
    return folder / f"step{step}.pt"
