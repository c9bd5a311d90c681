# A training script as a user of MMEngine has it, kept as it is; test_patching.py runs it with MMEngine's runner and flextrain's.
import torch
from mmengine.evaluator import BaseMetric
from mmengine.model import BaseModel
from mmengine.runner import Runner
from torch import nn
from torch.utils.data import DataLoader


class Net(BaseModel):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 1)

    def forward(self, x, y, mode):
        out = self.fc(x)
        return {"loss": (out - y).square().mean()} if mode == "loss" else (out, y)


class Error(BaseMetric):
    def process(self, data_batch, data_samples):
        out, y = data_samples
        self.results.append({"size": len(y), "error": (out - y).abs().sum().item()})

    def compute_metrics(self, results):
        return {"error": sum(each["error"] for each in results) / sum(each["size"] for each in results)}


def main(work_dir):
    torch.manual_seed(0)
    x = torch.randn(12, 2)
    data = list(zip(x, x.sum(1, keepdim=True), strict=True))
    runner = Runner(
        model=Net(),
        work_dir=work_dir,
        train_dataloader=DataLoader(data, batch_size=4),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
        train_cfg=dict(by_epoch=True, max_epochs=3, val_interval=1),
        val_dataloader=DataLoader(data, batch_size=5),
        val_cfg=dict(),
        val_evaluator=dict(type=Error),
        log_level="ERROR",
        experiment_name=f"script in {work_dir}",
    )
    runner.train()
    return runner, runner.val()
