from mmengine.hooks import Hook
from mmengine.logging import MMLogger
from mmengine.visualization import Visualizer

from .registry import HOOKS


@HOOKS.register_module()
class Journal(Hook):
    """Writes down what it sees of the run."""

    priority = "LOW"

    def __init__(self, every=2):
        self.every, self.entries, self.losses = every, [], []

    def before_run(self, runner):
        self.entries.append(("run", runner.max_epochs, runner.cfg.project_name, len(runner.train_dataloader.dataset)))

    def _before_epoch(self, runner, mode="train"):
        self.entries.append((mode, runner.epoch, runner.iter))

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.losses.append(float(outputs["loss"]))
        if self.every_n_train_iters(runner, self.every):
            rate = runner.optim_wrapper.get_lr()
            runner.message_hub.update_scalar("train/doubled", 2 * float(outputs["loss"]))
            runner.logger.debug("learning rates %s", rate)

    def after_val_epoch(self, runner, metrics=None):
        self.entries.append(("metrics", sorted(metrics)))
        MMLogger.get_current_instance().info(f"Journal of {runner.experiment_name}")


@HOOKS.register_module()
class DrawDigits(Hook):
    """Gives the first sample of every validation to the visualizer, which it looks for when it is made."""

    def __init__(self):
        self.visualizer = Visualizer.get_current_instance()
        MMLogger.get_current_instance().info("DrawDigits draws")

    def after_val_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if batch_idx == 0:
            sample = outputs[0]
            image = data_batch["inputs"][0][0].numpy()
            self.visualizer.add_datasample("digit", image, data_sample=sample, step=runner.iter)
