"""Runs of a small Llama with LoRA, under any strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from flextrain import FlexibleRunner, Hook

from .training import whole

SIZES: dict[str, Any] = dict(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=64,
)
TARGETS = ["q_proj", "v_proj", "o_proj"]
LORA: dict[str, Any] = dict(type="LoRA", r=4, target_modules=TARGETS)
STRATEGIES: dict[str, dict[str, Any]] = {
    "single": dict(type="SingleDeviceStrategy"),
    "ddp": dict(type="DDPStrategy"),
    "fsdp": dict(type="FSDPStrategy"),
    "zero1": dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=1)),
    "zero2": dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=2)),
    # The constructors of transformers initialise layers a second time, which ZeRO-3 cannot do while it divides them.
    "zero3": dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=3)),
    "tp2": dict(type="MeshStrategy", tp=2),
    "pp2": dict(type="MeshStrategy", pp=2),
}
WHOLE_BATCH = ("single", "tp2", "pp2")
"""Every process, or the only one, has all samples."""


def llama(**sizes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**{**SIZES, "max_position_embeddings": 64, **sizes}))


class Tokens(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 64, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


class Losses(Hook):
    """Keeps the losses of this process."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        self.values.append(float(outputs["loss"]))


def adapted_run(folder: Path, strategy: str, epochs: int = 2, **changes: Any) -> tuple[FlexibleRunner, Losses]:
    losses = Losses()
    options = {"exclude_frozen_parameters": True, **changes.pop("options", {})}
    arguments: dict[str, Any] = dict(
        model=llama,
        strategy={**STRATEGIES[strategy], "device": "cpu", **options},
        train_dataloader=dict(
            dataset=Tokens(),
            batch_size=4 if strategy in WHOLE_BATCH else 2,
            sampler=dict(type="DefaultSampler", shuffle=False),
            collate_fn="default_collate",
        ),
        optim_wrapper=dict(optimizer=dict(type="AdamW", lr=1e-2)),
        train_cfg=dict(max_epochs=epochs),
        work_dir=folder,
        transforms=[LORA],
        randomness=dict(seed=3),
        log_level="WARNING",
        default_hooks=dict(checkpoint=dict(type="CheckpointHook", interval=1, overwrite=True)),
        custom_hooks=[losses],
    )
    return FlexibleRunner(**{**arguments, **changes}), losses


def adapted(
    folder: Path, strategy: str, epochs: int = 2, **changes: Any
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of this process, and the trained parameters at the end, whole."""
    runner, losses = adapted_run(folder, strategy, epochs, **changes)
    try:
        runner.train()
        state = {name: t for name, t in runner.strategy.model_state().items() if "lora_" in name}
        return losses.values, {name: whole(t).detach().clone() for name, t in state.items()}
    finally:
        runner.close()


def means(results: list[tuple[list[float], Any]]) -> list[float]:
    """The losses of an update over all processes."""
    return [sum(values) / len(values) for values in zip(*(losses for losses, _ in results), strict=True)]
