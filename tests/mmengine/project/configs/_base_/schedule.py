optim_wrapper = dict(
    type="OptimWrapper",
    optimizer=dict(type="AdamW", lr=0.01, weight_decay=0.05),
    clip_grad=dict(max_norm=1.0),
)
param_scheduler = [
    dict(type="QuadraticRise", begin=0, end=1, convert_to_iter_based=True),
    dict(type="CosineAnnealingLR", T_max=2, by_epoch=True, begin=1, end=3, convert_to_iter_based=True),
]
train_cfg = dict(type="EpochBasedTrainLoop", max_epochs=3, val_interval=1)
val_cfg = dict(type="ValLoop")
test_cfg = dict(type="TestLoop")
