import numpy as np
from mmengine.dist import master_only
from mmengine.visualization import Visualizer

from .registry import VISUALIZERS


@VISUALIZERS.register_module()
class DigitVisualizer(Visualizer):
    @master_only
    def add_datasample(self, name, image, data_sample=None, step=0, **kwargs):
        shades = (255 * np.kron(image / 16, np.ones((8, 8)))).astype(np.uint8)
        self.set_image(np.stack([shades] * 3, axis=-1))
        label = self.dataset_meta["classes"][int(data_sample.pred_label)]
        self.draw_texts(label, np.array([4, 4]), colors="r")
        self.add_image(name, self.get_image(), step)
