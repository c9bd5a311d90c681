_base_ = "mmseg::unet/unet-s5-d16_fcn_4xb4-40k_chase-db1-128x128.py"

norm_cfg = dict(type="BN")  # torch's SyncBatchNorm needs an accelerator
model = dict(
    data_preprocessor=dict(size=(64, 64)),
    backbone=dict(base_channels=8, norm_cfg=norm_cfg),
    decode_head=dict(in_channels=8, channels=8, norm_cfg=norm_cfg, dropout_ratio=0.0),
    auxiliary_head=dict(in_channels=16, channels=8, norm_cfg=norm_cfg, dropout_ratio=0.0),
    test_cfg=dict(crop_size=(64, 64), stride=(42, 42)),
)
pipeline = [dict(type="LoadImageFromFile"), dict(type="LoadAnnotations"), dict(type="PackSegInputs")]
train_dataloader = dict(dataset=dict(times=1, dataset=dict(pipeline=pipeline)))
val_dataloader = dict(dataset=dict(pipeline=pipeline))
test_dataloader = val_dataloader
train_cfg = dict(max_iters=4, val_interval=2)
default_hooks = dict(checkpoint=dict(interval=2))
