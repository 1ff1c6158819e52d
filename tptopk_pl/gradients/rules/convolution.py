"""Convolutions and transposed convolutions in one, two and three dimensions."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from tptopk_pl.gradients.contributions import Rows
from tptopk_pl.gradients.correlation import Correlation
from tptopk_pl.gradients.options import correlation_options
from tptopk_pl.gradients.rules._rule import Gradients, Rule, only


def _correlated(
    layer: _ConvNd, large: Tensor, small: Tensor, padding: tuple[int, ...], g: Tensor
) -> Gradients:
    """Of the ``layer`` whose output gradient is ``g``."""
    geometry = (layer.kernel_size, layer.stride, layer.dilation, padding, layer.groups)
    correlation = Correlation(large, small, *geometry)
    return {
        "weight": lambda selection: correlation_options(correlation, selection),
        "bias": only(lambda selection: Rows(selection.gather(g.flatten(2).sum(2)))),
    }


def _gradients(layer: _ConvNd, x: Tensor, g: Tensor) -> Gradients:
    if layer.padding_mode == "zeros" and not isinstance(layer.padding, str):
        return _correlated(layer, x, g, layer.padding, g)
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    padded = F.pad(x, layer._reversed_padding_repeated_twice, mode=mode)
    return _correlated(layer, padded, g, (0,) * len(layer.kernel_size), g)


def _transposed_gradients(layer: _ConvNd, x: Tensor, g: Tensor) -> Gradients:
    assert not isinstance(layer.padding, str)
    return _correlated(layer, g, x, layer.padding, g)


def _min_ndim(layer: _ConvNd) -> int:
    return 2 + len(layer.kernel_size)


CONVOLUTIONS = (
    *(
        Rule(kind, _min_ndim, _gradients, ("forward", "_conv_forward"))
        for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    ),
    *(
        Rule(kind, _min_ndim, _transposed_gradients, ("forward", "_output_padding"))
        for kind in (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    ),
)
