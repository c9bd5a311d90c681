"""The model's own switch of activation checkpointing: under every strategy, without a cache of keys and values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from flextrain import BaseModel
from flextrain.core.base.errors import ConfigError
from flextrain.testing import WorkerGroup

from .folders import model_of, runner_of, whole_weights

FSDP_BF16 = dict(type="fsdp", wrap="blocks", mixed_precision=dict(param_dtype="bfloat16"))


def frozen_llama() -> Any:
    torch.manual_seed(2)
    model = model_of("llama")
    model.get_input_embeddings().requires_grad_(False)
    return model


def gpt2() -> Any:
    torch.manual_seed(2)
    return model_of("gpt2")


def train(work_dir: Path, make: Any, strategy: dict[str, Any], how: Any) -> tuple[dict[str, Any], int]:
    """Train two updates; return the weights and how often the first layer's perceptron was computed."""
    runner = runner_of(
        work_dir,
        dict(type=make),
        lr=0.1,
        strategy={**strategy, **({} if how is None else {"activation_checkpointing": how})},
    )
    runner.model  # noqa: B018 - built here
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    layer = next(
        (m for n, m in runner.strategy.module.named_modules() if n.endswith(("layers.0.mlp", "h.0.mlp"))), None
    )
    if layer is not None:
        layer.register_forward_pre_hook(count)  # torch stops computing again before the end
    assert runner.strategy.module.config.use_cache is (how is None)
    runner.train()
    weights = whole_weights(runner)
    runner.close()
    return weights, calls


@pytest.mark.parametrize("how", ["model", dict(classes=["LlamaDecoderLayer"])], ids=["model", "classes"])
def test_layers_are_computed_twice_with_the_same_result(tmp_path: Path, how: Any) -> None:
    before, once = train(tmp_path / "a", frozen_llama, dict(type="single"), None)
    after, twice = train(tmp_path / "b", frozen_llama, dict(type="single"), how)
    assert (once, twice) == (2, 4)
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, rtol=1e-6, atol=1e-7)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "make, strategy",
    [
        pytest.param(frozen_llama, FSDP_BF16, id="fsdp-bf16-frozen"),
        pytest.param(frozen_llama, dict(type="zero3"), id="zero3", marks=pytest.mark.full),
        pytest.param(frozen_llama, dict(type="zero1"), id="zero1", marks=pytest.mark.full),
        pytest.param(frozen_llama, dict(type="ddp"), id="ddp", marks=pytest.mark.full),
        pytest.param(frozen_llama, dict(type="mesh", tp=2), id="tp2", marks=pytest.mark.full),
        pytest.param(frozen_llama, dict(type="mesh", pp=2), id="pp2", marks=pytest.mark.full),
        pytest.param(gpt2, FSDP_BF16, id="gpt2-fsdp", marks=pytest.mark.full),
        pytest.param(gpt2, dict(type="mesh", pp=2), id="gpt2-pp2", marks=pytest.mark.full),
    ],
)
def test_every_strategy_obeys_the_models_own_switch(
    workers2: WorkerGroup, tmp_path: Path, make: Any, strategy: dict[str, Any]
) -> None:
    if strategy["type"].startswith("zero"):
        pytest.importorskip("deepspeed")
    before = workers2.run(train, tmp_path / "a", make, strategy, None)
    after = workers2.run(train, tmp_path / "b", make, strategy, "model")
    assert max(calls for _, calls in after) == 2 * max(calls for _, calls in before) > 0
    for (wanted, _), (found, _) in zip(before, after, strict=True):
        for name, tensor in wanted.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)


def test_it_is_told_and_the_export_keeps_the_cache(tmp_path: Path) -> None:
    from transformers import AutoConfig

    runner = runner_of(
        tmp_path,
        dict(type=frozen_llama),
        strategy=dict(type="single", activation_checkpointing="model"),
        log_level="INFO",
    )
    runner.train()
    (log,) = tmp_path.rglob("*.log")  # a run passes no lines on to the root logger, whose handler caplog is
    assert "LlamaForCausalLM trains with use_cache=False, because" in log.read_text()
    runner.export_hugging_face(tmp_path / "out")
    assert AutoConfig.from_pretrained(tmp_path / "out").use_cache is True
    runner.close()


class Plain(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(2, 2)

    def forward(self, x: Any, mode: str = "loss") -> Any:
        return x


class Refusing(torch.nn.Linear):
    def gradient_checkpointing_enable(self, **_: Any) -> None:
        raise ValueError("Refusing does not support\nactivation checkpointing.")


@pytest.mark.parametrize(
    "model, how, message",
    [
        (
            lambda: Plain(),
            "model",
            '"model" needs a model with gradient_checkpointing_enable, which Plain does not have',
        ),
        (
            lambda: Refusing(2, 2),
            "model",
            '"model" is refused by Refusing, Refusing does not support activation checkpointing',
        ),
        (lambda: Plain(), "modle", "strategy.activation_checkpointing"),
        (lambda: Plain(), True, "strategy.activation_checkpointing"),
    ],
    ids=["no switch", "refused", "word", "true"],
)
def test_wrong_options_are_told_in_a_line(tmp_path: Path, model: Any, how: Any, message: str) -> None:
    def build() -> Any:
        runner = runner_of(tmp_path, dict(type=model), strategy=dict(type="single", activation_checkpointing=how))
        return runner.model

    with pytest.raises(ConfigError, match=message) as raised:
        build()
    assert "\n" not in str(raised.value)
