"""Cut batches along their sequences: which keys, true positions, shifted labels, and how much of the loss is where."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from ....core.base.errors import ConfigError, StrategyError, suggest
from ....core.model.token_counts import TokenCount
from ....core.torch_compat.torch_private import tree_flatten, tree_unflatten

# Which positions of a sequence each process has: a range of them, or one from either end.


Span = tuple[int, int]
"""Positions [start, stop) of the whole sequence."""


@dataclass(frozen=True)
class SequenceShards:
    """The division of a sequence over processes.

    Under a causal mask the last positions attend to the most others. Therefore, if ``balanced``, a process has one of
    ``2 * count`` spans from the start and the one at the same distance from the end, which is equal work for all.

    Args:
        length: number of positions; ``count`` divides it, and ``2 * count`` if ``balanced``.
        count: number of processes.
    """

    length: int
    count: int
    balanced: bool

    def spans(self, index: int) -> list[Span]:
        """Return the positions of process ``index``, in the order in which it has them."""
        if not self.balanced:
            size = self.length // self.count
            return [(index * size, (index + 1) * size)]
        size = self.length // (2 * self.count)
        return [(at * size, (at + 1) * size) for at in (index, 2 * self.count - 1 - index)]

    def cut(self, whole: Tensor, dim: int, index: int) -> Tensor:
        """Return what process ``index`` has of a tensor with all positions along ``dim``."""
        found = [whole.narrow(dim, start, stop - start) for start, stop in self.spans(index)]
        return found[0] if len(found) == 1 else torch.cat(found, dim)

    def join(self, shards: Sequence[Tensor], dim: int) -> Tensor:
        """Return the tensor with all positions along ``dim``, in their order, from those of all processes."""
        if not self.balanced:
            return torch.cat(list(shards), dim)
        halves = [shard.chunk(2, dim) for shard in shards]
        return torch.cat([*(first for first, _ in halves), *(last for _, last in reversed(halves))], dim)


KEYS: Mapping[str, int] = {
    "input_ids": 1, "labels": 1, "position_ids": -1, "inputs_embeds": 1, "token_type_ids": 1, "shift_labels": 1,
}  # fmt: skip
"""The dimension of sequences in entries with these names, unless ``strategy.cp_keys`` has others."""
OF_DECODER: Mapping[str, int] = {"labels": 1, "decoder_input_ids": 1, "decoder_inputs_embeds": 1}
"""The same for the sequence of a decoder beside an encoder, whose own are the others of ``KEYS``."""
OF_ENCODER = ("input_ids", "inputs_embeds")
MASKS = ("attention_mask", "decoder_attention_mask")
IGNORED = -100
"""The label of positions that do not count in a loss, as in transformers and by default in torch."""


class CutBatch(dict[str, Any]):
    """This process's shard of the sequences of a batch.

    Attributes:
        whole: the batch.
        completed: the same with shifted labels, see ``SequenceBatches``.
        shards: the division of its sequences; of a model with an encoder and a decoder those of the decoder.
        of_encoder: that of the encoder's sequences; None: the model has one sequence.
        size: number of its samples; None if sequences are along the first dimension.
        dim, dims: dimension of the sequences, and that of each entry that was cut.
        count, total: number of targets that count in the loss, on this process and on all that share the batch.
        ignoring: key of the targets of which some do not count; None: every target counts.
        weight: what ``loss_weight`` gives for this shard; 1 if it has not been asked.
        is_weighed: ``loss_weight`` has been asked. One that counts labels is not, of a batch without any, such as one to predict.
        is_sum: the loss is a sum divided by a number that the batch has, no mean over this shard.
        is_void: no target of this shard counts, but some of the batch do: the loss has factor 0.
        documents: (samples or 1, length), the number of each position's document, if the model is given no mask; None: a sequence has one.
        is_full: the batch has a mask, and no padding.
    """

    whole: Mapping[str, Any]
    completed: Mapping[str, Any]
    shards: SequenceShards
    of_encoder: SequenceShards | None
    size: int | None
    dim: int
    dims: Mapping[str, int]
    count: float
    total: float
    ignoring: str | None
    weight: float
    is_weighed: bool
    is_sum: bool
    is_void: bool
    documents: Tensor | None
    is_full: bool

    @property
    def factor(self) -> float:
        """The factor of this shard's loss, so that the mean over the processes is that of the whole batch."""
        if self.is_sum:
            return float(self.shards.count)
        # Without any target a loss is 0/0 on one device too.
        return self.shards.count * self.count / self.total if self.total else 1.0


