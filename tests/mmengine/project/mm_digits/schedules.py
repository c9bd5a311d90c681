from mmengine.optim.scheduler.lr_scheduler import LRSchedulerMixin
from mmengine.optim.scheduler.param_scheduler import INF, _ParamScheduler

from .registry import PARAM_SCHEDULERS


@PARAM_SCHEDULERS.register_module()
class QuadraticRise(LRSchedulerMixin, _ParamScheduler):
    """Rises with the square of the step; what it adds depends on the length of its window."""

    def __init__(self, *args, begin=0, end=INF, **kwargs):
        self.total = end - begin
        super().__init__(*args, begin=begin, end=end, **kwargs)

    @classmethod
    def build_iter_from_epoch(cls, *args, begin=0, end=INF, by_epoch=True, epoch_length=None, **kwargs):
        return cls(*args, begin=begin * epoch_length, end=end * epoch_length, by_epoch=False, **kwargs)

    def _get_value(self):
        added = [base * (2 * self.last_step + 1) / self.total**2 for base in self.base_values]
        if self.last_step == 0:
            return added
        groups = self.optimizer.param_groups
        return [group[self.param_name] + more for group, more in zip(groups, added, strict=True)]
