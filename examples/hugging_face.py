"""Train a Hugging Face model without changes: its forward returns an object with a loss.

    python examples/hugging_face.py
    torchrun --nproc-per-node 2 examples/hugging_face.py
    torchrun --nproc-per-node 4 examples/hugging_face.py --mesh tp=2,dp_shard=2

A small BERT, built from a config, learns to distinguish Python code from text about Python, byte by byte. Both texts come
with Python: nothing is downloaded.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import pydoc_data.topics
import typing
import unittest.mock
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification

from flextrain import BaseMetric, FlexibleRunner

LENGTH = 64
CODE = [argparse, asyncio.base_events, inspect, typing, unittest.mock]


class Snippets(Dataset[dict[str, Tensor]]):
    """Snippets of LENGTH bytes, labelled 0 for prose and 1 for code; every eighth belongs to the validation part."""

    def __init__(self, train: bool) -> None:
        texts = ["\n".join(pydoc_data.topics.topics.values()), "\n".join(inspect.getsource(module) for module in CODE)]
        self.samples = [
            (text[start : start + LENGTH], label)
            for label, text in enumerate(text.encode("ascii", "replace") for text in texts)
            for number, start in enumerate(range(0, len(text) - LENGTH, LENGTH))
            if (number % 8 != 0) == train
        ]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        text, label = self.samples[index]
        return {"input_ids": torch.tensor(list(text)), "labels": torch.tensor(label)}


class Accuracy(BaseMetric):
    def process(self, data_batch: dict[str, Tensor], data_samples: Any) -> None:
        predicted = data_samples.logits.argmax(dim=1).cpu()
        self.results.extend((predicted == data_batch["labels"].cpu()).tolist())

    def compute_metrics(self, results: list[bool]) -> dict[str, float]:
        return {"accuracy": 100 * sum(results) / len(results)}


def dataloader(train: bool) -> dict[str, Any]:
    return dict(
        batch_size=64,
        dataset=Snippets(train),
        sampler=dict(type="DefaultSampler", shuffle=train),
        collate_fn=dict(type="default_collate"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-iters", type=int, default=400)
    parser.add_argument("--mesh", help="several kinds of parallelism: tp=2,dp_shard=2")
    parser.add_argument("--work-dir", default="work_dirs/hugging_face")
    arguments = parser.parse_args()
    config = BertConfig(
        vocab_size=128,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=LENGTH,
        num_labels=2,
    )
    FlexibleRunner(
        model=lambda: BertForSequenceClassification(config),
        work_dir=arguments.work_dir,
        # Without --mesh, one device or DDP, by the number of processes.
        strategy=dict(type=f"mesh:{arguments.mesh}", wrap="blocks") if arguments.mesh else None,
        train_dataloader=dataloader(train=True),
        optim_wrapper=dict(optimizer=dict(type="AdamW", lr=2e-3), clip_grad=dict(max_norm=1.0)),
        param_scheduler=dict(type="CosineAnnealingLR", by_epoch=False, T_max=arguments.max_iters),
        train_cfg=dict(by_epoch=False, max_iters=arguments.max_iters, val_interval=arguments.max_iters),
        val_dataloader=dataloader(train=False),
        val_cfg=dict(),
        val_evaluator=dict(type=Accuracy),
        default_hooks=dict(
            checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=arguments.max_iters, overwrite=True)
        ),
        randomness=dict(seed=0),
    ).train()


if __name__ == "__main__":
    main()
