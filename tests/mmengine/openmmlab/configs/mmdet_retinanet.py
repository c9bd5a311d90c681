_base_ = "mmdet::retinanet/retinanet_r18_fpn_1x_coco.py"

metainfo = dict(classes=("person", "bicycle"))
model = dict(
    backbone=dict(init_cfg=None),
    bbox_head=dict(num_classes=2),
    test_cfg=dict(score_thr=0.0),  # otherwise nothing is found, and there are no metrics
)
pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="LoadAnnotations", with_bbox=True),
    dict(type="Resize", scale=(64, 64), keep_ratio=True),
    dict(type="PackDetInputs"),
]
train_dataloader = dict(batch_size=4, dataset=dict(metainfo=metainfo, pipeline=pipeline, filter_cfg=dict(min_size=8)))
val_dataloader = dict(
    dataset=dict(
        metainfo=metainfo,
        pipeline=[
            *pipeline[:-1],
            dict(type="PackDetInputs", meta_keys=("img_id", "img_path", "ori_shape", "img_shape", "scale_factor")),
        ],
    )
)
test_dataloader = val_dataloader
train_cfg = dict(max_epochs=2)
param_scheduler = [dict(type="LinearLR", start_factor=0.1, by_epoch=False, begin=0, end=2)]
