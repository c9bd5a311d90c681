from my_plugin import MyPluginDataset
from torch import nn

from flextrain import FlexibleRunner


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.seen = 0

    def forward(self, x, y):
        self.seen += len(x)
        return {"loss": (self.layer(x) - y).square().mean()}


def test_every_row_is_trained_on(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text("\n".join(f"{n},{n + 1},{n + 2}" for n in range(12)))
    runner = FlexibleRunner(
        model=Net,
        train_dataloader=dict(
            dataset=dict(type=MyPluginDataset, path=str(file)), batch_size=4, collate_fn="default_collate"
        ),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=1e-3)),
        train_cfg=dict(max_epochs=2),
        work_dir=str(tmp_path),
    )
    model = runner.train()
    runner.close()
    assert model.seen == 24
