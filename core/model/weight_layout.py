"""Which dimension of a layer's weight has its outputs."""

from __future__ import annotations

from torch import nn

_OF_TRANSFORMERS = {"Conv1D", "Llama4TextExperts"}
_OF_TORCH = (nn.Embedding, nn.EmbeddingBag, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def inputs_come_first(layer: nn.Module) -> bool:
    """Whether the weights of a layer are (inputs, outputs), used as ``x @ W``, and those of a stack (layers, inputs, outputs).

    Such are embeddings, transposed convolutions, the Conv1D of GPT-2 in transformers, and each module with an attribute
    ``is_transposed`` that is True, as transformers has it for experts, such as those of gpt-oss. All other weights are
    (outputs, inputs), as those of ``nn.Linear``.

    Args:
        layer: the module that holds the weights.
    """
    if isinstance(layer, _OF_TORCH) or getattr(layer, "is_transposed", None) is True:
        return True
    return any(
        kind.__name__ in _OF_TRANSFORMERS and kind.__module__.startswith("transformers.")
        for kind in type(layer).__mro__
    )
