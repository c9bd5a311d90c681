"""What all trainings of the project share."""

custom_imports = dict(imports=["project"], allow_failed_imports=False)
default_scope = "flextrain"
default_hooks = dict(
    logger=dict(type="LoggerHook", interval=10),
    checkpoint=dict(type="CheckpointHook", interval=1, max_keep_ckpts=2, save_best="accuracy", overwrite=True),
)
randomness = dict(seed=0)
