"""Train a language model on preferences (DPO): a policy, and a frozen reference that it starts from.

    python examples/preferences.py
    torchrun --nproc-per-node 2 examples/preferences.py --strategy fsdp
    torchrun --nproc-per-node 2 examples/preferences.py --strategy zero3 --exclude-reference

A small Llama, built from a config, learns to prefer an answer that repeats the prompt over one with mistakes. The method is that of
https://arxiv.org/abs/2305.18290. The pairs are generated: nothing is downloaded.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from flextrain import BaseMetric, BaseModel, FlexibleRunner

VOCABULARY = 32
SEPARATOR, END, PADDING = 1, 2, 0
FIRST_LETTER = 3

Pair = tuple[list[int], list[int], list[int]]
"""Token ids of a prompt, of the answer that is preferred, and of the other one."""


class Pairs(Dataset[Pair]):
    """Prompts of 3 to 8 letters; the preferred answer repeats them, the other has some mistakes."""

    def __init__(self, length: int, first: int = 0) -> None:
        self.length, self.first = length, first

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Pair:
        generator = torch.Generator().manual_seed(self.first + index)
        length = int(torch.randint(3, 9, (), generator=generator))
        letters = torch.randint(FIRST_LETTER, VOCABULARY, (length,), generator=generator)
        wrong = torch.rand(length, generator=generator) < 0.5
        wrong[int(torch.randint(length, (), generator=generator))] = True
        shifts = torch.randint(1, VOCABULARY - FIRST_LETTER, (length,), generator=generator)
        others = (letters - FIRST_LETTER + shifts) % (VOCABULARY - FIRST_LETTER) + FIRST_LETTER
        return (
            [*letters.tolist(), SEPARATOR],
            [*letters.tolist(), END],
            [*torch.where(wrong, others, letters).tolist(), END],
        )


def collate(pairs: Sequence[Pair]) -> dict[str, Tensor]:
    """Pad the texts to one length.

    ``input_ids``: (pairs, 2, length) int64, first the preferred text; ``is_answer``: the same shape, bool: tokens whose likelihood
    counts. Pairs are the first dimension, so that whatever divides a batch leaves them together.
    """
    texts = [prompt + answer for prompt, *answers in pairs for answer in answers]
    length = max(map(len, texts))
    input_ids = torch.tensor([text + [PADDING] * (length - len(text)) for text in texts])
    begins = torch.tensor([len(prompt) for prompt, _, _ in pairs]).repeat_interleave(2)
    ends, places = torch.tensor([len(text) for text in texts]), torch.arange(length)
    is_answer = (places >= begins[:, None]) & (places < ends[:, None])
    return {"input_ids": input_ids.view(-1, 2, length), "is_answer": is_answer.view(-1, 2, length)}


class Preferences(BaseModel):
    """The policy is trained; the reference is the policy as it was at the beginning, and stays so.

    Args:
        policy: a causal language model of transformers.
        beta: how strongly the policy is held near the reference.
    """

    def __init__(self, policy: nn.Module, beta: float) -> None:
        super().__init__()
        self.policy, self.beta = policy, beta
        self.reference = copy.deepcopy(policy).requires_grad_(False)

    def train(self, mode: bool = True) -> Preferences:
        super().train(mode)
        self.reference.eval()  # without dropout, also while the policy has it
        return self

    def forward(self, input_ids: Tensor, is_answer: Tensor, mode: str = "tensor") -> Any:
        input_ids, is_answer = input_ids.flatten(0, 1), is_answer.flatten(0, 1)
        ours = log_likelihoods(self.policy, input_ids, is_answer)
        with torch.no_grad():
            theirs = log_likelihoods(self.reference, input_ids, is_answer)
        chosen, rejected = (self.beta * (ours - theirs)).view(-1, 2).unbind(1)
        margin = chosen - rejected
        if mode == "loss":
            return {
                "loss": -F.logsigmoid(margin).mean(),
                "margin": margin.detach().mean(),
                "reward_chosen": chosen.detach().mean(),
            }
        return margin


def log_likelihoods(model: nn.Module, input_ids: Tensor, is_answer: Tensor) -> Tensor:
    """The log likelihood of each answer, (texts,) in float32. Padding stands at the end, where causal attention needs no mask."""
    logits = model(input_ids=input_ids, use_cache=False).logits[:, :-1].float()
    found = logits.log_softmax(-1).gather(2, input_ids[:, 1:, None]).squeeze(2)
    return (found * is_answer[:, 1:]).sum(1)


class PreferenceAccuracy(BaseMetric):
    """Percentage of pairs in which the policy has moved towards the preferred answer."""

    def process(self, data_batch: Any, data_samples: Tensor) -> None:
        self.results += data_samples.tolist()

    def compute_metrics(self, results: list[float]) -> dict[str, float]:
        return {
            "accuracy": 100 * sum(margin > 0 for margin in results) / len(results),
            "margin": sum(results) / len(results),
        }


def language_model(layers: int) -> nn.Module:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=32,
        pad_token_id=PADDING,
        bos_token_id=SEPARATOR,
        eos_token_id=END,
    )
    return LlamaForCausalLM(config)


def dataloader(dataset: Dataset[Any], batch_size: int, shuffle: bool) -> dict[str, Any]:
    return dict(
        batch_size=batch_size,
        dataset=dataset,
        sampler=dict(type="DefaultSampler", shuffle=shuffle),
        collate_fn=collate,
    )


def strategy(arguments: argparse.Namespace) -> Any:
    options: dict[str, Any] = dict(exclude_frozen_parameters=True) if arguments.exclude_reference else {}
    name = arguments.strategy
    if name is not None and name.startswith(("fsdp", "mesh")):
        options["wrap"] = ["LlamaDecoderLayer"]  # each layer of both models is gathered when it computes
    if name is None and not options:
        return None
    return dict(type=name or "single", **options)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategy", help="ddp, fsdp, zero3, mesh:tp=2 and so on; default: one device or DDP")
    parser.add_argument("--exclude-reference", action="store_true", help="leave the reference out of checkpoints")
    parser.add_argument("--max-iters", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=32, help="pairs per process")
    parser.add_argument("--accumulate", type=int, default=1, help="batches per update")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument("--work-dir", default="work_dirs/preferences")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in --work-dir")
    return parser.parse_args(arguments)


def make_runner(arguments: argparse.Namespace) -> FlexibleRunner:
    checkpoint = dict(type="CheckpointHook", by_epoch=False, interval=50, max_keep_ckpts=2, overwrite=True)
    return FlexibleRunner(
        # The same weights in every run, so that the reference need not be in checkpoints: they come from the seed.
        model=lambda: Preferences(language_model(arguments.layers), arguments.beta),
        work_dir=arguments.work_dir,
        strategy=strategy(arguments),
        train_dataloader=dataloader(Pairs(20_000), arguments.batch_size, shuffle=True),
        optim_wrapper=dict(
            optimizer=dict(type="AdamW", lr=1e-3),
            clip_grad=dict(max_norm=1.0),
            accumulative_counts=arguments.accumulate,
        ),
        train_cfg=dict(by_epoch=False, max_iters=arguments.max_iters, val_interval=50),
        val_dataloader=dataloader(Pairs(256, first=1_000_000), arguments.batch_size, shuffle=False),
        val_cfg=dict(),
        val_evaluator=dict(type=PreferenceAccuracy),
        default_hooks=dict(checkpoint=checkpoint),
        randomness=dict(seed=0),
        resume=arguments.resume,
    )


if __name__ == "__main__":
    make_runner(parse_arguments()).train()
