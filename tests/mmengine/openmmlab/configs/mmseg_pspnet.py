_base_ = "mmseg::pspnet/pspnet_r18-d8_4xb2-80k_cityscapes-512x1024.py"

norm_cfg = dict(type="BN")  # torch's SyncBatchNorm needs an accelerator
head = dict(norm_cfg=norm_cfg, dropout_ratio=0.0)
# Without the scale 1: normalising the two values of a batch on one of two processes makes 5e-4 of a last bit in the weights, under
# MMEngine's DDP too.
scales = (2, 3, 6)
model = dict(
    data_preprocessor=dict(size=(64, 64)),
    pretrained=None,
    backbone=dict(norm_cfg=norm_cfg),
    decode_head=dict(head, pool_scales=scales),
    auxiliary_head=head,
)
pipeline = [dict(type="LoadImageFromFile"), dict(type="LoadAnnotations"), dict(type="PackSegInputs")]
train_dataloader = dict(batch_size=4, dataset=dict(pipeline=pipeline))
val_dataloader = dict(dataset=dict(pipeline=pipeline))
test_dataloader = val_dataloader
train_cfg = dict(max_iters=4, val_interval=2)
default_hooks = dict(checkpoint=dict(interval=2))
