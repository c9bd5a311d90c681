_base_ = "mmdet::rtmdet/rtmdet_tiny_8xb32-300e_coco.py"

norm_cfg = dict(type="BN")  # torch's SyncBatchNorm needs an accelerator
metainfo = dict(classes=("person", "bicycle"))
model = dict(
    use_syncbn=False,
    backbone=dict(init_cfg=None, norm_cfg=norm_cfg),
    neck=dict(norm_cfg=norm_cfg),
    bbox_head=dict(norm_cfg=norm_cfg, num_classes=2),
)
pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="LoadAnnotations", with_bbox=True),
    dict(type="Resize", scale=(64, 64), keep_ratio=True),
    dict(type="PackDetInputs"),
]
train_dataloader = dict(batch_size=4, dataset=dict(metainfo=metainfo, pipeline=pipeline, filter_cfg=dict(min_size=8)))
val_dataloader = dict(dataset=dict(metainfo=metainfo))
test_dataloader = val_dataloader
train_cfg = dict(max_epochs=2, val_interval=1, dynamic_intervals=[(1, 1)])
param_scheduler = [
    dict(type="LinearLR", start_factor=0.1, by_epoch=False, begin=0, end=2),
    dict(type="CosineAnnealingLR", eta_min=0.0002, begin=1, end=2, T_max=1, by_epoch=True, convert_to_iter_based=True),
]
default_hooks = dict(checkpoint=dict(interval=1))
custom_hooks = [
    dict(type="EMAHook", ema_type="ExpMomentumEMA", momentum=0.0002, update_buffers=True, priority=49),
    dict(type="PipelineSwitchHook", switch_epoch=1, switch_pipeline=pipeline),
]
