_base_ = "mmseg::pspnet/pspnet_r18-d8_4xb2-80k_cityscapes-512x1024.py"

norm_cfg = dict(type="BN")  # torch's SyncBatchNorm needs an accelerator
head = dict(norm_cfg=norm_cfg, dropout_ratio=0.0)
# Without the scale 1, where torch's convolution rounds by how weights lie in memory (which is another way under ZeRO), and the
# norm after it has two values on each of two processes: MMEngine's DDP differs from itself by 5e-4 if one bit of its weights does.
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
