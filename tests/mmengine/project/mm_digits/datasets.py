from mmengine.dataset import BaseDataset
from sklearn.datasets import load_digits

from .registry import DATASETS


@DATASETS.register_module()
class Digits(BaseDataset):
    """The digits of scikit-learn, 8 x 8, from ``start`` to ``stop``."""

    METAINFO = dict(classes=tuple("0123456789"))

    def __init__(self, start=0, stop=64, **kwargs):
        self.start, self.stop = start, stop
        super().__init__(**kwargs)

    def load_data_list(self):
        digits = load_digits()
        chosen = range(self.start, self.stop)
        return [dict(img=digits.images[i], gt_label=int(digits.target[i]), sample_idx=i) for i in chosen]
