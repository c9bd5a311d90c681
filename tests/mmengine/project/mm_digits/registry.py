from mmengine.registry import DATASETS as MMENGINE_DATASETS
from mmengine.registry import HOOKS as MMENGINE_HOOKS
from mmengine.registry import METRICS as MMENGINE_METRICS
from mmengine.registry import MODELS as MMENGINE_MODELS
from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS as MMENGINE_CONSTRUCTORS
from mmengine.registry import OPTIM_WRAPPERS as MMENGINE_OPTIM_WRAPPERS
from mmengine.registry import OPTIMIZERS as MMENGINE_OPTIMIZERS
from mmengine.registry import PARAM_SCHEDULERS as MMENGINE_PARAM_SCHEDULERS
from mmengine.registry import TRANSFORMS as MMENGINE_TRANSFORMS
from mmengine.registry import VISBACKENDS as MMENGINE_VISBACKENDS
from mmengine.registry import VISUALIZERS as MMENGINE_VISUALIZERS
from mmengine.registry import WEIGHT_INITIALIZERS as MMENGINE_WEIGHT_INITIALIZERS
from mmengine.registry import Registry

SCOPE = "mm_digits"
DATASETS = Registry("dataset", parent=MMENGINE_DATASETS, scope=SCOPE, locations=["mm_digits.datasets"])
TRANSFORMS = Registry("transform", parent=MMENGINE_TRANSFORMS, scope=SCOPE, locations=["mm_digits.transforms"])
MODELS = Registry("model", parent=MMENGINE_MODELS, scope=SCOPE, locations=["mm_digits.models"])
METRICS = Registry("metric", parent=MMENGINE_METRICS, scope=SCOPE, locations=["mm_digits.metrics"])
HOOKS = Registry("hook", parent=MMENGINE_HOOKS, scope=SCOPE, locations=["mm_digits.hooks"])
VISUALIZERS = Registry("visualizer", parent=MMENGINE_VISUALIZERS, scope=SCOPE, locations=["mm_digits.visualizers"])
OPTIM_WRAPPER_CONSTRUCTORS = Registry(
    "optimizer wrapper constructor",
    parent=MMENGINE_CONSTRUCTORS,
    scope=SCOPE,
    locations=["mm_digits.constructors"],
)
PARAM_SCHEDULERS = Registry(
    "parameter scheduler", parent=MMENGINE_PARAM_SCHEDULERS, scope=SCOPE, locations=["mm_digits.schedules"]
)
OPTIMIZERS = Registry("optimizer", parent=MMENGINE_OPTIMIZERS, scope=SCOPE)
OPTIM_WRAPPERS = Registry("optim_wrapper", parent=MMENGINE_OPTIM_WRAPPERS, scope=SCOPE)
VISBACKENDS = Registry("vis_backend", parent=MMENGINE_VISBACKENDS, scope=SCOPE)
WEIGHT_INITIALIZERS = Registry("weight initializer", parent=MMENGINE_WEIGHT_INITIALIZERS, scope=SCOPE)
