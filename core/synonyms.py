"""Words of other libraries, and what they are called here: only errors and ``flextrain show`` use them."""

from __future__ import annotations

RUNNER = {
    "accumulate_grad_batches": "give optim_wrapper=dict(accumulative_counts=...)",
    "args": "give the runner's own arguments",
    "callbacks": "give custom_hooks=[...]",
    "compute_metrics": "give val_evaluator=...",
    "criterion": "let the model return its loss",
    "data_collator": "give train_dataloader a collate_fn",
    "devices": "start as many processes with torchrun or flextrain run",
    "eval_dataset": "give val_dataloader=...",
    "gradient_accumulation_steps": "give optim_wrapper=dict(accumulative_counts=...)",
    "gradient_clip_val": "give optim_wrapper=dict(clip_grad=dict(max_norm=...))",
    "lr_scheduler": "give param_scheduler=...",
    "max_epochs": "give train_cfg=dict(max_epochs=...)",
    "max_grad_norm": "give optim_wrapper=dict(clip_grad=dict(max_norm=...))",
    "max_iters": "give train_cfg=dict(by_epoch=False, max_iters=...)",
    "max_steps": "give train_cfg=dict(by_epoch=False, max_iters=...)",
    "num_nodes": "start processes on every machine with torchrun or flextrain run",
    "num_train_epochs": "give train_cfg=dict(max_epochs=...)",
    "optimizer": "give optim_wrapper=dict(optimizer=...)",
    "optimizers": "give optim_wrapper=... and param_scheduler=...",
    "plugins": "give strategy=...",
    "precision": 'give optim_wrapper=dict(type="AmpOptimWrapper", dtype=...)',
    "scheduler": "give param_scheduler=...",
    "seed": "give randomness=dict(seed=...)",
    "train_dataset": "give train_dataloader=...",
    "train_loader": "give train_dataloader=...",
    "val_loader": "give val_dataloader=...",
}
"""Arguments of other trainers, and what to give a runner."""

NAMES = {
    "Accelerator": "FlexibleRunner",
    "Callback": "Hook",
    "CSVLogger": "LoggerHook",
    "EarlyStopping": "EarlyStoppingHook",
    "EarlyStoppingCallback": "EarlyStoppingHook",
    "EMAWeightAveraging": "EMAHook",
    "LearningRateMonitor": "LoggerHook",
    "LightningModule": "BaseModel",
    "MLFlowLogger": "MLflowReporter",
    "ModelCheckpoint": "CheckpointHook",
    "ReduceLROnPlateau": "ReduceOnPlateauLR",
    "StochasticWeightAveraging": "EMAHook",
    "TensorBoardLogger": "TensorboardReporter",
    "Trainer": "FlexibleRunner",
    "TrainerCallback": "Hook",
    "WandbLogger": "WandbReporter",
}
"""Classes of other libraries, and the one of the same purpose."""
