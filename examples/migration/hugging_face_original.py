"""A language model with Hugging Face's Trainer; hugging_face_flextrain.py is the same training with flextrain.

python examples/migration/hugging_face_original.py
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, SequentialSampler
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


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


class InOrder(Trainer):
    """Reads the samples in order, so that both scripts see the same batches."""

    def _get_train_sampler(self, *args: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--work-dir", default="work_dirs/hugging_face_original")
    arguments = parser.parse_args()

    set_seed(0)
    config = GPT2Config(
        vocab_size=128, n_positions=64, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    model = GPT2LMHeadModel(config)
    options = TrainingArguments(
        output_dir=arguments.work_dir,
        num_train_epochs=arguments.epochs,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        learning_rate=2e-3,
        weight_decay=0.01,
        warmup_steps=4,
        lr_scheduler_type="linear",
        max_grad_norm=1.0,
        logging_steps=5,
        save_strategy="epoch",
        report_to=[],
        use_cpu=True,
        seed=0,
    )
    trainer = InOrder(model, options, train_dataset=Paragraphs())
    trainer.train()
    torch.save(model.state_dict(), f"{arguments.work_dir}/weights.pth")


if __name__ == "__main__":
    main()
