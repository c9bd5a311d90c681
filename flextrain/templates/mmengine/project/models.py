"""Models."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from flextrain import MODELS, BaseModel


@MODELS.register_module()
class PictureClassifier(BaseModel):
    """A small convolutional network for pictures of shape (1, 16, 16).

    Args:
        width: channels of the first layer.
        num_classes: number of classes.
        data_preprocessor: see BaseModel.
    """

    def __init__(self, width: int = 16, num_classes: int = 4, data_preprocessor: dict[str, Any] | None = None) -> None:
        super().__init__(data_preprocessor)
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * width * 4 * 4, num_classes),
        )

    def forward(self, inputs: Tensor, labels: Tensor, mode: str = "tensor") -> Any:
        logits = self.net(inputs)
        if mode == "loss":
            return {"loss": F.cross_entropy(logits, labels)}
        return (logits, labels) if mode == "predict" else logits
