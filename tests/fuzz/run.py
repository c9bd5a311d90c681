"""Random models under every strategy, beside one device: ``python -m tests.fuzz --runs 2000``."""

from __future__ import annotations

import os
import re
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flextrain import FlexibleRunner, Hook
from flextrain.core.base.errors import FlexTrainError
from flextrain.core.comm.collectives import all_reduce
from flextrain.strategies.parts import explain
from flextrain.testing import WorkerError, WorkerGroup
from flextrain.testing.sessions import whole_model

from . import faults, loop
from .loop import Outcome
from .models import GLOBAL_BATCH, OPTIMIZERS, Case, RandomModel, case_of, data_of

TIMEOUT_S = 60.0


def is_layer(module: nn.Module) -> bool:
    """Whether FSDP takes a module for a unit: the layers of a random model."""
    return type(module).__module__.endswith("fuzz.layers") and not isinstance(module, nn.Linear)


def _zero(stage: int) -> dict[str, Any]:
    return dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=stage))


_MESH = dict(type="MeshStrategy", dp_shard=1)
_SEQUENCES = dict(tokens=1, labels=1)
# By name: the kinds of layers, and the configuration.
STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("any", dict(type="DDPStrategy", find_unused_parameters=True)),
    "fsdp": ("any", dict(type="FSDPStrategy")),
    "fsdp_units": ("any", dict(type="FSDPStrategy", wrap=["Linear"])),
    "dp_shard": ("any", dict(type="MeshStrategy", dp_shard=2, wrap=is_layer)),
    "dp_replicate": ("any", {**_MESH, "dp_replicate": 2}),
    "zero0": ("any", _zero(0)),
    "zero1": ("any", _zero(1)),
    "zero2": ("any", _zero(2)),
    "zero3": ("any", _zero(3)),
    "tp": ("positionwise", {**_MESH, "tp": 2}),
    "cp": ("positionwise", {**_MESH, "cp": 2, "cp_keys": _SEQUENCES, "cp_positions": "position_ids"}),
    "pp": ("piped", {**_MESH, "pp": 2, "pp_layers": ["layers"]}),
}


@dataclass
class Notes(Hook):
    """Freezes or thaws a layer, and notes losses and gradient norms."""

    thaws: int | None
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)

    def before_train_iter(self, runner: FlexibleRunner, batch_idx: int, data_batch: Any = None) -> None:
        if runner.iter == self.thaws:
            loop.freeze_or_thaw(runner.strategy.module)

    def after_train_iter(
        self, runner: FlexibleRunner, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        self.losses.append(float(all_reduce(outputs["loss"].clone(), "mean")))
        if (norm := outputs.get("grad_norm")) is not None:
            self.grad_norms.append(float(norm))


def runner_of(case: Case, strategy: dict[str, Any], folder: Path, **options: Any) -> FlexibleRunner:
    """A runner that trains the case; ``options`` go to it."""
    recipe = case.recipe
    torch.manual_seed(case.seed)
    given: dict[str, Any] = {
        "instance": lambda: RandomModel(case),
        "class": lambda: dict(type=RandomModel, case=case),
        "callable": lambda: lambda: RandomModel(case),
    }
    divided = 1 if {"tp", "cp", "pp"} & strategy.keys() else int(os.environ["WORLD_SIZE"])
    optimizer = dict(type=recipe.optimizer_class.__name__, **OPTIMIZERS[recipe.optimizer])
    return FlexibleRunner(
        model=given[recipe.given](),
        work_dir=folder,
        strategy=strategy,
        train_dataloader=dict(
            batch_size=GLOBAL_BATCH // divided,
            dataset=data_of(case),
            sampler=dict(type="DefaultSampler", shuffle=False),
            collate_fn=dict(type="default_collate"),
        ),
        optim_wrapper=dict(
            optimizer=optimizer,
            accumulative_counts=recipe.accumulate,
            clip_grad=None if recipe.clip is None else dict(max_norm=recipe.clip),
            paramwise_cfg=dict(custom_keys=dict(bias=dict(lr_mult=recipe.bias_lr))),
        ),
        param_scheduler=(
            dict(type="LinearLR", start_factor=recipe.lr_factors[0], by_epoch=False, begin=0, end=4)
            if recipe.lr_factors[0] < 1
            else None
        ),
        randomness=dict(seed=case.seed),
        log_level="WARNING",
        **options,
    )


def trained(case: Case, strategy: dict[str, Any], folder: str, planted: str | None) -> Outcome:
    """In a worker: what the case gives under the strategy."""
    warnings.simplefilter("ignore")
    with faults.planted(planted):
        return _trained(case, strategy, Path(folder))


def _trained(case: Case, strategy: dict[str, Any], folder: Path) -> Outcome:
    notes = Notes(case.recipe.thaws)
    for part in _parts(case, notes):
        runner = runner_of(case, strategy, folder, **part)
        try:
            runner.train()
        except RuntimeError as error:
            if (advice := explain(runner.strategy, error)) is None:
                raise
            raise FlexTrainError(advice) from error  # what the log says of it
        end = _parameters(runner)
        runner.strategy.leave()
    return Outcome(notes.losses, notes.grad_norms, end)


def _parts(case: Case, notes: Notes) -> Iterator[dict[str, Any]]:
    """The arguments of the runners that train a case, one after the other."""
    resumes, total = case.recipe.resumes, len(case.recipe.windows)
    hooks = dict(custom_hooks=[notes], default_hooks=dict(checkpoint=None))
    if resumes is None:
        yield dict(train_cfg=dict(by_epoch=True, max_epochs=1), **hooks)
        return
    saves = dict(checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=resumes))
    by_iterations = dict(by_epoch=False, max_iters=resumes)
    yield dict(train_cfg=by_iterations, **{**hooks, "default_hooks": saves})
    yield dict(train_cfg={**by_iterations, "max_iters": total}, resume=True, **hooks)


