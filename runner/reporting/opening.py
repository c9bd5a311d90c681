"""What a training is, found once at its start: the table that the log begins with, and ``run.json`` for reports."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import platform
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ...core.base.errors import counted
from ...core.base.tensors import size_text
from ...core.version import __version__, untried
from ...strategies.parts import StateMemory, state_memory
from ..data.user_loaders import batch_size
from .console import Table

if TYPE_CHECKING:
    from ..run import Run

# ModelOutline: how many parameters the parts of a model have.


MOST_ROWS = 12
_LARGE = 0.5
"""A part with a larger share of the parameters is shown by its own parts, if there is room."""
_SEVERAL = 3
"""Blocks of one class in a row from which on they share a row."""


@dataclass(frozen=True)
class ModelPart:
    """A module of a model, or several equal ones in a row.

    Attributes:
        name: in the model; ``blocks.0-11`` for several; empty for the model itself.
        kind: the class; ``12 x Block`` for several.
        total: number of parameters; what modules share belongs to the first of them.
        trained: those of them that require a gradient.
    """

    name: str
    kind: str
    total: int
    trained: int
    is_group: bool = False


@dataclass(frozen=True)
class ModelOutline:
    """The parts of a model, the whole of it, and what each transform has changed in it, by the transform's name."""

    parts: tuple[ModelPart, ...]
    whole: ModelPart
    transforms: tuple[tuple[str, str], ...] = ()


def outline(
    model: nn.Module, shape_of: Callable[[Tensor], Sequence[int]], transforms: tuple[tuple[str, str], ...] = ()
) -> ModelOutline:
    """Return the parts of a model by their number of parameters, at most twelve.

    Args:
        model: a model that no strategy has set up yet, because a process may have a part of it afterwards.
        shape_of: returns the whole shape of a parameter, which may be sharded already.
        transforms: what each transform has changed, by its name.
    """
    counts: dict[str, tuple[int, int]] = {"": (0, 0)}
    for name, parameter in model.named_parameters():
        if is_lazy(cast(Any, parameter)):  # which set-up refuses, with what to do
            continue
        number = math.prod(shape_of(parameter))
        path = name.split(".")
        for prefix in (".".join(path[:depth]) for depth in range(len(path))):
            total, trained = counts.get(prefix, (0, 0))
            counts[prefix] = total + number, trained + (number if parameter.requires_grad else 0)
    whole = ModelPart("", type(model).__name__, *counts[""])
    rows = [whole]
    while True:
        largest = max(rows, key=lambda row: (not row.is_group, row.total))
        if largest.is_group or (len(rows) > 1 and largest.total <= _LARGE * whole.total):
            break
        inner = _inside(model, largest, counts)
        if len(inner) < 1 or inner == [largest] or (len(rows) > 1 and len(rows) + len(inner) - 1 > MOST_ROWS):
            break
        index = rows.index(largest)
        rows[index : index + 1] = inner
    return ModelOutline(tuple(_shortened([row for row in rows if row is not whole])), whole, transforms)


def _inside(model: nn.Module, part: ModelPart, counts: dict[str, tuple[int, int]]) -> list[ModelPart]:
    """The modules directly in a part that have parameters, and the part's own parameters; empty if it has no modules."""
    module, prefix = model.get_submodule(part.name), f"{part.name}." if part.name else ""
    found = [
        ModelPart(prefix + name, type(child).__name__, *counts[prefix + name])
        for name, child in module.named_children()
        if prefix + name in counts
    ]
    if not found:
        return []
    own = part.total - sum(each.total for each in found), part.trained - sum(each.trained for each in found)
    rest = [ModelPart(f"{part.name} (own)".strip(), part.kind, *own, is_group=True)] if own[0] else []
    return [*rest, *_grouped(found)]


def _grouped(parts: Sequence[ModelPart]) -> Iterator[ModelPart]:
    """Yield the parts, those of one class whose names are numbers in a row as one."""
    for (is_number, kind), members in groupby(parts, lambda part: (part.name.rpartition(".")[2].isdigit(), part.kind)):
        same = list(members)
        if not is_number or len(same) < _SEVERAL:
            yield from same
            continue
        last = same[-1].name.rpartition(".")[2]
        total, trained = sum(part.total for part in same), sum(part.trained for part in same)
        yield ModelPart(f"{same[0].name}-{last}", f"{len(same)} x {kind}", total, trained, is_group=True)


