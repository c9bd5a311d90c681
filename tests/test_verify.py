"""flextrain verify: a user's own model under several strategies, step by step against one device."""

from __future__ import annotations

import json
import logging
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from flextrain import STRATEGIES, ConfigError
from flextrain.cli import main
from flextrain.runner.data.user_loaders import batch_size
from flextrain.testing import WorkerError, WorkerGroup
from flextrain.user_script import runner_arguments
from flextrain.verify.parity import shared_loader
from flextrain.verify.verify import FirstDifference, Row, VerifyReport, verify

EXAMPLE = Path(__file__).parents[1] / "examples" / "train_classifier.py"
WorkerFactory = Callable[[int], WorkerGroup]

# A script like a user's, with strategies of its own that go wrong.
SCRIPT = """
import argparse, os
import torch
from torch import nn
from torch.utils.data import TensorDataset
from flextrain import STRATEGIES, BaseMetric, BaseModel, DDPStrategy, FlexibleRunner

class Model(BaseModel):
    def __init__(self, part):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), part, nn.Tanh(), nn.Linear(8, 1))
    def forward(self, x, y, mode="tensor"):
        error = self.net(x) - y
        if mode == "predict":
            return error, error.argmax(0)
        return {"loss": (error ** 2).sum() if arguments.sum else (error ** 2).mean()}

class WithHook(DDPStrategy):
    def setup(self, model, optim=None):
        called, optim = super().setup(model, optim)
        self.updates = 0
        optim.register_step_pre_hook(self.spoil)
        return called, optim

@STRATEGIES.register_module()
class AveragesTwice(WithHook):
    def spoil(self, optim):
        for group in optim.param_groups:
            for parameter in group["params"]:
                parameter.grad /= self.topology.world_size

@STRATEGIES.register_module()
class Tolerates(AveragesTwice):
    tolerance = {"gradients": 0.9, "resume_itself": 2.0}

@STRATEGIES.register_module()
class PromisesLess(AveragesTwice):
    not_promised = {"losses": "steps are halved"}
    def state(self):  # has state of its own, also before training
        rest = torch.full((3,), float(self.topology.rank))
        return super().state() | {f"optim.own.{self.topology.rank}.rest": rest}

@STRATEGIES.register_module()
class WrongLater(WithHook):
    def spoil(self, optim):
        self.updates += 1
        if self.updates == 3:
            self.module.net[3].weight.grad.zero_()

@STRATEGIES.register_module()
class OneStrays(WithHook):
    short_names = {"strays": {"static_graph": True}}
    def spoil(self, optim):
        if self.topology.rank == 1:
            self.module.net[0].bias.data += 0.01

@STRATEGIES.register_module()
class EvaluatesItsOwn(DDPStrategy):
    def evaluate(self, batch, step):
        return super().evaluate(batch, step)[0] + 0.01 * self.topology.rank

class Count(BaseMetric):
    def process(self, data_batch, data_samples):
        self.results.append(1)
    def compute_metrics(self, results):
        return {"count": len(results)}

@STRATEGIES.register_module()
class Fails(DDPStrategy):
    def setup(self, model, optim=None):
        raise OSError("its library is missing")

parser = argparse.ArgumentParser()
parser.add_argument("--optimizer", default="SGD")
parser.add_argument("--part", default="Identity")
parser.add_argument("--wrapper", default="OptimWrapper")
parser.add_argument("--sum", action="store_true")
parser.add_argument("--share", action="store_true")
parser.add_argument("--broken", action="store_true")
parser.add_argument("--validates", type=int, default=0)
if __name__ == "__main__":
    arguments = parser.parse_args()
    data = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
    parts = {"Identity": nn.Identity, "Dropout": nn.Dropout, "BatchNorm": lambda: nn.BatchNorm1d(8)}
    validated = TensorDataset(data[: arguments.validates], data[: arguments.validates, :1])
    validation = dict(
        val_dataloader=dict(dataset=validated, batch_size=4, collate_fn=dict(type="default_collate")), val_cfg=dict(), val_evaluator=Count(),
    )
    FlexibleRunner(
        **(validation if arguments.validates else {}),
        model=lambda: Model(parts[arguments.part]()),
        strategy=dict(type="ddp", bucket_cap_mb=1, oops=1) if arguments.broken else None,
        train_dataloader=dict(
            dataset=TensorDataset(data, data.sum(1, keepdim=True)), collate_fn=dict(type="default_collate"),
            batch_size=8 // int(os.environ["WORLD_SIZE"]) if arguments.share else 4,
        ),
        optim_wrapper=dict(
            type=arguments.wrapper, optimizer=dict(type=arguments.optimizer, lr=0.02), accumulative_counts=2
        ),
        param_scheduler=dict(type="LinearLR", start_factor=0.5, end=4, by_epoch=False),
        train_cfg=dict(by_epoch=True, max_epochs=4),
    ).train()
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "own_training.py"
    path.write_text(SCRIPT)
    return str(path)


@pytest.fixture
def group(workers: WorkerFactory) -> WorkerGroup:
    return workers(2)


# The script


def write(folder: Path, text: str) -> str:
    path = folder / "other.py"
    path.write_text(textwrap.dedent(text))
    return str(path)


def test_a_script_is_run_up_to_its_runner(tmp_path: Path) -> None:
    before = sys.modules["__main__"], list(sys.argv), list(sys.path)
    with runner_arguments(str(EXAMPLE), ["--batch-size", "7"]) as given:
        assert given["train_dataloader"]["batch_size"] == 7
        assert given["resume"] is False
        assert sys.modules["__main__"].__file__ == str(EXAMPLE)
    assert (sys.modules["__main__"], sys.argv, sys.path) == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text", ["cfg = dict(model=1, log_level='DEBUG')", "def config(): return dict(model=1, log_level='DEBUG')"]
)
def test_a_file_may_have_the_arguments_alone(tmp_path: Path, text: str) -> None:
    with runner_arguments(write(tmp_path, text)) as given:
        assert (given["model"], given["log_level"], given["resume"]) == (1, "DEBUG", False)


@pytest.mark.parametrize(
    "text, message",
    [
        ("x = 1", "other.py makes no FlexibleRunner and has no dict cfg"),
        ("cfg = dict(model=1, optimiser=2)", "unexpected keyword argument 'optimiser'"),
        (
            "import argparse\nargparse.ArgumentParser(prog='x').parse_args(['-q'])",
            "x: error: unrecognized arguments: -q",
        ),
        ("raise SystemExit('no data')", "ended before it made a FlexibleRunner: no data"),
    ],
)
def test_a_script_without_a_runner(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message), runner_arguments(write(tmp_path, text)):
        pass


def test_a_script_may_register_its_classes_and_be_run_again(script: str) -> None:
    for _ in range(2):
        with runner_arguments(script):
            assert "AveragesTwice" in STRATEGIES
    assert "AveragesTwice" not in STRATEGIES


# The data


class Noisy(Dataset[Any]):
    def __getitem__(self, index: int) -> torch.Tensor:
        return index + torch.rand(()) / 2

    def __len__(self) -> int:
        return 23


def load(cfg: Any, shard: tuple[int, int] = (0, 1), **how: bool) -> DataLoader[Any]:
    log = logging.getLogger("flextrain")
    return shared_loader(cfg, processes=2, shard=shard, seed=3, **how, logger=log)


def epoch(*args: Any, **kwargs: Any) -> list[list[float]]:
    return [torch.as_tensor(batch).tolist() for batch in load(*args, **kwargs)]


def learning_rate_size(*args: Any, **kwargs: Any) -> int | None:
    """What auto_scale_lr takes for the batch size."""
    return batch_size(load(*args, **kwargs))


def test_the_parts_of_all_processes_are_the_global_batch_with_the_same_random_numbers() -> None:
    cfg = dict(dataset=Noisy(), batch_size=4, collate_fn=torch.stack)
    whole, first, second = epoch(cfg), epoch(cfg, (0, 2)), epoch(cfg, (1, 2))
    assert [len(batch) for batch in whole] == [8, 8]  # 7 samples are left, which do not make two full batches
    assert [a + b for a, b in zip(first, second, strict=True)] == whole
    assert learning_rate_size(cfg) == 8
    assert learning_rate_size(cfg, (0, 2)) == learning_rate_size(cfg, one_by_one=True) == 4
    assert epoch(cfg, one_by_one=True) == [part for pair in zip(first, second, strict=True) for part in pair]
    assert epoch(cfg, exact=True) == whole
    assert next(iter(load(cfg, exact=True))).dtype == torch.float64


def test_a_built_dataloader_can_be_divided_too() -> None:
    loader = DataLoader(
        TensorDataset(torch.arange(12)), batch_size=3, collate_fn=lambda samples: torch.stack([s[0] for s in samples])
    )
    assert epoch(loader) == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    assert epoch(loader, (1, 2)) == [[3, 4, 5], [9, 10, 11]]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.mark.parametrize(
    "cfg, message",
    [
        (dict(dataset=Stream(), batch_size=1), "train_dataloader.dataset: verify cannot divide an IterableDataset"),
        (dict(dataset=Noisy(), batch_size=None), "train_dataloader.batch_size: None makes no batches"),
        (lambda: [torch.zeros(2)], "train_dataloader: verify divides the batches of a sampler"),
    ],
)
def test_data_that_cannot_be_divided(cfg: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        epoch(cfg)


# The verdict


@pytest.mark.full
@pytest.mark.distributed
def test_the_classifier_example_is_the_same(group: WorkerGroup) -> None:
    pytest.importorskip("sklearn")
    report = verify(str(EXAMPLE), ["ddp", "fsdp"], arguments=["--batch-size", "16"], steps=5, workers=group)
    assert report.exit_status == 0, report
    for row in report.rows:
        assert row.status == "same"
        assert row.tolerance == 1e-5
        assert all(value is not None and value < 1e-4 for value in row.differences.values())


@pytest.mark.distributed
def test_a_strategy_that_averages_twice(script: str, group: WorkerGroup) -> None:
    report = verify(script, ["ddp", "AveragesTwice"], steps=4, workers=group)
    good, bad = report.rows
    assert (good.status, bad.status, report.exit_status) == ("same", "differs", 1)
    assert bad.differences["grad_norm"] == pytest.approx(0.5, abs=0.05)
    assert bad.first is not None
    assert (bad.first.step, bad.first.parameter) == (1, "net.0.weight")
    assert "the gradient norm is 0.5 times what it should be" in str(bad.first)


@pytest.mark.distributed
def test_what_a_class_declares_of_its_strategy_holds(script: str, group: WorkerGroup) -> None:
    names = ["Tolerates", "PromisesLess"]
    report = verify(script, names, steps=3, workers=group)
    tolerates, less = report.rows
    assert (tolerates.status, tolerates.first, tolerates.tolerance) == ("same", None, 0.9)
    assert tolerates.left_out == ["its class counts differences up to 9.0e-01 as rounding"]
    assert (less.status, less.left_out) == ("not promised", ["does not promise losses: steps are halved"])
    assert less.first is not None
    assert (less.first.step, less.first.parameter) == (1, "net.0.weight"), (
        "state of its own was compared with one device"
    )
    assert report.exit_status == 0
    report = verify(script, names, steps=1, tolerance=0.01, workers=group)
    assert [(row.status, row.tolerance) for row in report.rows] == [("differs", 0.01), ("not promised", 0.01)]


@pytest.mark.distributed
@pytest.mark.parametrize("scale, status", [("None", "same"), ("2.0**14", "differs")])
def test_gradients_that_overflow_on_one_side_only(tmp_path: Path, group: WorkerGroup, scale: str, status: str) -> None:
    """Parts of a batch have larger gradients than its mean: with torch's first scale, two processes skip update 2."""
    text = SCRIPT.replace("lr=0.02), accumulative_counts=2", f"lr=0.02), dtype='float16', loss_scale={scale}")
    script = write(tmp_path, text)
    report = verify(script, ["ddp"], arguments=["--wrapper", "AmpOptimWrapper"], steps=4, workers=group)
    assert report.rows[0].status == status, report
    assert any(line.startswith("Loss scale: fixed at 256 in all") for line in report.notes) == (status == "same")
    if status == "differs":
        assert "; gradients overflowed on the processes only, and update 2 was skipped there" in str(
            report.rows[0].first
        )
        with pytest.raises(
            ConfigError, match="gradients overflow on one device in 2 of 2 updates, which compare nothing; give"
        ):
            verify(
                write(tmp_path, text.replace("2.0**14", "2.0**19")),
                ["ddp"],
                arguments=["--wrapper", "AmpOptimWrapper"],
                steps=2,
                workers=group,
            )


