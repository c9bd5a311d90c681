_base_ = "mmseg::segformer/segformer_mit-b0_8xb2-160k_ade20k-512x512.py"

norm_cfg = dict(type="BN")  # torch's SyncBatchNorm needs an accelerator
model = dict(
    data_preprocessor=dict(size=(64, 64)),
    backbone=dict(init_cfg=None, drop_path_rate=0.0),
    decode_head=dict(norm_cfg=norm_cfg, dropout_ratio=0.0),
)
pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="LoadAnnotations", reduce_zero_label=True),
    dict(type="PackSegInputs"),
]
train_dataloader = dict(batch_size=4, dataset=dict(pipeline=pipeline))
val_dataloader = dict(dataset=dict(pipeline=pipeline))
test_dataloader = val_dataloader
param_scheduler = [
    dict(type="LinearLR", start_factor=0.1, by_epoch=False, begin=0, end=2),
    dict(type="PolyLR", eta_min=0.0, power=1.0, begin=2, end=4, by_epoch=False),
]
train_cfg = dict(max_iters=4, val_interval=2)
default_hooks = dict(checkpoint=dict(interval=2))
