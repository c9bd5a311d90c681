"""Compare trainings of a user's model under strategies with one device: differences, verdict, first difference."""

from __future__ import annotations

import dataclasses
import math
import statistics
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from rich.console import Group
from rich.text import Text

from ..core.base.errors import ConfigError, FlexTrainError, counted
from ..optim.canonical import split_key
from ..tables import FittedTable, add_row, as_text
from ..testing.simulation.group_private import check_threads_as_ranks
from ..testing.workers import WorkerError, WorkerGroup
from .parity import Job, ProcessTrace, Way, train_alone, train_simulated, train_with

Status = Literal["same", "differs", "not promised", "not run"]
_STYLES = {"same": "green", "differs": "bold red", "not promised": "yellow", "not run": "yellow"}
QUANTITIES = ("loss", "grad_norm", "weights", "optimizer", "evaluation")

# The relative rounding error of float32 is 6e-8. Tens of steps of a real model, summed in another order, stay below this.
FLOAT32_TOLERANCE = 1e-5
# A value is rounded a few times (activations, their gradients, the sum over processes), each time by eps / 2.
ROUNDINGS = 4
# The differences on one device with the batch in parts, and from float64, are only two samples of the possible rounding errors.
MARGIN = 10.0
# Such as the bias of attention's keys under Adam, or the weights behind a router that decides otherwise.
BLURRED = 0.01


@dataclass(frozen=True)
class FirstDifference:
    """The first difference above the tolerance.

    Attributes:
        step: counted from 1; 0 is before training.
        parameter: the first in the model's order; empty if only the loss or the gradient norm differs.
        entry: a key of the canonical state, or "loss" or "grad_norm".
        hint: how it differs, if known.
        others: number of further entries that differ at that step.
    """

    step: int
    parameter: str
    entry: str
    difference: float
    allowed: float
    hint: str = ""
    others: int = 0

    def __str__(self) -> str:
        when = f"after step {self.step}" if self.step else "before training"
        more = f"; {self.others} more entries differ then" if self.others else ""
        return f"{when}: {self.entry} differs by {self.difference:.1e}, allowed {self.allowed:.1e}{self.hint}{more}"


@dataclass(frozen=True)
class Row:
    """The result of one strategy; ``differences`` holds the largest relative differences over all steps.

    Attributes:
        status: "not promised" means that it differs where its class says that it may.
        left_out: options of the script's own strategy that this one does not take, what it does not promise, and what its
            class counts as rounding, one line each.
    """

    strategy: str
    status: Status
    dtype: str = ""
    tolerance: float = 0.0
    differences: dict[str, float | None] = field(default_factory=dict)
    first: FirstDifference | None = None
    message: str = ""
    left_out: list[str] = field(default_factory=list)


@dataclass
class VerifyReport:
    """The results of all strategies; printing it with rich gives a table.

    Attributes:
        rounding: the largest differences between one device with whole batches, and with the same batches in parts, and in
            float64; they come from rounding; empty if they could not be measured.
        rounding_of: what ``rounding`` is the largest of: "in parts", "exact" (in float64).
        is_simulated: the processes were threads of one process.
    """

    script: str
    processes: int
    steps: int
    notes: list[str] = field(default_factory=list)
    rounding: dict[str, float | None] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    is_simulated: bool = False
    rounding_of: list[str] = field(default_factory=list)

    @property
    def exit_status(self) -> int:
        """0: all are the same, or differ where they promise nothing else; 1: one differs; 2: one could not run."""
        statuses = [row.status for row in self.rows]
        return 1 if "differs" in statuses else 2 if "not run" in statuses else 0

    def as_json(self) -> dict[str, Any]:
        """The report as plain values; an infinite difference (a missing or non-finite value) is the string "inf"."""
        return {**_finite_or_text(dataclasses.asdict(self)), "exit_status": self.exit_status}

    def __rich__(self) -> Group:
        where = f"{self.processes} {'simulated ranks' if self.is_simulated else 'processes'}"
        title = f"{Path(self.script).name}: {self.steps} steps on {where} against one device"
        table = FittedTable(title=Text(title), title_justify="left", caption_justify="left")
        caption = "the largest relative difference over all steps"
        table.add_column("strategy", overflow="fold")
        table.add_column("verdict", no_wrap=True)
        for heading in ("loss", "grad norm", "weights", "optimizer", "evaluation"):
            table.add_column(heading, justify="right")
        if self.rounding:
            cells = [_number(self.rounding.get(quantity)) for quantity in QUANTITIES]
            add_row(table, "(rounding)", "", *cells, style="dim")
            said = {"in parts": f"the same batches in {self.processes} parts", "exact": "in float64"}
            caption += f"\n(rounding): one device, {' and '.join(said[way] for way in self.rounding_of)}"
        table.caption = Text(caption)
        for row in self.rows:
            cells = [_number(row.differences.get(quantity)) for quantity in QUANTITIES]
            add_row(table, row.strategy, Text(row.status, style=_STYLES[row.status]), *cells)
        allowed = sorted({f"{row.tolerance:.1e} in {row.dtype}" for row in self.rows if row.dtype})
        more = f", or {MARGIN:g} times (rounding)" if self.rounding else ""
        lines = [Text(f"Allowed: {', '.join(allowed)}{more}", style="dim")] if allowed else []
        lines += [Text(f"{row.strategy}: {row.first}", style=_STYLES[row.status]) for row in self.rows if row.first]
        lines += [Text(f"{row.strategy}: {row.message}", style="yellow") for row in self.rows if row.message]
        lines += [Text(f"{row.strategy}: {line}", style="dim") for row in self.rows for line in row.left_out]
        lines += [Text(note, style="dim") for note in self.notes]
        return Group(table, *lines)

    def __str__(self) -> str:
        return as_text(self, width=160)