@pytest.mark.distributed
def test_steps_that_end_in_nan_are_not_compared(tmp_path: Path, group: WorkerGroup) -> None:
    """They hid the difference in the steps before, because no rounding was as large as what is no number."""
    text = SCRIPT.replace("(error ** 2).mean()}", "(error ** 2).mean() * scale(self)}").replace(
        "@STRATEGIES.register_module()\nclass AveragesTwice",
        "def scale(model):\n    model.calls = getattr(model, 'calls', 0) + 1\n"
        "    return float('nan') if model.calls > arguments.finite else 1\n\n@STRATEGIES.register_module()\nclass AveragesTwice",
    )
    text = text.replace("accumulative_counts=2", "accumulative_counts=1")
    path = write(tmp_path, text.replace(
        'parser.add_argument("--sum"', 'parser.add_argument("--finite", type=int)\nparser.add_argument("--sum"'
    ))  # fmt: skip
    report = verify(path, ["ddp", "AveragesTwice"], arguments=["--finite", "5"], steps=8, workers=group)
    assert [row.status for row in report.rows] == ["same", "differs"]
    assert report.steps == 4
    assert "The loss is NaN on one device in step 6: 4 steps before are compared" in report.notes
    with pytest.raises(ConfigError, match="verify: the loss is NaN on one device in step 2, so that nothing can be"):
        verify(path, ["ddp"], arguments=["--finite", "1"], steps=8, workers=group)


