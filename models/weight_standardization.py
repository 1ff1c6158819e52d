"""Weight standardisation: convolutions whose weights have mean 0 and a fixed scale."""

from torch import Tensor, nn
from torch.nn.functional import layer_norm


class StandardizedConv2d(nn.Conv2d):
    """A convolution that standardises its weight over (in, kh, kw), per output channel.

    Qiao et al. 2019 (arXiv 1903.10520), divided by √fan_in as in Brock et al. 2021
    (arXiv 2101.08692), so that variance is kept from input to output. Parameters are those of
    ``nn.Conv2d``.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[n, in, h, w]`` to ``[n, out, h', w']``."""
        fan_in = self.weight[0].numel()
        # The variance of a weight is about 1/fan_in: eps is relative to that.
        weight = layer_norm(self.weight, self.weight.shape[1:], eps=1e-4 / fan_in)
        return self._conv_forward(x, weight * fan_in**-0.5, self.bias)


def standardize_convolutions(network: nn.Module) -> None:
    """Let every ``nn.Conv2d`` within ``network`` standardise its weight, in place."""
    for module in network.modules():
        if type(module) is nn.Conv2d:
            module.__class__ = StandardizedConv2d  # the same parameters under another forward
