"""EMAHook: keeps a moving average of the weights, which validation and testing use."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter

from ...core.base.errors import CheckpointError, ConfigError, StrategyError, suggest
from ...core.base.registry import HOOKS
from ...core.base.tensors import is_quantised
from ...core.torch_compat.torch_private import foreach_copy_, foreach_lerp_, storage_key
from ...strategies.parts import computed_with, elsewhere, left_out, take_written
from .hook import Hook

if TYPE_CHECKING:
    from ..run import Run

# WeightAverage: running averages of a model's weights, which can be swapped into the model.


_HALF = (torch.float16, torch.bfloat16)


class WeightAverage:
    """Averages of live tensors, with the same layout; every process updates its own shards, without synchronisation.

    Args:
        tensors: the live tensors by name; they stay the same objects while the model trains.
        owners: of buffers among them, the module and the name there, for code that assigns new ones.
    """

    def __init__(self, tensors: Mapping[str, Tensor], owners: Mapping[str, tuple[Module, str]] | None = None) -> None:
        self._names = list(tensors)
        self._model = list(tensors.values())
        owners = owners or {}
        self._owned = [(i, *owners[name]) for i, name in enumerate(self._names) if name in owners]
        with torch.no_grad():
            # With a momentum of 1e-4 every change would be lost in the rounding of a half-precision average.
            self._averages = [
                tensor.to(torch.float32) if tensor.dtype in _HALF else tensor.clone() for tensor in self._model
            ]
        self._own: list[Tensor] | None = None

    @property
    def averages(self) -> dict[str, Tensor]:
        """The averages by name; the live tensors, not copies."""
        return dict(zip(self._names, self._averages, strict=True))

    @property
    def is_swapped_in(self) -> bool:
        """True while the model holds the averages."""
        return self._own is not None

    @torch.no_grad()
    def copy_from_model(self) -> None:
        """Make the averages equal to the weights."""
        self._follow()
        _copy(self._averages, self._model)

    @torch.no_grad()
    def lerp_to_model(self, weight: float) -> None:
        """Move the averages towards the weights by the share ``weight`` of the distance."""
        self._follow()
        move_towards(self._averages, self._model, weight)

    @torch.no_grad()
    def load(self, averages: Mapping[str, Tensor]) -> None:
        """Copy the averages by name; a tensor without one takes the model's weights."""
        for name, mine, tensor in zip(self._names, self._averages, self._model, strict=True):
            source = averages.get(name, tensor)
            # The source may be the average itself, when it was loaded in place.
            if source is not mine:
                mine.copy_(source)

    @torch.no_grad()
    def swap_in(self) -> None:
        """Put the averages into the model; no effect if they are there already."""
        if self._own is None:
            self._follow()
            own = [tensor.clone() for tensor in self._model]
            _copy(self._model, self._averages)
            self._own = own

    @torch.no_grad()
    def swap_out(self) -> None:
        """Restore the model's own weights, bit for bit."""
        if self._own is not None:
            _copy(self._model, self._own)
            self._own = None

    def _follow(self) -> None:
        for i, module, name in self._owned:
            self._model[i] = module.get_buffer(name)