def verify(
    script: str,
    strategies: Sequence[str] = ("ddp", "fsdp"),
    *,
    arguments: Sequence[str] = (),
    processes: int = 2,
    steps: int = 20,
    simulate: bool = False,
    device: str = "cpu",
    tolerance: float | None = None,
    timeout_s: float = 600.0,
    workers: WorkerGroup | None = None,
    on_progress: Callable[[str], object] = lambda what: None,
) -> VerifyReport:
    """Train a script's model on one device and under each strategy with the same global batches, and compare every step.

    A global batch is ``processes`` of the script's batches. Accumulation, clipping, precision and schedules are those of
    the script; its hooks, metrics, checkpoints and torch.compile are left out. If it validates, predictions for a batch of that
    data are compared after the first step and the last. Dropout is turned off, batch normalisation uses its running
    statistics, a loss scale that changes is fixed, and the report says so. Weights and optimizer state of each step are
    stored in a temporary folder, which needs space for ``steps`` of them.

    Args:
        script: a Python file that makes a FlexibleRunner, or that defines a dict ``cfg`` with FlexibleRunner's arguments
            or a function ``config()`` that returns one. It runs in every process, up to the construction of the runner.
        strategies: short names, registered names (`flextrain list strategies` shows both), or ``package.module:Name``. A
            strategy of the class that the script itself uses gets the script's options.
        arguments: command line arguments of the script.
        simulate: the processes are threads of one process, see ``flextrain.testing.simulation.simulate``: more of them than
            the machine has room for. They compute on the CPU.
        device: "cpu", or the type of accelerator, with one device per process.
        tolerance: relative difference that counts as rounding; None: depends on the dtype, or that of the strategy's class if
            it is larger.
        timeout_s: largest number of seconds for one training.
        workers: a group of ``processes`` processes to use, of one with ``simulate``; default: new processes, ended
            afterwards.
        on_progress: called with the name of the next training.

    Raises:
        ConfigError: the script cannot be verified.
        WorkerError: the script fails on one device.
    """
    check_asked(strategies, processes, timeout_s)
    if steps < 1:
        raise ConfigError(f"verify.steps: {steps} is not allowed, give 1 or more")
    if tolerance is not None and not 0 <= tolerance < math.inf:
        raise ConfigError(f"verify.tolerance: {tolerance} is not allowed, give 0 or more")
    if simulate:
        if device != "cpu":
            raise ConfigError(f'verify.device: "{device}" is not simulated, leave it out')
        check_threads_as_ranks()
    group = workers or WorkerGroup(1 if simulate else processes, timeout_s, accelerators=device != "cpu")
    report = VerifyReport(script, processes, steps, is_simulated=simulate)
    try:
        with tempfile.TemporaryDirectory(prefix="flextrain-verify-") as folder:
            job = Job(script, tuple(strategies), tuple(arguments), processes, steps, device, folder, simulate)
            _fill(report, job, group, tolerance, on_progress)
    finally:
        if workers is None:
            group.close()
    return report


