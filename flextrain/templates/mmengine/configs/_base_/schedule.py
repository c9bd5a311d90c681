"""How long and with which optimizer is trained."""

optim_wrapper = dict(type="OptimWrapper", optimizer=dict(type="AdamW", lr=2e-3, weight_decay=0.01))
param_scheduler = [
    dict(type="LinearLR", start_factor=0.1, by_epoch=False, begin=0, end=20),
    dict(type="CosineAnnealingLR", by_epoch=True, begin=0, end=5, convert_to_iter_based=True),
]
train_cfg = dict(by_epoch=True, max_epochs=5, val_interval=1)
val_cfg = dict()
