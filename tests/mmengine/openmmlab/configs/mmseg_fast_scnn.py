_base_ = "mmseg::fastscnn/fast_scnn_8xb4-160k_cityscapes-512x1024.py"

norm_cfg = dict(type="BN")  # torch's SyncBatchNorm needs an accelerator
head = dict(norm_cfg=norm_cfg, dropout_ratio=0.0)
model = dict(
    data_preprocessor=dict(size=(64, 64)),
    backbone=dict(norm_cfg=norm_cfg),
    decode_head=head,
    auxiliary_head=[dict(each, **head) for each in {{_base_.model.auxiliary_head}}],
)
pipeline = [dict(type="LoadImageFromFile"), dict(type="LoadAnnotations"), dict(type="PackSegInputs")]
train_dataloader = dict(batch_size=4, dataset=dict(pipeline=pipeline))
val_dataloader = dict(dataset=dict(pipeline=pipeline))
test_dataloader = val_dataloader
train_cfg = dict(max_iters=4, val_interval=2)
default_hooks = dict(checkpoint=dict(interval=2))