def _parameters(runner: FlexibleRunner) -> dict[str, Tensor]:
    return {name.removeprefix("model."): value for name, value in whole_model(runner.strategy).items()}


# Comparing


@dataclass
class Result:
    """What became of a run: "equal", "refused", "wrong", or "raw" for an error that is none of the library's own."""

    strategy: str
    case: Case
    kind: str
    reason: str = ""
    seconds: float = 0.0


def difference(found: Outcome, expected: Outcome, case: Case) -> str:
    """What differs, in words; empty if nothing does.

    A parameter is compared on the scale of its own movement: one that hardly moves has to do this rightly too.
    """
    tolerance, floor = TOLERANCES[case.dtype]
    for what, mine, others in (
        ("losses", found.losses, expected.losses),
        ("gradient norms", found.grad_norms, expected.grad_norms),
    ):
        if len(mine) != len(others):
            return f"{len(mine)} {what} for {len(others)}"
        for update, (a, b) in enumerate(zip(mine, others, strict=True)):
            if not abs(a - b) <= tolerance * (abs(b) + 1e-3):
                return f"{what}: {a} for {b} in update {update}"
    if missing := expected.end.keys() - found.end.keys():
        return f"no value of {sorted(missing)}"
    for name, end in expected.end.items():
        if not end.numel():
            continue
        moved = (end - expected.start[name]).abs().max()
        allowed = 10 * tolerance * moved + floor * (1 + end.abs().max())
        error = (found.end[name].double() - end).abs().max()
        if not error <= allowed:
            return f"{name}: off by {error:.3g}, moved by {moved:.3g}"
    return ""


# The relative tolerance, and the floor below which a movement is rounding alone: a gradient that is zero on paper (a bias
# before a norm) is some 1e-17 here and there, and an optimizer without second moments yet divides it by a tiny number.
TOLERANCES = {torch.float64: (1e-8, 1e-13), torch.float32: (1e-4, 1e-6)}


def run_case(seed: int, strategy: str, workers: WorkerGroup, planted: str | None = None) -> Result:
    """Train the case of a seed under a strategy, and by hand."""
    kinds, configuration = STRATEGIES[strategy]
    case = case_of(seed, kinds, torch.float32 if strategy.startswith("zero") else torch.float64)
    expected = loop.train(case)
    with tempfile.TemporaryDirectory() as folder:
        try:
            outcomes = workers.run(trained, case, configuration, folder, planted)
        except WorkerError as error:
            cause = error.__cause__
            is_refusal = isinstance(cause, FlexTrainError) and not error.timed_out
            return Result(strategy, case, "refused" if is_refusal else "raw", str(cause or error))
    for outcome in outcomes:
        if found := difference(outcome, expected, case):
            return Result(strategy, case, "wrong", found)
    return Result(strategy, case, "equal")


def pattern(reason: str) -> str:
    """A reason without names and numbers, to count those that are alike."""
    line = reason.strip().splitlines()[-1] if reason.strip() else ""
    return re.sub(r"\d+", "N", re.sub(r"\b(layers|head|tokens)(\.\w+)*", "NAME", line))[:160]


def fuzz(
    seeds: range,
    strategies: list[str],
    workers: WorkerGroup,
    seconds: float = float("inf"),
    tell: Callable[[str], None] = print,
) -> list[Result]:
    """Run one case per seed, the strategies in turn, until time is up."""
    ends, found = time.monotonic() + seconds, []
    for seed in seeds:
        if time.monotonic() > ends:
            break
        began = time.monotonic()
        result = run_case(seed, strategies[seed % len(strategies)], workers)
        result.seconds = time.monotonic() - began
        found.append(result)
        if result.kind in ("wrong", "raw"):
            tell(
                f"{result.kind}: {result.strategy}, {result.case}\n    {pattern(result.reason) if result.kind == 'raw' else result.reason}"
            )
    return found


def summary(results: list[Result]) -> str:
    """Tables of what became of the runs by strategy, and of the refusals by reason."""
    kinds = ("equal", "refused", "wrong", "raw")
    by_strategy: dict[str, Counter[str]] = defaultdict(Counter)
    seconds: dict[str, float] = defaultdict(float)
    for result in results:
        by_strategy[result.strategy][result.kind] += 1
        seconds[result.strategy] += result.seconds
    lines = [f"{'strategy':<14}" + "".join(f"{kind:>9}" for kind in (*kinds, "s/run"))]
    lines += [
        f"{name:<14}{''.join(f'{counts[kind]:>9}' for kind in kinds)}{seconds[name] / counts.total():>9.1f}"
        for name, counts in by_strategy.items()
    ]
    reasons = Counter(f"{result.strategy}: {pattern(result.reason)}" for result in results if result.kind == "refused")
    refused = sum(reasons.values())
    lines += [f"{len(results)} runs, {refused} refused ({refused / max(1, len(results)):.1%}):"]
    lines += [f"{count:>5}  {reason}" for reason, count in reasons.most_common()]
    return "\n".join(lines)
