"""TeacherHook: one part of the model is the moving average of another."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...core.errors import ConfigError, StrategyError, suggest
from ...core.registry import HOOKS
from ...core.torch_private import foreach_copy_
from .averaging import local_part, move_towards
from .hook import Hook

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..run import Run

_PREFIX = "precise."
_HALF = (torch.float16, torch.bfloat16)


@dataclass
class _Weight:
    """A parameter of the teacher with the student's, as this process has them."""

    name: str  # in the whole model
    teacher: Tensor
    student: Tensor
    precise: Tensor | None = None  # the average in float32, if the model computes with half-precision weights


@HOOKS.register_module()
class TeacherHook(Hook):
    """Makes one part of the model, the teacher, the moving average of another, the student.

    Contrastive learning and self-distillation (MoCo, BYOL, DINO, mean teachers) train a student against such a teacher. It
    moves once after every update that was applied: with accumulation after the whole window, and not after an update that loss
    scaling skipped. It is a part of the model, so it is in checkpoints, and the strategy shards it: each process
    averages its own shard. Its parameters must be frozen, so that no optimizer has them. Half-precision weights are averaged
    in float32. Buffers, such as running statistics, are the teacher's own.

    The momentum schedule is that of BYOL: https://arxiv.org/abs/2006.07733

    Args:
        student: name of the submodule that is trained, such as "student" or "net.encoder".
        teacher: name of the submodule that follows it; it has the same parameters.
        momentum: share of the newest weights in the average; default 0.004. Others call 1 - momentum the decay.
        end_momentum: share at the end of training, which ``momentum`` reaches along half a cosine; None: it stays.
        copy_at_start: the teacher begins as a copy of the student, buffers included; False: with the weights that it has.

    Example:
        custom_hooks=[dict(type="TeacherHook", student="student", teacher="teacher", momentum=0.004)]
    """

    priority = "NORMAL"

    def __init__(
        self,
        student: str,
        teacher: str,
        momentum: float = 0.004,
        end_momentum: float | None = None,
        copy_at_start: bool = True,
    ) -> None:
        for name, value in (("momentum", momentum), ("end_momentum", end_momentum)):
            if value is not None and not (0 < value <= 1 or (name == "end_momentum" and value == 0)):
                raise ConfigError(
                    f"TeacherHook.{name}: {value} is not allowed, give a number between 0 and 1, small for a long memory"
                )
        if student == teacher or f"{student}.".startswith(f"{teacher}.") or f"{teacher}.".startswith(f"{student}."):
            raise ConfigError(
                f'TeacherHook.teacher: "{teacher}" and the student "{student}" are not apart, name two submodules'
            )
        self.student, self.teacher = student, teacher
        self.momentum, self.end_momentum = momentum, end_momentum
        self.copy_at_start = copy_at_start
        self._weights: list[_Weight] = []
        self._has_loaded = False

    def before_run(self, runner: Run) -> None:
        """Find the parameters of both parts.

        Raises:
            ConfigError: a part is missing, they differ, or the teacher is trained or left out of checkpoints.
            StrategyError: the strategy lays the two parts out differently.
        """
        names = self._names(runner)
        tensors = runner.strategy.computed_with()
        self._weights = [
            self._pair(name, tensors[name], tensors.get(self.student + name.removeprefix(self.teacher)))
            for name in names
            if name in tensors
        ]
        for weight in self._weights:
            if weight.teacher.dtype in _HALF:
                weight.precise = weight.teacher.to(torch.float32)
        # Collected once: the hook works at every update.
        self._precise = [weight for weight in self._weights if weight.precise is not None]
        self._students = [weight.student for weight in self._weights]
        self._averages = [weight.teacher if weight.precise is None else weight.precise for weight in self._weights]
        self._written = [weight.name for weight in self._weights]
        if 0.5 < self.momentum < 1:
            runner.logger.warning(
                f"TeacherHook.momentum: {self.momentum} is the share of the newest weights, so the teacher is hardly different "
                f"from the student; what others call a momentum of {self.momentum} is {1 - self.momentum:.4g}"
            )

    def before_train(self, runner: Run) -> None:
        """Copy the student, if training begins; after loading, take up the averages."""
        if runner.iter == 0 and self.copy_at_start:
            self._copy_student(runner)
        elif not self._has_loaded:
            saved = runner.strategy.model_state()
            with torch.no_grad():
                for weight in self._weights:
                    if weight.precise is not None:
                        weight.precise.copy_(saved[weight.name])

    def after_train_iter(
        self,
        runner: Run,
        batch_idx: int,
        data_batch: Any = None,
        outputs: Mapping[str, Any] | None = None,
    ) -> None:
        """Move the teacher if the update was applied."""
        optim = runner.optim_wrapper
        if optim is None or optim.last_step.skipped:
            return
        share = self._share(runner.iter, runner.max_iters)
        with torch.no_grad():
            move_towards(self._averages, self._students, share)
            for weight in self._precise:
                weight.teacher.copy_(weight.precise)  # type: ignore[arg-type]
        self._wrote(runner)

    def before_save_checkpoint(self, runner: Run, checkpoint: dict[str, Any]) -> None:
        """Bring the float32 weights that a strategy saves for a half-precision teacher up to date."""
        self._update_saved(runner)

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return ``precise.<name>``: averages in float32, sharded like the weights, where the model is in half precision."""
        return {_PREFIX + w.name: w.precise for w in self._weights if w.precise is not None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict``; without averages, from the teacher in the checkpoint."""
        with torch.no_grad():
            for weight in self._weights:
                found = state.get(_PREFIX + weight.name)
                if weight.precise is not None and found is not None:
                    self._has_loaded = True
                    if found is not weight.precise:
                        weight.precise.copy_(found)

    def _share(self, done: int, total: int) -> float:
        if self.end_momentum is None:
            return self.momentum
        fallen = (1 + math.cos(math.pi * min(done / max(total, 1), 1.0))) / 2
        return self.end_momentum + (self.momentum - self.end_momentum) * fallen

    @torch.no_grad()
    def _copy_student(self, runner: Run) -> None:
        foreach_copy_([local_part(w.teacher) for w in self._weights], [local_part(w.student) for w in self._weights])
        for weight in self._weights:
            if weight.precise is not None:
                weight.precise.copy_(weight.student)
        buffers = dict(runner.strategy.module.named_buffers())
        for name, buffer in buffers.items():
            source = buffers.get(self.student + name.removeprefix(self.teacher))
            if name.startswith(f"{self.teacher}.") and source is not None and source.shape == buffer.shape:
                buffer.copy_(source)
        self._wrote(runner)

    def _wrote(self, runner: Run) -> None:
        runner.strategy.take_written(self._written)

    @torch.no_grad()
    def _update_saved(self, runner: Run) -> None:
        if all(weight.precise is None for weight in self._weights):
            return
        saved = runner.strategy.model_state()
        for weight in self._weights:
            if weight.precise is not None and saved[weight.name].dtype is torch.float32:
                local_part(saved[weight.name]).copy_(local_part(weight.precise))

    # Checks

    def _names(self, runner: Run) -> list[str]:
        """Return the names of the teacher's parameters on all processes, once they are known to be the student's."""
        strategy = runner.strategy
        own = dict(strategy.named_parameters())
        every = own.keys() | strategy.elsewhere()
        parts = {}
        for key, part in (("student", self.student), ("teacher", self.teacher)):
            parts[key] = {name.removeprefix(part) for name in every if name.startswith(f"{part}.")}
            if not parts[key]:
                known = sorted({name.rpartition(".")[0] for name in every} - {""})
                raise ConfigError(
                    f'TeacherHook.{key}: "{part}" has no parameters in the model{suggest(part, [*known, *_roots(known)])}'
                )
        buffers = {name.removeprefix(self.student) for name, _ in strategy.module.named_buffers()}
        buffers |= {name.removeprefix(self.teacher) for name, _ in strategy.module.named_buffers()}
        if differing := sorted((parts["student"] ^ parts["teacher"]) - buffers):
            owner = self.student if differing[0] in parts["student"] else self.teacher
            raise ConfigError(
                f"TeacherHook.teacher: {owner}{differing[0]} has no counterpart; student and teacher need the same "
                "parameters, and share none: make the teacher with copy.deepcopy(student)"
            )
        names = sorted(self.teacher + rest for rest in parts["teacher"] & parts["student"])
        for name in names:
            if name in own and own[name].requires_grad:
                raise ConfigError(
                    f"TeacherHook.teacher: {name} is trained by the optimizer, freeze it: {self.teacher}.requires_grad_(False)"
                )
        if any(name in strategy.left_out() for name in names):
            raise ConfigError(
                "strategy.exclude_frozen_parameters: leaves the teacher out of checkpoints, but it changes in training, "
                "see TeacherHook; give False"
            )
        return names

    def _pair(self, name: str, teacher: Tensor, student: Tensor | None) -> _Weight:
        if student is None:
            raise StrategyError(
                f"TeacherHook.teacher: this process has {name}, and the student's is on another one; put both on one stage "
                "of the pipeline, or choose a strategy without stages"
            )
        if teacher.shape != student.shape:
            raise ConfigError(
                f"TeacherHook.teacher: {name} has shape {tuple(teacher.shape)}, the student's {tuple(student.shape)}"
            )
        if _layout(teacher) != _layout(student):
            raise StrategyError(
                f"TeacherHook.teacher: the strategy lays {name} and the student's out differently, as {_layout(teacher)} and "
                f"{_layout(student)}; give both the same plan or the same units"
            )
        return _Weight(name, teacher, student)


def _layout(tensor: Tensor) -> Any:
    """Return what two tensors have to have alike so that their local parts are the same part."""
    if isinstance(tensor, DTensor):
        return (tensor.device_mesh, tensor.placements, tuple(tensor.to_local().shape))
    return (type(tensor).__name__, getattr(tensor, "start", 0), tuple(local_part(tensor).shape))


def _roots(names: list[str]) -> set[str]:
    """Return every module that is above one of ``names``."""
    return {name[:end] for name in names for end in range(len(name)) if name[end] == "."}
