_base_ = "mmpretrain::mobilenet_v2/mobilenet-v2_8xb32_in1k.py"

pipeline = [dict(type="LoadImageFromFile"), dict(type="Resize", scale=64), dict(type="PackInputs")]
train_dataloader = dict(batch_size=4, dataset=dict(pipeline=pipeline))
val_dataloader = dict(batch_size=4, dataset=dict(pipeline=pipeline))
test_dataloader = val_dataloader
train_cfg = dict(max_epochs=2)
