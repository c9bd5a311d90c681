"""Save a checkpoint: plan which process writes what, write in every process, and complete it on rank 0.

Every process plans by itself from the layouts of the tensors, see ``joint_plan`` and ``planning``.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import math
import os
import shutil
import threading
import time
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..base.errors import CheckpointError, StorageError
from ..base.tensors import DTYPES, check_tensor, nonfinite, size_text
from ..comm.collectives import get_rank, get_world_size, side_group
from ..device.device import HostBuffer, host_slices
from . import directory
from . import load as rows
from . import plain_values as own_row
from .chunks import held_chunks
from .folders import as_path, file_of, is_local, owner_of
from .manifest import MANIFEST, VALUES, FileEntry, LaidOutTensor, manifest_of
from .participants import Participants, ranks_text
from .plain_values import Own, OwnRow, PlainValues, RowFacts, RowsPlan, plan_rows
from .replicas import Replicas, Summaries, share_of
from .safetensors_file import header_of, write_safetensors
from .save_plan import Kind, Offer, PlannedChunk, SharedPlan, layout_of, offer_of, plan_save, unpacked

# Agree on the plan of a save: processes exchange hashes of what they offer, and only what differs, then plan alike.
#
# Under FSDP over 4,096 processes, rank 0 gets a hash and the first rank of a mesh from each of them, and no list of
# tensors.


class _Alike(NamedTuple):
    """Ranks of the processes of one kind, and the first ranks of their meshes."""

    ranks: Sequence[int]
    firsts: Sequence[Sequence[int]]


def agree(participants: Participants, tensors: Mapping[str, Tensor]) -> SharedPlan:
    """The plan for saving the tensors of all processes; every process must call it.

    Raises:
        CheckpointError: on every process, if what they offer does not fit together.
    """
    own: list[Offer] = []

    def offer() -> tuple[bytes, tuple[int, ...]]:
        own[:] = [offer_of(tensors, get_rank(), get_world_size())]
        return own[0].digest, own[0].firsts

    alike = participants.round(offer, _kinds)
    offers = [own[0]] * len(alike)
    if len(alike) > 1:
        senders = [kind.ranks[0] for kind in alike]
        packed: list[bytes] = participants.ask(senders, lambda: zlib.compress(own[0].packed()), lambda sent: sent)
        offers = [unpacked(zlib.decompress(one)) for one in packed]
    kinds = [Kind(ranks, one, firsts) for (ranks, firsts), one in zip(alike, offers, strict=True)]
    plans: list[SharedPlan] = []

    def plan() -> str:
        plans[:] = [plan_save(kinds, get_world_size())]
        return plans[0].mark

    participants.round(plan, _check_same)
    return plans[0]


def _kinds(offered: list[tuple[bytes, tuple[int, ...]]]) -> list[_Alike]:
    """The kinds of processes, that of rank 0 first."""
    ranks: dict[bytes, list[int]] = {}
    firsts: dict[bytes, list[set[int]]] = {}
    for rank, (digest, own) in enumerate(offered):
        ranks.setdefault(digest, []).append(rank)
        known = firsts.setdefault(digest, [set() for _ in own])
        for found, first in zip(known, own, strict=True):
            found.add(first)
    return [_Alike(_compact(ranks[digest]), [_compact(sorted(found)) for found in firsts[digest]]) for digest in ranks]


def _compact(numbers: list[int]) -> Sequence[int]:
    """The numbers as a range, if they are evenly spaced: a message of any length otherwise."""
    if len(numbers) < 2:
        return numbers
    found = range(numbers[0], numbers[-1] + 1, numbers[1] - numbers[0])
    return found if list(found) == numbers else numbers


def _check_same(marks: list[str]) -> None:
    if strays := [rank for rank, mark in enumerate(marks) if mark != marks[0]]:
        raise CheckpointError(
            f"rank {ranks_text(strays)} plans another checkpoint than rank 0 from the same layouts; all "
            "processes need the same versions of flextrain and torch"
        )


# PendingSave: a save that a thread completes while training goes on.


_logger = logging.getLogger("flextrain")


class Save(Protocol):
    """A save whose state is copied."""

    path: Path

    def finish(self) -> None:
        """Write and complete it."""


class PendingSave:
    """A save that a thread completes in the background; the interpreter waits for it before it exits."""

    def __init__(self, save: Save, logs_failure: bool) -> None:
        self.path = save.path
        self.seconds = 0.0
        """Seconds that writing took; set when the save is done."""
        self._error: Exception | None = None
        self._logs_failure = logs_failure
        # Not Thread.join: before Python 3.13 a thread counts as over if Ctrl-C or a signal interrupts that.
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(save,), name="flextrain-save")
        self._thread.start()

    def _run(self, save: Save) -> None:
        # Release the GIL, for which start() waits: this thread would hold it for some milliseconds.
        time.sleep(0.001)
        begin = time.perf_counter()
        try:
            save.finish()
        except Exception as error:
            if self._logs_failure:  # a script may never call wait()
                _logger.error("%s", error)
            self._error = error
        finally:
            self.seconds = time.perf_counter() - begin
            self._is_done.set()

    def is_done(self) -> bool:
        """Whether the save is done, successful or not; does not wait."""
        return self._is_done.is_set()

    def join(self) -> None:
        """Wait until the save is done, successful or not."""
        self._is_done.wait()

    def wait(self) -> Path:
        """Wait until the checkpoint is complete; return its path.

        Raises:
            CheckpointError: the checkpoint could not be saved.
        """
        self.join()
        if self._error is not None:
            raise self._error
        return self.path


# What one save leaves for the next: the plan which process writes what, and memory.


@dataclass(frozen=True)
class WritePlan:
    """The plan which process writes what; valid as long as the layouts of all processes' tensors do not change."""

    mark: str | None = None
    """Hash of the plan of all processes."""
    made_for: tuple[int, int, tuple[int, bool], dict[str, Any]] | None = None
    """The rank, the world size, ``OwnRow.position``, and the layout of each tensor of this process."""
    parts: Sequence[PlannedChunk] = ()
    """The chunks that this process writes."""
    tensors: Mapping[str, LaidOutTensor] = field(default_factory=dict)
    """What all processes write."""
    rows: RowsPlan | None = None
    """Which process has which of the plain values that differ by process; None: they are in one file."""


