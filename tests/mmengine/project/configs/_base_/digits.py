dataset_type = "Digits"
pipeline = [dict(type="PackDigit")]
train_dataloader = dict(
    batch_size=16,
    num_workers=0,
    sampler=dict(type="DefaultSampler", shuffle=False),
    collate_fn=dict(type="pseudo_collate"),
    dataset=dict(type="RepeatDataset", times=2, dataset=dict(type=dataset_type, start=0, stop=32, pipeline=pipeline)),
)
val_dataloader = dict(
    batch_size=4,
    num_workers=0,
    sampler=dict(type="DefaultSampler", shuffle=False),
    dataset=dict(
        type="ConcatDataset",
        datasets=[
            dict(type=dataset_type, start=100, stop=110, pipeline=pipeline, lazy_init=True),
            dict(type=dataset_type, start=110, stop=119, pipeline=pipeline),
        ],
    ),
)
val_evaluator = [dict(type="Accuracy"), dict(type="Recall", prefix="recall")]
test_dataloader = val_dataloader
test_evaluator = val_evaluator
tta_pipeline = [
    dict(
        type="Views",
        pipelines=[[dict(type="PackDigit")], [dict(type="Shift", columns=1), dict(type="PackDigit")]],
    )
]
