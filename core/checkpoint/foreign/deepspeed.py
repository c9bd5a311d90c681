"""Read weights from a checkpoint directory of DeepSpeed, ZeRO 0 to 3; each process reads only the slices that it needs.

DeepSpeed's tools unpickle its files, which may execute any code; here the pickles are only parsed. The partitions of
ZeRO are merged as in ``deepspeed.utils.zero_to_fp32``; float32 master weights are used if the files have them, also
those of a universal checkpoint, which ``ds_to_universal`` has made.

Source: https://github.com/deepspeedai/DeepSpeed, ``deepspeed/utils/zero_to_fp32.py`` (0.17 to 0.19)
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...base.errors import CheckpointError
from ..chunks import chunks_of_range
from ..load import Checkpoint
from ..manifest import StoredChunk, TensorEntry
from ..safetensors_file import Fetch
from ..untrusted import one_line, read_name, sibling
from .torch_files import DAMAGE, StoredTensor, TorchFile
from .weights_file import MODEL, dtype_name, entry, label

_MODEL_STATES = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIM_STATES = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_UNIVERSAL, _MASTER = "zero", "fp32.pt"
_MISSING = "float32 masters (files of optimizer states are missing)"
# Of ZeRO-0 in half precision; they are in the order of the optimizer's groups.
_MASTERS, _UNNAMED = {"fp32_groups", "fp32_groups_flat"}, "optimizer (with float32 masters, which have no names there)"

Shard = tuple[int, StoredTensor]
"""(index of the file, one-dimensional tensor in it)."""


def find(folder: Path) -> Path | None:
    """The directory of DeepSpeed's files: ``folder``, or the subfolder that ``latest`` names; None if there is none."""
    if _model_states(folder):
        return folder
    pointer = folder / "latest"
    tag = read_name(pointer) if pointer.is_file() else None
    return folder / tag if tag is not None and _model_states(folder / tag) else None


def _model_states(folder: Path) -> list[Path]:
    return _by_rank(folder, _MODEL_STATES)


