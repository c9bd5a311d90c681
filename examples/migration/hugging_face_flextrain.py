"""The training of hugging_face_original.py with flextrain: the same weights.

python examples/migration/hugging_face_flextrain.py
torchrun --nproc-per-node 2 examples/migration/hugging_face_flextrain.py
"""

from __future__ import annotations

import argparse
import pydoc_data.topics

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel

from flextrain import FlexibleRunner


class Paragraphs(Dataset[dict[str, Tensor]]):
    """Paragraphs of Python's own documentation as bytes, padded to 64; padding is not trained on."""

    def __init__(self) -> None:
        text = "\n\n".join(value for _, value in sorted(pydoc_data.topics.topics.items()))
        paragraphs = [part.encode("ascii", "replace")[:64] for part in text.split("\n\n") if len(part) > 8]
        self.samples = [torch.tensor(list(part)) for part in paragraphs[:320]]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = self.samples[index]
        ids, labels = torch.zeros(64, dtype=torch.long), torch.full((64,), -100)
        ids[: len(sample)] = labels[: len(sample)] = sample
        return {"input_ids": ids, "labels": labels}


class LanguageModel(GPT2LMHeadModel):
    def loss_weight(self, data: dict[str, Tensor]) -> Tensor:
        """The number of tokens in the loss's mean, so that each token of an update counts the same."""
        return (data["labels"][:, 1:] != -100).sum()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--work-dir", default="work_dirs/hugging_face_flextrain")
    arguments = parser.parse_args()

    config = GPT2Config(
        vocab_size=128, n_positions=64, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    dataset = Paragraphs()
    updates, warmup = arguments.epochs * len(dataset) // 32, 4
    runner = FlexibleRunner(
        model=lambda: LanguageModel(config),
        train_dataloader=DataLoader(dataset, batch_size=16),
        optim_wrapper=dict(
            optimizer=dict(type="AdamW", lr=2e-3, weight_decay=0.01),
            paramwise_cfg=dict(bias_decay_mult=0.0, norm_decay_mult=0.0),
            accumulative_counts=2,
            clip_grad=dict(max_norm=1.0),
        ),
        param_scheduler=dict(
            type="LambdaLR",
            by_epoch=False,
            lr_lambda=lambda step: min(step / warmup, (updates - step) / (updates - warmup)),
        ),
        train_cfg=dict(max_epochs=arguments.epochs),
        default_hooks=dict(logger=dict(interval=5), checkpoint=dict(interval=1, overwrite=True)),
        randomness=dict(seed=0),
        work_dir=arguments.work_dir,
    )
    model = runner.train()
    if runner.rank == 0:
        torch.save(model.state_dict(), f"{arguments.work_dir}/weights.pth")


if __name__ == "__main__":
    main()
