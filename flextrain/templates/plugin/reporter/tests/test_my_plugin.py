from my_plugin import MyPluginReporter
from torch import nn, rand
from torch.utils.data import TensorDataset

from flextrain import FlexibleRunner


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, x, y):
        return {"loss": (self.layer(x) - y).square().mean()}


def test_the_losses_are_written(tmp_path):
    x = rand(32, 8)
    runner = FlexibleRunner(
        model=Net,
        train_dataloader=dict(
            dataset=TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, collate_fn="default_collate"
        ),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
        train_cfg=dict(max_epochs=1),
        default_hooks=dict(logger=dict(interval=2)),
        visualizer=[dict(type=MyPluginReporter)],
        work_dir=str(tmp_path),
    )
    runner.train()
    runner.close()
    (file,) = tmp_path.rglob("my_plugin.txt")
    assert [line.split()[:2] for line in file.read_text().splitlines()] == [["train", "2"], ["train", "4"]]
