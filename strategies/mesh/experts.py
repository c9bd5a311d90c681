"""ExpertParallel: the axis of MeshStrategy along which each process has some of the experts of every mixture."""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ...core.base.errors import ConfigError, StrategyError, suggest
from ...core.hugging_face.transformers_private import expert_rules
from ...core.torch_compat.dtensor_private import using_in_place
from ...core.torch_compat.torch_private import apart, has_values, repeating_in, with_values
from ...optim.wrapper import OptimWrapper
from ..base import EvalStep, Optim, TrainStep
from ..sharding import check_divided
from .axis import Axis, Evaluate, RunWindow, check_torch, replace_forward
from .first_batch import computing_only

# The auxiliary loss with which transformers' models keep their experts equally busy, over the tokens of all
# processes.


_logger = logging.getLogger("flextrain")
_NAME = "load_balancing_loss_func"
"""The function of a module of transformers' that a model calls; checked with 5.17 and 5.23."""


class BalanceLoss:
    """The product of two means over tokens, for which the mean over processes of each one's product is another number.

    Models call a function of their module for it. ``used`` puts this object in its place, for functions that compute what
    this one does.

    Args:
        model: the model, before it is changed.
        group: the processes that have different tokens; None if there are no others.

    Source: Fedus et al., "Switch Transformers: Scaling to Trillion Parameter Models", 2022, equations 4 to 6.
    """

    def __init__(self, model: nn.Module, group: Any) -> None:
        self._group = group
        self._namespaces: list[dict[str, Any]] = []
        for name in sorted({kind.__module__ for module in model.modules() for kind in type(module).__mro__}):
            namespace = vars(sys.modules[name]) if name in sys.modules else {}
            if callable(function := namespace.get(_NAME)):
                with with_values():
                    is_known = _is_known(function)
                if is_known:
                    self._namespaces.append(namespace)
                else:
                    _logger.warning(f"strategy.ep: {name}.{_NAME} is not known, and is left over each process's tokens")

    @contextmanager
    def used(self) -> Iterator[None]:
        """Context in which the models' modules call this object."""
        before = [namespace[_NAME] for namespace in self._namespaces]
        for namespace in self._namespaces:
            namespace[_NAME] = self
        try:
            yield
        finally:
            for namespace, function in zip(self._namespaces, before, strict=True):
                namespace[_NAME] = function

    def __call__(
        self, gate_logits: Any, num_experts: Any = None, top_k: int = 2, attention_mask: Tensor | None = None
    ) -> Any:
        """Return the loss over the tokens of all processes; the same on each, with the gradients that belong to it."""
        if not isinstance(gate_logits, tuple):
            return 0
        logits = [layer.full_tensor() if isinstance(layer, DTensor) else layer for layer in gate_logits]
        sums = _sums(logits, num_experts, top_k, attention_mask)
        return _loss(cast(Tensor, _Sum.apply(sums, self._group)))


