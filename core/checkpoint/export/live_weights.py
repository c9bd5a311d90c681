"""The weights of a running model for another program, such as an inference engine: whole, one at a time, by its names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch import Tensor

from ...hugging_face.pretrained import META_KEY, Description
from ..load import Checkpoint, TensorReader, reading
from .files import ExportedTensor
from .hugging_face import named_weights, write_configuration
from .peft_adapters import KEY as ADAPTERS
from .peft_adapters import merged
from .weights import divided, in_safetensors, parse_size, weights_to_export


class LiveWeights:
    """The whole weights of a running model, on rank 0 alone; what is read is gathered from the processes that hold it.

    A model of transformers has the names and tensors of ``export_hugging_face``, another one those of ``export_weights``; adapters
    of LoRA are merged into their base. It is a ``WeightSource`` as vLLM's weight transfer takes one: ``metadata()``, and iteration,
    of which each is a new pass. It can be read until ``publish`` of the target returns, by one thread.

    Args:
        reader: of the running model's tensors.
        weights: what is read, in order.
        described: the model of transformers; None: it is another one.
        dtype: of floating-point tensors; None: their own.
        is_untied: whether ``weights`` have other values under two names that the configuration ties.
    """

    def __init__(
        self,
        reader: TensorReader,
        weights: Sequence[ExportedTensor],
        described: Description | None = None,
        dtype: torch.dtype | None = None,
        is_untied: bool = False,
    ) -> None:
        self._reader, self._weights = reader, list(weights)
        self._described, self._dtype, self._is_untied = described, dtype, is_untied

    def metadata(self) -> list[ExportedTensor]:
        """Return ``name``, ``shape``, ``dtype`` and ``nbytes`` of every tensor, in order; nothing is gathered."""
        return list(self._weights)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every name with its tensor on the host; the tensor is the caller's."""
        return ((weight.name, self.read(weight)) for weight in self._weights)

    def buckets(self, size: int | str) -> list[list[ExportedTensor]]:
        """Divide ``metadata()`` into buckets of at most ``size``, in order; a larger tensor has a bucket of its own.

        Args:
            size: bytes, or a number with KB, MB, GB, KiB, MiB or GiB.

        Raises:
            CheckpointError: it is not a size.
        """
        return [bucket for bucket in divided(self._weights, parse_size(size, "size")) if bucket]

    def read(self, weight: ExportedTensor) -> Tensor:
        """Return one tensor of ``metadata()`` on the host; it is the caller's."""
        return self._reader.read(weight.key, weight.dtype)

    def write_configuration(self, folder: Path) -> list[str]:
        """Write what ``from_pretrained`` reads beside the weights; return the files' names, none for other models."""
        if self._described is None:
            return []
        return write_configuration(folder, self._weights, self._described, self._dtype, self._is_untied)


@contextmanager
def live_weights(source: Checkpoint, dtype: torch.dtype | None) -> Iterator[LiveWeights]:
    """Context with the weights of a checkpoint as another program takes them.

    Args:
        source: the live checkpoint, see ``read_on_rank_0``.
        dtype: of floating-point tensors; None: their own.

    Raises:
        CheckpointError: adapters cannot be merged, or safetensors has no such dtype.
    """
    with merged(source) if source.values.get(ADAPTERS) else nullcontext(source) as whole:
        meta = whole.values.get("meta")
        described = None
        if isinstance(meta, Mapping) and META_KEY in meta:
            described = Description.of_values(meta[META_KEY], whole.path)
            whole, weights, is_untied = named_weights(whole, described, dtype=dtype)
        else:
            weights, is_untied = weights_to_export(whole, False, dtype), False
        exported = in_safetensors(whole, whole.path, weights, tied=described is None)
        with reading(whole) as reader:
            yield LiveWeights(reader, exported, described, dtype, is_untied)
