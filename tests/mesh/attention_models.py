"""Tiny language models of transformers, one for each kind of attention that models have."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from .models import LENGTH, VOCABULARY

COMMON = dict(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
SIZES = dict(COMMON, intermediate_size=32, max_position_embeddings=LENGTH, pad_token_id=0, tie_word_embeddings=False)
BY_TURNS = ["sliding_attention", "full_attention"]
MLA = dict(SIZES, num_key_value_heads=4, q_lora_rank=12, kv_lora_rank=8, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5,
           first_k_dense_replace=1, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, n_shared_experts=1,
           moe_intermediate_size=16)  # fmt: skip
T5 = dict(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4, dropout_rate=0.0,
          relative_attention_num_buckets=8, relative_attention_max_distance=12, decoder_start_token_id=0)  # fmt: skip
BART = dict(vocab_size=VOCABULARY, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
            encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=2 * LENGTH, dropout=0.0)  # fmt: skip
CONFIGS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "mistral": ("Mistral", dict(SIZES, head_dim=8, sliding_window=5)),
    "qwen2": ("Qwen2", dict(SIZES, sliding_window=5, use_sliding_window=True, layer_types=BY_TURNS)),
    "gemma2": ("Gemma2", dict(SIZES, head_dim=8, sliding_window=5, layer_types=BY_TURNS, query_pre_attn_scalar=8,
                              attn_logit_softcapping=0.5, final_logit_softcapping=3.0)),
    "gemma3": ("Gemma3Text", dict(SIZES, head_dim=8, sliding_window=5, layer_types=BY_TURNS, query_pre_attn_scalar=8)),
    "deepseek_v2": ("DeepseekV2", MLA),
    "deepseek_v3": ("DeepseekV3", MLA),
    "gpt_oss": ("GptOss", dict(SIZES, head_dim=8, sliding_window=5, layer_types=BY_TURNS, num_local_experts=4,
                               num_experts_per_tok=2, rope_parameters=dict(rope_type="default", rope_theta=1e4))),
    "bloom": ("Bloom", dict(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4, attention_dropout=0.0, hidden_dropout=0.0)),
    "mpt": ("Mpt", dict(vocab_size=VOCABULARY, d_model=32, n_layers=2, n_heads=4, max_seq_len=LENGTH)),
    "falcon": ("Falcon", dict(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True, new_decoder_architecture=True, num_kv_heads=2)),
    "llama4": ("Llama4Text", dict(SIZES, head_dim=8, attention_chunk_size=5, num_local_experts=2, intermediate_size_mlp=32)),
    "doge": ("Doge", dict(SIZES, num_experts=4, num_experts_per_tok=2)),
    "hy_v4": ("HYV4", dict(MLA, index_topk=4, index_head_dim=8, index_n_heads=2)),
    "t5": ("T5", T5),
    "umt5": ("UMT5", T5),
    "bart": ("Bart", BART),
    "mbart": ("MBart", BART),
    "marian": ("Marian", dict(BART, decoder_start_token_id=0, pad_token_id=0)),
    "pegasus": ("Pegasus", BART),
    "blenderbot": ("Blenderbot", BART),
    "m2m_100": ("M2M100", BART),
    "pegasus_x": ("PegasusX", BART),
    "bigbird_pegasus": ("BigBirdPegasus", BART),
}  # fmt: skip


def build(kind: str, **options: Any) -> nn.Module:
    """The model of a kind, with random weights that are large enough for attention to matter."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    name, own = CONFIGS[kind]
    config: Any = getattr(transformers, f"{name}Config", None)
    if config is None:
        pytest.skip(f"transformers {transformers.__version__} has no {name}Config")
    made = config(**{**own, **{key: value for key, value in options.items() if key != "attn_implementation"}})
    auto: Any = transformers.AutoModelForSeq2SeqLM if made.is_encoder_decoder else transformers.AutoModelForCausalLM
    more = {"experts_implementation": "eager"} if kind in ("deepseek_v2", "deepseek_v3", "gpt_oss", "llama4") else {}
    more |= {key: options[key] for key in ("attn_implementation",) if key in options}
    model: Any = auto.from_config(made, dtype=torch.get_default_dtype(), **more)
    model.config.use_cache = False
    model.to(torch.get_default_dtype())  # what some keep in float32
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 or name.endswith(("sinks", "bias")):  # a bias of keys has gradients of noise alone
                parameter.normal_(std=0.5)
            if name.endswith("Attention.q.weight"):  # T5 does not scale its scores
                parameter.mul_(0.25)
    return model  # type: ignore[no-any-return]


class Exact(TorchFunctionMode):
    """Context in which models keep float64 where they compute in float32 at least: norms, and the softmax of their own attention."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        first = args[0] if args else None
        if func is Tensor.float and not first.is_floating_point():  # positions, before they meet float64 frequencies
            return first.double()
        if isinstance(first, Tensor) and first.dtype == torch.float64:
            if func is Tensor.float or (func in (Tensor.to, Tensor.type) and args[1:] == (torch.float32,)):
                return first
            if func in (functional.softmax, Tensor.softmax):
                kwargs.pop("dtype", None)
        return func(*args, **kwargs)
