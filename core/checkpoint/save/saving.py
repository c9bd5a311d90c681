"""Save a checkpoint: plan which process writes what, write in every process, and complete it on rank 0.

Every process plans by itself from the layouts of the tensors, see ``joint_plan`` and ``planning``.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...comm.collectives import get_rank, get_world_size, side_group
from ...errors import CheckpointError, StorageError
from ...finite import nonfinite
from ...folder_lock import owner_of
from ...stored_dtypes import check_tensor
from .. import directory, rows
from ..held_chunks import held_chunks
from ..manifest import MANIFEST, VALUES, FileEntry, manifest_of
from ..names_in_files import file_of
from ..participants import Participants
from ..paths import as_path, is_local
from ..safetensors_file import header_of
from . import own_row
from .joint_plan import agree
from .offer import layout_of
from .own_row import OwnRow, RowFacts, RowsPlan, plan_rows
from .pending import PendingSave
from .plain_values import Own, PlainValues
from .replicas import Replicas, Summaries, share_of
from .shard import described, write_shard
from .staging import Staging, WritePlan

TIMEOUT_S = 600.0


def save_checkpoint(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    *,
    per_rank: Mapping[str, Any] | None = None,
    in_own_file: Mapping[str, Any] | None = None,
    number: int | None = None,
    joined: Mapping[str, Any] | None = None,
    written_by: Mapping[str, str | int] | None = None,
    is_latest: bool = False,
    verify: bool = False,
    timeout_s: float = TIMEOUT_S,
    staging: Staging | None = None,
    finite: Collection[str] = (),
) -> Path:
    """Write a checkpoint directory; every process must call it, and writes its own shard.

    One tensor at a time is copied to the CPU, and only the chunks of it that this process writes.

    Args:
        path: the directory, or a URL that fsspec knows (``s3://bucket/run/epoch_3``); an existing checkpoint of this
            name is replaced when the new one is complete.
        state: key to tensor (Tensor: equal on all processes that have it; DTensor and FlatShard: each process's shard)
            or plain value (rank 0's is saved, or that of the first process that has it).
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

    Raises:
        CheckpointError: on every process, if one failed or did not come; an existing checkpoint stays unchanged.
    """
    save = _Save(
        path,
        state,
        per_rank,
        in_own_file,
        number,
        joined,
        written_by,
        is_latest,
        verify,
        timeout_s,
        staging or Staging(),
        finite,
    )
    save.prepare(copy=False)
    save.finish()
    return save.path


def save_in_background(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    *,
    per_rank: Mapping[str, Any] | None = None,
    in_own_file: Mapping[str, Any] | None = None,
    number: int | None = None,
    joined: Mapping[str, Any] | None = None,
    written_by: Mapping[str, str | int] | None = None,
    is_latest: bool = False,
    verify: bool = False,
    timeout_s: float = TIMEOUT_S,
    staging: Staging | None = None,
    finite: Collection[str] = (),
    logs_failure: bool = True,
) -> PendingSave:
    """Like ``save_checkpoint``, but return as soon as the state is copied; a thread writes it.

    The copy takes as much host memory as this process writes: its shards, and its share of the replicated tensors. The
    memory is released after writing, unless ``staging`` keeps it for the next save, which is then several times as
    fast. Wait for one save before you start another: both would use the same process group and the same memory.

    Args:
        logs_failure: the thread logs an error; False if ``PendingSave.wait`` will surely be called.

    Raises:
        CheckpointError: on every process, if one could not start; ``PendingSave.wait`` raises later failures.
    """
    save = _Save(
        path,
        state,
        per_rank,
        in_own_file,
        number,
        joined,
        written_by,
        is_latest,
        verify,
        timeout_s,
        staging or Staging(),
        finite,
    )
    save.prepare(copy=True)
    return PendingSave(save, logs_failure)


class _Save:
    def __init__(
        self,
        path: str | os.PathLike[str],
        state: Mapping[str, Any],
        per_rank: Mapping[str, Any] | None,
        in_own_file: Mapping[str, Any] | None,
        number: int | None,
        joined: Mapping[str, Any] | None,
        written_by: Mapping[str, str | int] | None,
        is_latest: bool,
        verify: bool,
        timeout_s: float,
        staging: Staging,
        finite: Collection[str],
    ) -> None:
        self.path = self._folder = as_path(path)
        self._is_latest, self._verify, self._timeout_s = is_latest, verify, timeout_s
        if rows.KEY in state:
            raise CheckpointError(f"{rows.KEY}: cannot be saved, checkpoints have a tensor of this name")
        self._tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
        values = {key: value for key, value in state.items() if key not in self._tensors}
        own = get_rank() if number is None else number
        sent, kept = dict(per_rank or {}), dict(in_own_file or {})
        if get_world_size() < own_row.FROM:
            sent, kept = sent | kept, {}
        self._plain_values, self._row = PlainValues(values, own, sent, joined or {}), OwnRow(own, kept)
        self._row_keys: list[str] = []
        self._written_by = {"torch": torch.__version__, "world_size": get_world_size(), **(written_by or {})}
        self._staging, self._finite = staging, frozenset(finite)
        self._nonfinite: list[str] = []
        self._replicas = Replicas({})
        self._plan = WritePlan()
        self._staged: list[Tensor] | None = None
        self._text = b""
        self._written: list[_Written] = []
        self._summaries = Summaries([])
        self._participants = Participants(f"{self.path}: could not be saved", side_group())
        self._participants.meet(self.path.name, timeout_s)

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
            self._participants.group = side_group(self._timeout_s, "saves in the background")

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
        with torch.no_grad():  # to_local() would record an autograd graph
            layouts = {key: layout_of(key, tensor) for key, tensor in self._tensors.items()}
        return get_rank(), get_world_size(), self._row.position, layouts

    def _copy(self) -> None:
        """Copy what this process writes, and hash its other replicas before training changes them."""
        self._staged = self._staging.memory.copy(list(self._chunks()))
        # Hashing all blocks of tensors on the CPU would stop training for as long as the copy does.
        self._look_at_replicas(share_of(self.path.name), later=[part.key for part in self._plan.parts])

    def _look_at_replicas(self, share: int | None, later: Iterable[str] = ()) -> None:
        self._replicas = Replicas(self._tensors if get_world_size() > 1 else {}, share, self._staging.compared)
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
            if unlike:
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
        if not self._plan.parts:
            return _Written(None, self._nonfinite, self._replicas.summary())
        file = file_of(get_rank())
        self._staging.memory.wait()
        tensors = self._chunks() if self._staged is None else self._staged
        entry = write_shard(folder / file, self._plan.parts, self._looked_at(tensors))
        if self._verify:
            self._read_back(folder / file, entry)
        return _Written((file, entry), self._nonfinite, self._replicas.summary())

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

    def _looked_at(self, tensors: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield the tensors to write, and check them on the way: fingerprints, and NaN or infinity."""
        for part, tensor in zip(self._plan.parts, tensors, strict=True):
            key = part.key
            self._replicas.look_at(key, tensor)
            if key in self._finite and nonfinite({key: tensor}):
                self._nonfinite.append(key)
            yield tensor

    def _complete(self, written: list[_Written]) -> tuple[Sequence[int], tuple[str, ...]]:
        """Complete the checkpoint, unless replicas have to be compared one by one; return who has to send them."""
        self._written, self._summaries = written, Summaries([part.replicas for part in written])
        unlike = self._summaries.unlike
        return unlike, () if unlike else self._sealed()

    def _complete_compared(self, packed: list[bytes]) -> tuple[str, ...]:
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
        directory.commit(self.path, folder)
        if self._is_latest and not marked:
            directory.mark_latest(self.path)
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
