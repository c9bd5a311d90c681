# A training script as an MMEngine user has it, FlexibleRunner and all; test_mmengine_script.py changes its imports, runs it.
import torch.nn.functional as F
import torchvision
from mmengine.evaluator import BaseMetric
from mmengine.model import BaseModel
from mmengine.runner._flexible_runner import FlexibleRunner


class MMResNet50(BaseModel):
    def __init__(self):
        super().__init__()
        self.net = torchvision.models.resnet50(num_classes=10)

    def forward(self, images, targets, mode):
        logits = self.net(images)
        return dict(loss=F.cross_entropy(logits, targets)) if mode == "loss" else (logits, targets)


class Accuracy(BaseMetric):
    # One result per batch, of whatever size, as most metrics written for MMEngine have it.
    def process(self, data_batch, data_samples):
        logits, targets = data_samples
        hits = logits.argmax(dim=1).eq(targets).sum().item()
        self.results.append(dict(hits=hits, total=len(targets)))

    def compute_metrics(self, results):
        return dict(accuracy=100 * sum(r["hits"] for r in results) / sum(r["total"] for r in results))


def main():
    # The shape of CIFAR-10 without its download.
    to_tensor = torchvision.transforms.ToTensor()
    train_set = torchvision.datasets.FakeData(48, (3, 32, 32), 10, transform=to_tensor)
    valid_set = torchvision.datasets.FakeData(10, (3, 32, 32), 10, transform=to_tensor)
    train_dataloader = dict(
        batch_size=4,
        dataset=train_set,
        sampler=dict(type="DefaultSampler", shuffle=True),
        collate_fn=dict(type="default_collate"),
    )
    val_dataloader = dict(
        batch_size=4,
        dataset=valid_set,
        sampler=dict(type="DefaultSampler", shuffle=False),
        collate_fn=dict(type="default_collate"),
    )
    optim_wrapper = dict(type="OptimWrapper", optimizer=dict(type="AdamW", lr=1e-3))
    runner = FlexibleRunner(
        model=MMResNet50(),
        work_dir="./work_dirs",
        strategy=None,
        train_dataloader=train_dataloader,
        optim_wrapper=optim_wrapper,
        param_scheduler=dict(type="LinearLR"),
        train_cfg=dict(by_epoch=True, max_epochs=10, val_interval=1),
        val_dataloader=val_dataloader,
        val_cfg=dict(),
        val_evaluator=dict(type=Accuracy),
    )
    runner.train()


if __name__ == "__main__":
    main()
