"""Folders of tiny models of transformers, and runs that begin with them; functions of workers import this."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flextrain import FlexibleRunner

LENGTH, VOCABULARY = 8, 96


def model_of(kind: str, **settings: Any) -> Any:
    """A tiny causal language model."""
    import transformers

    common = dict(vocab_size=VOCABULARY, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    if kind == "llama":
        own: dict[str, Any] = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
        config: Any = transformers.LlamaConfig(**{**common, **own, **settings})
    elif kind == "gpt2":
        own = dict(n_embd=32, n_layer=2, n_head=2, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        config = transformers.GPT2Config(**{**common, **own, **settings})
    else:
        own = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, **common)
        config = transformers.BertConfig(**{**own, **settings})
        return transformers.BertModel(config)
    return transformers.AutoModelForCausalLM.from_config(config)


def save_folder(
    folder: Path, kind: str = "llama", *, shard: str = "5GB", dtype: torch.dtype = torch.float32, **settings: Any
) -> Any:
    """Write the folder of a model with random weights; return the model."""
    torch.manual_seed(1)
    model = model_of(kind, **settings)
    with torch.no_grad():  # norms and biases would be ones and zeros in any model
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    return model.float()


def save_tokenizer(folder: Path) -> Any:
    """Write a tokenizer that was trained on a few words."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    words = [f"{first}{last}" for first in ("one", "two", "three") for last in ("", "ly", "ing")]
    tokenizer.train_from_iterator(words, trainers.WordLevelTrainer(special_tokens=special))
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), special, strict=True))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    fast.save_pretrained(folder)
    return fast


def tokens(count: int = 16, labels: int | None = None) -> list[dict[str, Tensor]]:
    """Samples of a causal model, the first half with padding; with ``labels`` of a classifier."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for number in range(count):
        ids = torch.randint(3, VOCABULARY, (LENGTH,), generator=generator)
        mask = torch.ones(LENGTH, dtype=torch.long)
        if number % 2:
            ids[-3:], mask[-3:] = 0, 0
        target = ids.masked_fill(mask == 0, -100) if labels is None else torch.tensor(number % labels)
        found.append(dict(input_ids=ids, attention_mask=mask, labels=target))
    return found


def runner_of(work_dir: Path, model: Mapping[str, Any], *, lr: float = 0.0, **given: Any) -> FlexibleRunner:
    """A runner that trains two updates; with lr=0 the weights stay as they were read."""
    arguments: dict[str, Any] = dict(
        model=model,
        work_dir=work_dir,
        train_dataloader=dict(
            dataset=tokens(labels=2 if "Classification" in str(model["type"]) else None),
            batch_size=2,
            sampler=dict(type="DefaultSampler", shuffle=False),
            collate_fn="default_collate",
        ),
        optim_wrapper=dict(type="OptimWrapper", optimizer=dict(type="SGD", lr=lr)),
        train_cfg=dict(by_epoch=False, max_iters=2),
        default_hooks=dict(checkpoint=dict(by_epoch=False, interval=2)),
        randomness=dict(seed=5),
        env_cfg=dict(dry_run=False),
        log_level="WARNING",
    )
    return FlexibleRunner(**{**arguments, **given})


def whole_weights(runner: FlexibleRunner) -> dict[str, Tensor]:
    """Every parameter of this process as a whole tensor."""
    found = {}
    for name, tensor in runner.strategy.model_state().items():
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        found[name] = whole.detach().cpu().float().clone()
    return found
