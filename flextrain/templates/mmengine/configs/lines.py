"""A classifier of pictures with lines: `flextrain train configs/lines.py`."""

_base_ = ["_base_/runtime.py", "_base_/schedule.py"]

model = dict(type="PictureClassifier", width=16, num_classes=4)
train_dataloader = dict(
    batch_size=64,
    dataset=dict(type="Lines", size=2048, seed=0),
    sampler=dict(type="DefaultSampler", shuffle=True),
    collate_fn=dict(type="default_collate"),
)
val_dataloader = dict(
    batch_size=64,
    dataset=dict(type="Lines", size=512, seed=1),
    sampler=dict(type="DefaultSampler", shuffle=False),
    collate_fn=dict(type="default_collate"),
)
val_evaluator = dict(type="PictureAccuracy")
