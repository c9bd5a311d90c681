"""Read the weights of a model of transformers from its folder, each process its own part, after the model is set up."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ...core.checkpoint import match_weights, open_weights_together
from ...core.checkpoint.foreign.stored_tensors import MODEL
from ...core.checkpoint.held_chunks import held_chunks
from ...core.checkpoint.load.adapter_names import copies_of
from ...core.comm.joint_errors import gather_differing, raising_together
from ...core.errors import ConfigError, counted
from ...core.hugging_face import pretrained_private as private
from ...core.hugging_face.missing import initial_values
from ...core.hugging_face.pretrained import Pretrained, pretrained_in
from ...strategies.names import tied

if TYPE_CHECKING:
    from ..run import Run

_LISTED = 6


class ToRead:
    """What is read after ``Strategy.setup``.

    Args:
        source: the folder.
        model: the whole model, before it is set up.
    """

    def __init__(self, source: Pretrained, model: nn.Module) -> None:
        self.source = source
        self.names = source.renamed_in(model)
        """Name in the model that ``source`` built to that in the whole model."""
        parameters = dict(model.named_parameters(remove_duplicate=False))
        self.copies = copies_of(self.names.values(), parameters)
        """Name of a copy that an adapter trains to that of the original."""
        self.tied = tied(model)
        """Further names of tied parameters, each with its first."""
        self.parameters = {new for new in (*self.names.values(), *self.copies) if new in parameters}
        self.owner = next(module for module in model.modules() if source in pretrained_in(module))
        self.not_missed = private.ignored(self.owner, sorted(self.names), missing=True)

    def stored(self, name: str, there: Container[str]) -> str | None:
        """Return the name under which the files have a parameter, which they may have under that of one tied to it."""
        first = self.tied.get(name, name)
        group = (name, first, *(alias for alias, of in self.tied.items() if of == first))
        return next((each for each in group if MODEL + each in there), None)


def read_pretrained(run: Run, part: ToRead) -> None:
    """Fill the parameters and buffers with what the files hold, and initialise those that they lack; a collective.

    Raises:
        CheckpointError: a file is damaged.
        ConfigError: nothing fits, or a tensor has another shape.
    """
    source, strategy = part.source, run.strategy
    folder = source.folder
    live = {f"{MODEL}{name}": tensor for name, tensor in strategy.model_state().items()}
    own = {name: old for old, name in part.names.items()}
    # A copy whose original the files lack has the original's new values.
    own |= {copy: own[part.tied.get(name, name)] for copy, name in part.copies.items()}
    opened = open_weights_together(folder)
    entries = {}
    for key, entry in opened.entries.items():
        name = source.names.get(key.removeprefix(MODEL))
        if name is not None:
            entries[MODEL + part.names.get(name, name)] = entry
    copied = {copy: found for copy, name in part.copies.items() if (found := part.stored(name, entries)) is not None}
    entries |= {MODEL + copy: entries[MODEL + of] for copy, of in copied.items()}
    template = {key: tensor for key, tensor in live.items() if key.removeprefix(MODEL) in own}
    matched, fits, report = match_weights(opened.renamed(entries), template, strategy.aliases())
    report = report.of_all()
    if report.misshaped and not source.replaces_misshaped:
        name, (there, wanted) = next(iter(report.misshaped.items()))
        raise ConfigError(
            f"model.{name}: has shape {wanted}, and {there} in {folder}; change the setting that it depends on, or give "
            "model.ignore_mismatched_sizes=True to initialise it anew"
        )
    if not any(gather_differing(bool(fits))):
        raise ConfigError(f"model.pretrained: no tensor of {folder} is one of {source.name}: {report}")
    matched.load(fits)
    new = [name for name in (*report.missing, *report.misshaped) if name in part.parameters]
    with raising_together():
        values = initial_values(source, [*dict.fromkeys(own[name] for name in new)], run.seed) if new else {}
    for old, whole in values.items():
        name = part.names[old]
        same = (copy for copy, of in part.copies.items() if part.tied.get(of, of) == name)
        for key in (MODEL + each for each in (name, *same)):
            if key in template:
                _fill(key, template[key], whole)
                fits[key] = template[key]
    strategy.load_state_dict(fits)
    strategy.note_initialised(name for name, _ in strategy.named_parameters() if name in own)
    in_files = {info.dtype for info in opened.tensors.values() if info.dtype.is_floating_point}
    _tell(run, part, report.missing, report.unexpected, in_files)
    if replaced := [name for name in report.misshaped if name in part.parameters]:
        run.logger.warning(
            f"{source.folder}: has other shapes of {_listed(replaced)}, which start with new random values, also where shapes agree"
        )


def _tell(run: Run, part: ToRead, missing: Sequence[str], unused: Sequence[str], stored: set[torch.dtype]) -> None:
    source = part.source
    wanted = str(source.dtype).removeprefix("torch.")
    others = sorted(str(dtype).removeprefix("torch.") for dtype in stored - {source.dtype})
    cast = f", from {' and '.join(others)} to {wanted} (model.dtype)" if others else ""
    run.logger.info(f"{source.name}: weights of {source.folder} ({source.size() / 2**20:.1f} MiB){cast}")
    if shown := [name for name in missing if name in part.parameters and name not in part.not_missed]:
        run.logger.warning(f"{source.folder}: does not have {_listed(shown)}, which start with new random values")
    if shown := sorted({*unused} - private.ignored(part.owner, unused, missing=False)):
        run.logger.warning(f"{source.folder}: {_listed(shown)} is not used, {source.name} has no such tensor")


def _listed(names: Sequence[str]) -> str:
    more = f" and {counted(len(names) - _LISTED, 'other tensor')}" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


@torch.no_grad()
def _fill(key: str, tensor: Tensor, whole: Tensor) -> None:
    """Copy this process's part of a tensor that every process has."""
    for offsets, held in held_chunks(key, tensor).items():
        part = whole
        for dim, (begin, size) in enumerate(zip(offsets, held.shape, strict=True)):
            part = part.narrow(dim, begin, size)
        held.copy_(part)
