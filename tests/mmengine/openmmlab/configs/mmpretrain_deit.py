_base_ = "mmpretrain::deit/deit-tiny_4xb256_in1k.py"

model = dict(backbone=dict(img_size=64), train_cfg=None)
pipeline = [dict(type="LoadImageFromFile"), dict(type="Resize", scale=64), dict(type="PackInputs")]
train_dataloader = dict(batch_size=4, dataset=dict(pipeline=pipeline))
val_dataloader = dict(batch_size=4, dataset=dict(pipeline=pipeline))
test_dataloader = val_dataloader
train_cfg = dict(max_epochs=2)
param_scheduler = [
    dict(type="LinearLR", start_factor=0.1, by_epoch=True, end=1, convert_to_iter_based=True),
    dict(type="CosineAnnealingLR", eta_min=1e-5, by_epoch=True, begin=1),
]