def check_asked(strategies: Sequence[str], processes: int, timeout_s: float) -> None:
    """Raise ConfigError if nothing could be verified so, whatever the script is."""
    if isinstance(strategies, str) or not strategies:
        raise ConfigError(f"verify.strategies: {strategies!r} is not allowed, give a list of names")
    if type(processes) is not int or processes < 2:
        raise ConfigError(f"verify.processes: {processes} is not allowed, give 2 or more")
    if not 0 < timeout_s < math.inf:
        raise ConfigError(f"verify.timeout: {timeout_s:g} is not allowed, give a number of seconds above 0")


def _fill(
    report: VerifyReport,
    job: Job,
    group: WorkerGroup,
    tolerance: float | None,
    on_progress: Callable[[str], object],
) -> None:
    on_progress("one device")
    try:
        job, reference = _reference(job, group)
        _, *others = get_args(Way)
        in_parts, exact = (group.run(train_alone, job, way)[0] for way in others)
    except WorkerError as error:
        if isinstance(error.__cause__, FlexTrainError):
            raise error.__cause__ from None
        raise
    report.notes, report.steps = reference.notes, len(reference.losses)
    if number := sum(reference.skipped):
        said = f"gradients overflow on one device in {number} of {report.steps} updates, which compare nothing"
        if number == report.steps:
            raise ConfigError(f"verify: {said}; give a smaller loss_scale")
        report.notes.append(f"{said[0].upper()}{said[1:]}: a smaller loss_scale tells more")
    rounded: list[list[dict[str, float]]] = []
    norm_in_float64: float | None = None
    for way, trace in (("exact", exact), ("in parts", in_parts)):
        if trace is None:
            continue
        measured, allowed = _measured([trace], reference), _tolerance(trace, tolerance)
        loss, norm = (measured[1].get(name, 0.0) for name in ("loss", "grad_norm"))
        # Without a training in float64 it is not known how much rounding changes the norm.
        of_norm = MARGIN * allowed if norm_in_float64 is None else max(allowed, MARGIN * norm_in_float64)
        if loss <= allowed and (trace is exact or norm <= of_norm):
            norm_in_float64 = norm
            rounded.append(measured)
            report.rounding_of.insert(0, way)
        elif trace is in_parts:
            report.notes.append(_not_a_mean(reference, in_parts, measured[1], allowed))
    floor = _over_all(at_step for measured in rounded for at_step in measured)
    if rounded:
        report.rounding = _largest([floor])
    if blurred := [entry for entry, value in floor.items() if MARGIN * value > BLURRED]:
        report.notes.append(
            f"Rounding alone changes {len(blurred)} of {len(floor)} entries so much that no error below "
            f"{BLURRED:.0%} could be seen in them, such as {blurred[0]}; fewer steps, or SGD, tell more"
        )
    for name in job.strategies:
        on_progress(name)
        report.rows.append(_row(name, job, group, reference, floor, tolerance))


def _reference(job: Job, group: WorkerGroup) -> tuple[Job, ProcessTrace]:
    """The training on one device, and the job with as many steps as can be compared: without those that end in NaN.

    Raises:
        ConfigError: nothing can be compared.
    """
    reference = group.run(train_alone, job, "usual")[0]
    assert reference is not None
    before = next((step for step, loss in enumerate(reference.losses) if loss is not None and math.isnan(loss)), None)
    if before is None:
        return job, reference
    if before < 2:  # the weights of the step before may not be numbers either
        raise ConfigError(
            f"verify: the loss is NaN on one device in step {before + 1}, so that nothing can be compared; mend that first"
        )
    shorter, found = _reference(dataclasses.replace(job, steps=before - 1), group)
    found.notes.append(
        f"The loss is NaN on one device in step {before + 1}: {counted(before - 1, 'step')} before are compared"
    )
    return shorter, found