def _sums(logits: list[Tensor], num_experts: int, top_k: int, mask: Tensor | None) -> Tensor:
    """Return by expert how many tokens chose it, and the sum of its probabilities; then the number of tokens."""
    rows, device = sum(len(layer) for layer in logits), logits[0].device
    chosen, probable = torch.zeros(2, num_experts, device=device, dtype=torch.float32)
    counted = chosen.new_ones(rows // len(logits)) if mask is None else mask.reshape(-1).to(chosen)
    for layer in logits:
        probabilities = layer.softmax(-1)
        ids = probabilities.topk(top_k, dim=-1).indices
        chosen = chosen.scatter_add(0, ids.reshape(-1), counted.repeat_interleave(top_k))
        probable = probable + (probabilities.float() * counted.unsqueeze(-1)).sum(0)
    return torch.cat([chosen, probable, counted.sum()[None] * len(logits)])


def _loss(sums: Tensor) -> Tensor:
    (chosen, probable), rows = sums[:-1].view(2, -1), sums[-1]
    loss: Tensor = len(chosen) * (chosen / rows * (probable / rows)).sum()
    return loss


def _is_known(function: Callable[..., Any]) -> bool:
    """Whether a model's own function computes what ``BalanceLoss`` does on one process."""
    generator = torch.Generator().manual_seed(0)
    layers = tuple(torch.randn(6, 4, generator=generator, dtype=torch.float32) for _ in range(2))
    for mask in (None, torch.tensor([[1, 1, 0], [1, 1, 1]])):
        try:
            theirs = function(layers, 4, 2, mask)
        except (TypeError, ValueError, RuntimeError):  # it has other arguments
            return False
        if not isinstance(theirs, Tensor) or not torch.allclose(theirs, _loss(_sums([*layers], 4, 2, mask)), rtol=1e-4):
            return False
    return True


class _Sum(torch.autograd.Function):
    """The sum over processes, whose gradient is the sum of the gradients on all of them."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _summed(tensor, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Sum.apply(grad, ctx.group), None


def _summed(tensor: Tensor, group: Any) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    if group is not None:
        dist.all_reduce(total, group=group)
    return total


# Stacks of experts: modules whose parameters have an expert in every row; which ones a model has, and whether they
# fit.


STYLE = "experts"
"""The style in ``strategy.plan`` for a stack of experts."""


def find_stacks(model: nn.Module, plan: Any, size: int) -> dict[str, nn.Module]:
    """Return the stacks of experts by name: those of the plan, else those of the plan that the model has of its own.

    Args:
        plan: ``strategy.plan``.
        size: ``strategy.ep``.

    Raises:
        ConfigError: there is no plan for experts, or a module of it is no stack of experts.
        StrategyError: the experts of a stack cannot be divided over ``size`` processes.
    """
    modules = {name: module for name, module in model.named_modules() if name}
    given = [rule for rule, style in plan.items() if style == STYLE] if isinstance(plan, Mapping) else []
    kind = type(model).__name__
    sources = [(rule, f'strategy.plan["{rule}"]') for rule in given]
    if not given:
        sources = [(rule, f'strategy.ep: the plan of {kind} has "{rule}", and') for rule in _own_rules(model)]
    found: dict[str, nn.Module] = {}
    for rule, source in sources:
        matching = {name: module for name, module in modules.items() if fnmatchcase(name, rule)}
        if not matching and given:
            raise ConfigError(f"{source}: names no module of the model{suggest(rule, modules)}")
        for name, module in matching.items():
            if problem := why_no_stack(name, module):
                raise ConfigError(f"{source}: {problem}" if given else f"{source} {problem}")
        found |= matching
    if not found:
        raise ConfigError(f"strategy.ep: {kind} has no plan for experts, give {_suggested(modules)}, or leave ep out")
    for name, module in found.items():
        if problem := _why_not_divided(name, module, model, size):
            raise StrategyError(f"strategy.ep: {problem}")
    return found


def why_no_stack(name: str, module: nn.Module) -> str:
    """Return what a module lacks to be a stack of experts, in words; empty if nothing."""
    kind = f"{name} is a {type(module).__name__}"
    inner = next((inner for inner, _ in module.named_parameters() if "." in inner), None)
    if inner is not None:
        return (
            f"{kind} with parameters in submodules ({inner}), and a stack of experts has its own only, each with a row for "
            "every expert; stack them"
        )
    count = getattr(module, "num_experts", None)
    if not isinstance(count, int):
        return f"{kind} without num_experts, name the module whose parameters have a row for every expert"
    for key, tensor in module.named_parameters():
        if tensor.ndim == 0 or tensor.shape[0] != count:
            return f"{kind} of {count} experts, but {key} has the shape {tuple(tensor.shape)}; its first size must be {count}"
    if not any(True for _ in module.parameters()):
        return f"{kind} without parameters, name the module whose parameters have a row for every expert"
    for key, buffer in module.named_buffers():
        if buffer.ndim and buffer.shape[0] == count:
            return f"{kind} whose buffer {key} has a row for every expert; move it out of this module, or make it a parameter"
    given = _arguments(module)
    if given is not None and len(given) != 3:
        return (
            f"{kind} whose forward takes {', '.join(given) or 'nothing'}; it must take tokens, expert ids and weights"
        )
    return ""


def _why_not_divided(name: str, module: nn.Module, model: nn.Module, size: int) -> str:
    count = int(module.num_experts)  # type: ignore[arg-type]
    if count % size:
        return f"{size} does not divide the {count} experts of {name}, choose one of {_divisors(count)}"
    own = {id(parameter): key for key, parameter in module.named_parameters()}
    for other, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in own and other.rpartition(".")[0] != name:
            return (
                f"{name}.{own[id(parameter)]} is {other} too, and shared parameters cannot be divided; make it a copy"
            )
    return ""


def _arguments(module: nn.Module) -> list[str] | None:
    """Return the names that ``forward`` must be called with; None if it takes any."""
    parameters = inspect.signature(module.forward).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return None
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters if p.kind in positional and p.default is p.empty]


def _own_rules(model: nn.Module) -> Iterator[str]:
    """Yield the globs of transformers' models, which may be parts of the model, for their stacks of experts."""
    inside: set[str] = set()
    for name, module in model.named_modules():
        own = expert_rules(module)
        if own and not any(name.startswith(outer) for outer in inside):
            prefix = f"{name}." if name else ""
            inside.add(prefix)
            yield from (f"{prefix}{rule}" for rule in own)


def _suggested(modules: Mapping[str, nn.Module]) -> str:
    """Return what to give in ``plan``: the stacks that are there, else an example."""
    there = [name for name, module in modules.items() if not why_no_stack(name, module)]
    if not there:
        return (
            'a model with a module of stacked weights, and strategy.plan={"layers.*.experts": "experts"} with its name'
        )
    rules = dict.fromkeys(".".join("*" if part.isdigit() else part for part in name.split(".")) for name in there)
    plan = ", ".join(f'"{rule}": "{STYLE}"' for rule in rules)
    return f"strategy.plan={{{plan}}}"


def _divisors(count: int) -> str:
    return ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)


