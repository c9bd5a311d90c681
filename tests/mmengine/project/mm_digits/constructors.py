from mmengine.optim import DefaultOptimWrapperConstructor

from .registry import OPTIM_WRAPPER_CONSTRUCTORS


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class LayerDecay(DefaultOptimWrapperConstructor):
    """Learning rates that decay from the head to the stem; no weight decay for what has one dimension."""

    def add_params(self, params, module, **kwargs):
        decay_rate, depth = self.paramwise_cfg["decay_rate"], self.paramwise_cfg["depth"]
        groups = {}
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad:
                continue
            layer = depth + 1
            if name.startswith("backbone.stem"):
                layer = 0
            elif name.startswith("backbone.blocks"):
                layer = int(name.split(".")[2]) + 1
            decay = 0.0 if parameter.ndim == 1 else self.base_wd
            group = groups.setdefault(
                (layer, decay),
                dict(
                    params=[],
                    weight_decay=decay,
                    lr=self.base_lr * decay_rate ** (depth + 1 - layer),
                    group_name=f"layer_{layer}",
                ),
            )
            group["params"].append(parameter)
        params.extend(groups.values())
