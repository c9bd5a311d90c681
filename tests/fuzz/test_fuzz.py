"""The fuzzer itself: a part of it for a minute, and that it finds faults; ``make test-fuzz`` is the whole."""

from __future__ import annotations

import pytest
import torch
from torch.torch_version import TorchVersion

from flextrain.testing import WorkerGroup

from .faults import FAULTS
from .layers import KINDS
from .models import case_of
from .run import STRATEGIES, fuzz, run_case, summary

pytestmark = [pytest.mark.distributed, pytest.mark.deepspeed]

SECONDS = 10.0  # for each of the parts, which sessions of pytest run beside each other
PARTS = 3


@pytest.mark.parametrize("part", range(PARTS))
def test_random_models_train_as_on_one_device(workers2: WorkerGroup, part: int) -> None:
    told: list[str] = []
    results = fuzz(range(part, 2000, PARTS), list(STRATEGIES), workers2, SECONDS, told.append)
    assert results
    assert not told, f"{summary(results)}\n" + "\n".join(told)


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_found(workers2: WorkerGroup, name: str) -> None:
    strategy = FAULTS[name][0]
    if strategy == "fsdp" and TorchVersion(torch.__version__) < "2.7":
        pytest.skip("torch 2.6 shards on accelerators only")
    seeds = [seed for seed in range(1000) if could_show(name, seed)][:4]
    assert any(run_case(seed, strategy, workers2, name).kind == "wrong" for seed in seeds)


def could_show(name: str, seed: int) -> bool:
    """Whether a case has what a fault is about; a fault that needs luck as well takes several cases."""
    case = case_of(seed)
    return {
        "norm of own shards": case.recipe.clip == 0.05,
        "mean over full window": len(set(case.recipe.windows)) > 1,
        "without hooks": "masked_rows" in case.layers,
        "without moments": case.recipe.resumes is not None and case.recipe.optimizer not in ("SGD", "Adagrad"),
        "mean over users": bool({"experts", "unequal_experts", "stochastic_depth"} & {*case.layers}),
        "hardly moving": "tiny_scale" in case.layers,
    }[name]


def test_a_seed_is_a_case() -> None:
    assert len(KINDS) >= 40
    assert case_of(3) == case_of(3)
    assert len({case_of(seed) for seed in range(50)}) == 50