# Dispatch: the forward of a stack of experts of which each process has some. Tokens travel to their experts and back.


_SEPARATE = 0.05
"""Relative difference, by magnitude, below which two ways to compute a tiny sum count as equal in every dtype."""
_MANY = 64
"""Tokens for one expert, more than a capacity would let it have."""


@dataclass(frozen=True)
class _Routes:
    """Where the tokens of one call go: ``order`` sorts the choices of experts, by expert and hence by process; ``back`` is its inverse.

    ``theirs`` counts the choices that each process sends to each expert of this one. ``sent`` and ``received`` are numbers of rows
    by process.
    """

    order: Tensor
    back: Tensor
    theirs: Tensor
    sent: list[int]
    received: list[int]


class Repetitions:
    """Hands the routes that forward took to its repetition in backward, which then asks nobody and waits for nothing.

    The routes are those of forward too where a router that is computed again rounds differently.
    """

    def __init__(self) -> None:
        self.running: _Repeatable | None = None

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return the contexts of a forward that backward repeats, and of its repetition."""
        taken: list[_Routes] = []
        return _Repeatable(self, taken, repeats=False), _Repeatable(self, taken, repeats=True)

    def routes(self, find: Callable[[], _Routes]) -> _Routes:
        """Return what ``find`` finds in forward, and the same in its repetition."""
        if self.running is None:
            return find()
        return self.running.routes(find)


class _Repeatable(AbstractContextManager[None]):
    def __init__(self, owner: Repetitions, taken: list[_Routes], *, repeats: bool) -> None:
        self._owner, self._taken, self._repeats = owner, taken, repeats

    def __enter__(self) -> None:
        self._before, self._owner.running = self._owner.running, self
        self._calls = iter([*self._taken])

    def __exit__(self, *_: object) -> None:
        self._owner.running = self._before

    def routes(self, find: Callable[[], _Routes]) -> _Routes:
        if self._repeats:
            taken = next(self._calls, None)
            if taken is None:
                raise StrategyError(
                    "strategy.activation_checkpointing: backward repeats forward with a mixture that forward did not compute; what is "
                    "recomputed has to do the same each time"
                )
            return taken
        with apart():  # operations that the repetition leaves out are none whose results a policy keeps
            self._taken.append(find())
        return self._taken[-1]


class Dispatch:
    """Takes the place of ``module.forward``: every (token, expert) pair is computed by the process that has the expert.

    Its result is ``sum(forward(token, expert, weight))`` over a token's experts, which is checked at the first call.

    Args:
        name: the module's name in the model, for messages.
        module: the stack of experts; its parameters are DTensors, the experts of this process in each.
        mesh: the processes over which they are divided, of one dimension.
        sharing: the processes that have the same tokens, each of which sends some; None: every process has its own.
        scale: factor of the gradients of the experts, for an average over all processes by one over fewer.
        repetitions: of the model's forwards in backward.
        forward: the module's own forward.

    Source: Lepikhin et al., "GShard: Scaling Giant Models with Conditional Computation and Automatic Sharding", 2020.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        mesh: DeviceMesh,
        sharing: DeviceMesh | None,
        scale: float,
        repetitions: Repetitions,
        forward: Callable[..., Tensor],
    ) -> None:
        self._name, self._module, self._forward = name, module, forward
        self._repetitions = repetitions
        self._signature = inspect.signature(forward)
        self._mesh, self._sharing, self._scale = mesh, sharing, scale
        self._everyones = int(module.num_experts)  # type: ignore[arg-type]
        self._own = self._everyones // mesh.size()
        self._tried: set[bool] = set()  # in training, in evaluation
        self.is_running = False

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the output of the whole stack for the tokens of this process, as ``forward`` would."""
        given = self._signature.bind(*args, **kwargs).args
        self._check(*given)
        self.is_running = True  # tokens are taken in spans, which is no choice of positions
        try:
            return self._called(*given)
        finally:
            self.is_running = False

    def _called(self, *given: Tensor) -> Tensor:
        tokens, ids, weights = (self._rows_to_send(tensor) for tensor in given)
        if self._module.training not in self._tried and len(tokens) and has_values(tokens):
            with apart():  # backward, which repeats forward, does not check again
                self._check_sum(tokens, weights)
        output = self._send_and_compute(tokens, ids, weights)
        return self._whole(output, given[0])

    def _check(self, tokens: Tensor, ids: Tensor, weights: Tensor) -> None:
        if tokens.ndim != 2 or ids.ndim != 2 or ids.shape != weights.shape or len(ids) != len(tokens):
            raise StrategyError(
                f"model.{self._name}: is called with tokens, expert ids and weights of shapes {tuple(tokens.shape)}, "
                f"{tuple(ids.shape)} and {tuple(weights.shape)}; strategy.ep needs (n, width), (n, k) and (n, k)"
            )

    # Tokens that several processes have: each sends some of them

    def _rows_to_send(self, tensor: Tensor) -> Tensor:
        if self._sharing is None:
            return tensor
        if not isinstance(tensor, DTensor):
            tensor = DTensor.from_local(tensor, self._sharing, (Replicate(),), run_check=False)
        return tensor.redistribute(placements=(Shard(0),)).to_local()

    def _whole(self, output: Tensor, tokens: Tensor) -> Tensor:
        if self._sharing is None:
            return output
        shape = torch.Size((len(tokens), output.shape[1]))
        rows = DTensor.from_local(
            output.contiguous(), self._sharing, (Shard(0),), run_check=False, shape=shape, stride=(shape[1], 1)
        )
        whole = rows.redistribute(placements=(Replicate(),))
        return whole if isinstance(tokens, DTensor) else whole.to_local()

    # To the experts and back

    def _send_and_compute(self, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        count, choices = ids.shape
        routes = self._repetitions.routes(lambda: self._routes(ids.reshape(-1)))
        order, back, sent, received = routes.order, routes.back, routes.sent, routes.received
        rows = self._exchange(_reordered(tokens, order, back, choices), received, sent)
        factors = self._exchange(_reordered(weights.reshape(-1, 1), order, back), received, sent)
        # In groups by the process that sent them, and in each by expert.
        own_ids = torch.arange(self._own, device=ids.device, dtype=ids.dtype).repeat(self._mesh.size())
        experts = own_ids.repeat_interleave(routes.theirs, output_size=sum(received)).unsqueeze(1)
        if not sum(received):  # a row of zeros: backward and FSDP's reductions run on every process
            rows, factors = rows.sum(0, keepdim=True), factors.sum(0, keepdim=True)
            experts = experts.new_zeros((1, 1))
        with self._own_experts():
            output = self._forward(rows, experts, factors)
        found = self._exchange(output[: sum(received)], sent, received)
        return _reordered(found, back, order).view(count, choices, -1).sum(1)

    def _routes(self, ids: Tensor) -> _Routes:
        order = torch.argsort(ids, stable=True)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        numbers = ids.new_zeros(self._everyones).scatter_add_(0, ids, torch.ones_like(ids))
        theirs = torch.empty_like(numbers)
        dist.all_to_all_single(theirs, numbers, group=self._mesh.get_group())
        if not has_values(numbers):  # all experts get equally many, from each process
            sent = received = _even(len(ids), self._mesh.size())
        else:
            by_process = torch.stack([numbers, theirs]).view(2, -1, self._own)
            sent, received = by_process.sum(2).tolist()  # the one wait of the host: sizes of messages
        return _Routes(order, back, theirs, sent, received)

    def _exchange(self, rows: Tensor, received: list[int], sent: list[int]) -> Tensor:
        return cast(Tensor, _Exchange.apply(rows, received, sent, self._mesh.get_group()))

    @contextmanager
    def _own_experts(self) -> Iterator[None]:
        """Context in which the module is a stack of this process's experts alone."""
        module, own = self._module, {}
        for key, parameter in module.named_parameters(recurse=False):
            local = cast(DTensor, parameter).to_local()
            own[key] = cast(Tensor, _ScaleGradient.apply(local, self._scale))
        module.num_experts = self._own  # type: ignore[assignment]
        try:
            with using_in_place(module, own):
                yield
        finally:
            module.num_experts = self._everyones  # type: ignore[assignment]

    @torch.no_grad()
    def _check_sum(self, tokens: Tensor, weights: Tensor) -> None:
        """Raise StrategyError unless the output for two experts is the sum of those for one each, whatever tokens are beside it."""
        token = tokens[:1]
        ids = torch.tensor([[0, self._own - 1]], device=tokens.device)
        factors = torch.tensor([[0.75, 0.5]], device=tokens.device, dtype=weights.dtype)
        with self._own_experts(), computing_only(self._module, token.device):
            both = self._forward(token, ids, factors)
            one, other = (self._forward(token, ids[:, i : i + 1], factors[:, i : i + 1]) for i in range(2))
            many = self._forward(*(each.repeat(_MANY, 1) for each in (token, ids[:, :1], factors[:, :1])))
        difference, size = (both - one - other).abs().max().item(), (one + other).abs().max().item()
        if not 0.0 < size < float("inf"):
            return  # it shows nothing
        if difference > _SEPARATE * size:
            raise StrategyError(
                f"model.{self._name}: its output for two experts is not the sum of its outputs for each of them, as strategy.ep "
                "needs; normalise the weights before it is called"
            )
        if (many - one).abs().max().item() > _SEPARATE * max(one.abs().max().item(), size):
            raise StrategyError(
                f"model.{self._name}: its output for a token depends on the tokens beside it, as by a capacity of each expert, and strategy.ep "
                "gives each process other ones; drop tokens before it is called, by a weight of 0"
            )
        self._tried.add(self._module.training)