def _not_a_mean(reference: ProcessTrace, in_parts: ProcessTrace, differences: dict[str, float], allowed: float) -> str:
    """Say what to do about a loss or a gradient of a batch that is not the mean of its parts'."""
    difference = differences.get("loss", 0.0)
    if difference <= allowed:
        return (
            f"The gradient of a batch is not the mean of the gradients of its parts (its norm differs by {differences['grad_norm']:.1e}), "
            "though the loss is, so no split can train the same: backward looks at the whole batch, as a hook does that divides a "
            "gradient by its norm"
        )
    wholes = reference.losses_of_parts or [loss for loss in reference.losses[:1] if loss is not None]
    count = len(in_parts.losses_of_parts) // max(len(wholes), 1)
    parts = in_parts.losses_of_parts[:count]
    how_many = f"of its {count or 'several'} parts"
    if parts and wholes:
        whole = wholes[0]
        few, many = min(parts), max(parts)
        slack = _tolerance(in_parts, None) * max(abs(few), abs(many))
        is_sum = abs(whole - sum(parts)) <= slack * len(parts)
        if not is_sum and not few - slack <= whole <= many + slack:
            return (
                f"The loss of a batch is no mean of the losses {how_many} with any weights ({whole:.4g}, of {few:.4g} to "
                f"{many:.4g}), as with in-batch negatives: no loss_weight and no accumulation repairs that. Let each process see "
                "the samples of all, features = flextrain.gather_with_gradient(features) in forward"
            )
    return (
        f"The loss of a batch is not the mean of the losses {how_many} (it differs by {difference:.1e}), so no split can train "
        "the same; define loss_weight(data) in the model to weight the parts"
    )


def _row(
    name: str,
    job: Job,
    group: WorkerGroup,
    reference: ProcessTrace,
    floor: dict[str, float],
    tolerance: float | None,
) -> Row:
    try:
        found = group.run(train_simulated, job, name)[0] if job.is_simulated else group.run(train_with, job, name)
        traces = [trace for trace in found if trace is not None]
    except WorkerError as error:
        cause = error.__cause__
        # Errors of the library explain themselves; all others need the traceback.
        known = isinstance(cause, (FlexTrainError, ImportError))
        return Row(name, "not run", message=str(cause) if known else str(error))
    made, expected = len(traces[0].losses), len(reference.losses)
    if made != expected:
        return Row(name, "differs", message=f"its training ends after {made} steps, on one device after {expected}")
    measured, allowed = _measured(traces, reference), _tolerance(max(traces, key=lambda trace: trace.eps), tolerance)
    told = traces[0].left_out
    if tolerance is None and traces[0].declared > allowed:
        allowed = traces[0].declared
        told = [*told, f"its class counts differences up to {allowed:.1e} as rounding"]
    first = _first(measured, allowed, floor, traces, reference)
    status: Status = "differs" if first else "same"
    # What differs before training, is missing or is no number, does not come from updates.
    if (
        first
        and not traces[0].promises
        and first.step
        and all(max(at_step.values()) < math.inf for at_step in measured)
    ):
        status = "not promised"
    return Row(name, status, traces[0].dtype, allowed, _largest(measured), first, left_out=told)


def _tolerance(trace: ProcessTrace, given: float | None) -> float:
    return given if given is not None else max(FLOAT32_TOLERANCE, ROUNDINGS * trace.eps / 2)


def _measured(traces: Sequence[ProcessTrace], reference: ProcessTrace) -> list[dict[str, float]]:
    """For every step, the largest difference of every entry over the processes; losses and norms from step 1 on."""
    steps = [
        {key: max(each.get(key, math.inf) for each in at_step) for key in sorted(set().union(*at_step))}
        for at_step in zip(*(trace.differences for trace in traces), strict=True)
    ]
    for name, found, expected in (
        ("loss", traces[0].losses, reference.losses),
        ("grad_norm", traces[0].grad_norms, reference.grad_norms),
    ):
        for step, (ours, theirs) in enumerate(zip(found, expected, strict=True), 1):
            if name == "grad_norm" and reference.skipped[step - 1] and traces[0].skipped[step - 1]:
                continue  # infinite or no number, it is not used
            # A loss that has fallen by a factor of 100 is a difference of larger numbers, and has their rounding error.
            scale = 0.01 * max((abs(value) for value in expected[:step] if value is not None), default=0.0)
            if theirs is not None:
                steps[step][name] = _relative(ours, theirs, scale)
    return steps


