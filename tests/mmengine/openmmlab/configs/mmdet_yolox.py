_base_ = "mmdet::yolox/yolox_nano_8xb8-300e_coco.py"

# Without the changes by chance: mosaics, colours, and the size of a batch.
metainfo = dict(classes=("person", "bicycle"))
model = dict(data_preprocessor=dict(batch_augments=None), bbox_head=dict(num_classes=2))
pipeline = [
    dict(type="Resize", scale=(64, 64), keep_ratio=True),
    dict(type="Pad", pad_to_square=True, pad_val=dict(img=(114.0, 114.0, 114.0))),
    dict(type="FilterAnnotations", min_gt_bbox_wh=(1, 1), keep_empty=False),
    dict(type="PackDetInputs"),
]
train_dataloader = dict(
    batch_size=4,
    dataset=dict(
        pipeline=pipeline, dataset=dict(metainfo=metainfo, filter_cfg=dict(filter_empty_gt=False, min_size=8))
    ),
)
val_dataloader = dict(batch_size=4, dataset=dict(metainfo=metainfo, pipeline={{_base_.test_pipeline}}))
test_dataloader = val_dataloader
train_cfg = dict(max_epochs=2, val_interval=1)
param_scheduler = [
    dict(type="mmdet.QuadraticWarmupLR", by_epoch=True, begin=0, end=1, convert_to_iter_based=True),
    dict(type="CosineAnnealingLR", eta_min=0.0005, begin=1, T_max=2, end=2, by_epoch=True, convert_to_iter_based=True),
]
default_hooks = dict(checkpoint=dict(interval=1))
custom_hooks = [
    dict(type="YOLOXModeSwitchHook", num_last_epochs=1, priority=48),
    dict(type="SyncNormHook", priority=48),
    dict(type="EMAHook", ema_type="ExpMomentumEMA", momentum=0.0001, update_buffers=True, priority=49),
]
