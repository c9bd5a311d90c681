"""Tiny models of the kinds that meshes divide: a plain transformer, transformers' families, torchvision's, convolutions.

``MODELS`` has a function that builds each, and ``sample(name, count, seed)`` a batch for it. All are small enough for eight processes
on two cores; sizes divide by two and four only where a kind of parallelism needs it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor, nn
from torch.nn import functional

Batch = dict[str, Tensor]
MATRICES = {
    "layers.*.[qkv]": "colwise",
    "layers.*.out": "rowwise",
    "layers.*.up": "colwise",
    "layers.*.down": "rowwise",
}
"""The plan for the matrices of ``Plain``."""
VOCABULARY, LENGTH = 64, 16


class PlainBlock(nn.Module):
    """Attention that reads the number of heads off its projection, as transformers does, and a perceptron."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.head = width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        # The bias of keys has no gradient but rounding noise, which Adam scales to full steps.
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (f(h).unflatten(-1, (-1, self.head)).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.drop(self.down(functional.gelu(self.up(self.norm2(x)))))


class FusedBlock(nn.Module):
    """Attention with one projection for queries, keys and values, and the number of heads in its views."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))
        return x + self.drop(self.mlp(self.norm2(x)))


class TurningBlock(PlainBlock):
    """Gives complex numbers for real ones, and the other way round."""

    def forward(self, x: Tensor) -> Tensor:
        if x.is_complex():
            return super().forward(torch.view_as_real(x.resolve_conj()).flatten(-2))
        return torch.view_as_complex(super().forward(x).unflatten(-1, (-1, 2))).conj()


class Plain(nn.Module):
    """A causal language model; positions come with the batch, or are counted from 0."""

    def __init__(
        self, block: Callable[..., nn.Module] = PlainBlock, tied: bool = False, layers: int = 2, dropout: float = 0.0
    ) -> None:
        super().__init__()
        width = 32
        self.embed, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.layers = nn.ModuleList(block(width, 4, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor | dict[str, Tensor]:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.embed(input_ids) + self.position(position_ids)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        if labels is None:
            return logits
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


class Experts(nn.Module):
    """A stack of experts, each a perceptron of one hidden layer."""

    def __init__(self, num_experts: int, width: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.up = nn.Parameter(torch.randn(num_experts, width, 2 * width) * 0.2)
        self.bias = nn.Parameter(torch.randn(num_experts, 2 * width) * 0.2)
        self.down = nn.Parameter(torch.randn(num_experts, 2 * width, width) * 0.2)

    def forward(self, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(tokens)
        for expert in range(self.num_experts):
            token, choice = (ids == expert).nonzero(as_tuple=True)
            found = functional.gelu(tokens[token] @ self.up[expert] + self.bias[expert]) @ self.down[expert]
            out = out.index_add(0, token, (found * weights[token, choice, None]).to(out.dtype))
        return out


class Mixture(nn.Module):
    """Attention, then a mixture of experts."""

    def __init__(self, width: int, heads: int, dropout: float, preferred: int = 0) -> None:
        super().__init__()
        self.attention = PlainBlock(width, heads, dropout)
        self.norm, self.router, self.experts = nn.LayerNorm(width), nn.Linear(width, 4), Experts(4, width)
        with torch.no_grad():
            self.router.bias[:preferred] += 20.0  # all others get no token

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x)
        flat = self.norm(x).flatten(0, 1)
        weights, ids = self.router(flat).softmax(-1).topk(2)
        return x + self.experts(flat, ids, weights).view_as(x)


class Images(nn.Module):
    """A classifier of images, with the loss that it trains on."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor | dict[str, Tensor]:
        logits: Tensor = self.net(x)
        return logits if y is None else {"loss": functional.cross_entropy(logits, y)}


def _exact_loss(logits: Tensor, labels: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The loss of transformers' causal models without its cast to float32, which would hide errors under rounding."""
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def of_transformers(kind: str, layers: int = 2, **options: Any) -> nn.Module:
    """A tiny causal language model of one of transformers' families."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    common = dict(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2
    )
    common |= dict(max_position_embeddings=LENGTH, tie_word_embeddings=False)
    config: Any
    if kind == "llama":
        config = transformers.LlamaConfig(**{**common, "intermediate_size": 64, **options})
    elif kind == "qwen3":
        config = transformers.Qwen3Config(**{**common, "intermediate_size": 64, "head_dim": 8, **options})
    elif kind == "mixtral":
        own = dict(intermediate_size=32, num_local_experts=4, num_experts_per_tok=2)
        config = transformers.MixtralConfig(**{**common, **own, **options})
    elif kind == "qwen3_moe":
        own = dict(intermediate_size=64, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2, head_dim=8)
        config = transformers.Qwen3MoeConfig(**{**common, **own, **options})
    else:
        none = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        own = dict(vocab_size=VOCABULARY, n_embd=32, n_layer=layers, n_head=4, n_positions=LENGTH, **none)
        config = transformers.GPT2Config(**{**own, **options})
    # The default kernels of experts compute in float32 and below.
    is_exact = torch.get_default_dtype() == torch.float64
    more = {"experts_implementation": "eager"} if is_exact and kind in ("mixtral", "qwen3_moe") else {}
    dtype = "dtype" if Version(transformers.__version__) >= Version("4.56") else "torch_dtype"
    model: Any = transformers.AutoModelForCausalLM.from_config(config, **{dtype: torch.get_default_dtype()}, **more)
    model.config.use_cache = False
    if torch.get_default_dtype() == torch.float64:
        model.loss_function = _exact_loss
    return model  # type: ignore[no-any-return]


def _vision_transformer() -> nn.Module:
    pytest.importorskip("torchvision")
    from torchvision.models import VisionTransformer

    return Images(VisionTransformer(8, 4, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=32, num_classes=5))


def _convolutions() -> nn.Module:
    layers = [nn.Conv2d(3, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.GELU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()]
    return Images(nn.Sequential(*layers, nn.Linear(24, 5)))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": Plain,
    "plain_tied": functools.partial(Plain, tied=True),
    "fused": functools.partial(Plain, FusedBlock),
    "turning": functools.partial(Plain, TurningBlock),
    "mixture": functools.partial(Plain, Mixture),
    "mixture_starved": functools.partial(Plain, functools.partial(Mixture, preferred=2)),
    "llama": functools.partial(of_transformers, "llama"),
    "llama_tied": functools.partial(of_transformers, "llama", tie_word_embeddings=True),
    "gpt2": functools.partial(of_transformers, "gpt2"),
    "mixtral": functools.partial(of_transformers, "mixtral"),
    "mixtral_balanced": functools.partial(
        of_transformers, "mixtral", output_router_logits=True, router_aux_loss_coef=0.5
    ),
    "qwen3_moe": functools.partial(of_transformers, "qwen3_moe"),
    "vision": _vision_transformer,
    "convolutions": _convolutions,
}
OF_IMAGES = ("vision", "convolutions")
OF_TRANSFORMERS = (
    "llama",
    "llama_tied",
    "gpt2",
    "mixtral",
    "mixtral_balanced",
    "qwen3_moe",
)  # they shift the labels themselves


def register(**builders: Callable[[], nn.Module]) -> None:
    """Add models of a test module, under names that no other has: processes import the modules in any order."""
    taken = MODELS.keys() & builders.keys()
    assert not taken, f"{sorted(taken)}: other models have these names"
    MODELS.update(builders)


def build(name: str, seed: int = 7) -> nn.Module:
    """The model of a name, the same for the same seed."""
    torch.manual_seed(seed)
    return MODELS[name]()


def sample(name: str, count: int, seed: int) -> Batch:
    """``count`` samples for the model of a name."""
    generator = torch.Generator().manual_seed(seed)
    if name in OF_IMAGES:
        y = torch.randint(0, 5, (count,), generator=generator)
        x = torch.randn(count, 3, 8, 8, generator=generator, dtype=torch.get_default_dtype())
        x[torch.arange(count), 0, y, y] += 3.0
        return {"x": x, "y": y}
    start = torch.randint(0, VOCABULARY, (count, 1), generator=generator)
    step = torch.randint(1, 4, (count, 1), generator=generator)
    ids = (start + step * torch.arange(LENGTH + 1)) % VOCABULARY
    labels = ids[:, :-1] if name in OF_TRANSFORMERS else ids[:, 1:]
    return {"input_ids": ids[:, :-1].contiguous(), "labels": labels.contiguous()}