def _shortened(rows: list[ModelPart]) -> list[ModelPart]:
    if len(rows) <= MOST_ROWS:
        return rows
    kept = sorted(rows, key=lambda row: row.total, reverse=True)[: MOST_ROWS - 1]
    others = [row for row in rows if row not in kept]
    rest = replace(
        others[0],
        name=f"{len(others)} others",
        kind="",
        total=sum(row.total for row in others),
        trained=sum(row.trained for row in others),
    )
    return [*(row for row in rows if row in kept), rest]


# Opening: the model, the samples of an update, and the rest of what the log begins with.


@dataclass(frozen=True)
class Batch:
    """How many samples an update has, and of what they are made up; None: the data do not say.

    Attributes:
        samples: of an update, over all processes.
        per_shard: of a micro-batch, on every process that reads data of its own.
        shards: number of processes, or groups of them, that read different data.
        accumulate: micro-batches of an update.
    """

    samples: int | None
    per_shard: int | None
    shards: int
    accumulate: int


@dataclass(frozen=True)
class Opening:
    """A training as it begins.

    Attributes:
        model: the parts of the model.
        memory: what this process keeps of states.
        batch: the samples of an update.
        facts: the rest, by the words of the table.
    """

    model: ModelOutline
    memory: StateMemory
    batch: Batch
    facts: dict[str, str]

    def tables(self) -> Iterator[Table]:
        """Yield the table of the model, and that of the training."""
        rows = [
            (part.name, part.kind, f"{part.total:,}", _share(part.trained, part.total)) for part in self.model.parts
        ]
        whole = self.model.whole
        rows.append(("all", whole.kind, f"{whole.total:,}", _share(whole.trained, whole.total)))
        yield Table("Model", ("module", "class", "parameters", "trained"), rows, right=(2, 3), last_is_sum=True)
        if self.model.transforms:
            yield Table("Transforms", ("transform", "what it has changed"), list(self.model.transforms))
        yield Table("Training", ("", ""), [*self.facts.items()])

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {
            "parameters": self.model.whole.total,
            "trained": self.model.whole.trained,
            "model": self.model.whole.kind,
            "parts": [asdict(part) for part in self.model.parts],
            "transforms": [list(each) for each in self.model.transforms],
            "memory": asdict(self.memory),
            "batch": asdict(self.batch),
            "facts": self.facts,
        }


def opening(run: Run, model: ModelOutline) -> Opening:
    """Return what a training is that is about to begin; every process could, and none waits for another."""
    for newer in untried():
        logging.getLogger("flextrain").warning(f"{newer}; what has changed in its private parts may end in an error")
    memory, batch = state_memory(run.strategy), _batch(run)
    facts = {
        "precision": str(run.strategy.precision_report()),
        "strategy": _strategy(run),
        "batch": _batch_text(batch, run),
        "updates": _updates(run),
        "states": _memory_text(memory, run),
    }
    return Opening(model, memory, batch, facts)


def environment(run: Run) -> dict[str, Any]:
    """Return the machine and the versions that a run uses, for reports."""
    device = run.strategy.device
    name = ""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    return {
        "flextrain": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": f"{device.type} {name}".strip(),
        "processes": run.world_size,
        "machine": socket.gethostname(),
        "system": platform.platform(),
        "script": sys.argv[0],
    }


def _share(part: int, whole: int) -> str:
    """A share in percent; 0 % and 100 % only if it is exactly that."""
    if part in (0, whole):
        return "100 %" if part else ("0 %" if whole else "")
    return f"{min(max(100 * part / whole, 0.01), 99.99):.3g} %".replace("100 %", "99.9 %")


def _strategy(run: Run) -> str:
    topology = run.strategy.topology
    axes = {name: size for name, (_, size) in topology.axes.items() if size > 1}
    layout = f": {' x '.join(f'{name} {size}' for name, size in axes.items())}" if axes else ""
    return f"{type(run.strategy).__name__} on {counted(run.world_size, 'process', 'processes')}{layout}"


def samples_per_iteration(run: Run) -> int | None:
    """Return the samples of an update over all processes; None if the dataloader does not say."""
    size = batch_size(run.train_dataloader)
    if size is None:
        return None
    return size * run.strategy.topology.data.count * run.accumulate


