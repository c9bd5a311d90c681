"""Reinforcement learning (GRPO) in a loop of one's own: a small Llama learns to add two digits, rewarded for right digits.

    python examples/grpo.py
    torchrun --nproc-per-node 2 examples/grpo.py --strategy fsdp
    torchrun --nproc-per-node 2 examples/grpo.py --strategy mesh:tp=2

Every step samples a group of answers to each problem, rewards them, and makes updates with the advantages within the groups, as in
https://arxiv.org/abs/2402.03300, without a penalty for leaving a reference. Sampling, rewards and updates use one Engine. The random
numbers of a sample depend on its number, so that every strategy gets the same rewards. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from flextrain import Engine

PLUS, EQUALS, VOCABULARY = 10, 11, 12
DIGITS = 2
"""Tokens of an answer: the tens and the ones of a sum."""


def build_model(width: int) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=8,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).double()  # type: ignore[no-any-return]  # samples then do not depend on rounding


def problems(step: int, count: int, group: int) -> Tensor:
    """``a + b =`` of the step, each ``group`` times: (count * group, 4)."""
    digits = torch.randint(0, 10, (count, 2), generator=torch.Generator().manual_seed(step))
    rows = torch.stack([digits[:, 0], torch.full((count,), PLUS), digits[:, 1], torch.full((count,), EQUALS)], 1)
    return rows.repeat_interleave(group, 0)


def rewards(texts: Tensor) -> Tensor:
    """The share of right digits of each answer."""
    total = texts[:, 0] + texts[:, 2]
    return (texts[:, -DIGITS:] == torch.stack([total // 10, total % 10], 1)).double().mean(1)


def next_logits(output: Any, batch: dict[str, Tensor]) -> Tensor:
    return output.logits[:, -1]  # type: ignore[no-any-return]


def log_probs(output: Any, batch: dict[str, Tensor]) -> Tensor:
    """Log-probabilities of the tokens of the answers, (samples, DIGITS)."""
    logits = output.logits[:, -DIGITS - 1 : -1].log_softmax(-1)
    return logits.gather(-1, batch["input_ids"][:, -DIGITS:, None]).squeeze(-1)  # type: ignore[no-any-return]


def policy_loss(output: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    ratio = (log_probs(output, batch) - batch["before"]).exp()
    advantages = batch["advantages"][:, None]
    gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return {"loss": -gain.mean(), "ratio": ratio.detach().mean()}


def sample(engine: Engine, texts: Tensor, noise: Tensor) -> Tensor:
    """Texts with answers; ``noise`` is that of each sample, digit and token, (samples, DIGITS, VOCABULARY)."""
    for digit in range(DIGITS):
        logits = engine.forward({"input_ids": texts}, next_logits).cpu()
        # The largest of logits with Gumbel noise is a sample of their distribution.
        texts = torch.cat([texts, (logits + noise[:, digit]).argmax(-1, keepdim=True)], 1)
    return texts


def train(engine: Engine, steps: int, count: int, group: int, updates: int) -> list[float]:
    """Return the mean reward of each step over all processes."""
    data = engine.strategy.topology.data
    if count % data.count:
        raise SystemExit(
            f"--problems: {count} is not a multiple of the {data.count} processes that have data of their own"
        )
    history = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(1_000_000 + step)
        uniform = torch.rand(count * group, DIGITS, VOCABULARY, generator=generator, dtype=torch.float64)
        noise = -(-uniform.clamp_min(1e-12).log()).log()
        own = slice(*(part * count // data.count * group for part in (data.index, data.index + 1)))
        texts = sample(engine, problems(step, count, group)[own], noise[own])
        reward = rewards(texts)
        of_group = reward.view(-1, group)
        advantages = (of_group - of_group.mean(1, keepdim=True)) / (of_group.std(1, keepdim=True) + 1e-4)
        batch = {"input_ids": texts, "advantages": advantages.flatten()}
        batch["before"] = engine.forward(batch, log_probs)
        for _ in range(updates):
            engine.forward_backward(batch, policy_loss)
            engine.optim_step()
        history.append(float(data.mean(reward.mean())))
        if step % 20 == 0 and engine.strategy.topology.rank == 0:
            print(f"step {step}  reward {history[-1]:.3f}", flush=True)
    return history


def main(arguments: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--problems", type=int, default=32)
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--updates", type=int, default=2)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-3)
    given = parser.parse_args(arguments)
    optim = dict(optimizer=dict(type="AdamW", lr=given.lr, weight_decay=0.0), clip_grad=dict(max_norm=1.0))
    with Engine(build_model(given.width), given.strategy, optim) as engine:
        return train(engine, given.steps, given.problems, given.group, given.updates)


if __name__ == "__main__":
    main()
