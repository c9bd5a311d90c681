default_scope = "mm_digits"
project_name = "digits"
default_hooks = dict(
    timer=dict(type="IterTimerHook"),
    logger=dict(type="LoggerHook", interval=2),
    param_scheduler=dict(type="ParamSchedulerHook"),
    checkpoint=dict(type="CheckpointHook", interval=1),
    sampler_seed=dict(type="DistSamplerSeedHook"),
    drawing=dict(type="DrawDigits"),
)
env_cfg = dict(cudnn_benchmark=False, mp_cfg=dict(mp_start_method="fork", opencv_num_threads=0))
vis_backends = [dict(type="LocalVisBackend")]
visualizer = dict(type="DigitVisualizer", vis_backends=vis_backends, name="visualizer")
log_processor = dict(type="LogProcessor", window_size=5, by_epoch=True)
log_level = "INFO"
load_from = None
resume = False
