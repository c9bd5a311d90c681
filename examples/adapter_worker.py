"""LoRA adapters of several users on one base model, trained in turns on one Engine: the worker group of tinker_server.py.

    python examples/tinker_server.py

Every process runs the same commands in the same order: rank 0 takes them from a queue, and the others get them by a broadcast. Each
adapter has gradients, moments and settings of its own, see ``Engine.switch``. A command that fails leaves its adapter as it was.
"""

from __future__ import annotations

import contextlib
import math
import queue
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from flextrain import Engine, StrategyError, TrainingCopy
from flextrain.core.comm.collectives import all_gather_object, broadcast_object, is_main
from flextrain.runner.transforms.lora import LoRA

Row = dict[str, list[Any]]
"""A text: ``tokens``, and of each of them ``target_tokens``, the token that comes next, and what else the loss needs."""
INPUTS = {
    "cross_entropy": ("target_tokens", "weights"),
    "importance_sampling": ("target_tokens", "logprobs", "advantages"),
    "ppo": ("target_tokens", "logprobs", "advantages"),
}
"""Losses, and what they need of each token."""
SETTINGS = {"ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}}
PACE_S = 60.0
"""Seconds without a command after which processes meet nevertheless, so that none waits longer than a collective may."""


class CommandError(Exception):
    """A command has failed, on one line."""


def losses(loss_fn: str, logprobs: Tensor, batch: Mapping[str, Tensor], settings: Mapping[str, float]) -> Tensor:
    """The loss of every token, (rows, tokens); a request's loss is their sum."""
    if loss_fn == "cross_entropy":
        return -logprobs * batch["weights"]
    ratio, advantages = (logprobs - batch["logprobs"]).exp(), batch["advantages"]
    if loss_fn == "importance_sampling":
        return -ratio * advantages
    low, high = ({**SETTINGS["ppo"], **settings}[key] for key in SETTINGS["ppo"])
    return -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)


@dataclass
class Command:
    """``call(**arguments)`` of a Worker, for an adapter."""

    call: str
    adapter: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    future: Future[Any] = field(default_factory=Future, compare=False)


