import numpy as np
import torch
from mmengine.dataset import Compose
from mmengine.structures import BaseDataElement

from .registry import TRANSFORMS


class DigitSample(BaseDataElement):
    """A digit's label, and what a model says of it."""


@TRANSFORMS.register_module()
class Shift:
    def __init__(self, columns):
        self.columns = columns

    def __call__(self, results):
        return {**results, "img": np.roll(results["img"], self.columns, axis=1)}


@TRANSFORMS.register_module()
class PackDigit:
    def __init__(self, meta_keys=("sample_idx",)):
        self.meta_keys = meta_keys

    def __call__(self, results):
        sample = DigitSample(metainfo={key: results[key] for key in self.meta_keys})
        sample.gt_label = torch.tensor(results["gt_label"])
        return dict(inputs=torch.from_numpy(results["img"]).float()[None], data_samples=sample)


@TRANSFORMS.register_module()
class Views:
    """Several views of a sample, for test-time augmentation."""

    def __init__(self, pipelines):
        self.pipelines = [Compose(pipeline) for pipeline in pipelines]

    def __call__(self, results):
        views = [pipeline(dict(results)) for pipeline in self.pipelines]
        return {key: [view[key] for view in views] for key in views[0]}