@pytest.mark.distributed
def test_a_strategy_whose_evaluation_differs(script: str, group: WorkerGroup) -> None:
    report = verify(script, ["ddp", "EvaluatesItsOwn"], arguments=["--validates", "20"], steps=2, workers=group)
    good, bad = report.rows
    assert (good.status, bad.status, report.notes) == ("same", "differs", [])
    assert good.differences["evaluation"] is not None
    assert good.differences["evaluation"] < 1e-5
    assert str(bad.first).startswith("after step 1: evaluation.0 differs by ")
    report = verify(script, ["EvaluatesItsOwn"], arguments=["--validates", "7"], steps=2, workers=group)
    assert report.rows[0].status == "same"
    assert report.notes == ["Evaluation is not compared: val_dataloader has no 2 batches of one size"]


@pytest.mark.distributed
def test_the_first_step_and_parameter_are_named(script: str, group: WorkerGroup) -> None:
    report = verify(script, ["WrongLater", "strays"], arguments=["--optimizer", "AdamW"], steps=4, workers=group)
    assert report.rounding_of == ["in parts", "exact"]
    assert "(rounding): one device, the same batches in 2 parts and in float64" in str(report)
    later, strays = (row.first for row in report.rows)
    assert later is not None
    assert (later.step, later.parameter) == (3, "net.3.weight")
    assert strays is not None
    assert (strays.step, strays.parameter) == (1, "net.0.bias")


