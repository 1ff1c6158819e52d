"""Two CNNs of the DP-SGD literature: 26,010 parameters for 28×28 grey, 550,570 for 32×32 colour."""

from typing import Literal

from torch import Tensor, nn

Activation = Literal["tanh", "relu"]


def _activation(name: Activation) -> type[nn.Module]:
    if name not in ("tanh", "relu"):
        raise ValueError(f"Expected activation={name!r} in {{tanh, relu}}.")
    return nn.Tanh if name == "tanh" else nn.ReLU


class SmallCNN(nn.Module):
    """conv16(8×8, stride 2) - pool - conv32(4×4, stride 2) - pool - fc32 - fc10.

    Args:
        activation: "tanh", whose bounded outputs suit clipped gradients, or "relu".
    """

    def __init__(self, activation: Activation = "tanh") -> None:
        super().__init__()
        act = _activation(activation)
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


class DeepCNN(nn.Module):
    """Three times two conv(3×3) and a pool, of 32, 64 and 128 channels - fc128 - fc10.

    The CIFAR-10 network of Papernot et al. 2021 (arXiv 2007.14191), which later work compares on.

    Args:
        activation: "tanh", whose bounded outputs suit clipped gradients, or "relu".
    """

    def __init__(self, activation: Activation = "tanh") -> None:
        super().__init__()
        act = _activation(activation)
        layers: list[nn.Module] = []
        for inputs, outputs in ((3, 32), (32, 64), (64, 128)):  # 32×32 -> 16×16 -> 8×8 -> 4×4
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), act()]
            layers += [nn.Conv2d(outputs, outputs, 3, padding=1), act(), nn.MaxPool2d(2)]
        self.features = nn.Sequential(*layers)
        fully_connected = nn.Linear(128 * 4 * 4, 128)
        self.head = nn.Sequential(nn.Flatten(), fully_connected, act(), nn.Linear(128, 10))

    def forward(self, images: Tensor) -> Tensor:
        """Map images ``[n, 3, 32, 32]`` to class scores ``[n, 10]``."""
        return self.head(self.features(images))
