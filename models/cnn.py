"""The small CNN of the DP-SGD literature for 28×28 grey images: 26,010 parameters."""

from typing import Literal

from torch import Tensor, nn


class SmallCNN(nn.Module):
    """conv16(8×8, stride 2) - pool - conv32(4×4, stride 2) - pool - fc32 - fc10.

    Args:
        activation: "tanh", whose bounded outputs suit clipped gradients, or "relu".
    """

    def __init__(self, activation: Literal["tanh", "relu"] = "tanh") -> None:
        super().__init__()
        if activation not in ("tanh", "relu"):
            raise ValueError(f"Expected activation={activation!r} in {{tanh, relu}}.")
        act = nn.Tanh if activation == "tanh" else nn.ReLU
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 8, stride=2, padding=3),  # 28×28 -> 14×14
            act(),
            nn.MaxPool2d(2, stride=1),  # -> 13×13
            nn.Conv2d(16, 32, 4, stride=2),  # -> 5×5
            act(),
            nn.MaxPool2d(2, stride=1),  # -> 4×4
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(32 * 4 * 4, 32), act(), nn.Linear(32, 10))

    def forward(self, images: Tensor) -> Tensor:
        """Map images ``[n, 1, 28, 28]`` to class scores ``[n, 10]``."""
        return self.head(self.features(images))