@pytest.mark.distributed
def test_a_strategy_that_cannot_be_run_has_its_row(script: str, group: WorkerGroup) -> None:
    report = verify(script, ["Fails", "single"], steps=1, workers=group)
    fails, single = report.rows
    assert [row.status for row in report.rows] == ["not run", "same"]
    assert "OSError: its library is missing" in fails.message
    assert set(single.differences.values()) == {0.0}
    assert report.exit_status == 2


@pytest.mark.distributed
@pytest.mark.full
def test_simulated_ranks(script: str, workers: WorkerFactory) -> None:
    names = ["fsdp", "ddp", "AveragesTwice", "zero2"]
    options = dict(steps=2, simulate=True, processes=4, workers=workers(1))
    report = verify(script, names, arguments=["--optimizer", "AdamW"], **options)  # type: ignore[arg-type]
    assert "2 steps on 4 simulated ranks against one device" in str(report)
    assert [row.status for row in report.rows] == ["same", "same", "differs", "not run"], report
    twice, zero = report.rows[2:]
    assert twice.first is not None
    assert (twice.first.step, twice.first.entry) == (1, "optim.state.net.0.weight.exp_avg")
    assert twice.first.hint == ", it is 0.25 times what it should be"
    assert zero.message.startswith(
        "cannot be simulated, DeepSpeed keeps its process groups in variables of modules; give"
    )


UNSEEDED = """
import torch
from torch import nn
from flextrain import FlexibleRunner

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 2)

    def forward(self, x):
        return {"loss": self.net(x).square().mean()}

samples = [{"x": torch.arange(4.0) + i} for i in range(8)]
FlexibleRunner(
    model=Net(),
    train_dataloader=dict(dataset=samples, batch_size=2, collate_fn="default_collate"),
    train_cfg=dict(by_epoch=True, max_epochs=1),
    optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
).train()
"""


