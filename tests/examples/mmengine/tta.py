"""Test-time augmentation: a configuration gets another model and another last transform, and a trained checkpoint is tested."""

from copy import deepcopy
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset

from flextrain import DATASETS, METRICS, MODELS, BaseMetric, BaseModel, BaseTTAModel, Registry
from flextrain import FlexibleRunner as Runner

TRANSFORMS = Registry("transform")


class ClsDataSample:
    def __init__(self, label):
        self.label, self.score = label, None

    def new(self):
        return ClsDataSample(self.label)

    def set_pred_score(self, score):
        self.score = score
        return self


@TRANSFORMS.register_module()
class Brighten:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, results):
        return {**results, "img": results["img"] * self.factor}


@TRANSFORMS.register_module()
class PackInputs:
    def __call__(self, results):
        return dict(inputs=results["img"], data_samples=ClsDataSample(results["label"]))


@TRANSFORMS.register_module()
class TestTimeAug:
    """Every combination of the transforms of the lists, as one list of each field."""

    def __init__(self, transforms):
        alternatives = [[TRANSFORMS.build(cfg) for cfg in cfgs] for cfgs in transforms]
        self.chains = list(product(*alternatives))

    def __call__(self, results):
        outputs = []
        for chain in self.chains:
            augmented = results
            for transform in chain:
                augmented = transform(augmented)
            outputs.append(augmented)
        return {key: [output[key] for output in outputs] for key in outputs[0]}


@DATASETS.register_module()
class DigitsDataset(Dataset):
    def __init__(self, split, pipeline):
        images, labels = load_digits(return_X_y=True)
        chosen = slice(800) if split == "train" else slice(1500, None)
        self.images = torch.tensor(images[chosen].reshape(-1, 8, 8) / 16, dtype=torch.float32)
        self.labels = labels[chosen].tolist()
        self.pipeline = [TRANSFORMS.build(cfg) for cfg in pipeline]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        results = dict(img=self.images[index], label=self.labels[index])
        for transform in self.pipeline:
            results = transform(results)
        return results


@MODELS.register_module()
class Classifier(BaseModel):
    def __init__(self, width=32):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    def forward(self, inputs, data_samples=None, mode="tensor"):
        scores = self.net(torch.stack(inputs))
        if mode == "loss":
            labels = torch.tensor([sample.label for sample in data_samples], device=scores.device)
            return dict(loss=F.cross_entropy(scores, labels))
        return [s.set_pred_score(p) for s, p in zip(data_samples, scores.softmax(dim=1), strict=True)]


@MODELS.register_module()
class ClsTTAModel(BaseTTAModel):
    def merge_preds(self, data_samples_list):
        return [self._merge_single_sample(data_samples) for data_samples in data_samples_list]

    def _merge_single_sample(self, data_samples):
        merged = data_samples[0].new()
        merged.set_pred_score(sum(sample.score for sample in data_samples) / len(data_samples))
        return merged


@METRICS.register_module()
class Scores(BaseMetric):
    def process(self, data_batch, data_samples):
        self.results += [(int(s.score.argmax()) == s.label, -float(s.score[s.label].log())) for s in data_samples]

    def compute_metrics(self, results):
        right, losses = zip(*results, strict=True)
        return dict(count=len(right), accuracy=100 * sum(right) / len(right), entropy=sum(losses) / len(losses))


def get_config():
    return dict(
        model=dict(type="Classifier"),
        train_dataloader=dict(batch_size=32, dataset=dict(type="DigitsDataset", split="train", pipeline=pipeline())),
        test_dataloader=dict(batch_size=32, dataset=dict(type="DigitsDataset", split="test", pipeline=pipeline())),
        test_cfg=dict(),
        test_evaluator=dict(type="Scores"),
        train_cfg=dict(by_epoch=True, max_epochs=4),
        optim_wrapper=dict(optimizer=dict(type="Adam", lr=3e-3)),
        randomness=dict(seed=0),
    )


def pipeline():
    return [dict(type="PackInputs")]


if __name__ == "__main__":
    cfg = get_config()
    cfg["work_dir"] = "work_dirs/digits"
    if not Path("work_dirs/digits/epoch_4").exists():
        runner = Runner.from_cfg(deepcopy(cfg))
        runner.train()
        runner.test()
    cfg["model"] = dict(type="ClsTTAModel", module=cfg["model"])
    test_pipeline = deepcopy(cfg["test_dataloader"]["dataset"]["pipeline"])
    brightness_tta = dict(
        type="TestTimeAug",
        transforms=[[dict(type="Brighten", factor=factor) for factor in (0.8, 1.0, 1.5)], [test_pipeline[-1]]],
    )
    cfg["test_dataloader"]["dataset"]["pipeline"][-1] = brightness_tta
    cfg["load_from"] = "work_dirs/digits/epoch_4"
    cfg["work_dir"] = "work_dirs/tta"
    runner = Runner.from_cfg(cfg)
    runner.test()
