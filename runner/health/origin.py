"""Origin: the part of a run that an error came from, read off its traceback."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from torch import nn

from ...core.base.errors import is_the_user_s, shown
from ...core.model.base_model import class_name
from ..data.sample_seeds import samples_in_words
from ..hooks import Hook

_LIBRARY = __name__.partition(".")[0]
_STAGES = {"val": "validation", "test": "testing"}

# Functions of Stepper in which the model computes; everything else there has other functions inside.
_FORWARD = {"forward", "predict", "_losses_by_mode", "_losses_of_result", "_losses_of_own_forward", "_predict"}
_OF_OPTIM = {"backward": "backward", "step": "the optimizer step", "finish": "the optimizer step"}


@dataclass
class Origin:
    """Where an error came from.

    Attributes:
        frames: the frames of the traceback, from the outermost on.
        mode: "train", "val" or "test".
        is_dry: True if the dry pass was under way.
        part: the part of the run in words; empty if it is not known.
        kind: "forward", "backward", "optimizer", "data", "metric", "hook", "preprocessor" or "".
        module: the innermost part of the model that computed, with its name.
    """

    frames: list[tuple[FrameType, int]]
    mode: str = "train"
    is_dry: bool = False
    part: str = ""
    kind: str = ""
    module: tuple[str, nn.Module] | None = None
    names: Mapping[int, str] = field(default_factory=dict)

    @property
    def loader(self) -> str:
        """The configuration key of the data."""
        return f"{self.mode}_dataloader"

    def local(self, function: str, name: str) -> Any:
        """A local variable of the innermost frame of a function; None if there is none."""
        found = (frame.f_locals.get(name) for frame, _ in reversed(self.frames) if frame.f_code.co_name == function)
        return next((value for value in found if value is not None), None)

    def samples(self) -> str:
        """The samples whose batch this process was reading, in words; empty if it was not reading one."""
        if self.kind != "data":
            return ""
        turn = self.local("__getitem__", "turn")
        return "" if turn is None else samples_in_words(turn.indices)

    def source(self) -> str:
        """The file and line of the user's own code in which the error arose; empty if there is none."""
        for frame, line in reversed(self.frames):
            if is_the_user_s(frame):
                return shown(frame.f_code.co_filename, line)
        return ""

    def words(self) -> str:
        """Where the error arose, for a line in the log: `` in forward of model.net.0 (Linear), train.py:31``."""
        part = self.part
        if self.module is not None and self.kind == "forward":
            name, module = self.module
            part = f"{part} of {'.'.join(filter(None, ('model', name)))} ({class_name(module)})"
        stage = "the dry pass" if self.is_dry else _STAGES.get(self.mode, "")
        if stage and (self.is_dry or not part.startswith(self.mode)):
            part = f"{part} in {stage}" if part else stage
        source = self.source()
        return f" in {', '.join(filter(None, (part, source)))}" if part else f" at {source}" if source else ""


def find_origin(error: BaseException, model: nn.Module | None) -> Origin:
    """Find the part of a run that an error came from; ``model`` is the user's module."""
    return origin_of_frames(list(traceback.walk_tb(error.__traceback__)), model, error)


def origin_of_frames(
    frames: list[tuple[FrameType, int]], model: nn.Module | None, error: BaseException | None = None
) -> Origin:
    """Find the part of a run that a stack is in.

    Args:
        frames: the frames with their lines, from the outermost on.
        model: the user's module.
        error: the error that was raised in the last frame, if there is one.
    """
    names = {} if model is None else {id(module): name for name, module in model.named_modules()}
    origin = Origin(frames, names=names)
    following = [*(frame for frame, _ in origin.frames[1:]), None]
    for (frame, _), inner in zip(origin.frames, following, strict=True):
        own = frame.f_locals.get("self")
        if _module_of(frame):
            _note(origin, frame, own)
            _note_hook(origin, frame, inner, error)
        elif isinstance(own, nn.Module) and id(own) in names:
            origin.module = (names[id(own)], own)
    if origin.kind == "data":
        _refine_data(origin)
    return origin