@pytest.mark.full
@pytest.mark.distributed
def test_simulated_ranks_draw_the_weights_of_one_device(tmp_path: Path, workers: WorkerFactory) -> None:
    """The script makes its model before there is a runner, which would seed."""
    script = tmp_path / "unseeded.py"
    script.write_text(UNSEEDED)
    report = verify(str(script), ["ddp"], steps=1, simulate=True, workers=workers(1))
    assert [row.status for row in report.rows] == ["same"], report


@pytest.mark.distributed
@pytest.mark.parametrize(
    "name, says", [("ddpp", 'did you mean "ddp"?'), ("no.such:Strategy", '"no.such:Strategy" cannot be imported')]
)
def test_an_unknown_name_is_told_before_anything_is_trained(
    script: str, group: WorkerGroup, name: str, says: str
) -> None:
    begun: list[str] = []
    with pytest.raises(ConfigError) as caught:
        verify(script, ["single", name], steps=1, workers=group, on_progress=begun.append)
    assert says in str(caught.value)
    assert begun == ["one device"]


@pytest.mark.distributed
@pytest.mark.parametrize(
    "part, note",
    [("Dropout", "Dropout: set to 0 in 1 modules"), ("BatchNorm", "Batch normalisation: 1 modules use their")],
)
def test_what_depends_on_the_split_is_turned_off_and_said(
    script: str, group: WorkerGroup, part: str, note: str
) -> None:
    report = verify(script, ["ddp"], arguments=["--part", part], steps=6, workers=group)
    assert report.exit_status == 0, report
    assert any(note in line for line in report.notes)


@pytest.mark.distributed
def test_a_loss_that_is_no_mean_is_explained(script: str, group: WorkerGroup) -> None:
    report = verify(script, ["ddp"], arguments=["--sum"], steps=2, workers=group)
    assert report.rows[0].status == "differs"
    assert any("define loss_weight(data)" in line for line in report.notes)
    weights = report.rounding["weights"]
    assert weights is not None
    assert weights < 1e-4, "what the loss makes of the parts is no rounding"


IN_BATCH_NEGATIVES = """
import torch
from torch import nn
from flextrain import FlexibleRunner, gather_with_gradient

class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, 4)
    def forward(self, x):
        x = self.net(x)
        {gather}
        return {{"loss": nn.functional.cross_entropy(x @ x.T, torch.arange(len(x)))}}

data = [{{"x": row}} for row in torch.randn(64, 6, generator=torch.Generator().manual_seed(1))]
FlexibleRunner(
    model=Pairs, work_dir="work_dirs", train_cfg=dict(max_epochs=2), optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
    train_dataloader=dict(dataset=data, batch_size=4, collate_fn=dict(type="default_collate")),
)
"""


@pytest.mark.parametrize("gather, verdict", [("", "differs"), ("x = gather_with_gradient(x)", "same")])
def test_in_batch_negatives_are_told_from_what_weights_repair(
    tmp_path: Path, group: WorkerGroup, gather: str, verdict: str
) -> None:
    (tmp_path / "pairs.py").write_text(IN_BATCH_NEGATIVES.format(gather=gather))
    report = verify(str(tmp_path / "pairs.py"), ["ddp"], steps=2, workers=group)
    assert report.rows[0].status == verdict
    (note,) = [line for line in report.notes if "no mean" in line]
    assert "no loss_weight and no accumulation repairs that" in note
    assert "gather_with_gradient(features)" in note


LOOKS_AT_ALL_GRADIENTS = """
import torch
from torch import nn
from flextrain import FlexibleRunner

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 4), nn.Linear(4, 1)
    def forward(self, x):
        features = self.first(x)
        if features.requires_grad:
            features.register_hook(lambda gradient: gradient / gradient.norm())
        return {"loss": self.last(features).square().mean()}

data = [{"x": row} for row in torch.randn(64, 6, generator=torch.Generator().manual_seed(1))]
FlexibleRunner(
    model=Net, work_dir="work_dirs", train_cfg=dict(max_epochs=2), optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
    train_dataloader=dict(dataset=data, batch_size=4, collate_fn=dict(type="default_collate")),
)
"""


@pytest.mark.distributed
def test_a_gradient_that_is_no_mean_is_no_rounding(tmp_path: Path, group: WorkerGroup) -> None:
    (tmp_path / "normalised.py").write_text(LOOKS_AT_ALL_GRADIENTS)
    report = verify(str(tmp_path / "normalised.py"), ["ddp"], steps=2, workers=group)
    assert report.rounding_of == ["exact"]
    assert report.rows[0].status == "differs"
    assert any("The gradient of a batch is not the mean of the gradients of its parts" in line for line in report.notes)


