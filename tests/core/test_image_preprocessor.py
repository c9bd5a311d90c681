"""Pictures become the model's input as in MMEngine: swapped, normalised, padded, stacked."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flextrain import MODELS, ConfigError, ImgDataPreprocessor, stack_batch

RGB = dict(mean=[10.0, 20.0, 30.0], std=[1.0, 2.0, 4.0])


def pictures(*sizes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(256, size, dtype=torch.uint8, generator=generator) for size in sizes]


def test_pictures_of_different_sizes_are_normalised_then_padded() -> None:
    first, second = pictures((3, 2, 5), (3, 4, 3))
    made = MODELS.build(dict(type="ImgDataPreprocessor", **RGB, bgr_to_rgb=True, pad_size_divisor=4, pad_value=-7))
    batch = made({"inputs": [first, second], "data_samples": ["a", "b"]}, True)
    assert batch["data_samples"] == ["a", "b"]
    inputs = batch["inputs"]
    assert inputs.shape == (2, 3, 4, 8)
    assert inputs.dtype is torch.float32
    assert torch.equal(inputs[0, 2, :2, :5], (first[0] - 30.0) / 4.0), "blue comes first in, and last out"
    assert torch.equal(inputs[1, 0, :4, :3], second[2] - 10.0)
    assert (inputs[0, :, 2:] == -7).all()
    assert (inputs[1, :, :, 3:] == -7).all()


def test_a_stacked_batch_keeps_its_other_keys() -> None:
    batch = torch.stack(pictures((1, 3, 3), (1, 3, 3)))
    given = {"inputs": batch, "scale": 2}
    made = ImgDataPreprocessor(mean=[127.5], std=[127.5], pad_size_divisor=2)(given)
    assert made["scale"] == 2
    assert made["data_samples"] is None
    assert torch.equal(made["inputs"][:, :, :3, :3], (batch - 127.5) / 127.5)
    assert made["inputs"].shape == (2, 1, 4, 4)
    assert given["inputs"] is batch, "the batch of the dataloader stays as it is"


@pytest.mark.parametrize("options", [{}, RGB, dict(RGB, rgb_to_bgr=True, pad_size_divisor=3), dict(pad_value=4)])
@pytest.mark.parametrize("stacked", [False, True])
def test_equals_mmengine(options: dict[str, Any], stacked: bool) -> None:
    theirs = pytest.importorskip("mmengine.model").ImgDataPreprocessor(**options)
    images: Any = pictures((3, 5, 4), (3, 5, 4) if stacked else (3, 2, 6))
    images = torch.stack(images) if stacked else images
    found = ImgDataPreprocessor(**options)({"inputs": images})
    expected = theirs({"inputs": images})
    assert found.keys() == expected.keys()
    assert torch.equal(found["inputs"], expected["inputs"])


def test_the_constants_go_with_the_model_and_into_no_checkpoint() -> None:
    made = ImgDataPreprocessor(**RGB)
    assert not made.state_dict()
    assert made.to("meta").mean.device.type == "meta"


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(mean=[1.0]), "data_preprocessor.std: missing, give both mean and std"),
        (dict(mean=[1.0, 2.0], std=[1.0]), "data_preprocessor.mean: 2 values are not allowed, give 1 or 3"),
        (dict(bgr_to_rgb=True, rgb_to_bgr=True), "rgb_to_bgr: bgr_to_rgb is given too"),
        (dict(pad_size_divisor=0), "pad_size_divisor: 0 is not allowed, give 1 or more"),
    ],
)
def test_wrong_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ImgDataPreprocessor(**options)


@pytest.mark.parametrize(
    "data, message",
    [
        ([torch.zeros(1)], "got a list, its dataset has to give dicts with inputs"),
        ({"img": 1}, "got a dict of img, its dataset has to give dicts with inputs"),
        ({"inputs": torch.zeros(3, 4, 4)}, r"inputs is a tensor \(3, 4, 4\), give a tensor \(batch"),
        ({"inputs": [torch.zeros(1, 4, 4)]}, "a picture has 1 channels, and the settings are for 3"),
    ],
)
def test_wrong_data(data: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ImgDataPreprocessor(**RGB)(data)


def test_stacking_needs_equal_channels() -> None:
    with pytest.raises(ConfigError, match=r"stack_batch: got \(3, 2\), \(1, 2\), give tensors with equal channels"):
        stack_batch([torch.zeros(3, 2), torch.zeros(1, 2)])
    assert stack_batch([torch.ones(1, 2), torch.ones(1, 3)], 4, 9).tolist() == [[[1, 1, 9, 9]], [[1, 1, 1, 9]]]