class Staging:
    """Plan and buffers reused between saves; new memory would be slow, because the system clears it page by page."""

    def __init__(self) -> None:
        self.plan = WritePlan()
        self.nonfinite: tuple[str, ...] = ()
        """Keys of the tensors for which the last complete save was marked."""
        self.compared: Collection[str] = ()
        """Keys whose replicas the caller has just compared, and the save need not."""
        self.shared: set[Path] = set()
        """Folders in which all processes have seen each other's files."""
        self.memory = HostBuffer()


# Write what one process has planned to one file.


def described(parts: Sequence[PlannedChunk]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Name in the file to dtype and shape.

    Raises:
        CheckpointError: two chunks have one name, as the first of ``a`` and a tensor ``a@0`` have.
    """
    found = {part.name: (DTYPES[part.dtype], part.box[1]) for part in parts}
    if len(found) < len(parts):
        names = [part.name for part in parts]
        name = next(name for name in names if names.count(name) > 1)
        keys = " and ".join(part.key for part in parts if part.name == name)
        raise CheckpointError(f"{keys}: would both be {name} in a file; give one of them another name")
    return found


def write_shard(path: Path, parts: Sequence[PlannedChunk], tensors: Iterable[Tensor]) -> FileEntry:
    """Write chunks of tensors to one safetensors file, with one of them in memory at a time."""
    header = described(parts)
    try:
        return write_safetensors(path, header, tensors)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not is_local(path):
            raise
        found = path.stat().st_size if path.exists() else 0
        size = size_text(sum(dtype.itemsize * math.prod(shape) for dtype, shape in header.values()))
        room = size_text(found + shutil.disk_usage(path.parent).free)
        raise OSError(error.errno, f"{error.strerror}: its file needs {size}, and {room} were free") from None


@dataclass(frozen=True)
class SaveOptions:
    """What the functions below take beside the path and the state.

    Attributes:
        per_rank: plain values that differ by process; read back as lists of those that are not empty, in order of
            ``number``.
        in_own_file: the same, for values that are too large to be sent: from 64 processes on each has them in its file.
        number: position of this process in those lists; default: its rank.
        joined: lists of names, or mappings to such lists; the checkpoint gets the union over all processes.
        written_by: information for people, such as the strategy's name.
        is_latest: let ``latest`` in the parent directory name the checkpoint when it is complete.
        verify: read the files again and compare their checksums before the checkpoint is complete.
        timeout_s: how many seconds to wait for the other processes.
        staging: plan and buffers to use again in the next save; give one on every process, or on none.
        finite: keys of tensors that training should keep finite. If one of them has NaN or infinity, the checkpoint is
            marked and ``latest`` does not change; ``staging.nonfinite`` has the keys afterwards.
    """

    per_rank: Mapping[str, Any] | None = None
    in_own_file: Mapping[str, Any] | None = None
    number: int | None = None
    joined: Mapping[str, Any] | None = None
    written_by: Mapping[str, str | int] | None = None
    is_latest: bool = False
    verify: bool = False
    timeout_s: float = 600.0
    staging: Staging | None = None
    finite: Collection[str] = ()


def save_checkpoint(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    **options: Any,
) -> Path:
    """Write a checkpoint directory; every process must call it, and writes its own shard.

    Tensors of a device are copied to the host 64 MiB at a time while the 64 MiB before are written, and only the chunks that
    this process writes.

    Args:
        path: the directory, or a URL that fsspec knows (``s3://bucket/run/epoch_3``); an existing checkpoint of this
            name is replaced when the new one is complete.
        state: key to tensor (Tensor: equal on all processes that have it; DTensor and FlatShard: each process's shard)
            or plain value (rank 0's is saved, or that of the first process that has it).
        options: see SaveOptions.

    Raises:
        CheckpointError: on every process, if one failed or did not come; an existing checkpoint stays unchanged.
    """
    save = _Save(path, state, SaveOptions(**options))
    save.prepare(copy=False)
    save.finish()
    return save.path


def save_in_background(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    logs_failure: bool = True,
    **options: Any,
) -> PendingSave:
    """Like ``save_checkpoint``, but return as soon as the state is copied; a thread writes it.

    The copy takes as much host memory as this process writes: its shards, and its share of the replicated tensors. The
    memory is released after writing, unless ``staging`` keeps it for the next save, which is then several times as
    fast. Wait for one save before you start another: both would use the same process group and the same memory.

    Args:
        path, state, options: see ``save_checkpoint``.
        logs_failure: the thread logs an error; False if ``PendingSave.wait`` will surely be called.

    Raises:
        CheckpointError: on every process, if one could not start; ``PendingSave.wait`` raises later failures.
    """
    save = _Save(path, state, SaveOptions(**options))
    save.prepare(copy=True)
    return PendingSave(save, logs_failure)


class _Save:
    def __init__(self, path: str | os.PathLike[str], state: Mapping[str, Any], options: SaveOptions) -> None:
        self.path = self._folder = as_path(path)
        self._options = options
        if rows.KEY in state:
            raise CheckpointError(f"{rows.KEY}: cannot be saved, checkpoints have a tensor of this name")
        self._tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
        values = {key: value for key, value in state.items() if key not in self._tensors}
        own = get_rank() if options.number is None else options.number
        sent, kept = dict(options.per_rank or {}), dict(options.in_own_file or {})
        if get_world_size() < own_row.FROM:
            sent, kept = sent | kept, {}
        self._plain_values, self._row = PlainValues(values, own, sent, options.joined or {}), OwnRow(own, kept)
        self._row_keys: list[str] = []
        self._written_by = {"torch": torch.__version__, "world_size": get_world_size(), **(options.written_by or {})}
        self._staging, self._finite = options.staging or Staging(), frozenset(options.finite)
        self._nonfinite: list[str] = []
        self._replicas: Replicas | None = None  # of several processes
        self._plan = WritePlan()
        self._staged: list[Tensor] | None = None
        self._text = b""
        self._written: list[_Written] = []
        self._summaries: Summaries | None = None
        self._participants = Participants(f"{self.path}: could not be saved", side_group())
        self._participants.meet(self.path.name, options.timeout_s)

    def prepare(self, copy: bool) -> None:
        """Agree on the plan, make the directory, and, if ``copy``, copy this process's shard: training may go on.

        If the plan of the last save is still valid on all processes, they copy at once, and one round of messages is
        enough.
        """
        folder, as_before, known, self._rows = self._participants.round(lambda: self._offer(copy), self._begin)
        # Not rank 0's path for a local folder: if storage is not shared, this process must see that it is missing.
        self._folder = directory.temporary(self.path) if is_local(self.path) else as_path(folder)
        if known is not None:
            with self._cleared_away():
                self._participants.round(
                    lambda: (self._plain_values.own, self._plain_values.beyond(known)), self._put_together
                )
        if not as_before:
            self._staged = None  # an early copy would keep the old memory while new memory is allocated
            with self._cleared_away():
                self._plan = self._staging.plan = self._agree()
                if copy:
                    self._participants.round(self._copy, lambda copied: None)
        if copy:
            self._tensors.clear()
            # The thread that writes sends messages while this one may send others; all processes are here.
            self._participants.group = side_group(self._options.timeout_s, "saves in the background")

    def _offer(self, copy: bool) -> tuple[str | None, Own, int, RowFacts]:
        """The mark of the old plan if it is still valid here, own values, the keys' fingerprint, and the own row."""
        for key, tensor in self._tensors.items():
            check_tensor(key, tensor)
        fingerprint, row = self._plain_values.fingerprint(), self._row.facts()
        if self._staging.plan.made_for != self._layouts() or not self._row.fits(self._staging.plan.rows):
            return None, self._plain_values.own, fingerprint, row
        self._plan = self._staging.plan
        if copy:
            self._copy()
        return self._plan.mark, self._plain_values.own, fingerprint, row

    def _begin(
        self, offers: list[tuple[str | None, Own, int, RowFacts]]
    ) -> tuple[str, bool, list[str] | None, RowsPlan | None]:
        marks, own, fingerprints, facts = zip(*offers, strict=True)
        planned, self._row_keys = plan_rows(facts)
        known = None if len(set(fingerprints)) == 1 else self._plain_values.keys()
        if known is None:
            self._keep_text(self._plain_values.text(own, row_keys=self._row_keys))
        as_before = len(set(marks)) == 1 and None not in marks
        return str(directory.begin(self.path)), as_before, known, None if as_before else planned

    def _put_together(self, offers: list[tuple[Own, tuple[dict[str, Any], dict[str, Any]]]]) -> None:
        """Merge the values of processes that have different keys."""
        own, others = zip(*offers, strict=True)
        self._keep_text(self._plain_values.text(own, others, self._row_keys))

    def _keep_text(self, text: bytes) -> None:
        directory.check_length(self.path / VALUES, text)
        self._text = text

    def _agree(self) -> WritePlan:
        plan = agree(self._participants, self._tensors)
        parts, tensors = plan.parts_of(get_rank()), plan.tensors
        if self._rows is not None:
            parts = (*parts, *self._rows.part_of(get_rank()))
            tensors = {**tensors, rows.KEY: self._rows.tensor()}
        made = WritePlan(plan.mark, self._layouts(), parts, tensors, self._rows)
        self._participants.round(lambda: self._check_lengths(made), lambda checked: None)
        return made

    def _check_lengths(self, plan: WritePlan) -> None:
        """Check before anything is written that what is written can be read again."""
        file = self._folder / file_of(get_rank())
        directory.check_length(file, header_of(described(plan.parts)))
        if self._participants.is_main:
            names = [VALUES, *map(file_of, range(get_world_size()))]
            files = dict.fromkeys(names, FileEntry(size=2**62, xxh3="0" * 16))  # as long as any
            marked = [key for key in plan.tensors if key in self._finite]
            directory.check_length(self.path / MANIFEST, manifest_of(plan.tensors, files, self._written_by, marked))

    def _layouts(self) -> tuple[int, int, tuple[int, bool], dict[str, Any]]:
        layouts = {key: layout_of(key, tensor) for key, tensor in self._tensors.items()}
        return get_rank(), get_world_size(), self._row.position, layouts

    def _copy(self) -> None:
        """Copy what this process writes, and hash its other replicas before training changes them."""
        self._staged = self._staging.memory.copy(list(self._chunks()))
        # Hashing all blocks of tensors on the CPU would stop training for as long as the copy does.
        self._look_at_replicas(share_of(self.path.name), later=[part.key for part in self._plan.parts])

    def _look_at_replicas(self, share: int | None, later: Iterable[str] = ()) -> None:
        if get_world_size() > 1:
            self._replicas = Replicas(self._tensors, share, self._staging.compared)
            self._replicas.look(later)

    def _chunks(self) -> Iterator[Tensor]:
        """Yield views of what this process writes, in the plan's order."""
        for key, parts in itertools.groupby(self._plan.parts, lambda part: part.key):
            if key == rows.KEY:
                assert self._plan.rows is not None
                yield self._row.tensor(self._plan.rows)
                continue
            held = held_chunks(key, self._tensors[key])
            for part in parts:
                offsets, sizes = part.box
                chunk = held.get(offsets)
                if chunk is None or tuple(chunk.shape) != sizes:
                    raise CheckpointError(f"{key}: this process has no chunk of shape {sizes} at {offsets} any more")
                yield chunk

    def finish(self) -> None:
        """Write this process's shard; rank 0 completes the checkpoint when all processes have written theirs."""
        with self._cleared_away():
            unlike, marked = self._participants.round(self._write, self._complete)
            if unlike and self._replicas is not None:
                marked = self._participants.ask(unlike, self._replicas.packed, self._complete_compared)
            self._staging.nonfinite = marked
        self._staging.shared.add(self.path.parent)

    @contextmanager
    def _cleared_away(self) -> Iterator[None]:
        """Context that removes the unfinished files after a failure, because they would keep a full disk full."""
        try:
            yield
        except CheckpointError:
            if self._participants.is_main:
                with contextlib.suppress(OSError, StorageError):  # do not hide the reason of the failure
                    directory.abandon(self._folder)
            raise

    def _write(self) -> _Written:
        folder = self._folder
        if is_local(folder) and not folder.is_dir():
            raise self._why_gone()
        if self._staged is None:
            self._look_at_replicas(None)
        summary = b"" if self._replicas is None else self._replicas.summary()
        if not self._plan.parts:
            return _Written(None, self._nonfinite, summary)
        file = file_of(get_rank())
        self._staging.memory.wait()
        tensors = self._staged or self._chunks()
        is_on_host = all(one.is_cpu for one in self._staged or self._tensors.values())
        numbered = enumerate(tensors) if is_on_host else host_slices(tensors)
        entry = write_shard(folder / file, self._plan.parts, self._looked_at(numbered))
        if self._options.verify:
            self._read_back(folder / file, entry)
        return _Written((file, entry), self._nonfinite, summary)

    def _read_back(self, path: Path, entry: FileEntry) -> None:
        try:
            directory.check_file(path, entry)
        except CheckpointError as error:
            raise StorageError(str(error)) from None

    def _why_gone(self) -> CheckpointError:
        """The reason why the directory that rank 0 has made is not there."""
        if not self._participants.is_main and self.path.parent not in self._staging.shared:
            return CheckpointError("rank 0's directory is not visible here, use storage that all processes share")
        owner = owner_of(self.path.parent)
        return StorageError(
            f"its folder {self._folder} was removed while it was written, as another run in the same folder does"
            f"{f'; the folder is locked by {owner}' if owner else ''}; give each run a work_dir of its own"
        )

    def _looked_at(self, tensors: Iterable[tuple[int, Tensor]]) -> Iterator[Tensor]:
        """Yield what to write, tensors or their slices, and check it on the way: fingerprints, and NaN or infinity."""
        for number, tensor in tensors:
            key = self._plan.parts[number].key
            if self._replicas is not None:
                self._replicas.look_at(key, tensor)
            if key in self._finite and nonfinite({key: tensor}):
                self._nonfinite.append(key)
            yield tensor

    def _complete(self, written: list[_Written]) -> tuple[Sequence[int], tuple[str, ...]]:
        """Complete the checkpoint, unless replicas have to be compared one by one; return who has to send them."""
        self._written = written
        if self._replicas is None:
            return (), self._sealed()
        self._summaries = Summaries([part.replicas for part in written])
        unlike = self._summaries.unlike
        return unlike, () if unlike else self._sealed()

    def _complete_compared(self, packed: list[bytes]) -> tuple[str, ...]:
        assert self._replicas is not None
        assert self._summaries is not None
        if found := self._replicas.difference(self._summaries, packed, self._plan.tensors):
            raise CheckpointError(f"{found}; replicas must be equal, or only rank 0 may save the tensor")
        return self._sealed()

    def _sealed(self) -> tuple[str, ...]:
        """Write the index and make the directory a checkpoint; return the keys for which it is marked."""
        folder, written = self._folder, self._written
        files = {VALUES: directory.write_file(folder / VALUES, self._text)}
        files |= dict(part.file for part in written if part.file is not None)
        marked = tuple(sorted({key for part in written for key in part.nonfinite}))
        directory.seal(folder, manifest_of(self._plan.tensors, files, self._written_by, marked))
        if marked and is_local(self.path) and directory.is_checkpoint(self.path) and not rows.is_marked(self.path):
            directory.keep_finite(self.path)
        moves = self._options.is_latest and not marked
        with directory.becoming_latest(self.path) if moves else contextlib.nullcontext():
            directory.commit(self.path, folder)
        return marked


@dataclass(frozen=True)
class _Written:
    """The result of writing in one process."""

    file: tuple[str, FileEntry] | None
    """Name, size and checksum of its file; None if it has written none."""
    nonfinite: Sequence[str]
    """Keys of tensors that should be finite and are not."""
    replicas: bytes
    """Hashes of its replicas."""
