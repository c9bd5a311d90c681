"""The labels that are counted for a model of transformers are those that its loss is a mean over."""

from __future__ import annotations

import ast
import copy
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flextrain.core.model.token_counts import _Losses, count_tokens, labels_in_loss

from .token_models import TOKEN_MODELS, token_batch

transformers: Any = pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def _needs(name: str) -> None:
    if "tuning" in name or name == "lora":
        pytest.importorskip("peft")


@pytest.mark.parametrize("name", TOKEN_MODELS)
def test_the_loss_is_the_mean_over_the_labels_that_are_counted(name: str) -> None:
    _needs(name)
    torch.manual_seed(0)
    model: Any = TOKEN_MODELS[name]().eval()
    assert count_tokens(model)
    batch = token_batch(name)
    total = count = 0.0
    with torch.no_grad():
        for row in range(3):
            own = {key: value[row : row + 1] for key, value in batch.items()}
            number = float(model.loss_weight(own))
            total, count = total + number * float(model(**own).loss), count + number
        assert float(model(**batch).loss) == pytest.approx(total / count, rel=1e-5)


_BERT = dict(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
_AUDIO = _BERT | dict(conv_dim=(16,), conv_kernel=(4,), conv_stride=(4,), num_feat_extract_layers=1, num_labels=3,
                      num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, classifier_proj_size=16, mask_time_prob=0.0)  # fmt: skip
OF_SAMPLES: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "Wav2Vec2ForSequenceClassification": ("Wav2Vec2Config", _AUDIO, (64,)),
    "BertForMultipleChoice": ("BertConfig", _BERT, (2, 5)),
    "BertForNextSentencePrediction": ("BertConfig", _BERT, (5,)),
    "BertForSequenceClassification": ("BertConfig", _BERT, (5,)),
}


@pytest.mark.parametrize("name", OF_SAMPLES)
def test_labels_of_whole_samples_are_counted_or_left_alone(name: str) -> None:
    config, sizes, shape = OF_SAMPLES[name]
    torch.manual_seed(0)
    model: Any = getattr(transformers, name)(getattr(transformers, config)(**sizes)).eval()
    key = "input_values" if "Wav" in name else "input_ids"
    data = torch.randn(3, *shape) if "Wav" in name else torch.randint(32, (3, *shape))
    batch = {key: data, "labels": torch.tensor([0, 1, 1])}
    counted = count_tokens(model)
    assert counted is (name != "BertForSequenceClassification")  # which has losses of other kinds too
    if counted:
        parts = [{key: value[rows] for key, value in batch.items()} for rows in (slice(2), slice(2, 3))]
        with torch.no_grad():
            total = sum(float(model.loss_weight(part)) * float(model(**part).loss) for part in parts)
            assert float(model(**batch).loss) == pytest.approx(total / 3, rel=1e-5)


@pytest.mark.parametrize("name", ["bert masked", "t5", "causal"])
def test_off_by_one_is_seen(name: str) -> None:
    """The check above can fail."""
    model: Any = TOKEN_MODELS[name]()
    assert count_tokens(model)
    model.loss_weight.shifts = not model.loss_weight.shifts
    batch, numbers, losses = token_batch(name), [], []
    with torch.no_grad():
        for row in range(3):
            own = {key: value[row : row + 1] for key, value in batch.items()}
            numbers.append(float(model.loss_weight(own)))
            losses.append(float(model(**own).loss))
        mean = sum(n * loss for n, loss in zip(numbers, losses, strict=True)) / sum(numbers)
        assert float(model(**batch).loss) != pytest.approx(mean, rel=1e-5)


class Twice(transformers.T5ForConditionalGeneration):  # type: ignore[misc]
    """One that adds a loss of another class."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        loss_fct = nn.CrossEntropyLoss()
        logits = super().forward(input_ids, labels=labels).logits
        other = nn.MSELoss()(logits, torch.zeros_like(logits))
        return {"loss": loss_fct(logits.flatten(0, 1), labels.view(-1)) + other}


class Half(transformers.T5ForConditionalGeneration):  # type: ignore[misc]
    """One that trains on half of the labels."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        logits = super().forward(input_ids, labels=labels).logits
        labels = labels[:, ::2]
        loss_fct = nn.CrossEntropyLoss()
        return {"loss": loss_fct(logits[:, ::2].flatten(0, 1), labels.reshape(-1))}


@pytest.mark.parametrize("kind", [Twice, Half])
def test_losses_that_are_not_known_are_not_counted(kind: Any) -> None:
    assert labels_in_loss(kind(TOKEN_MODELS["t5"]().config)) is None


def test_a_criterion_of_another_kind_is_not_counted() -> None:
    model: Any = TOKEN_MODELS["distilbert masked"]()
    model.mlm_loss_fct = nn.CrossEntropyLoss(reduction="sum")
    assert labels_in_loss(model) is None


def test_adapters_with_a_loss_of_their_own_are_not_counted() -> None:
    peft = pytest.importorskip("peft")
    config = peft.CPTConfig(task_type="CAUSAL_LM", cpt_token_ids=[1, 2], cpt_mask=[1, 1], cpt_tokens_type_mask=[1, 2])
    assert labels_in_loss(peft.get_peft_model(TOKEN_MODELS["causal"](), config)) is None


SOURCES = {
    "self.loss_function(logits, labels, self.config)": ("all", "none"),
    "self.loss_function(logits=logits, labels=labels, shift_labels=labels)": ("all", "all"),
    "self.loss_function(logits=a, labels=None, shift_labels=labels[:, 1:].contiguous())": ("none", "all but the first"),
    "self.loss_function(logits=a, labels=labels[..., 1:])": ("all but the first", "none"),
    "self.loss_function(logits=a, labels=labels[mask])": (None, "none"),
    "self.loss_function(logits=a, labels=labels, shift_labels=kwargs.pop('shift_labels', None))": ("all", "none"),
    "self.loss_function(logits=a, labels=labels[labels != -100])": ("all", "none"),
}


@pytest.mark.parametrize("call", SOURCES)
def test_what_a_call_gives_to_the_loss(call: str) -> None:
    found = _Losses(ast.parse(f"def forward(self, labels, **kwargs):\n    loss = {call}"))
    assert found.of_function == [SOURCES[call]]


def test_models_that_shift_before_their_loss() -> None:
    """They give ``shift_labels`` that are the labels: none is left out."""
    of_moonshine = getattr(transformers, "MoonshineForConditionalGeneration", None)
    if of_moonshine is None or "shift_labels" not in inspect.getsource(of_moonshine.forward):
        pytest.skip("needs a transformers whose MoonshineForConditionalGeneration gives shift_labels")
    config = transformers.MoonshineConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, encoder_num_hidden_layers=1, decoder_num_hidden_layers=1,
        encoder_num_attention_heads=2, decoder_num_attention_heads=2, decoder_start_token_id=1, pad_token_id=0,
    )  # fmt: skip
    assert labels_in_loss(of_moonshine(config)) == "all"
    assert labels_in_loss(copy.deepcopy(TOKEN_MODELS["causal"]())) == "all but the first"
