"""ResNet-18, -34 and -50 (He et al. 2015, arXiv 1512.03385) with GroupNorm, by torchvision."""

from functools import partial
from typing import Literal

from torch import nn
from torchvision.models import resnet

from models.weight_standardization import standardize_convolutions

_KINDS = {
    18: (resnet.BasicBlock, [2, 2, 2, 2]),
    34: (resnet.BasicBlock, [3, 4, 6, 3]),
    50: (resnet.Bottleneck, [3, 4, 6, 3]),
}
_NUM_GROUPS = 32  # Wu and He 2018 (arXiv 1803.08494)


class ResNet(resnet.ResNet):
    """torchvision's ResNet without BatchNorm: images ``[n, c, h, w]`` to scores ``[n, classes]``.

    Parameters keep torchvision's names, and GroupNorm's weight and bias the shape of BatchNorm's,
    so public torchvision weights fit (with ``stem="large"`` and three channels).

    Args:
        depth: 18, 34 or 50.
        num_classes: number of scores.
        in_channels: 1 (grey) or 3 (colour).
        stem: "small", a 3×3 convolution that keeps the size, for images of up to 64 pixels, or
            "large", ImageNet's 7×7 of stride 2 and a pool, beyond: a sixteenth of the memory.
        weight_standardization: standardise the weights of convolutions. In private training this
            costs much time and memory: see ``WideResNet``.
    """

    def __init__(
        self,
        depth: Literal[18, 34, 50] = 18,
        num_classes: int = 10,
        in_channels: Literal[1, 3] = 3,
        stem: Literal["small", "large"] = "small",
        weight_standardization: bool = False,
    ) -> None:
        if depth not in _KINDS:
            raise ValueError(f"Expected depth={depth} in {{18, 34, 50}}.")
        if stem not in ("small", "large"):
            raise ValueError(f"Expected stem={stem!r} in {{small, large}}.")
        block, layers = _KINDS[depth]
        norm = partial(nn.GroupNorm, _NUM_GROUPS)
        super().__init__(block, layers, num_classes=num_classes, norm_layer=norm)
        if stem == "small":
            self.conv1 = nn.Conv2d(in_channels, 64, 3, padding=1, bias=False)
            self.maxpool = nn.Identity()
        else:
            self.conv1 = nn.Conv2d(in_channels, 64, 7, stride=2, padding=3, bias=False)
        nn.init.kaiming_normal_(self.conv1.weight, mode="fan_out", nonlinearity="relu")
        if weight_standardization:
            standardize_convolutions(self)