def _relative(ours: float | None, theirs: float, scale: float) -> float:
    if ours is None:
        return math.inf
    if ours == theirs or (math.isnan(ours) and math.isnan(theirs)):
        return 0.0
    difference = abs(ours - theirs) / max(abs(theirs), scale, 1e-30)
    return difference if math.isfinite(difference) else math.inf


def _quantity(entry: str) -> str:
    if entry in ("loss", "grad_norm"):
        return entry
    kind = entry.partition(".")[0]
    return {"model": "weights", "evaluation": kind}.get(kind, "optimizer")


def _largest(measured: Iterable[dict[str, float]]) -> dict[str, float | None]:
    largest: dict[str, float | None] = dict.fromkeys(QUANTITIES[:-1])  # many scripts evaluate nothing
    for step in measured:
        for entry, difference in step.items():
            largest[_quantity(entry)] = max(largest.get(_quantity(entry)) or 0.0, difference)
    return largest


def _over_all(found: Iterable[dict[str, float]]) -> dict[str, float]:
    """The largest difference of every entry; what is no longer a number at some step says nothing about the others."""
    largest: dict[str, float] = {}
    for each in found:
        for entry, value in each.items():
            if value < math.inf or entry not in largest:
                largest[entry] = max(value, largest.get(entry, 0.0))
    return largest


def _first(
    measured: Sequence[dict[str, float]],
    tolerance: float,
    floor: dict[str, float],
    traces: Sequence[ProcessTrace],
    reference: ProcessTrace,
) -> FirstDifference | None:
    order = {name: number for number, name in enumerate(reference.parameters)}
    # By chance, an entry may round less on one device than most of its kind do; the median, because the bias of attention's
    # keys has no gradient but rounding, which Adam scales to full steps.
    of_kind = {
        kind: statistics.median([value for entry, value in floor.items() if _quantity(entry) == kind] or [0.0])
        for kind in QUANTITIES
    }
    for step, differences in enumerate(measured):
        allowed = {
            entry: max(tolerance, MARGIN * max(floor.get(entry, 0.0), min(of_kind[_quantity(entry)], BLURRED / MARGIN)))
            for entry in differences
        }
        wrong = [entry for entry, difference in differences.items() if not difference <= allowed[entry]]
        if not wrong:
            continue
        # Weights come before optimizer state, parameters in the model's order, losses and norms last.
        entry = min(wrong, key=lambda entry: (order.get(_parameter(entry), len(order)), _quantity(entry) != "weights"))
        hint = _hint(step, entry, wrong, traces, reference)
        return FirstDifference(step, _parameter(entry), entry, differences[entry], allowed[entry], hint, len(wrong) - 1)
    return None


def _hint(step: int, entry: str, wrong: Sequence[str], traces: Sequence[ProcessTrace], reference: ProcessTrace) -> str:
    """How the entry, other state of its parameter, or else the gradient norm is related to the expected value."""
    for number, (is_ours, is_theirs) in enumerate(zip(traces[0].skipped[:step], reference.skipped, strict=False), 1):
        if is_ours != is_theirs:
            where = "on the processes" if is_ours else "on one device"
            return (
                f"; gradients overflowed {where} only, and update {number} was skipped there: give a smaller loss_scale"
            )
    related = [other for other in wrong if _parameter(other) == _parameter(entry) and other != entry]
    for other in (entry, *related):
        for trace in traces:
            if hint := trace.hints.get((step, other)):
                return hint if other == entry else f"; {other}{hint.removeprefix(', it')}"
    ours, theirs = (trace.grad_norms[step - 1] if step else None for trace in (traces[0], reference))
    if "grad_norm" in wrong and ours is not None and theirs:
        return f"; the gradient norm is {ours / theirs:.4g} times what it should be"
    return ""


def _parameter(entry: str) -> str:
    """The parameter of an entry of the canonical state; empty for a loss or norm."""
    return split_key(entry)[1] or (entry.removeprefix("model.") if entry.startswith("model.") else "")


def _number(value: float | None) -> str:
    return "-" if value is None else "0" if value == 0 else f"{value:.1e}"


def _finite_or_text(value: Any) -> Any:
    """``value`` with the string "inf" for infinity and NaN, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite_or_text(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_finite_or_text(part) for part in value]
    return "inf" if isinstance(value, float) and not math.isfinite(value) else value
