"""A small GPT on text: `flextrain train config.py`. `flextrain config check config.py` checks it without training."""

context = 64
steps = 500

model = dict(type="small_gpt:SmallGPT", layers=2, dim=128, heads=4, context=context)
train_dataloader = dict(
    batch_size=16,
    dataset=dict(type="gpt_data:Bytes", context=context, train=True),
    sampler=dict(type="InfiniteSampler"),
    collate_fn="default_collate",
)
val_dataloader = dict(
    batch_size=16, dataset=dict(type="gpt_data:Bytes", context=context, train=False), collate_fn="default_collate"
)
val_evaluator = dict(type="gpt_data:BytesLoss")
val_cfg = dict()

optim_wrapper = dict(
    optimizer=dict(type="AdamW", lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1),
    paramwise_cfg=dict(norm_decay_mult=0.0, bias_decay_mult=0.0),
    clip_grad=dict(max_norm=1.0),
)
param_scheduler = [
    dict(type="LinearLR", by_epoch=False, start_factor=0.1, end=steps // 10),
    dict(type="CosineAnnealingLR", by_epoch=False, begin=steps // 10, end=steps, eta_min_ratio=0.1),
]
train_cfg = dict(by_epoch=False, max_iters=steps, val_interval=steps // 5)
default_hooks = dict(
    logger=dict(interval=20), checkpoint=dict(by_epoch=False, interval=steps // 5, max_keep_ckpts=2, overwrite=True)
)
randomness = dict(seed=0)
