_base_ = "mmpretrain::convnext_v2/convnext-v2-atto_32xb32_in1k.py"

model = dict(backbone=dict(drop_path_rate=0.0))
pipeline = [dict(type="LoadImageFromFile"), dict(type="Resize", scale=64), dict(type="PackInputs")]
train_dataloader = dict(batch_size=4, dataset=dict(pipeline=pipeline))
val_dataloader = dict(batch_size=4, dataset=dict(pipeline=pipeline))
test_dataloader = val_dataloader
train_cfg = dict(max_epochs=2)
custom_hooks = [dict(type="EMAHook", momentum=0.1, priority="ABOVE_NORMAL")]
