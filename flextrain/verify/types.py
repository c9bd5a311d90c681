"""Check at the real number of processes where tensors of one update are the same, own, parts or sums along each axis of a mesh."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Group
from rich.text import Text
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..core.base.errors import ConfigError, StrategyError
from ..core.base.tensors import parts_of
from ..core.comm.topology import Topology
from ..core.device.precision import BATCH_NORM
from ..core.torch_compat.torch_private import tree_flatten, with_values
from ..optim.gradients import settled
from ..optim.wrapper import OptimWrapper
from ..plan.child import as_rank, explained
from ..plan.ledger import Books, Ledger
from ..plan.plan import PlannedJob
from ..plan.update import Training
from ..runner.loops.step import Stepper
from ..tables import FittedTable, add_row, as_text
from ..testing.workers import WorkerError, WorkerGroup
from .type_rules import (
    Axes,
    Operation,
    OperationRecorder,
    Types,
    aligned,
    depends,
    looking,
    own,
    owned,
    part,
    parted,
    times,
)
from .verify import check_asked

NOT_SEEN = (
    "factors: a mean where a sum is due, or a wrong weight; flextrain verify --simulate compares numbers, on fewer ranks",
    "which dimension is divided: a softmax, norm or mean over a shard passes as one over the whole; --simulate finds it",
    "what depends on values: branches, routes of tokens, and messages whose senders or sizes only the data decide",
    "ranks other than the first one and its neighbour along every axis; of a pipeline the first and the last stage",
    "what another stage of a pipeline sends: it is taken for a part that no other axis divides but those of the data",
    "tensors made before the update, such as tables of positions: they are taken for the same on all ranks, unless DTensors",
    "order: a deadlock, or a collective that some ranks leave out; those compared call the same operations",
    "kernels that communicate inside of one operation, custom hooks, evaluation, and updates after the first",
)
"""What the analysis cannot see, one line each."""
_STYLES = {"sound": "green", "faulty": "bold red", "not run": "yellow"}


@dataclass(frozen=True)
class TypeFault:
    """A tensor that is not what it must be along an axis.

    Attributes:
        what: "loss", "gradient norm", "gradient", "parameter", "optimizer state", "buffer" or "activation".
        name: of the parameter, buffer or module; empty for a loss and a norm.
        axis: the axis, or several.
        kind: "missing" reduction, "doubled" reduction, "averaged": the same where processes have different parts; "late":
            terms of a sum went through an operation that only their sum should have gone through.
        where: module and line; empty if they are not known.
        others: how many further tensors have the same fault.
    """

    what: str
    name: str
    axis: str
    kind: Literal["missing", "doubled", "averaged", "late"]
    where: str = ""
    others: int = 0

    def __str__(self) -> str:
        said = {
            "missing": f"differs along {self.axis} by what each process has of its own: a reduction over {self.axis} is missing",
            "doubled": f"was added up over {self.axis} although all had the same: a reduction over {self.axis} is doubled",
            "averaged": f"is the same along {self.axis}, where the processes have different parts of the parameter",
            "late": f"is computed of each process's term along {self.axis}, and added up after it: the reduction comes late",
        }[self.kind]
        subject = f"{self.what} of {self.name}" if self.name else self.what
        more = f"; {self.others} more" if self.others else ""
        return f"{subject} {said}" + (f", at {self.where}" if self.where else "") + more


@dataclass
class TypeRow:
    """The result of one strategy.

    Attributes:
        axes: number of processes by axis.
        types: by "parameter", "gradient", "activation" (by module) and "buffer", then by name: the type along each axis that
            has one: "own", "part" or "partial"; the same along all others.
        operations: how many were followed.
    """

    strategy: str
    status: Literal["sound", "faulty", "not run"]
    axes: dict[str, int] = field(default_factory=dict)
    faults: list[TypeFault] = field(default_factory=list)
    types: dict[str, dict[str, dict[str, str]]] = field(default_factory=dict)
    operations: int = 0
    message: str = ""
    notes: list[str] = field(default_factory=list)


@dataclass
class TypeReport:
    """The results of all strategies; printing it with rich gives a table."""

    script: str
    processes: int
    rows: list[TypeRow] = field(default_factory=list)
    not_seen: tuple[str, ...] = NOT_SEEN

    @property
    def exit_status(self) -> int:
        """0: no fault; 1: a fault; 2: a strategy could not be followed."""
        statuses = [row.status for row in self.rows]
        return 1 if "faulty" in statuses else 2 if "not run" in statuses else 0

    def as_json(self) -> dict[str, Any]:
        """The report as plain values."""
        return {**dataclasses.asdict(self), "exit_status": self.exit_status}

    def __rich__(self) -> Group:
        title = f"{Path(self.script).name}: types of one update at {self.processes} processes, of which none runs"
        table = FittedTable(title=Text(title), title_justify="left", caption_justify="left")
        table.add_column("strategy", overflow="fold")
        table.add_column("verdict", no_wrap=True)
        for heading in ("axes", "parameters", "gradients", "activations"):
            table.add_column(heading, overflow="fold")
        for row in self.rows:
            sizes = " x ".join(f"{name}={size}" for name, size in row.axes.items())
            cells = [_counted(row.types.get(what, {})) for what in ("parameter", "gradient", "activation")]
            add_row(table, row.strategy, Text(row.status, style=_STYLES[row.status]), sizes, *cells)
        lines = [Text(f"{row.strategy}: {fault}", style="red") for row in self.rows for fault in row.faults]
        lines += [Text(f"{row.strategy}: {row.message}", style="yellow") for row in self.rows if row.message]
        lines += [Text(f"{row.strategy}: {note}", style="dim") for row in self.rows for note in row.notes]
        lines += [Text(f"Not seen: {line}", style="dim") for line in self.not_seen]
        return Group(table, *lines)

    def __str__(self) -> str:
        return as_text(self, width=160)


def _counted(types: Mapping[str, Mapping[str, str]]) -> str:
    """How many tensors have each type, such as "12 replicated, 20 part (tp)"."""
    counts: dict[str, int] = {}
    for each in types.values():
        words: dict[str, list[str]] = {}
        for axis, word in each.items():
            words.setdefault(word, []).append(axis)
        text = ", ".join(f"{word} ({', '.join(axes)})" for word, axes in words.items()) or "replicated"
        counts[text] = counts.get(text, 0) + 1
    return "; ".join(f"{count} {text}" for text, count in sorted(counts.items(), key=lambda item: -item[1])) or "-"


def verify_types(
    script: str,
    strategies: Sequence[str],
    *,
    arguments: Sequence[str] = (),
    processes: int = 2,
    timeout_s: float = 600.0,
    on_progress: Callable[[str], object] = lambda what: None,
) -> TypeReport:
    """Follow one update of a script's training at its real number of processes, and find what is not as it must be.

    The ranks that are compared, the first one and its neighbour along each axis, are rehearsed one after another on tensors without
    values, as ``flextrain plan`` does. What differs between them (batches, numbers, offsets, random numbers) and what they
    have parts of is followed through every operation of the first one. Faults: a loss, a gradient or a state that differs
    where it must be the same; something that was added up although all had the same; parts that get one gradient.

    Args:
        script: see ``verify``.
        strategies: a list of names, at least one, see ``verify``.
        arguments: command line arguments of the script.
        processes: the real number of processes, 2 or more.
        timeout_s: largest number of seconds for one rank.
        on_progress: called with what is done next.

    Raises:
        ConfigError: the script or the number of processes is not possible.
    """
    check_asked(strategies, processes, timeout_s)
    if not Path(script).is_file():
        raise ConfigError(f"verify.script: {script} is not a file")
    report = TypeReport(script, processes)
    for name in strategies:
        job = PlannedJob(script, name, processes, arguments=tuple(arguments))
        report.rows.append(_row(job, timeout_s, partial(_said_of, name, on_progress)))
    return report


def _said_of(name: str, on_progress: Callable[[str], object], what: str) -> None:
    on_progress(f"{name}: {what}")


def _row(job: PlannedJob, timeout_s: float, on_progress: Callable[[str], object]) -> TypeRow:
    def rehearsed(rank: int, *more: Any) -> Any:
        on_progress(f"rank {rank}")
        # Each in a process of its own: a script and torch's process groups leave traces in one.
        with WorkerGroup(1, timeout_s, imports=[__name__]) as group:
            return group.run(rehearse, job, rank, *more)[0]

    try:
        return _compared(job, rehearsed)
    except WorkerError as error:
        # What a rehearsal raises is explained in its process; else that has ended, or not answered in time.
        return TypeRow(job.name, "not run", message=str(error.__cause__ or str(error).splitlines()[0]))
    except StrategyError as error:
        return TypeRow(job.name, "not run", message=str(error))


def _compared(job: PlannedJob, rehearsed: Callable[..., Any]) -> TypeRow:
    second: RankRecord = rehearsed(1)  # a neighbour of the first one along the innermost axis
    axes = Axes.of(job.world_size, second.sizes)
    stages, beside = [0], {i: stride for i, stride in enumerate(axes.strides) if axes.names[i] != "pp"}
    for i, name in enumerate(axes.names):
        if name == "pp":
            stages.append(axes.strides[i] * (axes.sizes[i] - 1))
    neighbours: dict[int, dict[int, RankRecord]] = {}
    names: dict[int, list[str]] = {}
    for rank in stages:
        ranks = {i: rank + stride for i, stride in beside.items()}
        neighbours[rank] = {i: second if other == 1 else rehearsed(other) for i, other in ranks.items()}
        names[rank] = next((record.names for record in neighbours[rank].values()), []) or rehearsed(rank).names
    row = TypeRow(job.name, "sound", dict(zip(axes.names, axes.sizes, strict=True)))
    for rank in stages:
        others = {name for other in stages if other != rank for name in names[other]}
        shared = sorted(others if len(stages) > 1 else names[rank])
        operations = {i: record.operations for i, record in neighbours[rank].items()}
        found = rehearsed(rank, RankComparison(axes, neighbours[rank], shared, operations))
        if isinstance(found, RankRecord):  # not all execute the same
            for i, other in operations.items():
                if [name for name, _ in other] != [name for name, _ in found.operations]:
                    row.notes.append(
                        f"ranks {rank} and {rank + axes.strides[i]}, neighbours along {axes.names[i]}, execute different operations; "
                        "what only one of them executes is taken for different"
                    )
            alike = {i: aligned(found.operations, other) for i, other in operations.items()}
            found = rehearsed(rank, RankComparison(axes, neighbours[rank], shared, alike))
            if isinstance(found, RankRecord):
                raise StrategyError(
                    f"verify.types: rank {rank} executes other operations each time, and types can only follow what is the same"
                )
        row.operations += found.operations
        row.notes += [note for note in found.notes if note not in row.notes]
        known = {(fault.what, fault.name, fault.axis, fault.kind) for fault in row.faults}  # on the other stage
        row.faults += [f for f in found.faults if (f.what, f.name, f.axis, f.kind) not in known]
        for what, types in found.types.items():
            row.types.setdefault(what, {}).update(types)
    row.status = "faulty" if row.faults else "sound"
    return row


# One rank


@dataclass
class RankRecord:
    """What a rank does, to be compared with others.

    Attributes:
        sizes: of the axes, see Topology.
        operations: name and check sum of each.
        batch: a check sum for each tensor of the micro-batches.
        names: of the parameters that it has.
    """

    sizes: dict[str, int] = field(default_factory=dict)
    operations: list[Operation] = field(default_factory=list)
    batch: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)


@dataclass
class RankComparison:
    """What a rank is compared with.

    Attributes:
        neighbours: by axis, what the rank's neighbour along it does.
        shared: names of parameters that another stage has too.
        operations: by axis, what the neighbour executes in place of each operation.
    """

    axes: Axes
    neighbours: dict[int, RankRecord]
    shared: list[str]
    operations: Mapping[int, Sequence[Operation | None]]

    def batch(self, own: Sequence[int]) -> list[int]:
        """The axes along which each tensor of the micro-batches differs, as bits."""
        return [
            sum((sums != record.batch[j]) << i for i, record in self.neighbours.items()) for j, sums in enumerate(own)
        ]


class _EnoughError(Exception):
    """Ends a rehearsal after the first update."""


def rehearse(job: PlannedJob, rank: int, comparison: RankComparison | None = None) -> Any:
    """Rehearse the first update of a rank.

    Returns:
        Its RankRecord; with a comparison its TypeRow, unless a neighbour executes other operations.

    Raises:
        StrategyError: it cannot be rehearsed, for example because the computation depends on values.
    """
    try:
        with as_rank(job, rank) as (found, arguments, notes):
            recorder = (
                OperationRecorder() if comparison is None else Types(comparison.axes, rank, comparison.operations)
            )
            with recorder:
                training = _Update(arguments, job, found, recorder, comparison)
                training.row.notes += notes
                with suppress(_EnoughError):
                    training.run()
    except Exception as error:  # here, where its traceback says which line has failed
        raise StrategyError(explained(error, "; or compare numbers with flextrain verify --simulate")) from None
    return training.row if isinstance(recorder, Types) and not recorder.is_apart else training.record


class _Update(Training):
    """The first update of a rehearsal, recorded or typed."""

    def __init__(
        self,
        given: Mapping[str, Any],
        job: PlannedJob,
        found: Any,
        recorder: OperationRecorder,
        comparison: RankComparison | None,
    ) -> None:
        super().__init__(given, job, found)
        self.record, self.row = RankRecord(), TypeRow(job.name, "sound")
        self._recorder, self._comparison = recorder, comparison

    def _without_its_values(self, batch: Any) -> Any:
        with with_values():
            self.record.batch += [_sum_of(leaf) for leaf in _leaves(batch)]
        return super()._without_its_values(batch)

    def _made(self, ledger: Ledger, stepper: Stepper, window: list[Any], model: nn.Module) -> Books:
        topology, module, recorder = self.strategy.topology, self.strategy.module, self._recorder
        assert stepper.optim is not None
        wrappers = [*stepper.optim.wrappers.values()]
        self.record.sizes = {axis: size for axis, (_, size) in topology.axes.items()}
        parameters = dict(self.strategy.parameters())
        self.record.names = [*parameters]
        recorder.name_modules(module)
        torch.manual_seed(0)  # as in a run: ranks with the same samples draw the same
        update = None
        if isinstance(recorder, Types):
            assert self._comparison is not None
            update = TypedUpdate(recorder, self._comparison, topology, module, parameters, self.row)
            batches = self._comparison.batch(self.record.batch)
            update.begin([leaf for batch in window for leaf in _leaves(batch)], batches)
            for wrapper in wrappers:
                wrapper.register_step_pre_hook(update.look_at_gradients)
        recorder.is_on = True
        outputs = stepper.train(window)
        recorder.end()
        self.record.operations = recorder.record
        if update is not None:
            update.finish(outputs, [wrapper.optimizer for wrapper in wrappers])
        raise _EnoughError


def _leaves(batch: Any) -> list[Tensor]:
    found = tree_flatten(dict(batch) if isinstance(batch, dict) else batch)[0]
    return [leaf for leaf in found if isinstance(leaf, Tensor)]


def _sum_of(tensor: Tensor) -> int:
    values = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return zlib.crc32(values, zlib.crc32(repr(tuple(tensor.shape)).encode()))


class TypedUpdate:
    """Gives parameters, buffers and batches their types before an update, and looks at what has become of them.

    Args:
        types: follows the operations.
        comparison: of this rank with its neighbours.
        parameters: by name.
        row: where faults and types go.
    """

    def __init__(
        self,
        types: Types,
        comparison: RankComparison,
        topology: Topology,
        module: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        row: TypeRow,
    ) -> None:
        self._types, self._axes, self._row, self._module = types, comparison.axes, row, module
        self._comparison, self._parameters = comparison, parameters
        self._data = self._axes.along(topology.data.ranks) if topology.data.count > 1 else 0
        self._stages = sum(1 << i for i, name in enumerate(self._axes.names) if name == "pp")
        self._parts: dict[str, int] = {}

    def begin(self, batch: Sequence[Tensor], differing: Sequence[int]) -> None:
        """Give what is there before the update its type; ``differing``: the axes along which each tensor of the batch differs."""
        types, different = self._types, self._data
        for bits in differing:
            different |= bits
        types.data = different
        types.received = own(different) | part(self._stages)
        with looking():
            for leaf, bits in zip(batch, differing, strict=True):
                types.write(leaf, own(self._data | bits))
            for name, parameter in self._parameters.items():
                self._parts[name] = bits = self._parts_of(name, parameter)
                for each in parts_of(parameter):
                    types.write(each, part(bits))
                self._note("parameter", name, part(bits))
            for name, buffer in self._module.named_buffers():
                self._parts[name] = bits = self._parts_of(name, buffer)
                for each in parts_of(buffer):
                    types.write(each, part(bits & ~self._stages))

    def _parts_of(self, name: str, parameter: Tensor) -> int:
        """The axes along which processes have different parts of a parameter."""
        bits = 0 if name in self._comparison.shared else self._stages
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            for dim, placement in enumerate(parameter.placements):
                if not placement.is_replicate():
                    bits |= self._axes.along(torch.distributed.get_process_group_ranks(mesh.get_group(dim)))
        return bits

    def look_at_gradients(self, wrapper: OptimWrapper) -> None:
        """Compare the types of gradients with those of their parameters, before ``wrapper`` clips them."""
        settled(self._parameters.values())  # pending sums are no fault
        with looking():
            for name, parameter in self._parameters.items():
                if parameter.grad is None or name in self._row.types.get("gradient", {}):
                    continue
                kind = self._kind(parameter.grad)
                self._note("gradient", name, kind)
                self._check("gradient", name, kind, self._parts[name], parameter.grad)
                if depends(kind) and (same := self._parts[name] & ~(parted(kind) | owned(kind))):
                    self._add("gradient", name, same, "averaged", self._line_of(name))

    def finish(self, outputs: Mapping[str, Any], optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Look at the losses, and at what the update has left."""
        types = self._types
        gradients, self._row.faults = self._row.faults, []
        with looking():
            for name, value in outputs.items():
                if isinstance(value, Tensor):
                    is_norm = name == "grad_norm"
                    what = "gradient norm" if is_norm else "loss" if name == "loss" else f"loss ({name})"
                    kind = self._kind(value)
                    # A stage of a pipeline has a loss of its own or none; each process logs the mean over the data later.
                    allowed = self._stages if is_norm is False else 0
                    allowed_own = 0 if is_norm else self._data
                    if is_norm and any(fault.kind == "missing" for fault in gradients):
                        continue  # it is made of them
                    own_axes = allowed | allowed_own
                    self._check(what, "", kind & ~own(own_axes) | kind & own(0), own_axes, value)
            leaked = {fault.axis for fault in self._row.faults if fault.what.startswith("loss")}
            self._row.faults += [fault for fault in gradients if not (fault.kind == "missing" and fault.axis in leaked)]
            reported = {fault.axis for fault in self._row.faults}
            names = {id(parameter): name for name, parameter in self._parameters.items()}
            before, self._row.faults = self._row.faults, []
            for name, parameter in self._parameters.items():
                self._check("parameter", name, self._kind(parameter), self._parts[name], parameter)
            for optimizer in optimizers:
                for stated, state in optimizer.state.items():
                    if (known := names.get(id(stated))) is None:
                        continue
                    for key, value in state.items():
                        self._check("optimizer state", f"{known}.{key}", self._kind(value), self._parts[known], value)
            self._row.faults = before + [fault for fault in self._row.faults if fault.axis not in reported]
            self._look_at_buffers()
            for name, (kind, step) in types.outputs.items():
                self._note("activation", name or "(the model)", kind, types.summed.get(step, 0))
            for at, axes in types.late.items():
                self._add("activation", types.steps[at].module, axes, "late", types.where(at))
        self._row.operations = len(types.steps)
        self._row.faults = _grouped(self._row.faults)

    def _look_at_buffers(self) -> None:
        running = {
            f"{prefix}.{name}" if prefix else name
            for prefix, module in self._module.named_modules()
            if isinstance(module, BATCH_NORM)
            for name, _ in module.named_buffers(recurse=False)
        }
        for name, buffer in self._module.named_buffers():
            kind = self._kind(buffer)
            self._note("buffer", name, kind)
            if name in running and owned(kind) & self._data:
                self._row.notes.append(
                    "Batch normalisation: running statistics are each process's own in training, and shared before evaluation"
                )
                kind &= ~own(self._data)
            self._check("buffer", name, kind, self._parts[name], buffer)

    # Faults

    def _kind(self, value: Any) -> int:
        """The union of the types of a tensor's elements, of all that a DTensor consists of."""
        return _either(self._types.kind_of(each) for each in parts_of(value))

    def _check(self, what: str, name: str, kind: int, parts: int, tensor: Any) -> None:
        start = [step for each in parts_of(tensor) for step in self._types.writers(each)]
        if missing := owned(kind) | parted(kind) & ~parts:
            self._add(what, name, missing, "missing", self._where(what, name, missing, start))
        if doubled := times(kind):
            self._add(what, name, doubled, "doubled", self._where_doubled(name, doubled, start))

    def _add(self, what: str, name: str, axes: int, kind: Any, where: str) -> None:
        for i in self._axes.each(axes):
            self._row.faults.append(TypeFault(what, name, self._axes.names[i], kind, where))

    def _where(self, what: str, name: str, axes: int, start: Sequence[int]) -> str:
        if name or what == "gradient norm":  # which is made of all gradients, outside of the model
            return self._line_of(name) if name else ""
        types = self._types
        steps = types.chain(start, lambda kind: (owned(kind) | parted(kind)) & axes)
        for at in steps:
            step = types.steps[at]
            if not (step.adds and step.line and len(step.inputs) > 1):
                continue
            # Where something of this process meets what is the same on all: who made it has left out the reduction.
            apart = [i for i, kind, same in step.inputs if same and (owned(kind) | parted(kind)) & axes]
            alike = [
                i for i, kind, same in step.inputs if same and not (owned(kind) | parted(kind)) & axes and depends(kind)
            ]
            if apart and alike and apart[0] >= 0:
                return types.where(apart[0])
        lines = [at for at in reversed(steps) if types.steps[at].line]
        return (
            next((types.where(at) for at in lines if types.steps[at].module), "") or types.where(lines[0])
            if lines
            else ""
        )

    def _where_doubled(self, name: str, axes: int, start: Sequence[int]) -> str:
        types = self._types
        for at in types.chain(start, lambda kind: times(kind) & axes):
            if types.steps[at].sums_same & axes and (types.steps[at].module or not name):
                return types.where(at)
        return self._line_of(name) if name else ""

    def _line_of(self, name: str) -> str:
        """The module of a parameter, and the line that calls it."""
        module = name.rpartition(".")[0]
        found = next((step.line for step in self._types.steps if step.module == module and step.line), "")
        return f"{module or 'the model'} ({found})" if found else module

    # What is reported of all tensors

    def _note(self, what: str, name: str, kind: int, summed: int = 0) -> None:
        words = {self._axes.names[i]: "own" for i in self._axes.each(owned(kind))}
        for i in self._axes.each(parted(kind) & ~owned(kind)):
            words[self._axes.names[i]] = "part"
        for i in self._axes.each(summed & (owned(kind) | parted(kind))):
            words[self._axes.names[i]] = "partial"
        self._row.types.setdefault(what, {})[name] = words


def _either(kinds: Iterable[int]) -> int:
    found = 0
    for kind in kinds:
        found |= kind
    return found


def _grouped(faults: Iterable[TypeFault]) -> list[TypeFault]:
    """One fault for each axis, kind and sort of tensor, with the number of the others."""
    found: dict[tuple[str, str, str], list[TypeFault]] = {}
    for fault in faults:
        found.setdefault((fault.what, fault.axis, fault.kind), []).append(fault)
    return [dataclasses.replace(same[0], others=len(same) - 1) for same in found.values()]
