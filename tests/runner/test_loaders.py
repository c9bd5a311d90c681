"""Batches come from whatever gives them: loaders with methods of their own or a state, lists, functions, streams."""

from __future__ import annotations

import itertools
import math
import queue
import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from .training import (
    Samples,
    SaveEvery,
    Watch,
    differences,
    make_runner,
    whole_state,
)

pytestmark = pytest.mark.usefixtures("quick")

ITERATIONS = dict(by_epoch=False, max_iters=9)


class Packer(DataLoader[Any]):
    """Two batches as one, after a shuffle of its own; its length is that of what it gives."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        held: list[Any] = []
        for batch in super().__iter__():
            held.append(batch)
            if len(held) == 2:
                random.shuffle(held)
                yield {name: torch.cat([part[name] for part in held]) for name in held[0]}
                held = []
        yield from held

    def __len__(self) -> int:
        return math.ceil(super().__len__() / 2)


class Prefetcher(DataLoader[Any]):
    """Reads in a thread, two batches ahead."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        batches: queue.Queue[Any] = queue.Queue(2)

        def read(source: Iterator[Any]) -> None:
            for batch in source:
                batches.put(batch)
            batches.put(None)

        threading.Thread(target=read, args=[super().__iter__()], daemon=True).start()
        return iter(batches.get, None)


class Named(DataLoader[Any]):
    """A subclass that changes nothing about the batches."""

    def describe(self) -> str:
        return f"{type(self).__name__} of {len(self)}"


def collated(samples: Samples, size: int = 4) -> list[Any]:
    return [
        default_collate([samples[i] for i in range(start, min(start + size, len(samples)))])
        for start in range(0, len(samples), size)
    ]


class Restartable:
    """Its own iterator, as DALI's are: at its end it stays there until it is reset."""

    def __init__(self, samples: Samples) -> None:
        self.batches, self.place, self.resets = collated(samples), 0, 0

    def __iter__(self) -> Restartable:
        return self

    def __next__(self) -> Any:
        if self.place == len(self.batches):
            raise StopIteration
        self.place += 1
        return self.batches[self.place - 1]

    def __len__(self) -> int:
        return len(self.batches)

    def reset(self) -> None:
        self.place, self.resets = 0, self.resets + 1


class WithState:
    """Goes through its samples in an order of its own, drawn for each pass, and says where it is in tensors and tuples."""

    def __init__(self, samples: Samples, passes_end: bool = True) -> None:
        self.samples, self.passes, self.place = samples, 0, 0

    def __iter__(self) -> Iterator[Any]:
        order = np.random.default_rng(self.passes).permutation(len(self.samples))
        while self.place < len(order):
            chosen = order[self.place : self.place + 4]
            self.place += len(chosen)
            noise = 0.1 * torch.rand(len(chosen), 6)
            batch = default_collate([self.samples[int(i)] for i in chosen])
            yield {**batch, "x": batch["x"] + noise}
        self.passes, self.place = self.passes + 1, 0

    def __len__(self) -> int:
        return math.ceil(len(self.samples) / 4)

    def state_dict(self) -> dict[Any, Any]:
        return {"place": (self.passes, self.place), 7: torch.tensor([self.place]), "array": np.arange(self.place)}

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        assert state[7].tolist() == [len(state["array"])] == [state["place"][1]]
        self.passes, self.place = state["place"]


class Batched(IterableDataset[Any]):
    """A stream that gives batches by itself, as WebDataset's loaders do."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        order = list(range(len(self.samples)))
        random.shuffle(order)
        for start in range(0, len(order), 4):
            yield default_collate([self.samples[i] for i in order[start : start + 4]])


def stateful(samples: Samples, **options: Any) -> Any:
    module = pytest.importorskip("torchdata.stateful_dataloader")
    return module.StatefulDataLoader(samples, batch_size=4, **options)


def function(samples: Samples) -> Callable[[], Iterator[Any]]:
    def batches() -> Iterator[Any]:
        yield from Batched(samples)

    return batches


MAKERS: dict[str, Any] = {
    "packer": lambda samples: Packer(samples, batch_size=2, shuffle=True),
    "packer with workers": lambda samples: Packer(
        samples, batch_size=2, shuffle=True, num_workers=1, persistent_workers=True, generator=torch.Generator()
    ),
    "prefetcher": lambda samples: Prefetcher(samples, batch_size=4, shuffle=True),
    "named": lambda samples: Named(samples, batch_size=4, shuffle=True),
    "list": collated,
    "function": function,
    "stream": Batched,
    "cycle": lambda samples: itertools.cycle(collated(samples)),
    "iterator": Restartable,
    "state": WithState,
    "stateful": partial(stateful, shuffle=True),
    "stateful with workers": partial(stateful, shuffle=True, num_workers=2),
}
WITHOUT_LENGTH = ("function", "stream", "cycle")


def settings(kind: str, accumulate: int = 1) -> dict[str, Any]:
    noisy = kind not in ("prefetcher", "list", "cycle", "iterator") and "workers" not in kind
    changes = dict(
        train_dataloader=MAKERS[kind](Samples(22, noisy=noisy)),
        optim_wrapper=dict(optimizer=dict(type="AdamW", lr=0.02), accumulative_counts=accumulate),
    )
    return changes | (dict(train_cfg=ITERATIONS) if kind in WITHOUT_LENGTH else {})


@pytest.mark.parametrize(
    "kind, accumulate",
    [
        *((kind, 1) for kind in MAKERS),
        *((kind, 2) for kind in ("packer", "function", "stateful")),
        *(
            pytest.param(kind, 2, marks=pytest.mark.full)
            for kind in MAKERS
            if kind not in ("packer", "function", "stateful")
        ),
    ],
)
def test_a_resumed_run_ends_where_the_whole_one_does(kind: str, accumulate: int, tmp_path: Path) -> None:
    watch = Watch()
    whole = make_runner(tmp_path / "whole", custom_hooks=[watch, SaveEvery()], **settings(kind, accumulate))
    whole.train()
    count = whole.iter
    assert count == (9 if kind in WITHOUT_LENGTH else 3 * -(-6 // accumulate))
    first = sorted(itertools.chain(*watch.trained[: -(-6 // accumulate)]))
    assert first == list(range(22))
    for at in (1, -(-6 // accumulate), -(-6 // accumulate) + 2):
        seen = Watch()
        again = make_runner(
            tmp_path / "again",
            custom_hooks=[seen],
            load_from=tmp_path / "whole" / f"iter_{at}",
            resume=True,
            **settings(kind, accumulate),
        )
        again.train()
        assert seen.trained == watch.trained[at:], f"resumed at {at}"
        assert not differences(whole_state(again), whole_state(whole)), f"resumed at {at}"