def following(strategy: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with the model's parameters in place of their views: code may give a parameter other memory, ``p.data = ...``."""
    own = {_place(parameter): parameter for parameter in strategy.module.parameters() if type(parameter) is Parameter}
    return {name: own.get(_place(each), each) if type(each) is Tensor else each for name, each in tensors.items()}


def _place(tensor: Tensor) -> tuple[int, int, tuple[int, ...]]:
    return storage_key(tensor), int(tensor.storage_offset()), tuple(tensor.shape)


def _copy(to: list[Tensor], source: list[Tensor]) -> None:
    if to:  # torch takes no empty lists
        foreach_copy_(list(map(local_part, to)), list(map(local_part, source)))


_GROUP_BYTES = 2**26


def move_towards(averages: Sequence[Tensor], tensors: Sequence[Tensor], share: float) -> None:
    """Move averages towards tensors of the same layout by ``share`` of the distance; they may have another dtype."""
    pairs = list(zip(map(local_part, averages), map(local_part, tensors), strict=True))
    alike = [(average, tensor) for average, tensor in pairs if average.dtype == tensor.dtype]
    if alike:
        foreach_lerp_([average for average, _ in alike], [tensor for _, tensor in alike], share)
    for some in _grouped([pair for pair in pairs if pair[0].dtype != pair[1].dtype]):
        cast = [torch.empty_like(average) for average, _ in some]
        foreach_copy_(cast, [tensor for _, tensor in some])
        foreach_lerp_([average for average, _ in some], cast, share)


def _grouped(pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Yield the pairs in groups whose copies take no more memory than a large layer."""
    group: list[tuple[Tensor, Tensor]] = []
    room = _GROUP_BYTES
    for average, tensor in pairs:
        size = average.numel() * average.itemsize
        if group and size > room:
            yield group
            group, room = [], _GROUP_BYTES
        group.append((average, tensor))
        room -= size
    if group:
        yield group


def local_part(tensor: Tensor) -> Tensor:
    """Return this process's shard of a sharded tensor, which shares its memory; any other tensor itself."""
    local = getattr(tensor, "to_local", None)
    return tensor if local is None else local()


class Follows(Hook):
    """Follows every update once: in its turn among the hooks, or before that if one of them saves a checkpoint, which has the update."""

    _is_due: bool | None = None  # False: it has followed before its turn

    def before_train_iter(self, runner: Run, batch_idx: int, data_batch: Any = None) -> None:
        """Await an update."""
        self._is_due = True

    def after_train_iter(
        self,
        runner: Run,
        batch_idx: int,
        data_batch: Any = None,
        outputs: Mapping[str, Any] | None = None,
    ) -> None:
        """Follow the update, if there was one."""
        is_done, self._is_due = self._is_due is False, None
        if not is_done:
            self._follow(runner)

    def before_save_checkpoint(self, runner: Run, checkpoint: dict[str, Any]) -> None:
        """Follow an update that the checkpoint has, if a hook saves it before this one's turn."""
        if self._is_due and (runner.train_loop.state_dict()["iter"] or 0) > runner.iter:
            self._is_due = False
            self._follow(runner)

    def _follow(self, runner: Run) -> None:
        """Follow an update; optim_wrapper.has_updated says whether one was made."""


AverageType = Literal["ExponentialMovingAverage", "StochasticWeightAverage", "MomentumAnnealingEMA"]
_PREFIX = "averaged."


@HOOKS.register_module()
class EMAHook(Follows):
    """Keeps an average of the model's weights, and puts it into the model for validation and testing.

    The model's own weights are restored afterwards, also when validation raises. A checkpoint holds them as the model,
    and the averages beside them. If there are float32 master weights, the average follows these. Averages of
    half-precision weights are kept in float32, because small momenta need the precision. The average does not move where no
    update was made: loss scaling skipped it, or the recipe (``should_update``) or the model (``train_step``) left it out.
    Of several hooks all averages are kept and saved; validation and testing use those of the first.

    Args:
        ema_type: ExponentialMovingAverage, StochasticWeightAverage (the mean of all), or MomentumAnnealingEMA (the
            momentum falls like ``gamma / (gamma + updates)`` to its minimum ``momentum``), or a function that gives the
            momentum for a number of former updates.
        strict_load: raise if a checkpoint's averages have other names; otherwise the model's weights fill the gaps.
        begin_iter: first iteration that counts in the average.
        begin_epoch: first epoch that counts in the average; give only one of the two.
        momentum: weight of the newest weights in the average; default 0.0002.
        gamma: see MomentumAnnealingEMA in ``ema_type``; default 100.
        interval: the average moves at every ``interval``-th update.
        update_buffers: average floating-point buffers too; otherwise validation uses the model's own.
    """

    priority = "NORMAL"
    holds_weights = True

    def __init__(
        self,
        ema_type: AverageType | Callable[[int], float] = "ExponentialMovingAverage",
        strict_load: bool = False,
        begin_iter: int = 0,
        begin_epoch: int = 0,
        momentum: float | None = None,
        gamma: int | None = None,
        interval: int = 1,
        update_buffers: bool = False,
    ) -> None:
        if begin_iter < 0 or begin_epoch < 0 or (begin_iter and begin_epoch):
            raise ConfigError(
                f"EMAHook.begin_iter: {begin_iter} with begin_epoch={begin_epoch} is not allowed, give one of them, 0 or more"
            )
        if interval < 1:
            raise ConfigError(f"EMAHook.interval: {interval} is not allowed, give 1 or more")
        self.strict_load = strict_load
        self.begin_iter = begin_iter
        self.begin_epoch = begin_epoch
        self.update_buffers = update_buffers
        self._ema_type = ema_type
        self._annealing, self._interval = gamma, interval
        self.momentum = momentum
        self._average: WeightAverage | None = None
        self._updates = 0
        self._made_way = False  # for a save in the course of validation or testing

    @property
    def momentum(self) -> float | None:
        """Weight of the newest weights in the average; None: the default. Another hook may set it in the course of training."""
        return self._momentum

    @momentum.setter
    def momentum(self, momentum: float | None) -> None:
        self._weight = _weight_of(self._ema_type, momentum, self._annealing, self._interval)
        self._momentum = momentum

    def before_run(self, runner: Run) -> None:
        """Allocate the averages; they have no meaning before the first update."""
        if self._average is None:
            owners = {
                f"{prefix}.{name}" if prefix else name: (module, name)
                for prefix, module in runner.strategy.module.named_modules()
                for name, _ in (module.named_buffers(recurse=False) if self.update_buffers else ())
            }
            averaged = _averaged(runner, self.update_buffers)
            self._average = WeightAverage(following(runner.strategy, averaged), owners)

    def before_train(self, runner: Run) -> None:
        """Check that the average starts before training ends; training from iteration 0 starts a new average."""
        if runner.iter == 0:
            self._updates = 0
        for name, begin, limit in (
            ("begin_epoch", self.begin_epoch, runner.max_epochs),
            ("begin_iter", self.begin_iter, runner.max_iters),
        ):
            if begin > limit:
                raise ConfigError(f"EMAHook.{name}: {begin} is not allowed, training ends at {limit}")
        if self.momentum is not None and self.momentum > 0.5:
            runner.logger.warning(
                f"EMAHook.momentum: {self.momentum} is the share of the newest weights, so the averages are hardly different "
                f"from them; what others call a decay of {self.momentum} is momentum={1 - self.momentum:.4g}"
            )

    def before_train_iter(self, runner: Run, batch_idx: int, data_batch: Any = None) -> None:
        """Restore the weights after an evaluation that has not come to its end: a hook went on after an error, say."""
        super().before_train_iter(runner, batch_idx, data_batch)
        self._swap_out(runner)

    def after_train(self, runner: Run) -> None:
        """See before_train_iter; a loop of the user's may have ended its last evaluation without the hooks after it."""
        self._swap_out(runner)

    def _follow(self, runner: Run) -> None:
        """Move the average if an update was made."""
        optim = runner.optim_wrapper
        if not self._has_begun(runner) or optim is None or not optim.has_updated:
            return
        if self._updates == 0:
            self._get().copy_from_model()
        elif self._updates % self._interval == 0:
            self._get().lerp_to_model(self._weight(self._updates))
        self._updates += 1

    def before_val_epoch(self, runner: Run) -> None:
        """Put the averages into the model."""
        self._swap_in(runner)

    def after_val_epoch(self, runner: Run, metrics: dict[str, Any] | None = None) -> None:
        """Restore the weights."""
        self._swap_out(runner)

    def before_test_epoch(self, runner: Run) -> None:
        """Put the averages into the model."""
        self._swap_in(runner)

    def after_test_epoch(self, runner: Run, metrics: dict[str, Any] | None = None) -> None:
        """Restore the weights."""
        self._swap_out(runner)

    def on_exception(self, runner: Run, exception: BaseException) -> None:
        """Restore the weights if validation or testing was interrupted.

        Half-precision weights follow if all processes have failed: where weights are sharded that takes a collective,
        in which others than this process may not be.
        """
        self._made_way = False
        if self._average is not None and self._average.is_swapped_in:
            self._average.swap_out()
            if runner.all_have_failed():
                _refresh(runner)

    def before_save_checkpoint(self, runner: Run, checkpoint: dict[str, Any]) -> None:
        """Restore the weights if a checkpoint is saved while the averages are in the model, for the time of the save."""
        super().before_save_checkpoint(runner, checkpoint)
        made_way = self._average is not None and self._average.is_swapped_in
        self._swap_out(runner)
        self._made_way = made_way

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return the averages as ``averaged.<name>``, sharded like the weights, and the number of updates."""
        if self._average is None:
            return {}
        averages = {_PREFIX + name: tensor for name, tensor in self._average.averages.items()}
        return {"updates": self._updates, **averages}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict``.

        Raises:
            CheckpointError: the averages have other names than the model's weights, and ``strict_load`` is set.
        """
        found = {key.removeprefix(_PREFIX): value for key, value in state.items() if key.startswith(_PREFIX)}
        averages = self._get().averages
        if self.strict_load and found.keys() != averages.keys():
            names = sorted(found.keys() ^ averages.keys())
            raise CheckpointError(
                f"EMAHook.strict_load: the checkpoint's averages differ from the model in {', '.join(names)}"
            )
        self._get().load(found)
        self._updates = int(state.get("updates", 0))

    def _get(self) -> WeightAverage:
        assert self._average is not None, "before_run makes it"
        return self._average

    def _has_begun(self, runner: Run) -> bool:
        if self.begin_epoch:
            return runner.epoch + 1 >= self.begin_epoch
        return runner.iter + 1 >= self.begin_iter

    def _swap_in(self, runner: Run) -> None:
        # Before the first update the averages hold old weights. Those of another hook would be taken for the model's own.
        others = (hook._average for hook in runner.hooks if isinstance(hook, EMAHook) and hook is not self)
        if self._average is not None and self._updates and not any(each and each.is_swapped_in for each in others):
            self._average.swap_in()
            _refresh(runner)

    def after_save_checkpoint(self, runner: Run) -> None:
        """Put the averages into the model again, if they made way for the model's own weights."""
        if self._made_way:
            self._made_way = False
            self._swap_in(runner)

    def _swap_out(self, runner: Run) -> None:
        self._made_way = False
        if self._average is not None and self._average.is_swapped_in:
            self._average.swap_out()
            _refresh(runner)


def _averaged(runner: Run, with_buffers: bool) -> dict[str, Tensor]:
    """Return the live tensors to average, by canonical name.

    Those that checkpoints leave out are frozen for good; so are quantised ones, which are numbers that nobody averages.
    """
    strategy = runner.strategy
    others = left_out(strategy) | (set() if with_buffers else {name for name, _ in strategy.module.named_buffers()})
    return {
        name: tensor
        for name, tensor in strategy.model_state().items()
        if (tensor.is_floating_point() or tensor.is_complex()) and name not in others and not is_quantised(tensor)
    }


def _refresh(runner: Run) -> None:
    """Copy the float32 master weights into the half-precision weights."""
    if runner.optim_wrapper is not None:
        for wrapper in runner.optim_wrapper.wrappers.values():
            wrapper.refresh()


def _weight_of(
    kind: str | Callable[[int], float], momentum: float | None, gamma: int | None, interval: int
) -> Callable[[int], float]:
    """Return a function from the number of former updates to the share of the newest weights."""
    where = "EMAHook"
    if callable(kind):
        if momentum is not None or gamma is not None:
            raise ConfigError(
                f"{where}.{'gamma' if momentum is None else 'momentum'}: has no meaning with a function as ema_type, leave it out"
            )
        return kind
    if gamma is not None and (kind != "MomentumAnnealingEMA" or gamma < 1):
        raise ConfigError(f"{where}.gamma: {gamma} is not allowed with {kind}, give 1 or more to MomentumAnnealingEMA")
    if kind == "StochasticWeightAverage":
        if momentum is not None:
            raise ConfigError(f"{where}.momentum: has no meaning with StochasticWeightAverage, leave it out")
        return lambda updates: 1.0 / (updates // interval + 1)
    lowest = 0.0002 if momentum is None else momentum
    if not 0.0 < lowest < 1.0:
        raise ConfigError(
            f"{where}.momentum: {lowest} is not allowed, give a number between 0 and 1, small for a long memory"
        )
    if kind == "ExponentialMovingAverage":
        return lambda updates: lowest
    if kind == "MomentumAnnealingEMA":
        fall = 100 if gamma is None else gamma
        return lambda updates: max(lowest, fall / (fall + updates))
    known = "ExponentialMovingAverage, StochasticWeightAverage or MomentumAnnealingEMA"
    raise ConfigError(f'{where}.ema_type: "{kind}" is not allowed, choose {known}')


# TeacherHook: one part of the model is the moving average of another.


_PRECISE_PREFIX = "precise."


@dataclass
class _Weight:
    """A parameter of the teacher with the student's, as this process has them."""

    name: str  # in the whole model
    teacher: Tensor
    student: Tensor
    precise: Tensor | None = None  # the average in float32, if the model computes with half-precision weights


@HOOKS.register_module()
class TeacherHook(Follows):
    """Makes one part of the model, the teacher, the moving average of another, the student.

    Contrastive learning and self-distillation (MoCo, BYOL, DINO, mean teachers) train a student against such a teacher. It
    moves once after every update that was made: with accumulation after the whole window, and not where loss scaling skipped an
    update or the recipe left it out. It is a part of the model, so it is in checkpoints, and the strategy shards it: each process
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
        tensors = following(runner.strategy, computed_with(runner.strategy))
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

    def _follow(self, runner: Run) -> None:
        """Move the teacher if an update was made."""
        optim = runner.optim_wrapper
        if optim is None or not optim.has_updated:
            return
        share = self._share(runner.iter, runner.max_iters)
        with torch.no_grad():
            move_towards(self._averages, self._students, share)
            _copy([weight.teacher for weight in self._precise], [weight.precise for weight in self._precise])  # type: ignore[misc]
        self._wrote(runner)

    def before_save_checkpoint(self, runner: Run, checkpoint: dict[str, Any]) -> None:
        """Bring the float32 weights that a strategy saves for a half-precision teacher up to date."""
        super().before_save_checkpoint(runner, checkpoint)
        self._update_saved(runner)

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return ``precise.<name>``: averages in float32, sharded like the weights, where the model is in half precision."""
        return {_PRECISE_PREFIX + w.name: w.precise for w in self._weights if w.precise is not None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict``; without averages, from the teacher in the checkpoint."""
        with torch.no_grad():
            for weight in self._weights:
                found = state.get(_PRECISE_PREFIX + weight.name)
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
        take_written(runner.strategy, self._written)

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
        own = dict(strategy.parameters())
        every = own.keys() | elsewhere(strategy)
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
        if any(name in left_out(strategy) for name in names):
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