@pytest.mark.distributed
def test_the_batch_size_may_depend_on_the_number_of_processes(script: str, group: WorkerGroup) -> None:
    report = verify(script, ["single", "ddp"], arguments=["--share"], steps=4, workers=group)
    assert [row.status for row in report.rows] == ["same", "same"]


def test_bfloat16_has_its_own_tolerance(script: str, group: WorkerGroup) -> None:
    report = verify(
        script, ["ddp", "AveragesTwice"], arguments=["--wrapper", "AmpOptimWrapper"], steps=4, workers=group
    )
    good, bad = report.rows
    assert (good.status, good.dtype, bad.status) == ("same", "bfloat16", "differs")
    assert report.rounding_of == ["in parts"]  # float64 says nothing about rounding to bfloat16
    assert "float64" not in str(report)
    assert 5e-3 < good.tolerance < 5e-2


@pytest.mark.distributed
def test_the_scripts_own_options_reach_its_strategy(script: str, group: WorkerGroup) -> None:
    report = verify(script, ["ddp", "AveragesTwice"], arguments=["--broken"], steps=1, workers=group)
    assert [row.status for row in report.rows] == ["not run", "differs"]
    assert "strategy.oops" in report.rows[0].message


@pytest.mark.distributed
def test_what_fails_on_one_device_already(tmp_path: Path, group: WorkerGroup) -> None:
    with pytest.raises(ConfigError, match="train_dataloader: missing"):
        verify(write(tmp_path, "cfg = dict(model=1)"), workers=group)
    with pytest.raises(WorkerError, match="ZeroDivisionError"):
        verify(write(tmp_path, "1 / 0"), workers=group)


@pytest.mark.parametrize("wrong", [dict(processes=1), dict(steps=0)])
def test_wrong_numbers(script: str, wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=f"verify.{next(iter(wrong))}: . is not allowed"):
        verify(script, **wrong)  # type: ignore[arg-type]


def test_the_table_fits_a_narrow_terminal() -> None:
    first = FirstDifference(3, "net.weight", "model.net.weight", float("inf"), 1e-5, others=2)
    differences = dict(loss=1e-7, grad_norm=None, weights=float("inf"), optimizer=0.0)
    report = VerifyReport(
        "train.py", 2, 20, ["a note"], dict(differences), [Row("ddp", "differs", "float32", 1e-5, differences, first)]
    )
    text = str(report)
    for words in (
        "train.py: 20 steps on 2 processes",
        "differs",
        "1.0e-07",
        "after step 3: model.net.weight differs by inf",
        "Allowed: 1.0e-05 in float32, or 10 times (rounding)",
        "a note",
    ):
        assert words in text
    json.dumps(report.as_json(), allow_nan=False)


# The command


@pytest.mark.distributed
def test_the_command_prints_json_and_its_status_tells(
    script: str, group: WorkerGroup, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The session's processes: others would take longer to start than everything else here.
    monkeypatch.setattr("flextrain.verify.verify.WorkerGroup", lambda *args, **kwargs: Lent(group))
    options = ["--strategies", "ddp, AveragesTwice", "--steps", "2", "--json"]
    status = main(["verify", script, *options, "--", "--optimizer", "AdamW"])
    report = json.loads(capsys.readouterr().out)
    assert status == report["exit_status"] == 1
    assert [row["status"] for row in report["rows"]] == ["same", "differs"]
    first = report["rows"][1]["first"]
    assert (first["step"], first["entry"]) == (1, "optim.state.net.0.weight.exp_avg")
    assert first["hint"] == ", it is 0.5 times what it should be"


class Lent:
    """A group that its borrower does not end."""

    def __init__(self, group: WorkerGroup) -> None:
        self.run = group.run

    def close(self) -> None:
        pass


def test_the_command_refuses_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "train.py", "--strategies", ","]) == 2
    assert capsys.readouterr().err == "flextrain: verify.strategies: is empty, give names with commas between them\n"
    assert main(["verify", "train.py", "--simulate", "16", "--processes", "2"]) == 2
    assert capsys.readouterr().err == "flextrain: verify.processes: 2 was given with --simulate 16, give one of them\n"
    assert main(["verify", "train.py", "--simulate", "16", "--device", "cuda"]) == 2
    assert capsys.readouterr().err == 'flextrain: verify.device: "cuda" is not simulated, leave it out\n'
    with pytest.raises(SystemExit):
        main(["list", "--", "--amp"])
