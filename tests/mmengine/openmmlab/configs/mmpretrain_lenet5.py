_base_ = "mmpretrain::lenet/lenet5_mnist.py"

train_dataloader = dict(batch_size=4)
val_dataloader = dict(batch_size=4)
test_dataloader = dict(batch_size=4)
train_cfg = dict(max_epochs=2)
