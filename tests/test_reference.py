"""The reference: everything that a user can name is in it, complete, and its examples hold."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import flextrain
from flextrain.core.base.errors import FlexTrainError
from flextrain.core.base.registry import REGISTRIES
from flextrain.reference.catalogue import DATALOADER_KEYS, catalogue, find
from flextrain.reference.describe import read_docstring
from flextrain.reference.entry import Entry
from flextrain.reference.examples import KINDS
from flextrain.runner.config import check_everything

PUBLIC = sorted(set(Path(__file__).with_name("public_names.txt").read_text().split()))
PACKAGES = {"flextrain", "torch", "deepspeed", "torch_npu", "torchmetrics", "torchvision", "optuna"}
NOT_HERE = {"torch_npu", "wandb", "mlflow", "deepspeed", "torchao"}
"""Packages that a machine for development may not have."""


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)

    data_preprocessor: torch.nn.Module | None = None

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.generator(inputs).sum()}


class Trial:
    """Of the example of PruningHook."""

    def report(self, value: float, step: int) -> None: ...

    def should_prune(self) -> bool:
        return False


class Gan(Net):
    """Of the example of OptimWrapperDict."""

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, torch.Tensor]:
        raise NotImplementedError


class MyTTAModel(flextrain.BaseTTAModel):
    """Of the example of PrepareTTAHook."""


class Categories(TensorDataset):
    def get_cat_ids(self, index: int) -> list[int]:
        return [0]


def refusal(given: dict[str, Any]) -> str:
    """Why a runner does not take these arguments; empty if it does."""
    try:
        check_everything(given)
    except FlexTrainError as error:
        return str(error)
    return ""


def test_every_registered_type_is_in_the_reference() -> None:
    listed = {(KINDS[entry.group].registry, entry.name) for entry in catalogue() if entry.group in KINDS}
    by_registry = {getattr(flextrain, kind.registry): kind.registry for kind in KINDS.values()}
    assert set(by_registry) == set(REGISTRIES), "a new registry needs an entry in registry_kinds.py"
    assert listed == {(by_registry[each], name) for each in REGISTRIES for name in each}


def test_every_public_name_is_in_the_reference() -> None:
    assert sorted(entry.name for entry in catalogue() if entry.group == "public-names") == PUBLIC


def entries() -> list[Entry]:
    """The catalogue without what tests before this one have registered in the same process."""
    return [entry for entry in catalogue() if (entry.home or "torch").partition(".")[0] in PACKAGES]


def test_every_entry_says_what_it_is_and_what_each_argument_means() -> None:
    empty = [entry.name for entry in entries() if not entry.summary]
    unexplained = [f"{entry.name}: {each.name}" for entry in entries() for each in entry.arguments if not each.meaning]
    methods = [f"{entry.name}.{each.name}" for entry in entries() for each in entry.methods if not each.summary]
    raised = [f"{entry.name}: {each.name}" for entry in entries() for each in entry.raises if not each.meaning]
    assert (empty, unexplained, methods, raised) == ([], [], [], [])


def test_only_what_other_packages_have_is_missing() -> None:
    missing = {entry.name: entry.unavailable for entry in catalogue() if entry.unavailable}
    assert missing.pop("LBFGS").startswith("Every runner refuses it")
    assert all(any(package in why for package in NOT_HERE) for why in missing.values()), missing


def test_a_meaning_is_plain_text() -> None:
    """Without the marks of documentation systems, and not a reference to another place."""
    texts = [
        (entry.name, text) for entry in catalogue() for text in (entry.summary, *(a.meaning for a in entry.arguments))
    ]
    marked = [(name, text) for name, text in texts if re.search(r":\w+:`|\.\. \w+::|`__|\\\w", text)]
    elsewhere = [(name, text) for name, text in texts if re.fullmatch(r"[Ss]ee \w+\.?", text)]
    assert (marked, elsewhere) == ([], [])


def test_every_type_and_public_name_has_an_example() -> None:
    assert [
        e.name for e in catalogue() if e.group in (*KINDS, "public-names") and not e.example and not e.unavailable
    ] == []


def test_examples_of_public_names_are_python() -> None:
    for entry in catalogue():
        if entry.group == "public-names":
            configuration = re.match(
                r"\w+=(dict|\")", entry.example
            )  # keywords of FlexibleRunner, which another test checks
            compile(f"dict({entry.example})" if configuration else entry.example, entry.name, "exec")


@pytest.mark.parametrize("group", KINDS)
def test_a_runner_takes_the_examples(group: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    train_set = Categories(torch.zeros(8, 2))
    known = {"train_set": train_set, "more_data": train_set, "MyTTAModel": MyTTAModel, "trial": Trial()}
    loader = DataLoader(train_set, batch_size=2)
    for entry in entries():
        if entry.group != group or entry.unavailable:
            continue
        given: dict[str, Any] = {
            "model": Gan() if entry.name == "OptimWrapperDict" else Net(),
            "work_dir": str(tmp_path),
            "train_dataloader": loader,
            "optim_wrapper": {"optimizer": {"type": "SGD", "lr": 0.1, "weight_decay": 0.1}},
            "train_cfg": {"max_epochs": 1}
            if "InfiniteSampler" not in entry.name
            else {"by_epoch": False, "max_iters": 1},
            **{f"{mode}_dataloader": loader for mode in ("val", "test")},
            **{f"{mode}_evaluator": {"type": "MeanMetric"} for mode in ("val", "test")},
            **{f"{mode}_cfg": {} for mode in ("val", "test")},
        }
        given |= eval(f"dict({entry.example})", {"dict": dict, **known})
        bound = inspect.signature(flextrain.FlexibleRunner).bind(**given)
        bound.apply_defaults()
        if (why := refusal(dict(bound.arguments))) and not any(package in why for package in NOT_HERE):
            pytest.fail(f"{entry.name}: {entry.example}: {why}")
        is_default = (
            re.match(r"default_hooks|env_cfg|\w+_cfg=dict\(\)$", entry.example) or entry.name == "OptimWrapperDict"
        )
        assert is_default or f'"{entry.name}"' in entry.example, entry.example


def test_the_keys_of_a_dataloader_are_torchs() -> None:
    torchs = inspect.signature(DataLoader).parameters.keys() - {"generator"}
    assert {key.name for key in DATALOADER_KEYS} >= torchs
    assert {key.name for key in DATALOADER_KEYS} - torchs <= {"num_batch_per_epoch", "in_order"}


def the(name: str) -> Entry:
    (found,) = find(name)
    return found


def test_a_type_with_its_arguments() -> None:
    entry = the("EMAHook")
    assert (entry.kind, entry.home) == ("hook", "flextrain.runner.hooks.ema:EMAHook")
    arguments = {each.name: each for each in entry.arguments}
    assert arguments["momentum"].type == "float | None"
    assert arguments["momentum"].default == "None"
    assert "0.0002" in arguments["momentum"].meaning
    assert arguments["ema_type"].type.startswith('"ExponentialMovingAverage" | ')
    assert {"train_step", "self"} & arguments.keys() == set()


def test_what_flextrain_fills_in_is_marked() -> None:
    assert {each.name for each in the("LinearLR").arguments if each.is_filled_in} == {"optimizer"}
    assert {each.name for each in the("AdamW").arguments if each.is_filled_in} == {"params"}


def test_arguments_of_a_strategy_are_its_options() -> None:
    assert "replicate_size" in {each.name for each in the("FSDPStrategy").arguments}
    assert "replicate_size" not in {each.name for each in the("MeshStrategy").arguments}, "which refuses it"
    assert {"wrap", "device", "timeout_s"} <= {each.name for each in the("FSDPStrategy").arguments}
    assert the("fsdp").see_also[0] == "FSDPStrategy"


@pytest.mark.parametrize(
    "name, type, default",
    [
        ("strategy.zero_optimization.stage", "0 | 1 | 2 | 3", "0"),
        ("env_cfg.watchdog.stall_s", "float, 1.0 or more", "600.0"),
        ("randomness.seed", "int | None", "None"),
        ("train_dataloader.batch_size", "int", "1"),
        ("optim_wrapper.clip_grad", "dict | None", "None"),
        ("optim_wrapper.paramwise_cfg.bias_lr_mult", "float | None", "None"),
        ("train_cfg.max_epochs", "int, 1 or more", ""),
        ("default_hooks.checkpoint", "dict | None", 'dict(type="CheckpointHook")'),
        ("work_dir", "str | Path", '"work_dirs"'),
    ],
)
def test_an_option(name: str, type: str, default: str | None) -> None:
    entry = the(name)
    assert (entry.type, entry.default) == (type, default)


def test_docstrings_are_read() -> None:
    found = read_docstring(
        """Adds. The rest
        of the text.

        Another paragraph.

        Args:
            a: first,
                on two lines.
            b, c: both; default: 1.
            d (int, optional): of torch's style.

        Returns:
            The sum.

        Raises:
            ConfigError, StrategyError: they differ.

        Example:
            add(1,
                2)

        Source: a paper,
        on two lines.
        """
    )
    assert found.summary == "Adds."
    assert found.text == "The rest of the text.\n\nAnother paragraph."
    assert found.arguments == {
        "a": "first, on two lines.",
        "b": "both; default: 1.",
        "c": "both; default: 1.",
        "d": "of torch's style.",
    }
    assert (found.types["d"], found.returns, found.source) == ("int, optional", "The sum.", "a paper, on two lines.")
    assert [(each.name, each.meaning) for each in found.raises] == [
        ("ConfigError", "they differ."),
        ("StrategyError", "they differ."),
    ]
    assert found.example == "add(1,\n    2)"
