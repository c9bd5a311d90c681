"""Steps of a model's own in a pipeline: what the stages have is computed as on one device, and all else is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from flextrain.core.base.errors import FlexTrainError
from flextrain.core.model.base_model import parse_losses
from flextrain.strategies.mesh.pipeline.chain import chain_of
from flextrain.strategies.mesh.pipeline.stages import Left, StageRun

from .models import Plain, sample

Data = dict[str, Tensor]


class Asks(Plain):
    """Its forward asks a parameter for the device, and its steps call forward, the head and themselves."""

    def forward(self, input_ids: Tensor, labels: Any = None, position_ids: Any = None) -> Any:
        return super().forward(input_ids.to(next(self.parameters()).device), labels, position_ids)


class CallsItself(Asks):
    def val_step(self, data: Data) -> Any:
        return self(data["input_ids"]).argmax(-1), data["labels"]


class CallsForward(Asks):
    def val_step(self, data: Data) -> Any:
        found = self.forward(**data)
        return found["loss"]


class PenalisesItsHead(Asks):
    """It is on the stage that has the loss."""

    def val_step(self, data: Data) -> Any:
        total, _ = parse_losses(self(**data))
        return total + 0.1 * sum(p.square().sum() for p in self.head.parameters())


class CallsTwice(Plain):
    def val_step(self, data: Data) -> Any:
        return self(data["input_ids"]) + self(data["input_ids"].flip(1))


class CallsParts(Plain):
    def val_step(self, data: Data) -> Any:
        x = self.embed(data["input_ids"])
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class UsesTheEmbeddingAfterwards(Plain):
    def val_step(self, data: Data) -> Any:
        return self(data["input_ids"]), self.embed(data["input_ids"])


class ReadsTheEmbeddingAfterwards(Plain):
    def val_step(self, data: Data) -> Any:
        return self(data["input_ids"]), self.embed.weight.mean()


class PenalisesAll(Plain):
    def val_step(self, data: Data) -> Any:
        total, _ = parse_losses(self(**data))
        return total + 0.1 * sum(p.square().sum() for p in self.parameters())


class PenalisesLayers(Plain):
    def val_step(self, data: Data) -> Any:
        return self(**data)["loss"] + sum(
            p.square().sum() for _, p in self.layers.named_parameters() if p.requires_grad
        )


class PenalisesTheFirstLayer(Plain):
    def val_step(self, data: Data) -> Any:
        return self(**data)["loss"] + sum(p.square().sum() for p in self.layers[0].parameters())


class PenalisesInForward(Plain):
    def forward(self, input_ids: Tensor, labels: Any = None, position_ids: Any = None) -> Any:
        found = super().forward(input_ids, labels, position_ids)
        return {"loss": found["loss"] + sum(p.square().sum() for p in self.parameters() if p.requires_grad)}

    def val_step(self, data: Data) -> Any:
        return self(**data)


def through_stages(model: Plain, data: Data) -> Any:
    """What ``val_step`` gives where each of two stages has its layers only."""
    given: Any = None
    for stage in range(2):
        cut = copy.deepcopy(model)
        run = StageRun(cut, chain_of(cut), [1, 1], [stage], torch.device("cpu"))
        run.cut()
        cut.register_forward_hook(run.leave)
        found = run.run(stage, 0, lambda passed: given, lambda: cut.val_step(data))  # type: ignore[operator]  # noqa: B023
        if stage == 0:
            assert isinstance(found, Left)
            given = found.value
    return found


@torch.no_grad()
@pytest.mark.parametrize("kind", [CallsItself, CallsForward, PenalisesItsHead])
def test_honoured(kind: type[Plain]) -> None:
    model, data = kind().eval(), sample("plain", 2, 0)
    expected = model.val_step(data)  # type: ignore[operator]
    torch.testing.assert_close(through_stages(model, data), expected, rtol=0.0, atol=0.0)


REFUSED: list[tuple[type[Plain], str]] = [
    (CallsTwice, "model: CallsTwice is called twice for one batch, a pipeline sends each through its stages once"),
    (CallsParts, "model: CallsParts calls layers.1 outside of its forward, and another process of the pipeline has it"),
    (UsesTheEmbeddingAfterwards, "model: UsesTheEmbeddingAfterwards calls embed outside of its forward, and another"),
    (
        PenalisesAll,
        "model: PenalisesAll goes through its parameters in a step, and another process of the pipeline has",
    ),
    (PenalisesLayers, "model: PenalisesLayers goes through its parameters in a step, and another process of the pipe"),
    (PenalisesTheFirstLayer, "model: PenalisesTheFirstLayer goes through its parameters in a step, and another"),
    (PenalisesInForward, "strategy.pp: what PenalisesInForward returns was computed from embed.weight, which the last"),
]


@torch.no_grad()
@pytest.mark.parametrize("kind, message", REFUSED)
def test_refused(kind: type[Plain], message: str) -> None:
    with pytest.raises(FlexTrainError) as caught:
        through_stages(kind().eval(), sample("plain", 2, 0))
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@torch.no_grad()
def test_what_another_process_has_cannot_be_read() -> None:
    with pytest.raises(
        AttributeError, match=r"^model: embed\.weight is read outside of the forward of ReadsThe.*, and another"
    ):
        through_stages(ReadsTheEmbeddingAfterwards().eval(), sample("plain", 2, 0))


def test_parameters_between_steps_are_those_of_the_process() -> None:
    model = Plain()
    run = StageRun(model, chain_of(model), [1, 1], [1], torch.device("cpu"))
    run.cut()
    names = {name for name, _ in model.named_parameters()}
    assert {name.partition(".")[0] for name in names} == {"layers", "norm", "head"}
    assert not any(name.startswith("layers.0") for name in names)
