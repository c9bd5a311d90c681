_base_ = "mmseg::fastscnn/fast_scnn_8xb4-160k_cityscapes-512x1024.py"

norm_cfg = dict(type="BN")  # torch's SyncBatchNorm needs an accelerator
loss = dict(type="CrossEntropyLoss", use_sigmoid=True, loss_weight=0.4)
auxiliary = dict(type="FCNHead", channels=32, num_convs=1, num_classes=19, norm_cfg=norm_cfg, concat_input=False)
auxiliary.update(dropout_ratio=0.0, align_corners=False, loss_decode=loss)
model = dict(
    data_preprocessor=dict(size=(64, 64)),
    backbone=dict(norm_cfg=norm_cfg),
    decode_head=dict(norm_cfg=norm_cfg, dropout_ratio=0.0),
    auxiliary_head=[dict(auxiliary, in_channels=128, in_index=-2), dict(auxiliary, in_channels=64, in_index=-3)],
)
pipeline = [dict(type="LoadImageFromFile"), dict(type="LoadAnnotations"), dict(type="PackSegInputs")]
train_dataloader = dict(batch_size=4, dataset=dict(pipeline=pipeline))
val_dataloader = dict(dataset=dict(pipeline=pipeline))
test_dataloader = val_dataloader
train_cfg = dict(max_iters=4, val_interval=2)
default_hooks = dict(checkpoint=dict(interval=2))
