"""Data: empty, of other forms than the model takes, or never ending."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from .parts import REMOVE, Changed, Row, Samples, Stream, advises

LOADER = dict(batch_size=4, collate_fn="default_collate")


def train_on(dataset: Any, **options: Any) -> dict[str, Any]:
    return {"train_dataloader": {**LOADER, "dataset": dataset, **options}}


def no_batch() -> None: ...


ROWS = [
    Row("batch larger than the data, dropped", train_on(Samples(), batch_size=64, drop_last=True), "train_dataloader.batch_size: 64 is more than the 12 samples"),
    Row("batch larger than the validation data, dropped", {"val_dataloader.batch_size": 64, "val_dataloader.drop_last": True}, "val_dataloader.batch_size: 64 is more than the 12 samples"),
    Row("DataLoader that drops its only batch", {"train_dataloader": DataLoader(Samples(), 64, drop_last=True)}, "train_dataloader.batch_size: 64 is more than the 12 samples"),
    Row("empty dataset", train_on([]), "train_dataloader.dataset: list is empty"),
    Row("empty validation data", {"val_dataloader.dataset": Samples(0)}, "val_dataloader.dataset: Samples is empty"),
    Row("empty dataset, built later", train_on(dict(type=Samples, length=0)), "train_dataloader.dataset: Samples is empty"),
    Row("dataset that is smaller than a batch, built later", train_on(dict(type=Samples, length=3), drop_last=True), "train_dataloader.batch_size: 4 is more than the 3 samples"),
    Row("DataLoader of an empty dataset", {"val_dataloader": DataLoader(Samples(0))}, "val_dataloader.dataset: Samples is empty"),
    Row("no batches in a list", {"train_dataloader": []}, "train_dataloader: "),
    Row("no validation batches in a list", {"val_dataloader": []}, "val_dataloader: "),
    Row("empty stream", {**train_on(Stream(0)), "train_cfg": dict(by_epoch=False, max_iters=2)}, "train_dataloader: "),
    Row("stream by epoch", train_on(Stream()), "train_cfg.by_epoch: the training data have no end or no length"),
    Row("function without batches", {"train_dataloader": no_batch, "train_cfg": dict(by_epoch=False, max_iters=2)}, "train_dataloader"),
    Row("class instead of a loader", {"train_dataloader": DataLoader}, "train_dataloader"),
    Row("path instead of a dataset", train_on("data/train"), 'train_dataloader.dataset: "data/train" is no known dataset'),
    Row("no dataset", train_on(None), "train_dataloader.dataset: NoneType is no dataset"),
    Row("batch size True", {"train_dataloader.batch_size": True}, "train_dataloader.batch_size: True is not allowed"),
    Row("batch size automatic", {"train_dataloader.batch_size": "automatic"}, "train_dataloader.batch_size"),
    Row("shuffle by text", {"train_dataloader.shuffle": "yes"}, "train_dataloader.shuffle"),
    Row("sampler without data", {"train_dataloader.sampler": dict(type="DefaultSampler", dataset=Samples())}, "train_dataloader.sampler.dataset: is filled in"),
    Row("list of samplers", {"train_dataloader.sampler": []}, "train_dataloader"),
    Row("batch sampler without a type", {"train_dataloader.batch_sampler": dict(drop_last=True)}, "train_dataloader.batch_sampler.type: missing"),
    Row("shuffled stream", train_on(Stream(), shuffle=True), "train_dataloader.shuffle: has no meaning with an IterableDataset"),
    Row("PyTorch's words", {"train_dataloader.samples_per_gpu": 2}, "train_dataloader.samples_per_gpu: unknown key"),
    Row("MMEngine's old words", {"train_dataloader.workers_per_gpu": 2}, "train_dataloader.workers_per_gpu: unknown key"),
    advises("lists reach a Linear", {"train_dataloader.collate_fn": REMOVE}, 'the batch holds lists of samples, because a dataloader that is a dict does not stack them; train_dataloader=dict(collate_fn="default_collate")'),
    advises("lists reach a Linear in validation", {"val_dataloader.collate_fn": REMOVE}, 'val_dataloader=dict(collate_fn="default_collate") makes tensors'),
    advises("lists of tuples", {"train_dataloader": dict(batch_size=4, dataset=TensorDataset(Samples().x, Samples().y))}, 'train_dataloader=dict(collate_fn="default_collate") makes tensors'),
    advises("label out of range", train_on(Samples(classes=3)), "the model has 2 outputs, so labels go from 0 to 1, and one in train_dataloader is 2"),
    advises("labels from 1", train_on(Changed(lambda i, s: {**s, "y": s["y"] + 1})), "labels go from 0 to 1"),
    advises("label -1", train_on(Changed(lambda i, s: {**s, "y": s["y"] - 1})), "one in train_dataloader is -1"),
    advises("NumPy's float64", train_on(Samples(dtype=torch.float64)), "tensors of different dtypes meet, NumPy's default is float64"),
    advises("integers as features", train_on(Changed(lambda i, s: {**s, "x": s["x"].long()})), "inputs are floating point (.float())"),
    advises("float labels", train_on(Changed(lambda i, s: {**s, "y": s["y"].float()})), "labels of classes are integers"),
    advises("labels in a column", train_on(Changed(lambda i, s: {**s, "y": s["y"].reshape(1)})), "labels of cross_entropy"),
    advises("fields of other names", train_on(Changed(lambda i, s: {"image": s["x"], "label": s["y"]})), "becomes keyword arguments, this one has image, label; Net.forward takes x, y, mode"),
    advises("a field is missing", train_on(Changed(lambda i, s: {"x": s["x"]})), "becomes keyword arguments, this one has x; Net.forward takes x, y, mode"),
    advises("a field too many", train_on(Changed(lambda i, s: {**s, "path": "a"})), "becomes keyword arguments, this one has x, y, path"),
    advises("a tuple too long", train_on(Changed(lambda i, s: (s["x"], s["y"], 0, 0))), "becomes positional arguments, this one has 4"),
    advises("images of different sizes", train_on(Changed(lambda i, s: {**s, "x": s["x"][: 1 + i % 3]})), "samples of one batch have different shapes"),
    advises("None in a sample", train_on(Changed(lambda i, s: {**s, "path": None})), "collate_fn"),
    advises("no sample", train_on(Changed(lambda i, s: None)), "collate_fn"),
    advises("features of another size", train_on(Changed(lambda i, s: {**s, "x": s["x"][:2]})), "which must be the last dimension of its input of shape (4, 2)"),
]  # fmt: skip
