_base_ = "./classifier.py"

optim_wrapper = dict(constructor="LayerDecay", paramwise_cfg=dict(decay_rate=0.7, depth=2))
custom_hooks = [
    dict(type="EMAHook", ema_type="SlowingAverage", momentum=0.1, gamma=5),
    dict(type="Journal", every=2, priority="VERY_LOW"),
]
model = dict(backbone=dict(depth=2))
