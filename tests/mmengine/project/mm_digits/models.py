import math

import torch
from mmengine.logging import MessageHub, print_log
from mmengine.model import BaseModel, BaseModule, BaseTTAModel, ExponentialMovingAverage, Sequential
from torch import nn
from torch.nn import functional

from .registry import MODELS


@MODELS.register_module()
class Block(BaseModule):
    def __init__(self, channels, init_cfg=None):
        super().__init__(init_cfg)
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.GroupNorm(2, channels)

    def forward(self, x):
        return x + functional.gelu(self.norm(self.conv(x)))


@MODELS.register_module()
class Backbone(BaseModule):
    def __init__(
        self,
        channels=8,
        depth=2,
        init_cfg=[  # noqa: B006 - as such projects write it
            dict(type="Kaiming", layer="Conv2d"),
            dict(type="Constant", val=1.0, layer="GroupNorm"),
        ],
    ):
        super().__init__(init_cfg)
        self.stem = nn.Conv2d(1, channels, 3, stride=2, padding=1)
        self.blocks = Sequential(*(MODELS.build(dict(type="Block", channels=channels)) for _ in range(depth)))

    def forward(self, x):
        return self.blocks(self.stem(x))


@MODELS.register_module()
class Head(BaseModule):
    def __init__(self, channels, num_classes=10, init_cfg=dict(type="Normal", layer="Linear", std=0.05)):  # noqa: B006
        super().__init__(init_cfg)
        self.fc = nn.Linear(channels, num_classes)
        self.scale = nn.Parameter(torch.zeros(num_classes))

    def init_weights(self):
        super().init_weights()
        nn.init.constant_(self.scale, 0.5)

    def forward(self, x):
        return self.fc(x.mean((2, 3))) * (1 + self.scale)


@MODELS.register_module()
class Classifier(BaseModel):
    def __init__(self, backbone, head, data_preprocessor=None, init_cfg=None):
        super().__init__(data_preprocessor=data_preprocessor, init_cfg=init_cfg)
        self.backbone, self.head = MODELS.build(backbone), MODELS.build(head)

    def forward(self, inputs, data_samples=None, mode="tensor"):
        logits = self.head(self.backbone(inputs))
        if mode == "tensor":
            return logits
        if mode == "predict":
            for sample, scores in zip(data_samples, logits.softmax(1), strict=True):
                sample.pred_scores, sample.pred_label = scores, scores.argmax()
            return data_samples
        labels = torch.stack([sample.gt_label for sample in data_samples])
        hub = MessageHub.get_current_instance()
        if hub.get_info("iter", 0) == 0:
            print_log(f"labels on {labels.device.type}, epoch {hub.get_info('epoch')}", logger="current")
        return dict(
            loss_cls=functional.cross_entropy(logits, labels),
            loss_size=[0.001 * logits.square().mean()],
            accuracy=(logits.argmax(1) == labels).float().mean(),
        )


@MODELS.register_module()
class SlowingAverage(ExponentialMovingAverage):
    def __init__(self, model, momentum=0.0002, gamma=2000, interval=1, device=None, update_buffers=False):
        super().__init__(model, momentum, interval, device, update_buffers)
        self.gamma = gamma

    def avg_func(self, averaged_param, source_param, steps):
        momentum = (1 - self.momentum) * math.exp(-steps / self.gamma) + self.momentum
        averaged_param.mul_(1 - momentum).add_(source_param, alpha=momentum)


@MODELS.register_module()
class DigitTTA(BaseTTAModel):
    def merge_preds(self, data_samples_list):
        merged = []
        for views in data_samples_list:
            sample = views[0].new()
            sample.pred_scores = torch.stack([view.pred_scores for view in views]).mean(0)
            sample.pred_label = sample.pred_scores.argmax()
            merged.append(sample)
        return merged
