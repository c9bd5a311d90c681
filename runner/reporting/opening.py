"""What a training is, found once at its start: the table that the log begins with, and ``run.json`` for reports."""

from __future__ import annotations

import contextlib
import json
import logging
import platform
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch

from ...core.base.errors import counted
from ...core.base.tensors import size_text
from ...core.version import __version__, untried
from ...strategies.parts import StateMemory, state_memory
from ..data.user_loaders import batch_size
from .console import Table
from .model_outline import ModelOutline

if TYPE_CHECKING:
    from ..run import Run


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
        if self._folder is None or self._rank >= MOST_RANKS:
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
