"""What is particular about the strategy; that it trains like one device is checked by `pytest --flextrain-strategy`."""

from my_plugin import MyPluginStrategy
from torch import nn, rand
from torch.utils.data import TensorDataset

from flextrain import FlexibleRunner


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, x, y):
        return {"loss": (self.layer(x) - y).square().mean()}


def test_a_run_uses_it(tmp_path):
    x = rand(32, 8)
    runner = FlexibleRunner(
        model=Net,
        strategy=MyPluginStrategy,
        train_dataloader=dict(
            dataset=TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, collate_fn="default_collate"
        ),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
        train_cfg=dict(max_epochs=1),
        work_dir=str(tmp_path),
    )
    runner.train()
    runner.close()
    assert isinstance(runner.strategy, MyPluginStrategy)