class Worker:
    """One process of the group that trains adapters.

    Args:
        model: a causal language model of transformers, whose linear layers get adapters.
        strategy: as an Engine's; None: one device for one process, DDP for several. Every process has to see all logits, as under
            FSDP; a pipeline is not possible.
        rank: of the adapters' matrices.
        micro_batch: texts that a process computes at a time.
    """

    def __init__(self, model: nn.Module, strategy: Any, rank: int, micro_batch: int = 8) -> None:
        config: Any = model.config
        self.vocabulary, self.longest = config.vocab_size, config.max_position_embeddings
        end = config.eos_token_id
        self.ends = set(end if isinstance(end, list) else [] if end is None else [end])
        config.use_cache = False
        self.rank, self._micro_batch = rank, micro_batch
        layers = [name for name, part in model.named_modules() if isinstance(part, nn.Linear)]
        adapted = LoRA(r=rank, lora_alpha=32, target_modules=layers)(model)
        optim = dict(optimizer=dict(type="AdamW", lr=0.0), clip_grad=dict(max_norm=math.inf))
        self.engine = Engine(adapted, strategy, optim)
        self._first = self.engine.switch()
        self._adapters: dict[str, TrainingCopy] = {}
        self._sampler: tuple[str | None, TrainingCopy] = None, self._first

    # Commands: on every process, with the adapter in the engine

    def create(self) -> None:
        """A new adapter, which changes nothing yet."""

    def forget(self, adapters: list[str]) -> None:
        """Drop adapters."""
        for name in adapters:
            self._adapters.pop(name, None)

    def forward_backward(
        self, rows: list[Row], loss_fn: str, settings: dict[str, float], forward_only: bool
    ) -> dict[str, Any]:
        """Add the gradients of the sum of all tokens' losses; return log-probabilities of each row's targets, and that sum."""
        index, count = self.engine.strategy.topology.shard
        found: dict[int, tuple[Tensor, float]] = {}
        starts = range(0, len(rows), count * self._micro_batch)
        window = [self._batch(rows, start + index * self._micro_batch) for start in starts]

        def loss_of(output: Any, batch: dict[str, Tensor]) -> Tensor:
            logits = output.logits.to(torch.promote_types(output.logits.dtype, torch.float32))
            logprobs = logits.log_softmax(-1).gather(-1, batch["target_tokens"][..., None]).squeeze(-1)
            inputs = {name: values.to(logprobs.dtype) for name, values in batch.items() if values.is_floating_point()}
            of_tokens = losses(loss_fn, logprobs, inputs, settings).where(batch["counts"], 0.0)
            for row, *values in zip(
                batch["row"].tolist(), logprobs.detach().cpu(), of_tokens.detach().cpu(), strict=True
            ):
                if row >= 0:
                    found[row] = values[0][: len(rows[row]["tokens"])], float(values[1].sum())
            return of_tokens.sum() * (count * len(window))  # an engine takes the mean over processes and micro-batches

        if forward_only:
            for batch in window:
                self.engine.forward(batch, loss_of)
        else:
            self.engine.forward_backward(window=window, loss_fn=loss_of)
        for part in all_gather_object(found):
            found |= part
        total = sum(found[row][1] for row in range(len(rows)))
        if not math.isfinite(total):
            raise CommandError(f"loss_fn: {loss_fn} is {total}, its gradients were not added")
        return {"logprobs": [found[row][0] for row in range(len(rows))], "loss:sum": total}

    def _batch(self, rows: list[Row], start: int) -> dict[str, Tensor]:
        """Rows from ``start`` on, filled up at their ends; if there are none, the first row, which does not count."""
        numbers = range(start, min(start + self._micro_batch, len(rows))) or [-1]
        own = [rows[max(number, 0)] for number in numbers]
        width = max(len(row["tokens"]) for row in own)
        made = {
            name: torch.stack([nn.functional.pad(_tensor(name, row[name]), (0, width - len(row[name]))) for row in own])
            for name in own[0]
        }
        counts = [
            [at < len(row["tokens"]) and number >= 0 for at in range(width)]
            for row, number in zip(own, numbers, strict=True)
        ]
        return {
            "input_ids": made.pop("tokens"),
            **made,
            "counts": torch.tensor(counts),
            "row": torch.tensor([*numbers]),
        }

    def optim_step(self, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, clip: float) -> float:
        """Update the adapter by its gradients; return their norm before clipping. ``clip`` 0: none."""
        wrapper: Any = self.engine.optim_wrapper
        for group in wrapper.param_groups:
            group.update(betas=betas, eps=eps, weight_decay=weight_decay)
        wrapper.clip_grad = wrapper.clip_grad.model_copy(update={"max_norm": clip or math.inf})
        norm = float(self.engine.optim_step(lr=lr))  # type: ignore[arg-type]
        if not math.isfinite(norm):
            raise CommandError(f"optim_step: the gradients' norm is {norm}, nothing was updated; load_state drops them")
        return norm

    def save(self, path: str, meta: dict[str, str] | None) -> None:
        """Write a checkpoint of the adapter and its moments, which any strategy and number of processes loads."""
        self.engine.save(path, meta=meta)
        if self._sampler[0] == path:  # it was overwritten
            self._sampler = None, self._first

    def load(self, path: str, optimizer: bool) -> None:
        """Continue from a checkpoint, with its moments or without any."""
        self.engine.switch(self._first)
        self.engine.load(path, optimizer=optimizer)

    def sample(
        self,
        path: str | None,
        prompt: list[int],
        samples: int,
        length: int,
        temperature: float,
        seed: int,
        ends: list[int],
    ) -> list[tuple[list[int], list[float]]]:
        """Tokens that the adapter of a checkpoint continues with, or the base (None), and their log-probabilities at temperature 1.

        Rank 0 chooses. Each token computes the whole text again: a server for many samples is another program, see Engine.publish.
        """
        if self._sampler[0] != path:
            self.engine.switch(self._first)
            if path is not None:
                self.engine.load(path, optimizer=False)
            self._sampler = path, self.engine.switch()
        self.engine.switch(self._sampler[1])
        texts, generator = torch.tensor([prompt] * samples), torch.Generator().manual_seed(seed)
        found: list[tuple[list[int], list[float]]] = [([], []) for _ in range(samples)]
        is_open = [True] * samples
        while any(is_open) and texts.shape[1] < len(prompt) + length:
            logits = (
                self.engine.forward({"input_ids": texts}, lambda output, batch: output.logits[:, -1]).cpu().double()
            )
            uniform = torch.rand(logits.shape, generator=generator, dtype=torch.float64)
            noise = -(
                -uniform.clamp_min(1e-300).log()
            ).log()  # the largest of logits with it is a sample of their distribution
            chosen = broadcast_object((logits / temperature + noise if temperature else logits).argmax(-1))
            logprobs = logits.log_softmax(-1).gather(-1, chosen[:, None]).squeeze(-1)
            for number in range(samples):
                if is_open[number]:
                    found[number][0].append(int(chosen[number]))
                    found[number][1].append(float(logprobs[number]))
                    is_open[number] = int(chosen[number]) not in ends
            texts = torch.cat([texts, chosen[:, None]], 1)
        return found

    # The loop of every process

    def has(self, adapter: str) -> bool:
        """Whether there is such an adapter."""
        return adapter in self._adapters

    def run(self, commands: queue.Queue[Command | None]) -> None:
        """Execute commands until None comes; the queue is that of rank 0."""
        while True:
            command = self._next(commands) if is_main() else None
            sent = broadcast_object(command and (command.call, command.adapter, command.arguments))
            if sent is None:
                return
            result, failure = self._execute(*sent)
            if command is not None and failure is None:
                command.future.set_result(result)
            elif command is not None:
                command.future.set_exception(CommandError(failure))

    def _next(self, commands: queue.Queue[Command | None]) -> Command | None:
        try:
            return commands.get(timeout=PACE_S)
        except queue.Empty:
            return Command("forget", arguments={"adapters": []})

    def _execute(self, call: str, adapter: str | None, arguments: dict[str, Any]) -> tuple[Any, str | None]:
        result, failure, after = None, None, None
        try:
            if adapter is not None:
                self.engine.switch(self._first if call == "create" else self._adapters[adapter])
            result = getattr(self, call)(**arguments)
            if adapter is not None:
                after = self.engine.switch()
        except Exception as error:  # whoever has sent the command is told
            kind = "" if isinstance(error, CommandError) else f"{type(error).__name__}: "
            failure = kind + " ".join(str(error).split())
            # FSDP cannot drop what an error in the middle leaves; later commands say so.
            with contextlib.suppress(StrategyError):
                self.engine.abort_update()
        failures = [each for each in all_gather_object(failure) if each is not None]
        if not failures and adapter is not None and after is not None:
            self._adapters[adapter] = after  # on all processes, or on none
        return result, failures[0] if failures else None


