_base_ = "mmpretrain::resnet/resnet18_8xb16_cifar10.py"

# The dataset CIFAR10 compares its files with those of the original by their check sums: here are folders of pictures.
dataset = dict(
    _delete_=True,
    type="CustomDataset",
    data_root="data/imagenet",
    data_prefix="train",
    pipeline=[dict(type="LoadImageFromFile"), dict(type="Resize", scale=32), dict(type="PackInputs")],
)
train_dataloader = dict(batch_size=4, dataset=dataset)
val_dataloader = dict(batch_size=4, dataset=dict(dataset, data_prefix="val"))
test_dataloader = val_dataloader
train_cfg = dict(max_epochs=2)
