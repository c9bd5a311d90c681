"""A random model, with its recipe and its data: everything follows from one number.

What real models hardly have (``RARE``) has a quarter of the weight of the rest: every kind of layer and optimizer still comes at
least fifteen times in 2,000 runs.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .layers import KINDS, LENGTH, PIPED, POSITIONWISE, VOCABULARY, WIDTH

GLOBAL_BATCH = 4  # samples of a micro-batch over all processes
# With torch's own eps, the rounding error of a gradient that is zero would become a step like any other.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": dict(lr=0.1),
    "Momentum": dict(lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": dict(lr=0.01, amsgrad=True, eps=1e-3),
    "AdamW": dict(lr=0.01, weight_decay=0.1, betas=(0.8, 0.95), eps=1e-3),
    "Adagrad": dict(lr=0.05, eps=1e-3),
    "RMSprop": dict(lr=0.003, momentum=0.5, centered=True, eps=1e-2),
    "NAdam": dict(lr=0.01, eps=1e-3),
    "Adamax": dict(lr=0.01, eps=1e-3),
}
KINDS_FOR = {
    "any": sorted(KINDS),
    "positionwise": sorted(POSITIONWISE),
    "piped": sorted(PIPED),
}

RARE = frozenset(
    {"masked_rows", "halved_gradient", "own_parameter", "no_elements", "sparse_table", "gradient_penalty", "Adagrad"}
)
ALWAYS = {"positionwise": ["heads_apart", "gated"]}  # what tensor and context parallelism divide


@dataclass(frozen=True)
class Recipe:
    """How a random model is trained.

    Attributes:
        updates: full windows; one more window has a single micro-batch where ``ends_early``.
        accumulate: micro-batches of a window.
        clip: the largest gradient norm, or None.
        lr_factors: of the learning rate, by update.
        bias_lr: factor of the learning rate of biases.
        thaws: the update before which the first layer is frozen or thawed; None: never.
        given: how a runner gets the model: "instance", "class" or "callable".
        resumes: the update after which the run is saved and another runner goes on, or None.
    """

    optimizer: str
    updates: int
    accumulate: int
    ends_early: bool
    clip: float | None
    lr_factors: tuple[float, ...]
    bias_lr: float
    thaws: int | None
    given: str
    resumes: int | None

    @property
    def windows(self) -> list[int]:
        """Micro-batches of each update."""
        return [self.accumulate] * self.updates + [1] * (self.ends_early and self.accumulate > 1)

    @property
    def optimizer_class(self) -> type[torch.optim.Optimizer]:
        return getattr(torch.optim, {"Momentum": "SGD"}.get(self.optimizer, self.optimizer))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Case:
    """One run of the fuzzer.

    Attributes:
        seed: what everything follows from.
        layers: kinds of layers; ``"same:1"`` is layer 1 once more, ``"tied:1"`` one that has its weight.
        tied_head: the output layer has the weight of the embedding.
        dtype: of the parameters; their initial values are those of float32.
    """

    seed: int
    layers: tuple[str, ...]
    tied_head: bool
    recipe: Recipe
    dtype: torch.dtype = torch.float64

    def __str__(self) -> str:
        return f"seed {self.seed}: {' '.join(self.layers)}{' tied_head' * self.tied_head}, {self.recipe}"


def case_of(seed: int, kinds: str = "any", dtype: torch.dtype = torch.float64) -> Case:
    """The case of a seed, with layers of one of the sets in ``KINDS_FOR``."""
    # Two generators, so that cases without rare kinds do not change with the weight of these.
    draw, again = random.Random(seed), random.Random(f"{seed}, again")
    layers = [_seldom(draw, again, KINDS_FOR[kinds]) for _ in range(draw.choice([2, 3, 3, 4, 5]))]
    layers[1:1] = ALWAYS.get(kinds, [])
    if kinds == "any" and draw.random() < 0.2:
        layers.append(f"{draw.choice(['same', 'tied'])}:{draw.randrange(len(layers))}")
    updates, accumulate = draw.choice([2, 3, 4]), draw.choice([1, 1, 2, 3])
    resumes = draw.randrange(1, updates) if draw.random() < 0.15 else None
    recipe = Recipe(
        optimizer="SGD" if "sparse_table" in layers else _seldom(draw, again, sorted(OPTIMIZERS)),
        updates=updates,
        accumulate=accumulate,
        ends_early=draw.random() < 0.4 and resumes is None,
        clip=draw.choice([None, None, 0.05, 1.0, 100.0]),
        lr_factors=tuple(draw.choice([(1.0,) * 6, (0.1, 0.4, 0.7, 1.0, 1.0, 1.0)])),
        bias_lr=draw.choice([1.0, 1.0, 0.3]),
        thaws=draw.randrange(1, updates) if draw.random() < 0.05 and kinds == "any" else None,
        given=draw.choice(["instance", "class", "callable"]),
        resumes=resumes,
    )
    if resumes is not None:  # a resumed run begins with the layer as it was made
        recipe = replace(recipe, thaws=None)
    return Case(seed, tuple(layers), draw.random() < 0.3, recipe, dtype)


def _seldom(draw: random.Random, again: random.Random, names: list[str]) -> str:
    """Draw a name; three of four rare ones are drawn again, from the others."""
    name = draw.choice(names)
    return name if name not in RARE or again.random() < 0.25 else again.choice(sorted({*names} - RARE))


class RandomModel(nn.Module):
    """The model of a case: token numbers and labels of shape (samples, LENGTH) to the mean of the losses of all tokens."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        draw = random.Random(case.seed)
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        made: list[nn.Module] = []
        for name in case.layers:
            relation, _, other = name.partition(":")
            if not other:
                made.append(KINDS[name](draw))
            elif relation == "same":
                made.append(made[int(other)])
            else:
                made.append(_Tied(made[int(other)]))
        self.layers = nn.ModuleList(made)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=not case.tied_head)
        if case.tied_head:
            self.head.weight = self.tokens.weight
        self.to(case.dtype)

    def forward(self, tokens: Tensor, labels: Tensor, position_ids: Tensor | None = None) -> dict[str, Tensor]:
        hidden = self.tokens(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(hidden)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        for layer in dict.fromkeys(self.layers):
            if (penalty := getattr(layer, "penalty", None)) is not None:
                loss = loss + penalty
        return {"loss": loss}


class _Tied(nn.Module):
    """A layer that uses the first matrix of another one as its own."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        matrices = [parameter for parameter in other.parameters() if parameter.shape == (WIDTH, WIDTH)]
        self.weight = matrices[0] if matrices else nn.Parameter(torch.eye(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + F.linear(x, self.weight).tanh()


def data_of(case: Case) -> list[dict[str, Tensor]]:
    """All samples, in the order in which they are trained on."""
    generator = torch.Generator().manual_seed(case.seed)
    count = GLOBAL_BATCH * sum(case.recipe.windows)
    tokens = torch.randint(0, VOCABULARY, (count, LENGTH), generator=generator)
    labels = torch.randint(0, VOCABULARY, (count, LENGTH), generator=generator)
    return [{"tokens": tokens[i], "labels": labels[i]} for i in range(count)]
