"""Pretrain a small Llama on files of tokens, with any parallelism, and continue an interrupted run with any other.

    python examples/pretraining.py
    torchrun --nproc-per-node 2 examples/pretraining.py --strategy fsdp
    torchrun --nproc-per-node 2 examples/pretraining.py --strategy mesh:tp=2 --batch-size 16
    torchrun --nproc-per-node 2 examples/pretraining.py --strategy mesh:pp=2 --batch-size 16
    torchrun --nproc-per-node 4 examples/pretraining.py --strategy mesh:dp_shard=2,tp=2 --batch-size 8

The first run writes the files: a mixture of prose, which is what help() shows about keywords and topics, and code, which is Python's
own. Nothing is downloaded. To continue a run that was stopped, add --resume; the strategy and the number of processes may be
others. An update has the same sequences if --batch-size times the number of data shards is the same.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import os
import pydoc_data.topics
import typing
import unittest.mock
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from flextrain import FlexibleRunner

END = 256  # a token is a byte, or the end of a document
VOCABULARY = 320  # a multiple of 64 can be divided
SHARDS = 3
CODE = [asyncio.locks, argparse, asyncio.base_events, inspect, typing, unittest.mock]


def write_tokens(folder: Path) -> None:
    """Write ``prose-*.bin`` and ``code-*.bin``, and one of each to validate with; files that are there stay as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        "prose": list(pydoc_data.topics.topics.values()),
        "code": [inspect.getsource(module) for module in CODE],
    }
    for name, documents in texts.items():
        for shard in range(SHARDS):
            write_shard(folder / f"{name}-{shard}.bin", documents[1 + shard :: SHARDS])
        write_shard(folder / f"held_out-{name}.bin", documents[:1])  # about 20,000 tokens in all


def write_shard(path: Path, documents: Iterable[str]) -> None:
    """Write a file of uint16. Processes may do it at the same time: the first complete file is kept."""
    if path.exists():
        return
    tokens = [token for text in documents for token in (*text.encode(), END)]
    own = path.with_name(f".{path.name}.{os.getpid()}")
    np.array(tokens, np.uint16).tofile(own)
    try:
        os.link(own, path)
    except FileExistsError:
        pass
    finally:
        own.unlink()


def packed(files: Path, length: int, **options: Any) -> dict[str, Any]:
    """Sequences of ``length`` tokens from the documents in ``files``, a pattern."""
    source = dict(type="TokenFiles", paths=str(files), dtype="uint16", end_token=END)
    return dict(type="PackedTokens", source=source, length=length, vocab_size=VOCABULARY, **options)


def language_model(arguments: argparse.Namespace) -> nn.Module:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=arguments.dim,
        intermediate_size=3 * arguments.dim,
        num_hidden_layers=arguments.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=arguments.length,
        bos_token_id=END,
        eos_token_id=END,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def strategy(name: str | None) -> Any:
    if name is None or not name.startswith(("fsdp", "mesh")):
        return name
    return dict(type=name, wrap="blocks")  # each layer is gathered when it computes


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategy", help="ddp, fsdp, zero3, mesh:tp=2 and so on; default: one device or DDP")
    parser.add_argument("--data-dir", type=Path, default=Path("work_dirs/pretraining_tokens"))
    parser.add_argument("--prose", type=float, default=0.7, help="share of prose in the mixture")
    parser.add_argument("--length", type=int, default=128, help="tokens in a sequence")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences of a micro-batch on each data shard")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches per update; a pipeline needs a few")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--max-iters", type=int, default=300)
    parser.add_argument("--interval", type=int, default=50, help="updates between checkpoints, and between validations")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16 where it is safe")
    parser.add_argument("--work-dir", default="work_dirs/pretraining")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in --work-dir")
    return parser.parse_args(arguments)


def make_runner(arguments: argparse.Namespace) -> FlexibleRunner:
    folder, length, updates = arguments.data_dir, arguments.length, arguments.max_iters
    write_tokens(folder)
    mixture = dict(
        type="Mixture",
        sources=[packed(folder / f"{name}-*.bin", length, shuffle_documents=True) for name in ("prose", "code")],
        weights=[arguments.prose, 1 - arguments.prose],
    )
    warmup = max(updates // 10, 1)  # one update has the whole learning rate at once
    return FlexibleRunner(
        model=lambda: language_model(arguments),
        work_dir=arguments.work_dir,
        strategy=strategy(arguments.strategy),
        train_dataloader=dict(
            dataset=mixture,
            batch_size=arguments.batch_size,
            # One pass follows the other inside of a batch, so that every sequence of a pass is trained on exactly once.
            sampler=dict(type="InfiniteSampler"),
            collate_fn="default_collate",
        ),
        optim_wrapper=dict(
            type="AmpOptimWrapper" if arguments.bf16 else "OptimWrapper",
            optimizer=dict(type="AdamW", lr=arguments.lr, betas=(0.9, 0.95), weight_decay=0.1),
            paramwise_cfg=dict(norm_decay_mult=0.0),
            clip_grad=dict(max_norm=1.0),
            accumulative_counts=arguments.accumulate,
            **(dict(dtype="bfloat16") if arguments.bf16 else {}),
        ),
        param_scheduler=[
            dict(type="LinearLR", by_epoch=False, start_factor=0.1, end=warmup),
            dict(type="CosineAnnealingLR", by_epoch=False, begin=warmup, T_max=max(updates - warmup, 1), eta_min=1e-4),
        ],
        train_cfg=dict(by_epoch=False, max_iters=updates, val_interval=arguments.interval),
        val_dataloader=dict(
            dataset=packed(folder / "held_out-*.bin", length),
            batch_size=arguments.batch_size,
            sampler=dict(type="DefaultSampler", shuffle=False),
            collate_fn="default_collate",
        ),
        val_cfg=dict(),
        val_evaluator=dict(type="Perplexity"),
        default_hooks=dict(
            checkpoint=dict(
                type="CheckpointHook", by_epoch=False, interval=arguments.interval, max_keep_ckpts=2, overwrite=True
            )
        ),
        custom_hooks=[dict(type="TokenRateHook")],
        randomness=dict(seed=0),
        resume=arguments.resume,
    )


if __name__ == "__main__":
    make_runner(parse_arguments()).train()
