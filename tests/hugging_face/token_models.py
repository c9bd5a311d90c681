"""Tiny models of transformers whose loss is a mean over labels of tokens, of the kinds that differ in which labels count."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, CLASSES = 64, 5
_SMALL: dict[str, Any] = dict(
    vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
    num_labels=CLASSES, pad_token_id=0, bos_token_id=1, eos_token_id=2, hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0, max_position_embeddings=40,
)  # fmt: skip
_ENCODER_DECODER: dict[str, Any] = dict(
    vocab_size=VOCABULARY, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
    decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, dropout=0.0, max_position_embeddings=40,
    pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=2,
)  # fmt: skip
_T5: dict[str, Any] = dict(
    vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, dropout_rate=0.0, pad_token_id=0,
    decoder_start_token_id=0,
)  # fmt: skip
_GPT2: dict[str, Any] = dict(
    vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2, n_positions=40, resid_pdrop=0.0, embd_pdrop=0.0,
    attn_pdrop=0.0, num_labels=CLASSES,
)  # fmt: skip


def _make(config: str, model: str, options: dict[str, Any]) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(**options))  # type: ignore[no-any-return]

    return made


def adapted(base: str, **options: Any) -> Callable[[], nn.Module]:
    """A model in peft's wrapper, with virtual tokens of one kind."""

    def made() -> nn.Module:
        import peft

        kind = getattr(peft, options["kind"])
        given = {"task_type": "CAUSAL_LM"} | {name: value for name, value in options.items() if name != "kind"}
        return peft.get_peft_model(TOKEN_MODELS[base](), kind(**given))  # type: ignore[no-any-return]

    return made


TOKEN_MODELS: dict[str, Callable[[], nn.Module]] = {
    "causal": _make("LlamaConfig", "LlamaForCausalLM", _SMALL),
    "gpt2": _make("GPT2Config", "GPT2LMHeadModel", _GPT2),
    "t5": _make("T5Config", "T5ForConditionalGeneration", _T5),
    "bart": _make("BartConfig", "BartForConditionalGeneration", _ENCODER_DECODER),
    "bart decoder": _make("BartConfig", "BartForCausalLM", _ENCODER_DECODER),
    "bert masked": _make("BertConfig", "BertForMaskedLM", _SMALL),
    "modernbert masked": _make("ModernBertConfig", "ModernBertForMaskedLM", _SMALL),
    "distilbert masked": _make("DistilBertConfig", "DistilBertForMaskedLM", dict(
        vocab_size=VOCABULARY, dim=16, hidden_dim=16, n_layers=1, n_heads=2, dropout=0.0, attention_dropout=0.0)),
    "roberta masked": _make("RobertaConfig", "RobertaForMaskedLM", _SMALL),
    "bert tokens": _make("BertConfig", "BertForTokenClassification", _SMALL),
    "llama tokens": _make("LlamaConfig", "LlamaForTokenClassification", _SMALL),
    "gpt2 tokens": _make("GPT2Config", "GPT2ForTokenClassification", _GPT2),
    "prompt tuning": adapted("causal", kind="PromptTuningConfig", num_virtual_tokens=3),
    "p-tuning": adapted("gpt2", kind="PromptEncoderConfig", num_virtual_tokens=3, encoder_hidden_size=16),
    "prefix tuning": adapted("causal", kind="PrefixTuningConfig", num_virtual_tokens=3),
    "lora": adapted("causal", kind="LoraConfig", r=2),
    "prompt tuning of t5": adapted("t5", kind="PromptTuningConfig", num_virtual_tokens=3, task_type="SEQ_2_SEQ_LM"),
}  # fmt: skip


def token_batch(name: str, rows: int = 3, length: int = 12) -> dict[str, Tensor]:
    """Sequences of which different numbers of labels count, the first one's among them: int64, (rows, length)."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
    labels = torch.randint(0, CLASSES, ids.shape, generator=generator) if name.endswith("tokens") else ids.clone()
    for row in range(1, rows):
        labels[row, 2 * row :: row + 1] = -100
        labels[row, : row - 1] = -100
    return {"input_ids": ids, "labels": labels}