def _by_rank(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    if not folder.is_dir():
        return []
    matches = [(match, path) for path in folder.iterdir() if (match := pattern.fullmatch(path.name))]
    return [path for _, path in sorted((tuple(int(n or 0) for n in match.groups()), path) for match, path in matches)]


def open_directory(folder: Path) -> Checkpoint:
    """Open the weights in a directory from ``find``, under the keys ``model.<name>``.

    Raises:
        CheckpointError: a file is damaged, missing, or has objects that cannot be read safely; or the model is sharded
            by tensor, pipeline or expert parallelism.
    """
    _refuse_other_splits(folder)
    try:
        return _Reader(folder).checkpoint()
    except DAMAGE as error:
        reason = one_line(error)
        raise CheckpointError(
            f"{folder}: is no checkpoint of DeepSpeed's ZeRO, {type(error).__name__}: {reason}"
        ) from None


def _refuse_other_splits(folder: Path) -> None:
    for path in sorted(folder.iterdir()):
        match = _MODEL_STATES.fullmatch(path.name) or _OPTIM_STATES.fullmatch(path.name)
        if path.name.startswith(("layer_", "expp_rank_")) or "_expert_" in path.name or (match and int(match[2])):
            raise CheckpointError(
                f"{path}: belongs to a model split by tensors, layers or experts, and only ZeRO is read; "
                "convert it with DeepSpeed's own tools first"
            )


class _Reader:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: list[TorchFile] = []
        self.entries: dict[str, TensorEntry] = {}
        self.views: dict[tuple[str, str], tuple[StoredTensor, int, int, tuple[int, ...]]] = {}
        self.models = [self._open(path) for path in _model_states(folder)]
        self.optims = [self._open(path) for path in _by_rank(folder, _OPTIM_STATES)]

    def _open(self, path: Path) -> int:
        self.files.append(TorchFile(sibling(path, path.name)))
        return len(self.files) - 1

    @property
    def _is_sharded(self) -> bool:
        """Whether there is a file of the model for each process, which has shards of its parameters, as of ZeRO-3."""
        return self.files[self.models[0]].path.name.startswith("zero_")

    def checkpoint(self) -> Checkpoint:
        """All tensors of the files, with the highest precision that they have."""
        model = self.files[self.models[0]].content
        self._add_module(model)
        states = [self.files[index].content["optimizer_state_dict"] for index in self.optims]
        shapes = model.get("param_shapes") or []
        if states and shapes:
            self._check_world(states)
            if "fp32_flat_groups" in states[0]:
                self._add_frozen_shards()
                self._add_stage_3(model, [state["fp32_flat_groups"] for state in states])
            else:
                groups = [state["single_partition_of_fp32_groups"] for state in states]
                self._add_stages_1_and_2(model, groups, states[0].get("param_alignment_paddings"))
        elif (self.folder / _UNIVERSAL).is_dir():
            if self._is_sharded:
                self._add_frozen_shards()
            self._add_universal(shapes)
        wanted = [name for group in (*shapes, model.get("frozen_param_shapes") or {}) for name in group]
        if lost := [name for name in wanted if MODEL + name not in self.entries]:
            raise CheckpointError(f"{self.folder}: lacks {lost[0]}, files of optimizer states are missing")
        for name, original in (model.get("shared_params") or {}).items():
            if MODEL + original in self.entries:
                self.entries[MODEL + name] = self.entries[MODEL + original]
        beside = self._masters_not_read(model, shapes)
        return Checkpoint(self.folder, self.entries, {}, self._source, origin="DeepSpeed", not_read=beside)

    def _masters_not_read(self, model: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> list[str]:
        """What to say of float32 masters if the weights of half precision are read in their place."""
        if not groups:
            return [_UNNAMED] if (model.get("optimizer") or {}).keys() & _MASTERS else []
        dtypes = {self.entries[MODEL + name].dtype for shapes in groups for name in shapes}
        return [_MISSING] if not self.optims and dtypes & {"F16", "BF16"} else []

    def _check_world(self, states: Sequence[Mapping[str, Any]]) -> None:
        count = states[0]["partition_count"]
        count = max(count) if isinstance(count, list) else count
        if count != len(states):
            raise CheckpointError(f"{self.folder}: has {len(states)} files of optimizer states, {count} were written")

    # Tensors in the files

    def _add_module(self, model: Mapping[str, Any]) -> None:
        """Add the buffers, and the whole parameters in the precision of computation."""
        module = dict(model["module"] or {})
        if self._is_sharded:
            module = {name: tensor for name, tensor in module.items() if name in model["buffer_names"]}
        else:
            module |= model.get("frozen_param_fragments") or {}
        for name, tensor in module.items():
            if isinstance(tensor, StoredTensor):
                self._add(name, tensor.shape, [(self.models[0], tensor, 0, 0, math.prod(tensor.shape))])

    def _add_frozen_shards(self) -> None:
        """Add the frozen parameters of ZeRO-3: every process has a shard of each."""
        models = [self.files[index].content for index in self.models]
        for name, shape in (models[0].get("frozen_param_shapes") or {}).items():
            shards = [(i, m["frozen_param_fragments"][name]) for i, m in zip(self.models, models, strict=True)]
            self._add(name, shape, _consecutive(shards, 0, math.prod(shape)))

    def _add_stages_1_and_2(self, model: Mapping[str, Any], ranks: Sequence[Sequence[Any]], paddings: Any) -> None:
        """Add the parameters of ZeRO-1 and 2: a group's are concatenated, then cut into one shard per process."""
        for number, shapes in enumerate(model["param_shapes"]):
            shards = [(file, groups[number]) for file, groups in zip(self.optims, ranks, strict=True)]
            padding = paddings[number] if paddings else [0] * len(shapes)
            offset = 0
            for (name, shape), behind in zip(shapes.items(), padding, strict=True):
                numel = math.prod(shape)
                self._add(name, shape, _consecutive(shards, offset, numel))
                offset += numel + behind

    def _add_stage_3(self, model: Mapping[str, Any], ranks: Sequence[Sequence[Any]]) -> None:
        """Add the parameters of ZeRO-3: each is cut into one shard per process, which concatenates its shards."""
        shapes = {name: shape for group in model["param_shapes"] for name, shape in group.items()}
        offset = 0
        for name, shape in shapes.items():
            numel = math.prod(shape)
            share = -(-numel // len(ranks))
            ranges = []
            for rank, (file, groups) in enumerate(zip(self.optims, ranks, strict=True)):
                begin, end = min(rank * share, numel), min((rank + 1) * share, numel)
                own = _consecutive([(file, group) for group in groups], offset, end - begin)
                ranges += [(f, tensor, start, at + begin, length) for f, tensor, start, at, length in own]
            self._add(name, shape, ranges)
            offset += share

    def _add_universal(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Add the parameters of a universal checkpoint, which has a folder with the whole master of each."""
        folder = self.folder / _UNIVERSAL
        there = {path.name for path in folder.iterdir() if not path.is_symlink()}
        for name, shape in (item for shapes in groups for item in shapes.items()):
            if name not in there or not (folder / name / _MASTER).is_file():
                continue  # ZeRO-1 and 2 leave out what never had a gradient
            file = self._open(folder / name / _MASTER)
            content = self.files[file].content
            master = content["param"] if isinstance(content, Mapping) else content  # flat and padded after ZeRO-3
            self._add(name, shape, [(file, master, 0, 0, math.prod(shape))])

    # Chunks

    def _add(self, name: str, shape: Sequence[int], ranges: Sequence[tuple[int, StoredTensor, int, int, int]]) -> None:
        """Add a tensor of chunks: (file, stored tensor, offset in it, offset in the flattened tensor, length)."""
        shape = tuple(shape)
        chunks, dtype = [], None
        for file, tensor, start, at, length in ranges:
            path = self.files[file].path
            dtype = dtype_name(path, name, tensor)
            flat = math.prod(tensor.shape)
            if math.prod(shape) and not 0 <= start <= start + length <= flat:
                raise CheckpointError(f"{path}: lacks a part of {name}")
            for offsets, sizes in chunks_of_range(shape, at, at + length):
                own = f"{name}@{','.join(map(str, offsets))}"
                chunks.append(StoredChunk(offsets=offsets, shape=sizes, file=label(file), name=own))
                self.views[label(file), own] = (tensor, start, math.prod(sizes), sizes)
                start += math.prod(sizes)
        if dtype is None and not math.prod(shape):
            dtype = "F32"
        if dtype is not None:
            self.entries[MODEL + name] = entry(self.folder, name, dtype, shape, chunks)

    @contextmanager
    def _source(self, file: str) -> Iterator[Fetch]:
        number = next(index for index in range(len(self.files)) if label(index) == file)
        tensor_of = self.files[number].map()

        def fetch(name: str, slices: tuple[slice, ...]) -> Any:
            stored, start, length, sizes = self.views[file, name]
            return tensor_of(stored).reshape(-1)[start : start + length].view(sizes)[slices]

        yield Fetch(self.folder / file, fetch)


def _consecutive(shards: Sequence[Shard], offset: int, length: int) -> list[tuple[int, StoredTensor, int, int, int]]:
    """The range [offset, offset + length) of concatenated tensors, as chunks whose positions count from ``offset``."""
    found = []
    begin = 0
    for file, tensor in shards:
        end = begin + math.prod(tensor.shape)
        low, high = max(offset, begin), min(offset + length, end)
        if low < high:
            found.append((file, tensor, low - begin, low - offset, high - low))
        begin = end
    return found