def _note_hook(origin: Origin, frame: FrameType, inner: FrameType | None, error: BaseException | None) -> None:
    """Note that a hook is called: a function of the user's at a hook point, or one that cannot be called like this."""
    if not _module_of(frame).startswith("runner."):
        return
    method = frame.f_locals.get("hook", frame.f_locals.get("method"))
    hook: Any = getattr(method, "__self__", None)
    if inner is None:
        name = getattr(method, "__name__", "")
        if not isinstance(hook, Hook) or not isinstance(error, TypeError) or f".{name}()" not in str(error):
            return
    else:
        code = getattr(getattr(method, "__func__", method), "__code__", None)
        name, called = inner.f_code.co_name, inner.f_locals.get("self")
        if isinstance(called, Hook) and not isinstance(frame.f_locals.get("self"), Hook):
            hook = called
        elif code is not inner.f_code:
            return
    is_ours = type(hook).__module__.partition(".")[0] == _LIBRARY
    kind = f"{type(hook).__name__}." if isinstance(hook, Hook) else ""
    origin.kind, origin.module = "hook", None
    origin.part = f"hook {kind}{name}" if is_ours else f"custom_hooks ({kind}{name})"


def _note(origin: Origin, frame: FrameType, own: Any) -> None:
    """Take from a frame of this library what it says of the part."""
    module, function = _module_of(frame), frame.f_code.co_name
    if module == "runner.loops.dry_pass":
        origin.is_dry, origin.mode = True, getattr(own, "_mode", "val")
        if function == "_compute":
            _note_metric(origin, frame.f_locals.get("part"), "compute")
    elif module == "runner.loops.evaluate":
        origin.mode = getattr(own, "mode", origin.mode)
        origin.part = origin.kind = ""
    elif module == "runner.loops.step":
        if function in _FORWARD or function == "_call_train_step":
            origin.part, origin.kind = "train_step" if function == "_call_train_step" else "forward", "forward"
    elif module == "runner.hooks.small_hooks" and "scheduler" in frame.f_locals:
        kind = type(frame.f_locals["scheduler"]).__name__
        origin.part, origin.kind = f"param_scheduler ({kind}.step)", "optimizer"
    elif module.startswith("optim.") and function in _OF_OPTIM:
        origin.part, origin.kind = _OF_OPTIM[function], "backward" if function == "backward" else "optimizer"
        origin.module = None
    elif module == "runner.metrics.evaluator" and function in ("process", "evaluate"):
        method = "process" if function == "process" else "compute"
        _note_metric(origin, frame.f_locals.get("metric"), method)
    elif module in ("runner.metrics.base", "runner.metrics.torchmetrics") and function == "evaluate":
        _note_metric(origin, own, "compute")
    elif module.startswith("runner.data."):
        origin.part, origin.kind = origin.loader, "data"
    elif module.startswith("core.comm.") and origin.kind not in ("forward", "data"):
        origin.part, origin.kind = origin.part or "communication between processes", origin.kind or "collective"
    elif module.startswith(("core.checkpoint.save", "runner.resume.saver")):
        origin.part, origin.kind = "saving a checkpoint", "checkpoint"


def _note_metric(origin: Origin, metric: Any, method: str) -> None:
    if metric is not None:
        kind = type(getattr(metric, "metric", metric))
        origin.part, origin.kind = f"{origin.mode}_evaluator ({kind.__name__}.{method})", "metric"


def _refine_data(origin: Origin) -> None:
    """Say whether the dataset or the collate function failed, if this process read the batch itself."""
    reading = [i for i, (frame, _) in enumerate(origin.frames) if _module_of(frame) == "runner.data.sample_seeds"]
    inside = [frame for frame, _ in origin.frames[reading[-1] + 1 :]] if reading else []
    if not inside:
        return
    own, name = inside[0].f_locals.get("self"), inside[0].f_code.co_name
    if name in ("__getitem__", "__getitems__", "__next__", "__iter__"):
        origin.part = f"{origin.loader}.dataset ({type(own).__name__}.{name})"
    else:
        origin.part = f"{origin.loader}.collate_fn ({name})"


def _module_of(frame: FrameType) -> str:
    """The module of a frame of this library, without the library's name; otherwise empty."""
    first, _, rest = str(frame.f_globals.get("__name__", "")).partition(".")
    return rest if first == _LIBRARY else ""


def causes(error: BaseException) -> Iterator[BaseException]:
    """The error, and those from which it was raised."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = found.__cause__
