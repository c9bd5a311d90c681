"""ReplicaCheck: compares what several processes hold replicas of, with one small message, and names what differs."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash
from torch import Tensor

from ..base.errors import DivergenceError, counted
from ..base.tensors import fingerprints, of_name, replica_of
from ..torch_compat.torch_private import version_of
from .agreement import all_same, gather_digests
from .collectives import broadcast_object, gather_object, get_world_size, side_group

_MOST_RANKS = 8  # in messages

_Key = tuple[str, tuple[int, ...]]
"""The name of a tensor, and the coordinates of a shard on those axes of its mesh that do not replicate it."""


@dataclass(frozen=True)
class _Known:
    """A buffer as it was at the last check."""

    buffer: weakref.ref[Tensor]
    version: int
    value: int


class ReplicaCheck:
    """Compares the replicas of a model's tensors over all processes; one object for all checks of a model.

    The tensors are compared in parts (whole weights, shards of weights, the same of the optimizer, buffers), each with
    the processes that hold the same tensors and shards. A buffer is compared as long as nothing writes it, because
    those that training writes are each process's own.
    """

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}

    def check(self, sections: Sequence[Mapping[str, Tensor]], buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Compare the tensors; a collective, which waits once for the device and sends a message of fixed size.

        Args:
            sections: tensors by name, as many sections on every process. Those of which there are no replicas are left out.
            buffers: buffers by name.

        Returns:
            Those of ``sections`` that were compared on all processes that hold them.

        Raises:
            DivergenceError: on every process, if replicas differ; it names a tensor and the ranks.
        """
        if get_world_size() == 1:
            return {}
        parts = [part for section in sections for part in _whole_and_sharded(section)]
        owned = {
            (name, at): local
            for name, buffer in buffers.items()
            if not buffer.is_inference() and (held := replica_of(buffer)) is not None
            for local, at in (held,)
        }
        every = {(number, key): tensor for number, part in enumerate([*parts, owned]) for key, tensor in part.items()}
        hashes = fingerprints(every)
        prints = [{key: hashes[number, key] for key in part} for number, part in enumerate([*parts, owned])]
        latest = {name: value for (name, _), value in prints[-1].items()}
        prints[-1] = {key: value for key, value in prints[-1].items() if self._is_constant(key[0], buffers[key[0]])}

        suspects, everywhere = _exchange(prints)
        if suspects:
            own = [{key: (value, self._before(number == len(parts), key[0])) for key, value in prints[number].items()}
                   for number in suspects]  # fmt: skip
            everyones = gather_object(own, side_group())
            if said := broadcast_object(None if everyones is None else _first_said(everyones), group=side_group()):
                raise DivergenceError(
                    f"replicas differ: {said}; a device or its memory may be faulty, the program changes it there alone, or a "
                    "strategy trains apart, see docs/strategy_state.md"
                )
        self._known = {
            name: _Known(weakref.ref(buffers[name]), version_of(buffers[name]), value) for name, value in latest.items()
        }
        return {
            key[0]: tensor
            for part, all_of in zip(parts, everywhere[: len(parts)], strict=True)
            if all_of
            for key, tensor in part.items()
        }

    def _is_constant(self, name: str, buffer: Tensor) -> bool:
        """Whether a buffer is that of the last check, and was not written since."""
        last = self._known.get(name)
        return last is not None and last.buffer() is buffer and last.version == version_of(buffer)

    def _before(self, is_buffer: bool, name: str) -> int | None:
        """The hash of a buffer at the last check, because ``.data`` and NumPy write without a trace; None: no buffer."""
        return self._known[name].value if is_buffer else None


def _whole_and_sharded(tensors: Mapping[str, Tensor]) -> tuple[dict[_Key, Tensor], dict[_Key, Tensor]]:
    """What this process holds of replicated tensors, those that are whole and those that are sharded too."""
    held = {name: replica for name, tensor in tensors.items() if (replica := replica_of(tensor)) is not None}
    whole = {(name, at): local for name, (local, at) in held.items() if not at}
    return whole, {(name, at): local for name, (local, at) in held.items() if at}


def _exchange(prints: Sequence[Mapping[_Key, int]]) -> tuple[list[int], list[bool]]:
    """The parts that may differ, and for each part whether all of it was compared: from a hash of keys, and one of values."""
    own = []
    for part in prints:
        keys = sorted(part)
        values = np.array([part[key] for key in keys], dtype=np.uint64)
        own += [of_name(repr(keys)), xxhash.xxh3_64_intdigest(values.tobytes())]
    message = np.array(own, dtype=np.uint64).tobytes()
    if all_same(message, side_group()):  # alone with its shards, a process would differ from the others
        return [], [True] * len(prints)
    answer = None
    if (digests := gather_digests(message, side_group())) is not None:
        found = np.frombuffer(b"".join(digests), dtype=np.uint64).reshape(len(digests), len(prints), 2)
        suspects = [number for number in range(len(prints)) if _differ(found[:, number])]
        everywhere = [_is_everywhere(found[:, number], whole=number % 2 == 0) for number in range(len(prints))]
        answer = suspects, everywhere
    told = broadcast_object(answer, group=side_group())
    assert told is not None
    return told


def _first_said(everyones: Sequence[Sequence[Mapping[_Key, tuple[int, int | None]]]]) -> str | None:
    """The text of ``_difference`` for the first part that has one."""
    return next((said for told in zip(*everyones, strict=True) if (said := _difference(told))), None)


def _differ(found: np.ndarray) -> bool:
    """Whether two processes with the same keys have other values."""
    return len({tuple(row) for row in found.tolist()}) > len({keys for keys, _ in found.tolist()})


def _is_everywhere(found: np.ndarray, whole: bool) -> bool:
    """Whether every tensor of this part was compared wherever it is: all have the same keys, or each has a partner."""
    counts = Counter(row[0] for row in found.tolist())
    return len(counts) == 1 if whole else min(counts.values()) > 1


def _difference(everyones: Sequence[Mapping[_Key, tuple[int, int | None]]]) -> str | None:
    """A text that names the first tensor whose replicas differ, and the ranks; None: only buffers, by their own process."""
    split: dict[_Key, list[list[int]]] = {}
    for key in dict.fromkeys(key for own in everyones for key in own):
        holders: dict[int, list[int]] = {}
        for rank, own in enumerate(everyones):
            if key in own:
                holders.setdefault(own[key][0], []).append(rank)
        if len(holders) > 1 and not _is_own([own[key] for own in everyones if key in own]):
            split[key] = sorted(holders.values(), key=lambda ranks: (-len(ranks), ranks))
    if not split:
        return None
    (name, _), (most, *others) = next(iter(split.items()))
    more = f" (and {counted(len(split) - 1, 'tensor')} more)" if len(split) > 1 else ""
    if len(most) > len(others[0]):
        stray = sorted(rank for ranks in others for rank in ranks)
        return f"{_ranks(stray)} {'differ' if len(stray) > 1 else 'differs'} from {_ranks(most)} in {name}{more}"
    return f"{' and '.join(map(_ranks, (most, *others)))} differ in {name}{more}"


def _is_own(values: Sequence[tuple[int, int | None]]) -> bool:
    """Whether it is a buffer that the processes write themselves: on most of them it is not what it was, or it was not equal."""
    before = {last for _, last in values}
    changed = sum(value != last for value, last in values)
    return None not in before and (len(before) > 1 or 2 * changed > len(values))


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_MOST_RANKS])) + (", ..." if len(ranks) > _MOST_RANKS else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
