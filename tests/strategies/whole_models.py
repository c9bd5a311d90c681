"""Tiny language models of transformers that generate, and what one device generates with them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, LENGTH = 48, 32


def language_model(kind: str, tied: bool = False, seed: int = 0, width: int = 16) -> nn.Module:
    """Llama or GPT-2 with two layers and random weights, large enough that greedy decoding does not repeat one token."""
    import transformers

    torch.manual_seed(seed)
    common: dict[str, Any] = dict(
        vocab_size=VOCABULARY, tie_word_embeddings=tied, bos_token_id=0, eos_token_id=1, pad_token_id=2
    )
    if kind == "llama":
        config: Any = transformers.LlamaConfig(
            hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=LENGTH, initializer_range=0.5, **common,
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config)
    config = transformers.GPT2Config(
        n_positions=LENGTH, n_embd=width, n_layer=2, n_head=4, initializer_range=0.5, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0,
        **common,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def prompts(rank: int) -> Tensor:
    """Prompts whose number and length differ between processes."""
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randint(3, VOCABULARY, (1 + rank, 3 + 2 * rank), generator=generator)


def batch(seed: int) -> dict[str, Tensor]:
    """A batch that one to four processes divide."""
    ids = torch.randint(3, VOCABULARY, (12, 8), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def generated(model: Any, rank: int, **options: Any) -> list[list[int]]:
    """What a model generates for the prompts of a rank; processes generate unequally many tokens."""
    ids = prompts(rank)
    given = dict(do_sample=False, max_new_tokens=6 + 4 * rank, attention_mask=torch.ones_like(ids)) | options
    with torch.no_grad():
        found: list[list[int]] = model.eval().generate(ids, **given).tolist()
    return found