def _batch(run: Run) -> Batch:
    samples = samples_per_iteration(run)
    return Batch(samples, batch_size(run.train_dataloader), run.strategy.topology.data.count, run.accumulate)


def _batch_text(batch: Batch, run: Run) -> str:
    what = "processes" if batch.shards == run.world_size else "groups of processes"
    parts = [f"{batch.per_shard:,} per process" if batch.per_shard is not None else "as the data give them"]
    if batch.shards > 1:
        parts.append(f"{batch.shards:,} {what}")
    if batch.accumulate > 1:
        parts.append(f"{batch.accumulate:,} accumulated")
    if batch.samples is None:
        return f"of unknown size: {' x '.join(parts)}"
    made_of = f" = {' x '.join(parts)}" if len(parts) > 1 else ""
    return f"{batch.samples:,} samples per update{made_of}"


def _updates(run: Run) -> str:
    loop, done = run.train_loop, run.iter
    text = f"{loop.max_iters:,}"
    if loop.by_epoch:
        text = f"{loop.max_iters:,} = {counted(loop.max_epochs, 'epoch')} of {loop.epoch_length:,}"
    else:
        length = getattr(getattr(loop, "data", None), "epoch_length", None)
        text += f", an epoch has {length:,}" if length else ", the data have no end or no known length"
    return f"{text}; {done:,} are done" if done else text


def _memory_text(memory: StateMemory, run: Run) -> str:
    state = "not known before the first update" if memory.optimizer_state is None else size_text(memory.optimizer_state)
    total = f"{'at least ' if memory.optimizer_state is None else ''}{size_text(memory.total)}"
    whose = "on rank 0" if run.world_size > 1 else "of memory"
    parts = f"parameters {size_text(memory.parameters)}, gradients {size_text(memory.gradients)}, optimizer {state}"
    return f"{total} {whose}: {parts}{f' ({memory.note})' if memory.note else ''}"


# RunRecord: what a report needs beside scalars: ``run.json`` with the start and the end, and a file of every other
# rank.


FILE = "run.json"
MOST_RANKS = 64
"""Ranks that write a file, the first ones: thousands of small files would be a load for a shared disk."""
_OF_A_RANK = ("iter", "time", "data_time", "memory")


def rank_file(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank_{rank}.json"


class RunRecord:
    """Writes beside the JSON lines of a run; if there are none, it writes nothing.

    Args:
        run: the run; its visualizer is known.
    """

    def __init__(self, run: Run) -> None:
        self._folder: Path | None = run.visualizer.record_dir
        self._rank = run.rank
        self._values: dict[str, Any] = {}
        self._lines: TextIO | None = None
        self._fails = False

    @property
    def is_kept(self) -> bool:
        """Whether anything is written."""
        return self._folder is not None

    def update(self, **values: Any) -> None:
        """Write ``run.json`` again with these values in it; on rank 0."""
        if self._folder is None or self._rank != 0:
            return
        self._values |= values
        path = self._folder / FILE
        with self._surviving(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{path.name}")
            temporary.write_text(json.dumps(self._values, indent=2, default=str) + "\n", encoding="utf-8")
            temporary.replace(path)  # a reader never finds a part of it

    def add_line(self, record: Mapping[str, Any]) -> None:
        """Write what this rank has measured itself; on every rank but 0, whose records have it."""
        if self._folder is None or not 0 < self._rank < MOST_RANKS:
            return
        names = {name.removeprefix("train/"): value for name, value in record.items()}
        with self._surviving(self._folder / rank_file(self._rank)):
            if self._lines is None:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._lines = (self._folder / rank_file(self._rank)).open("a", buffering=1, encoding="utf-8")
            self._lines.write(json.dumps({name: names[name] for name in _OF_A_RANK if name in names}) + "\n")

    def close(self) -> None:
        """Close the file of this rank."""
        if self._lines is not None:
            lines, self._lines = self._lines, None
            with contextlib.suppress(OSError):  # add_line has said it
                lines.close()

    @contextlib.contextmanager
    def _surviving(self, path: Path) -> Any:
        """Context that turns the failure of storage into one warning."""
        try:
            yield
        except OSError as error:
            if not self._fails:
                logging.getLogger("flextrain").warning(f"{path}: cannot be written, {error.strerror or error}")
            self._fails = True
