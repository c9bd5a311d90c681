"""Data of Hugging Face's datasets: with a length and as streams, divided over processes, saved and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")
pytest.importorskip("datasets")

from flextrain import FlexibleRunner
from flextrain.core.base.errors import ConfigError
from flextrain.core.model.batch_keys import check_batch_keys
from flextrain.testing import WorkerGroup

from .folders import model_of, save_tokenizer

SAMPLES = 24


class Sum(nn.Module):
    """Keeps the first token of every sample that it has trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.seen: list[int] = []

    def forward(self, input_ids: Tensor, **_: Any) -> Any:
        if self.training:
            self.seen += input_ids[:, 0].tolist()
        return {"loss": (self.scale * input_ids.float().mean()).square()}


def rows() -> Any:
    import datasets

    return datasets.Dataset.from_dict({"input_ids": [[number, 3] for number in range(SAMPLES)]})


def stream(shards: int) -> Any:
    return rows().to_iterable_dataset(num_shards=shards).with_format("torch")


def train(
    work_dir: Path, dataset: Any, *, updates: int = 3, resume: bool = False, log_level: str = "ERROR", **loader: Any
) -> list[int]:
    """Train some updates; return which samples this process has read."""
    runner = FlexibleRunner(
        model=dict(type=Sum),
        work_dir=work_dir,
        train_dataloader=dict(dataset=dataset, **{"batch_size": 2, "collate_fn": "default_collate", **loader}),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=1e-3)),
        train_cfg=dict(by_epoch=False, max_iters=updates),
        default_hooks=dict(checkpoint=dict(by_epoch=False, interval=1)),
        resume=resume,
        log_level=log_level,
    )
    model: Any = runner.train()
    runner.close()
    return list(model.seen)


def train_stream(work_dir: Path, shards: int, updates: int, resume: bool, workers: int = 0) -> list[int]:
    return train(work_dir, stream(shards), updates=updates, resume=resume, num_workers=workers)


def collator_of(folder: Path) -> dict[str, Any]:
    tokenizer = dict(type="transformers:AutoTokenizer.from_pretrained", pretrained_model_name_or_path=str(folder))
    return dict(type="transformers:DataCollatorForLanguageModeling", tokenizer=tokenizer, mlm=False)


def test_rows_with_a_collator_of_transformers(tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "tokenizer")
    rows().save_to_disk(tmp_path / "rows")
    on_disk = dict(type="datasets:load_from_disk", dataset_path=str(tmp_path / "rows"))
    found = train(tmp_path / "run", on_disk, updates=12, collate_fn=collator_of(tmp_path / "tokenizer"))
    assert sorted(found) == list(range(SAMPLES))


def test_a_stream_continues_where_it_was(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", stream(4), updates=9)
    first = train(tmp_path / "parts", stream(4), updates=4)
    assert first + train(tmp_path / "parts", stream(4), updates=9, resume=True) == whole


@pytest.mark.distributed
@pytest.mark.parametrize("shards", [4, 3])
def test_a_stream_is_divided_over_processes(workers2: WorkerGroup, tmp_path: Path, shards: int) -> None:
    pass_of_all = SAMPLES // 4
    found = workers2.run(train_stream, tmp_path / "whole", shards, pass_of_all, False)
    assert sorted(found[0] + found[1]) == list(range(SAMPLES))  # every sample once, on one of them
    first = workers2.run(train_stream, tmp_path / "parts", shards, 2, False)
    rest = workers2.run(train_stream, tmp_path / "parts", shards, pass_of_all, True)
    assert [a + b for a, b in zip(first, rest, strict=True)] == found


@pytest.mark.distributed
@pytest.mark.full
def test_workers_of_processes_read_their_own(workers2: WorkerGroup, tmp_path: Path) -> None:
    found = workers2.run(train_stream, tmp_path, 4, SAMPLES // 4, False, 2)
    assert sorted(found[0] + found[1]) == list(range(SAMPLES))


class NoCollator:
    pass


class Demanding:
    """A collator that refuses what it is given, with an error of several lines."""

    def __init__(self, width: int) -> None:
        raise KeyError(f"no width {width}\nin the table")

    def __call__(self, samples: list[Any]) -> Any:
        return samples


@pytest.mark.parametrize(
    "loader, message",
    [
        (
            dict(collate_fn=dict(type=NoCollator)),
            "collate_fn.type: NoCollator is no collator, its objects cannot be called",
        ),
        (dict(collate_fn=dict(type=Demanding, width=3)), r"^train_dataloader\.collate_fn: .*no width 3"),
        (
            dict(collate_fn=dict(type="transformers:DataCollatorForLanguageModeling")),
            "train_dataloader.collate_fn.tokenizer: missing",
        ),
        (
            dict(collate_fn=dict(type="transformers:DataCollatorForLanguageModelling")),
            'did you mean "DataCollatorForLanguageModeling"',
        ),
        (
            dict(collate_fn=dict(type="transformers:DataCollatorWithPadding", tokeniser=3)),
            'collate_fn.tokeniser: .*did you mean "tokenizer"',
        ),
        (
            dict(
                collate_fn=dict(type="transformers:DataCollatorWithPadding", tokenizer=dict(path="x", type="no:Where"))
            ),
            "collate_fn.tokenizer.type",
        ),
    ],
)
def test_wrong_collators_are_told_in_a_line(tmp_path: Path, loader: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        train(tmp_path, rows(), **loader)
    assert "\n" not in str(raised.value)


def test_a_tokenizer_that_is_not_there_is_told_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train_dataloader\.collate_fn\.tokenizer: ") as raised:
        train(tmp_path / "run", rows(), collate_fn=collator_of(tmp_path / "missing"))
    assert "\n" not in str(raised.value)


def test_a_stream_that_was_divided_for_others_is_refused(tmp_path: Path) -> None:
    from datasets.distributed import split_dataset_by_node

    with pytest.raises(
        ConfigError, match="is divided already, as part 1 of 2, and this process has to read part 0 of 1"
    ):
        train(tmp_path, split_dataset_by_node(stream(4), rank=1, world_size=2))


def test_splits_are_not_a_dataset(tmp_path: Path) -> None:
    from datasets import DatasetDict

    line = r"train_dataloader\.dataset: is a DatasetDict of train, give one of its splits: split=\"train\""
    with pytest.raises(ConfigError, match=line):
        train(tmp_path, DatasetDict(train=rows()))


def test_columns_that_the_model_would_not_use(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Models of transformers take any keyword argument."""
    with pytest.raises(
        ConfigError, match=r"^batch\.attention_msk: .* LlamaForCausalLM.*did you mean attention_mask\?$"
    ):
        check_batch_keys(model_of("llama"), {"input_ids": 1, "attention_msk": 1})
    check_batch_keys(model_of("llama"), {"input_ids": 1, "output_attentions": False, "answer": ["a"]})
    assert "LlamaForCausalLM makes no use of answer; remove" in caplog.text
    assert "output_attentions" not in caplog.text
