"""The Wide ResNet of De et al. 2022 (arXiv 2204.13650) for private training from scratch."""

import torch
from torch import Tensor, nn

from models.weight_standardization import standardize_convolutions

_NUM_GROUPS = 16


def _relu_norm_conv(inputs: int, outputs: int, kernel: int, stride: int) -> list[nn.Module]:
    """De et al. put the ReLU before the norm: what enters a convolution is normalised."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2)
    return [nn.ReLU(), nn.GroupNorm(_NUM_GROUPS, inputs), conv]


class _Block(nn.Module):
    """``shortcut(x) + branch(x)``; the shortcut is the identity where channels stay."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            *_relu_norm_conv(inputs, outputs, 3, stride), *_relu_norm_conv(outputs, outputs, 3, 1)
        )
        changes = inputs != outputs
        shortcut = _relu_norm_conv(inputs, outputs, 1, stride) if changes else [nn.Identity()]
        self.shortcut = nn.Sequential(*shortcut)

    def forward(self, x: Tensor) -> Tensor:
        return self.shortcut(x) + self.branch(x)


class WideResNet(nn.Module):
    """Pre-activation WRN with GroupNorm: images ``[n, c, h, w]`` to scores ``[n, classes]``.

    Any size from 28 pixels; memory grows with the area, since nothing shrinks before the second of
    the three groups of blocks.

    Args:
        depth: 6·b + 4 for b blocks in each group: 16 has two.
        width: k, for 16k, 32k and 64k channels.
        num_classes: number of scores.
        in_channels: channels of the images.
        weight_standardization: standardise the weights of convolutions, as De et al. do (without
            their learned gains). The gradients of each record then cost one copy of the weights per
            record: WRN-16-4 on 16 images of 32 pixels took about 2.5 times as long and a third more
            memory (5.4 s, 489 MB; without 2.2 s, 364 MB; one thread of a busy CPU).
    """

    def __init__(
        self,
        depth: int = 16,
        width: int = 4,
        num_classes: int = 10,
        in_channels: int = 3,
        weight_standardization: bool = False,
    ) -> None:
        super().__init__()
        if depth < 10 or depth % 6 != 4:
            raise ValueError(f"Expected depth={depth} in {{10, 16, 22, …}}.")
        if width < 2:
            raise ValueError(f"Expected width={width} in {{2, 3, …}}: WRN-{depth}-1 is not wide.")
        channels = 16
        layers: list[nn.Module] = [nn.Conv2d(in_channels, channels, 3, padding=1)]
        for outputs, stride in ((16 * width, 1), (32 * width, 2), (64 * width, 2)):
            for block in range((depth - 4) // 6):
                layers.append(_Block(channels, outputs, stride if block == 0 else 1))
                channels = outputs
        self.features = nn.Sequential(*layers, nn.ReLU(), nn.GroupNorm(_NUM_GROUPS, channels))
        self.head = nn.Linear(channels, num_classes)
        self.apply(_initialize)
        if weight_standardization:
            standardize_convolutions(self)

    def forward(self, images: Tensor) -> Tensor:
        """Class scores; features are averaged over the image."""
        return self.head(self.features(images).mean(dim=(2, 3)))


@torch.no_grad()
def _initialize(module: nn.Module) -> None:
    """Weights of variance 1/fan_in, which keeps that of normalised inputs; no biases."""
    if isinstance(module, nn.Conv2d | nn.Linear):
        nn.init.kaiming_normal_(module.weight, nonlinearity="linear")
        nn.init.zeros_(module.bias)