def _tensor(name: str, values: Sequence[Any]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64 if name in ("tokens", "target_tokens") else torch.float64)


# What a request may not hold, said before it is a command.


def check(rows: list[Row], loss_fn: str, settings: Mapping[str, float], vocabulary: int, longest: int) -> None:
    """Raise ValueError, on one line, for what a worker cannot train on."""
    if loss_fn not in INPUTS:
        raise ValueError(f'loss_fn: "{loss_fn}" is not served, choose {", ".join(INPUTS)}')
    if unknown := sorted(settings.keys() - SETTINGS.get(loss_fn, {}).keys()):
        raise ValueError(f'loss_fn_config: {loss_fn} has no "{unknown[0]}"')
    if not all(map(math.isfinite, settings.values())):
        raise ValueError("loss_fn_config: holds NaN or infinity, give finite numbers")
    if not rows:
        raise ValueError("data: is empty, give one or more")
    for number, row in enumerate(rows):
        where = f"data[{number}]"
        check_tokens(row["tokens"], f"{where}.model_input", vocabulary, longest)
        if (given := sorted(row.keys() - {"tokens"})) != sorted(INPUTS[loss_fn]):
            raise ValueError(
                f"{where}.loss_fn_inputs: has {', '.join(given) or 'nothing'}, {loss_fn} needs {', '.join(INPUTS[loss_fn])}"
            )
        for name in given:
            values, at = row[name], f"{where}.loss_fn_inputs.{name}"
            if len(values) != len(row["tokens"]):
                raise ValueError(f"{at}: has {len(values)} values for {len(row['tokens'])} tokens")
            if name == "target_tokens":
                check_tokens(values, at, vocabulary, longest)
            elif not all(map(math.isfinite, values)):
                raise ValueError(f"{at}: holds NaN or infinity, give finite numbers")


def check_tokens(tokens: Sequence[Any], where: str, vocabulary: int, longest: int) -> None:
    """Raise ValueError if these are not 1 to ``longest`` tokens of the vocabulary."""
    if not 1 <= len(tokens) <= longest:
        raise ValueError(f"{where}: has {len(tokens)} tokens, give 1 to {longest}")
    for token in tokens:
        if not isinstance(token, int) or not 0 <= token < vocabulary:
            raise ValueError(f"{where}: {token} is no token, give 0 to {vocabulary - 1}")
