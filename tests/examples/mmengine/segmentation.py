"""Segmentation of pictures in files, with masks in colours; a hook stores what the model makes of them."""

import argparse
import csv
import shutil
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.optim import AdamW
from torchvision import transforms
from torchvision.datasets import VisionDataset

from flextrain import AmpOptimWrapper, BaseMetric, BaseModel, Hook
from flextrain import FlexibleRunner as Runner
from flextrain.core.comm.collectives import master_only

COLOURS = {"sky": (128, 128, 128), "road": (128, 64, 128), "car": (64, 0, 128)}


def prepare(root):
    """Pictures of a car on a road under the sky, in the layout of CamVid."""
    root = Path(root)
    generator = np.random.default_rng(0)
    for split, count in (("train", 48), ("val", 7)):
        (root / split).mkdir(parents=True, exist_ok=True)
        (root / f"{split}_labels").mkdir(exist_ok=True)
        for number in range(count):
            classes = np.zeros((16, 24), dtype=int)
            horizon, left = generator.integers(5, 11), generator.integers(0, 16)
            classes[horizon:], classes[horizon + 1 : horizon + 5, left : left + 8] = 1, 2
            picture = np.array([(120, 160, 220), (90, 90, 90), (200, 40, 40)])[classes]
            picture = (picture + generator.normal(0, 20, picture.shape)).clip(0, 255).astype(np.uint8)
            Image.fromarray(picture).save(root / split / f"{number:03}.png")
            mask = np.array(list(COLOURS.values()), dtype=np.uint8)[classes]
            Image.fromarray(mask).save(root / f"{split}_labels" / f"{number:03}.png")
    with open(root / "class_dict.csv", "w", newline="") as file:
        csv.writer(file).writerows([("name", "r", "g", "b"), *((name, *rgb) for name, rgb in COLOURS.items())])


def create_palette(path):
    with open(path, newline="") as file:
        return [(int(row["r"]), int(row["g"]), int(row["b"])) for row in csv.DictReader(file)]


class CamVid(VisionDataset):
    def __init__(self, root, img_folder, mask_folder, transform=None, target_transform=None):
        super().__init__(root, transform=transform, target_transform=target_transform)
        self.images = sorted((Path(root) / img_folder).iterdir())
        self.masks = sorted((Path(root) / mask_folder).iterdir())
        self.palette = create_palette(Path(root) / "class_dict.csv")

    def __getitem__(self, index):
        image = self.transform(Image.open(self.images[index]).convert("RGB"))
        mask = np.array(Image.open(self.masks[index]).convert("RGB"))
        labels = np.zeros(mask.shape[:2], dtype=np.int64)
        for number, colour in enumerate(self.palette):
            labels[(mask == colour).all(axis=2)] = number
        labels = self.target_transform(labels)
        data_samples = dict(labels=labels, img_path=str(self.images[index]), mask_path=str(self.masks[index]))
        return image, data_samples

    def __len__(self):
        return len(self.images)


class MMSegmentor(BaseModel):
    def __init__(self, num_classes):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, num_classes, 3, padding=1)
        )

    def forward(self, imgs, data_samples=None, mode="tensor"):
        scores = self.net(imgs)
        if mode == "loss":
            return {"loss": F.cross_entropy(scores, data_samples["labels"])}
        return scores, data_samples


class IoU(BaseMetric):
    def process(self, data_batch, data_samples):
        predictions, labels = data_samples[0].argmax(dim=1), data_samples[1]["labels"]
        right = (labels == predictions).sum()
        iou = (right / (2 * labels.numel() - right)).cpu()
        self.results.append(dict(batch_size=len(labels), iou=iou * len(labels)))

    def compute_metrics(self, results):
        return dict(iou=sum(r["iou"] for r in self.results) / sum(r["batch_size"] for r in self.results))


class SegVisHook(Hook):
    def __init__(self, data_root, vis_num=1):
        super().__init__()
        self.vis_num = vis_num
        self.palette = np.array(create_palette(Path(data_root) / "class_dict.csv"), dtype=np.uint8)

    @master_only
    def after_val_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if batch_idx > self.vis_num:
            return
        predictions, data_samples = outputs
        for idx, (scores, image) in enumerate(zip(predictions, data_samples["img_path"], strict=True)):
            runner.visualizer.set_image(self.palette[scores.argmax(dim=0).cpu().numpy()])
            runner.visualizer.add_image(f"prediction_{idx}", runner.visualizer.get_image(), runner.iter)
            folder = Path(runner.log_dir) / "vis_data" / str(idx)
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(image, folder / Path(image).name)


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--launcher", choices=["none", "pytorch", "slurm", "mpi"], default="none")
    parser.add_argument("--local_rank", "--local-rank", type=int, default=0)
    return parser.parse_args()


def main():
    args = parse_args()
    prepare("data/CamVid")
    normalize = transforms.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])
    transform = transforms.Compose([transforms.ToTensor(), normalize])
    target_transform = transforms.Lambda(lambda x: torch.tensor(np.array(x), dtype=torch.long))
    train_set = CamVid("data/CamVid", "train", "train_labels", transform, target_transform)
    valid_set = CamVid("data/CamVid", "val", "val_labels", transform, target_transform)
    train_dataloader = dict(
        batch_size=3,
        dataset=train_set,
        sampler=dict(type="DefaultSampler", shuffle=True),
        collate_fn=dict(type="default_collate"),
    )
    val_dataloader = dict(
        batch_size=3,
        dataset=valid_set,
        sampler=dict(type="DefaultSampler", shuffle=False),
        collate_fn=dict(type="default_collate"),
    )
    runner = Runner(
        model=MMSegmentor(num_classes=len(COLOURS)),
        work_dir="./work_dir",
        train_dataloader=train_dataloader,
        optim_wrapper=dict(type=AmpOptimWrapper, optimizer=dict(type=AdamW, lr=5e-3)),
        train_cfg=dict(by_epoch=True, max_epochs=2, val_interval=2),
        val_dataloader=val_dataloader,
        val_cfg=dict(),
        val_evaluator=dict(type=IoU),
        launcher=args.launcher,
        randomness=dict(seed=0),
        custom_hooks=[SegVisHook("data/CamVid")],
        default_hooks=dict(checkpoint=dict(type="CheckpointHook", interval=1)),
    )
    runner.train()


if __name__ == "__main__":
    main()