@dataclass(frozen=True)
class TargetNeeds:
    """What is wrong with what a model gives for some batches, and not for the first one.

    Attributes:
        problem: in words.
        targets: keys of the targets of which it is told.
        of: each "sample", or each "key" of targets, needs the same share of those that count on a process; None: nothing helps.
    """

    problem: str
    targets: Sequence[str]
    of: str | None


@dataclass
class SequenceBatches:
    """Cuts batches.

    Args:
        keys: dimension of sequences by key of the batch; None: that entry stays whole.
        positions: key of positions; None: the model needs none.
        shards: gives the division for a length.
        index: number of this process.
        of_transformers: the model is one of transformers: masks may be given, and caches are turned off.
        shifts: labels have to be shifted.
        divides: the loss is a sum divided by ``num_items_in_batch`` where the batch has it.
        loss_weight: the model's, see Weighing; None: it has none.
        decoder_inputs: gives ``decoder_input_ids`` for labels, of a model with an encoder and a decoder; None: it has one sequence.
        needs: by mode, "train", "val" or "test", what is wrong with what the model gives where other targets do not count, if that
            was found.
        targets: keys of the targets of training of which some may not count; None: not known yet.
    """

    keys: Mapping[str, int | None]
    positions: str | None
    shards: Callable[[int], SequenceShards]
    index: int
    of_transformers: bool = False
    shifts: bool = False
    divides: bool = False
    loss_weight: Callable[[Any], Any] | None = None
    decoder_inputs: Callable[[Tensor], Tensor] | None = None
    needs: dict[str, Sequence[TargetNeeds]] = field(default_factory=dict)
    targets: Sequence[str] | None = None

    def cut(self, batch: Any) -> CutBatch:
        """Return this process's shard of a batch.

        Raises:
            ConfigError, StrategyError: the batch cannot be divided; the message names its key.
        """
        if not isinstance(batch, Mapping):
            raise ConfigError(
                f"batch: is {type(batch).__name__}, cp={self._count} needs a dict, whose keys say what is a sequence"
            )
        whole, documents = self._completed(batch)
        dims = {key: dim for key in whole if (dim := self._dim(key)) is not None and isinstance(whole[key], Tensor)}
        lengths = {key: self._length(key, whole[key], dim) for key, dim in dims.items()}
        mains = self._mains(lengths)
        main, length = mains[0], lengths[mains[0]]
        self._check(whole, lengths, mains)
        shards = self.shards(length)
        cut = CutBatch({key: value for key, value in whole.items() if key not in dims})
        for key, dim in dims.items():
            cut[key] = self.shards(lengths[key]).cut(whole[key], dim, self.index).contiguous()
        cut.whole, cut.completed = batch, whole
        cut.shards, cut.dim, cut.dims = shards, dims[main] % whole[main].ndim, dims
        cut.of_encoder = self.shards(lengths[mains[1]]) if len(mains) > 1 else None
        cut.documents, cut.is_full = documents, _are_full([whole.get(key) for key in self._masks])
        cut.size = whole[main].shape[0] if cut.dim else None
        cut.is_sum = self.divides and cut.get("num_items_in_batch") is not None
        cut.ignoring = ignoring = self._ignoring(whole, dims)
        if ignoring is None:
            cut.count, cut.total = length / shards.count, length
        else:
            counted = _counted(whole[ignoring], dims[ignoring])
            cut.count, cut.total = float(shards.cut(counted, -1, self.index).sum()), float(counted.sum())
        has_labels = any(isinstance(whole.get(key), Tensor) for key in ("labels", "shift_labels"))
        cut.weight, cut.is_weighed = 1.0, has_labels or not isinstance(self.loss_weight, TokenCount)
        if self.loss_weight is not None and cut.is_weighed:
            # It may shift labels itself, which those of a shard are already.
            shifted = self._is_shifted(whole)
            share = (cut.count / cut.total if cut.total else 0.0) if shifted else 1.0
            cut.weight = share * float(self.loss_weight(batch if shifted else cut))
        weight = cut.weight if self.loss_weight is not None else cut.count if cut.total else 1.0
        cut.is_void = not weight and not cut.is_sum
        if cut.is_void:
            self._fill(cut, ignoring)
        return cut

    def check_keys(self, batches: Sequence[Mapping[str, Any]]) -> None:
        """Check that the given keys name entries of the first update's batches, as they were before they were cut.

        The names of transformers and the positions may be absent: models have optional inputs. Any other entry that only
        some batches have is None in the others, so that a wrong name is not taken for one of these.

        Raises:
            ConfigError: no batch has the key.
        """
        has = dict.fromkeys(key for batch in batches for key in batch)
        for key in self.keys:
            if key not in has and key not in KEYS and key != self.positions:
                names = ", ".join(f'"{name}"' for name in has)
                way_out = suggest(key, has).replace(",", ";", 1) or (
                    "; if only some batches have it, let it be None in the others"
                )
                raise ConfigError(f'strategy.cp_keys: "{key}" is not in the batch, which has {names}{way_out}')

    def _fill(self, cut: CutBatch, key: str | None) -> None:
        """Let one target count in a loss whose factor is 0.

        The gradient of a mean over nothing is NaN, and attention would carry it to the other processes.
        """
        if key is None or cut.count:
            raise StrategyError(
                f"model.loss_weight: gave 0 for {cut.count:g} targets of a process; with strategy.cp targets that do not count "
                f"are {IGNORED}"
            )
        for name in {key, *({"labels", "shift_labels"} & cut.keys() if self.shifts else ())}:
            cut[name].view(-1)[0] = 0

    def excerpt(self, batch: Mapping[str, Any], length: int) -> dict[str, Any]:
        """Return a batch with ``length`` positions of each sequence, from its start and its end: padding may be at either.

        If possible, some of them count in the loss. In a mask of 0 and 1 some of the last ones are 0: another batch may have such,
        and processes then differ in how much counts.
        """
        whole: dict[str, Any] = dict(batch)
        dims = {key: dim for key in whole if (dim := self._dim(key)) is not None and isinstance(whole[key], Tensor)}
        other = (self.positions, *self._masks)
        masks = [key for key in dims if key not in other and bool(((whole[key] == 0) | (whole[key] == 1)).all())]
        first = self._first_counting(whole, dims, masks, length)
        dims |= {key: 1 for key in self._masks if isinstance(whole.get(key), Tensor)}
        found: dict[str, Tensor] = {}
        for key, dim in dims.items():
            full = whole[key].shape[dim]
            some = min(length, full)
            tail, start = some // 2, max(0, min(first if self._is_of_loss(key) else 0, full - some))
            ends = (start, some - tail), (full - tail, tail)
            found[key] = torch.cat([whole[key].narrow(dim, *end) for end in ends], dim)
            if key in masks:
                counted = (found[key] == 1).movedim(dim, -1)
                found[key].movedim(dim, -1)[_some_of_last(counted, self._few(some), by_row=True)] = 0
        return {**whole, **found}

    def _first_counting(
        self, whole: Mapping[str, Any], dims: Mapping[str, int], masks: Collection[str], length: int
    ) -> int:
        """Return the position at which an excerpt begins, so that it has targets which count, as far as the batch says it."""
        ignoring = self._ignoring(whole, dims)
        said = {key: whole[key] == 1 for key in masks} if ignoring is None else {ignoring: whole[ignoring] != IGNORED}
        for key, marked in said.items():
            by_row = marked.movedim(dims[key], -1)
            half = min(length, by_row.shape[-1]) // 2
            at_ends = bool(by_row[..., :half].any() or by_row[..., by_row.shape[-1] - half :].any())
            where = by_row.reshape(-1, by_row.shape[-1]).any(0).nonzero()
            if len(where) and (key == ignoring or not at_ends):
                # Labels that are not shifted yet belong to the position before them.
                return int(where[0]) - 1
        return 0

    def _few(self, length: int) -> int:
        return max(1, length // (4 * self._count))

    def with_ignored(self, batch: Mapping[str, Any], keys: Sequence[str], of: str | None = None) -> dict[str, Any]:
        """Return a batch in which some of the last targets do not count, so that processes differ in how many do.

        Args:
            of: "sample" or "key": these differ too.
        """
        whole = dict(batch)
        for number, key in enumerate(keys):
            dim = self._dim(key)
            assert dim is not None
            whole[key] = whole[key].clone()
            few = self._few(whole[key].shape[dim]) * (1 + number if of == "key" else 1)
            whole[key].movedim(dim, -1)[_some_of_last(_counted(whole[key], dim), few, by_row=of == "sample")] = IGNORED
        return whole

    def check_counting(self, batch: CutBatch, mode: str) -> None:
        """Raise StrategyError for a batch with targets that do not count, if what the model gives would not be that of one process."""
        if mode == "train" and self.targets is not None and batch.ignoring not in (None, *self.targets):
            raise StrategyError(
                f'batch: "{batch.ignoring}" has entries of {IGNORED}, and in the first batch the model did not compare it with {IGNORED}: '
                "strategy.cp cannot tell whether these are targets that do not count; begin with a batch that has such entries"
            )
        for needs in () if batch.ignoring is None else self.needs.get(mode, ()):
            if needs.of is None:
                raise StrategyError(
                    f"batch: has targets of {IGNORED}, and where other ones do not count, {needs.problem}"
                )
            if self._differ(batch, needs):
                raise StrategyError(
                    f"batch: has targets of {IGNORED}, with another share of those that count on a process for one {needs.of} than for "
                    f"another, and then {needs.problem}"
                )

    def _differ(self, batch: CutBatch, needs: TargetNeeds) -> bool:
        """Whether a process has other shares of the targets that count of one sample, or key, than of another."""
        found = []  # by key: (samples, processes)
        for key in needs.targets:
            target = batch.completed.get(key)
            if isinstance(target, Tensor) and target.shape[batch.dims[key]] == batch.shards.length:
                counted = _counted(target, batch.dims[key])
                shards = [batch.shards.cut(counted, -1, index).sum(-1) for index in range(self._count)]
                found.append(torch.stack(shards, -1).reshape(-1, self._count))
        if needs.of == "key" and found:
            found = [torch.stack([each.sum(0) for each in found])]
        # In whole numbers: a / b == c / d.
        return any(bool((each * each.sum() != each.sum(0) * each.sum(-1, keepdim=True)).any()) for each in found)

    @property
    def _masks(self) -> Sequence[str]:
        """The entries that are masks of padding, which stay whole."""
        return MASKS[: 0 if not self.of_transformers else 1 if self.decoder_inputs is None else 2]

    @property
    def _count(self) -> int:
        return self.shards(0).count

    def _dim(self, key: str) -> int | None:
        if key in self.keys:
            return self.keys[key]
        if self.decoder_inputs is not None:
            return {**KEYS, **OF_DECODER}.get(key)
        if key == self.positions:
            return -1
        return KEYS.get(key)

    def _is_of_loss(self, key: str) -> bool:
        """Whether an entry has positions of the sequence that the loss has."""
        return self.decoder_inputs is None or key in OF_DECODER or key.startswith("decoder_")

    def _mains(self, lengths: Mapping[str, int]) -> list[str]:
        """The keys that say how long sequences are: of the only one, or of a decoder's and of its encoder's."""
        if self.decoder_inputs is None:
            return [next(iter(lengths))]
        found = []
        for name, keys in (("decoder", OF_DECODER), ("encoder", OF_ENCODER)):
            if not (given := [key for key in keys if key in lengths]):
                raise ConfigError(
                    f"batch: has no sequence for the {name}, cp={self._count} needs one of "
                    + ", ".join(f'"{key}"' for key in keys)
                )
            found.append(given[0])
        return found

    def _is_shifted(self, batch: Mapping[str, Any]) -> bool:
        return self.shifts and batch.get("labels") is not None

    def _completed(self, batch: Mapping[str, Any]) -> tuple[dict[str, Any], Tensor | None]:
        """The batch with true positions, shifted labels, and a mask of bool, and its documents, see CutBatch."""
        whole, documents = dict(batch), None
        known = [
            key for key, value in whole.items()
            if isinstance(value, Tensor) and self._dim(key) is not None and key != self.positions
        ]  # fmt: skip
        if not known:
            names = [f'"{key}"' for key, value in whole.items() if isinstance(value, Tensor)]
            if not names:
                raise ConfigError(f"batch: has no tensor, cp={self._count} needs those that are a sequence")
            raise ConfigError(
                f"strategy.cp_keys: names no entry of the batch, which has {', '.join(names)}; give the dimension of sequences by key, "
                f"such as {{{names[0]}: 1}}"
            )
        main, dim = whole[known[0]], self._dim(known[0])
        assert dim is not None
        length = self._length(known[0], main, dim)
        if self._is_shifted(whole) and whole.get("shift_labels") is None:
            # The target of a position is the next label, which another process may have.
            labels = functional.pad(whole["labels"], (0, 1), value=IGNORED)
            whole["labels"] = labels[:, 1:]
        if self.decoder_inputs is not None:
            self._complete_decoder(whole, self.decoder_inputs)
        elif self.of_transformers:
            documents = self._documents(whole.get(self.positions or "position_ids"))
        if self.of_transformers:
            for name in self._masks:
                self._mask(whole, name, length)
            if whole.get("use_cache"):
                raise ConfigError(
                    'batch["use_cache"]: True is not possible with cp, whose processes have a shard of each cache'
                )
            if whole.get("output_attentions"):
                raise ConfigError(
                    'batch["output_attentions"]: True is not possible with cp, whose attention has no weights of whole sequences'
                )
        if self.positions is not None and self.decoder_inputs is None and whole.get(self.positions) is None:
            whole[self.positions] = torch.arange(length, device=main.device)[None]
        return whole, documents

    def _complete_decoder(self, whole: dict[str, Any], decoder_inputs: Callable[[Tensor], Tensor]) -> None:
        """Give each position of a decoder the label before it, which another process may have."""
        if whole.get("encoder_outputs") is not None:
            raise ConfigError(
                'batch["encoder_outputs"]: is not possible with cp, whose processes have a shard of each sequence; give input_ids'
            )
        labels = whole.get("labels")
        is_given = any(whole.get(key) is not None for key in ("decoder_input_ids", "decoder_inputs_embeds"))
        if isinstance(labels, Tensor) and labels.ndim == 2 and not is_given:
            whole["decoder_input_ids"] = decoder_inputs(labels)

    def _mask(self, whole: dict[str, Any], name: str, length: int) -> None:
        """Make a mask one of bool, which stays whole; ``length`` is that of the only sequence."""
        mask = whole.get(name)
        if mask is None:
            return
        if self.decoder_inputs is not None:
            keys = OF_ENCODER if name == MASKS[0] else OF_DECODER
            length = next((whole[key].shape[1] for key in keys if isinstance(whole.get(key), Tensor)), length)
        if not isinstance(mask, Tensor) or mask.ndim != 2:
            given = f"has {mask.ndim} dimensions" if isinstance(mask, Tensor) else f"is {type(mask).__name__}"
            raise ConfigError(f'batch["{name}"]: {given}, cp needs (samples, positions) with 0 for padding')
        if mask.shape[1] != length:
            raise StrategyError(
                f'batch["{name}"]: has {mask.shape[1]} positions and the sequences have {length}, cp needs the same'
            )
        whole[name] = mask != 0

    def _documents(self, positions: Any) -> Tensor | None:
        """The documents that transformers finds where positions begin again."""
        if not isinstance(positions, Tensor) or positions.ndim != 2:
            return None
        restarts = torch.diff(positions, dim=-1) != 1
        return functional.pad(restarts.long().cumsum(-1), (1, 0)) if bool(restarts.any()) else None

    def _length(self, key: str, value: Tensor, dim: int) -> int:
        if not -value.ndim <= dim < value.ndim:
            raise ConfigError(
                f"strategy.cp_keys.{key}: {dim} is no dimension of a tensor of shape {tuple(value.shape)}"
            )
        return value.shape[dim]

    def _check(self, whole: Mapping[str, Any], lengths: Mapping[str, int], mains: Sequence[str]) -> None:
        known = {*KEYS, *OF_DECODER}
        for key, other in lengths.items():
            main = mains[0] if self._is_of_loss(key) else mains[-1]
            # An entry that transformers does not know may be of either sequence.
            if other != lengths[main] and (key in known or all(other != lengths[each] for each in mains)):
                raise StrategyError(
                    f'batch["{key}"]: has {other} positions and "{main}" has {lengths[main]}, cp needs the same'
                )
        for main in mains:
            if lengths[main] % self._count:
                padding = f"label {IGNORED}" if main == mains[0] else "0 in attention_mask"
                raise StrategyError(
                    f'batch["{main}"]: {lengths[main]} positions do not divide over cp={self._count} processes; pad to a multiple of '
                    f"{self._count}, with {padding}"
                )
        for key, value in whole.items():
            if key in lengths or key in self.keys or key in self._masks or not isinstance(value, Tensor):
                continue
            length = next((lengths[main] for main in mains if lengths[main] in value.shape[1:]), None)
            if length is not None:
                raise ConfigError(
                    f'batch["{key}"]: has a dimension of {length} as the sequence has; give strategy.cp_keys={{"{key}": dim}}, '
                    "or None for an entry that every process needs whole"
                )

    def _ignoring(self, whole: Mapping[str, Any], dims: Mapping[str, int]) -> str | None:
        """The key of the targets, if some of them do not count in the loss; None if nothing says so."""
        names = ["shift_labels"] if isinstance(whole.get("shift_labels"), Tensor) else list(dims)
        found = (key for key in names if not whole[key].is_floating_point() and key != self.positions)
        return next((key for key in found if bool((whole[key] == IGNORED).any())), None)


def _are_full(masks: Sequence[Tensor | None]) -> bool:
    given = [mask for mask in masks if mask is not None]
    return bool(given) and all(bool(mask.all()) for mask in given)


def _some_of_last(counted: Tensor, few: int, *, by_row: bool = False) -> Tensor:
    """(..., positions) of bool: every second one of the last that count, so that hardly any shard is left without.

    Args:
        few: how many of every row.
        by_row: of every second row twice as many.
    """
    rest = counted.flip(-1).cumsum(-1).flip(-1)
    rows = torch.arange(rest[..., 0].numel(), device=rest.device).view(rest.shape[:-1])[..., None]
    return counted & (rest % 2 == 0) & (rest <= 2 * few * (1 + (rows % 2 if by_row else 0)))


def _counted(targets: Tensor, dim: int) -> Tensor:
    """(..., positions) of bool: where a target counts in the loss."""
    return (targets != IGNORED).movedim(dim, -1)


# Outputs of a model for sequences that are cut: gathered along the sequence on the process that reports.


def gather_outputs(outputs: Any, batch: CutBatch, mesh: DeviceMesh) -> Any:
    """Return the outputs for the whole batch on the first process of ``mesh``, None on the others; a collective.

    Tensors with the dimension of the sequence are joined in its order, numbers are averaged over the targets.

    Raises:
        StrategyError: a tensor has neither form.
    """
    leaves, tree = tree_flatten(outputs)
    found = [_gathered(leaf, batch, mesh) for leaf in leaves]
    return tree_unflatten(found, tree) if mesh.get_local_rank() == 0 else None


def _gathered(leaf: Any, batch: CutBatch, mesh: DeviceMesh) -> Any:
    if leaf is None:
        return None
    shards = batch.shards
    if not isinstance(leaf, Tensor):
        raise StrategyError(f"model: gives {type(leaf).__name__} in evaluation, cp needs tensors of each position")
    if leaf.ndim == 0 and leaf.is_floating_point():
        value = torch.zeros_like(leaf) if batch.factor == 0 else leaf.detach() * batch.factor
        torch_dist.all_reduce(value, group=mesh.get_group())
        return value / batch.shards.count
    own = shards.length // shards.count
    others = batch.of_encoder
    if others is not None and leaf.ndim > batch.dim and leaf.shape[batch.dim] != own:
        shards, own = others, others.length // others.count
    if leaf.ndim <= batch.dim or leaf.shape[batch.dim] != own or batch.size not in (None, leaf.shape[0]):
        raise StrategyError(
            f"model: gives a tensor of shape {tuple(leaf.shape)} in evaluation, cp={batch.shards.count} needs {own} positions of "
            f"this process in dimension {batch.dim}, or a number"
        )
    first = torch_dist.get_process_group_ranks(mesh.get_group())[0]
    sent = leaf.detach().contiguous()
    received = [torch.empty_like(sent) for _ in range(batch.shards.count)] if mesh.get_local_rank() == 0 else None
    torch_dist.gather(sent, received, first, group=mesh.get_group())
    return None if received is None else shards.join(received, batch.dim)