def _reordered(rows: Tensor, order: Tensor, back: Tensor, copies: int = 1) -> Tensor:
    """Return ``copies`` of each row, in this ``order``, of which ``back`` is the inverse."""
    return cast(Tensor, _Reorder.apply(rows, order, back, copies))


class _Reorder(torch.autograd.Function):
    """``rows[order // copies]``, whose backward does not sort, as that of an index does, which may have a row twice."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, back: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(order, back)
        ctx.copies = copies
        return rows[order // copies]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        order, back = ctx.saved_tensors
        own = _reordered(grad, back, order)
        return own.view(len(own) // ctx.copies, ctx.copies, *own.shape[1:]).sum(1), None, None, None


class _Exchange(torch.autograd.Function):
    """All-to-all of rows, of which every process receives some from every other; backward sends the gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, received: list[int], sent: list[int], group: Any) -> Tensor:
        ctx.received, ctx.sent, ctx.group = received, sent, group
        return _all_to_all(rows, received, sent, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Exchange.apply(grad, ctx.sent, ctx.received, ctx.group), None, None, None


def _even(total: int, count: int) -> list[int]:
    return [total // count + (i < total % count) for i in range(count)]


def _all_to_all(rows: Tensor, received: list[int], sent: list[int], group: Any) -> Tensor:
    found = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(found, rows.contiguous(), received, sent, group=group)
    return found


class _ScaleGradient(torch.autograd.Function):
    """The identity; backward multiplies by a number."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad if ctx.scale == 1.0 else grad * ctx.scale, None


class ExpertParallel(Axis):
    """Experts are divided over the processes, and tokens go to them by all-to-all; the rest of the model is as without it.

    It takes processes of ``dp_shard``, ``cp`` and ``tp``: those of a group have different tokens, or each sends some of
    the tokens that they share. FSDP shards experts over the processes that have the same ones.

    Source: Lepikhin et al., "GShard: Scaling Giant Models with Conditional Computation and Automatic Sharding", 2020.
    """

    name = "ep"
    overlays = True
    fast = True

    def check(self, model: nn.Module, optim: Optim | None) -> None:
        """See Axis."""
        self._found = find_stacks(model, self.config.plan, self.size)
        self._balance = BalanceLoss(model, self.layout.averaging().group)

    def apply(self, model: nn.Module) -> nn.Module:
        """See Axis."""
        check_torch(self.name)
        shared = [axis for axis in self.layout.sharing if self.layout.sizes[axis] > 1]
        sharing = self.layout.over(*shared) if shared else None
        scale, self._repetitions = self._scale(), Repetitions()
        there = set(model.modules())  # not what is on another stage of a pipeline
        self._stacks = {name: module for name, module in self._found.items() if module in there}
        for name, module in self._stacks.items():
            for key, parameter in [*module.named_parameters(recurse=False)]:
                own = distribute_tensor(parameter.detach(), self.mesh, (Shard(0),), src_data_rank=None)
                setattr(module, key, nn.Parameter(own, requires_grad=parameter.requires_grad))
            replace_forward(
                module, functools.partial(Dispatch, name, module, self.mesh, sharing, scale, self._repetitions)
            )
        return model

    def _scale(self) -> float:
        """Return the factor of an expert's gradients.

        The tokens of all processes have reached it, and FSDP averages over those that have it; all other parameters are
        averaged over the processes that have different tokens.
        """
        return self.layout.sharding(self.name).size() / self.layout.sharding().size()

    def run_window(self, window: Sequence[Any], step: TrainStep, inner: RunWindow) -> dict[str, Tensor]:
        """See Axis."""
        is_recomputed = self.config.activation_checkpointing is not None
        with self._balance.used(), repeating_in(self._repetitions.contexts) if is_recomputed else nullcontext():
            return inner(window, step)

    def evaluate(self, batch: Any, step: EvalStep, inner: Evaluate) -> Any:
        """See Axis."""
        with self._balance.used():
            return inner(batch, step)

    def meshes(self) -> Mapping[nn.Module, DeviceMesh]:
        """See Axis."""
        return dict.fromkeys(self._stacks.values(), self.layout.sharding(self.name))

    def check_optimizer(self, wrapper: OptimWrapper) -> None:
        """See Axis."""
        check_divided(wrapper, f"ep={self.size} divides experts", "ep=1")

    def described(self) -> str:
        """See Axis."""
        counts = {int(module.num_experts) for module in self._stacks.values()}  # type: ignore[arg-type]
        experts = " or ".join(str(count // self.size) for count in sorted(counts))
        return f"{experts} of {' or '.join(map(str, sorted(counts)))} experts in each of {len(self._stacks)} mixtures"


__all__ = ["ExpertParallel"]
