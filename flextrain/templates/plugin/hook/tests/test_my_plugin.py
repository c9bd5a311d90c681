from my_plugin import MyPluginHook
from torch import nn, rand
from torch.utils.data import TensorDataset

from flextrain import FlexibleRunner


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, x, y):
        return {"loss": (self.layer(x) - y).square().mean()}


def train(folder, epochs, resume=False):
    x, hook = rand(32, 8), MyPluginHook()
    runner = FlexibleRunner(
        model=Net,
        train_dataloader=dict(
            dataset=TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, collate_fn="default_collate"
        ),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
        train_cfg=dict(max_epochs=epochs),
        custom_hooks=[hook],
        work_dir=str(folder),
        resume=resume,
    )
    runner.train()
    runner.close()
    return hook.updates


def test_updates_are_counted_across_restarts(tmp_path):
    assert train(tmp_path, epochs=1) == 4
    assert train(tmp_path, epochs=3, resume=True) == 12
