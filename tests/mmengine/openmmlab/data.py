"""Small data sets in the files that OpenMMLab's configurations read: the colour of a picture says what is on it."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
from PIL import Image

TRAINED, VALIDATED = 8, 7
SIZE = 64


def write_all(root: Path) -> None:
    """Write the folders that configurations call ``data/...``, unless they exist."""
    if (root / "complete").exists():
        return
    draw = np.random.default_rng(0)
    for split, count in (("train", TRAINED), ("val", VALIDATED)):
        _mnist(root / "mnist", "train" if split == "train" else "t10k", count, draw)
        _imagenet(root / "imagenet", split, count, draw)
        _masks(root / "cityscapes", f"leftImg8bit/{split}/a", f"gtFine/{split}/a", split, count, draw)
        folder = "training" if split == "train" else "validation"
        for name, classes in (("CHASE_DB1", 2), ("ade/ADEChallengeData2016", 5)):
            _masks(root / name, f"images/{folder}", f"annotations/{folder}", split, count, draw, classes)
        _coco(root / "coco", f"{split}2017", count, draw)
    (root / "complete").touch()


def _noise(draw: np.random.Generator, *shape: int) -> np.ndarray:
    return draw.integers(0, 80, shape, dtype=np.uint8)


def _save(image: np.ndarray, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(path)


def _mnist(root: Path, prefix: str, count: int, draw: np.random.Generator) -> None:
    root.mkdir(parents=True, exist_ok=True)
    labels = np.arange(count, dtype=np.uint8) % 10
    images = _noise(draw, count, 28, 28) + 15 * labels[:, None, None]
    (root / f"{prefix}-images-idx3-ubyte").write_bytes(struct.pack(">4i", 2051, *images.shape) + images.tobytes())
    (root / f"{prefix}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 2049, count) + labels.tobytes())


def _imagenet(root: Path, split: str, count: int, draw: np.random.Generator) -> None:
    lines = []
    for i in range(count):
        label, name = i % 4, f"n{i % 4}/{i}.png"
        _save(_noise(draw, SIZE, SIZE, 3) + np.uint8(40 * label), root / split / name)
        lines.append(f"{name} {label}")
    (root / "meta").mkdir(exist_ok=True)
    (root / "meta" / f"{split}.txt").write_text("\n".join(lines))


def _masks(
    root: Path, images: str, masks: str, split: str, count: int, draw: np.random.Generator, classes: int = 4
) -> None:
    cityscapes, chase = root.name == "cityscapes", root.name == "CHASE_DB1"
    for i in range(count):
        mask = np.zeros((SIZE, SIZE), np.uint8)
        for label in range(1, classes):
            top, left = draw.integers(0, SIZE // 2, 2)
            mask[top : top + SIZE // 2, left : left + SIZE // 2] = label
        stem = f"{split}_{i}"
        image_name = f"{stem}_leftImg8bit.png" if cityscapes else f"{stem}.png" if chase else f"{stem}.jpg"
        mask_name = (
            f"{stem}_gtFine_labelTrainIds.png" if cityscapes else f"{stem}_1stHO.png" if chase else f"{stem}.png"
        )
        _save(_noise(draw, SIZE, SIZE, 3) + 40 * mask[:, :, None], root / images / image_name)
        _save(mask, root / masks / mask_name)


def _coco(root: Path, split: str, count: int, draw: np.random.Generator) -> None:
    images, boxes = [], []
    for i in range(count):
        picture = _noise(draw, SIZE, SIZE, 3)
        for category in (1, 2):
            left, top = (int(value) for value in draw.integers(0, SIZE // 2, 2))
            width, height = (int(value) for value in draw.integers(SIZE // 4, SIZE // 2, 2))
            picture[top : top + height, left : left + width] += np.uint8(80 * category)
            box = dict(id=len(boxes) + 1, image_id=i + 1, category_id=category, iscrowd=0, area=width * height)
            boxes.append(dict(box, bbox=[left, top, width, height], segmentation=[]))
        _save(picture, root / split / f"{i}.png")
        images.append(dict(id=i + 1, file_name=f"{i}.png", width=SIZE, height=SIZE))
    names = ["person", "bicycle"]
    content = dict(
        images=images, annotations=boxes, categories=[dict(id=i + 1, name=name) for i, name in enumerate(names)]
    )
    (root / "annotations").mkdir(exist_ok=True)
    (root / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))
