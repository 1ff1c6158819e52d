"""Convolutions and transposed convolutions in one, two and three dimensions.

The gradient of a record's weight correlates a *large* signal with a *small* one: for a convolution
the padded input with the output gradient, for a transposed convolution the padded output gradient
with the input. Stride, dilation and groups then mean the same in both.
"""

from __future__ import annotations

from math import prod

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from tptopk_pl.gradients.contributions import Contribution, Rows, Selection, blockwise
from tptopk_pl.gradients.rules._rule import Gradients, Rule


def _correlate(layer: _ConvNd, large: Tensor, small: Tensor) -> Tensor:
    """From ``large`` ``[b, C, *L]`` and ``small`` ``[b, c, *S]`` to ``[b, numel]``."""
    b, dims = len(small), small.ndim - 2
    windows = large
    for axis in range(2, 2 + dims):
        span = layer.dilation[axis - 2] * (layer.kernel_size[axis - 2] - 1) + 1
        windows = windows.unfold(axis, span, layer.stride[axis - 2])
        windows = windows[..., :: layer.dilation[axis - 2]]
        # An output padding beyond the stride leaves windows that no input reaches.
        windows = windows.narrow(axis, 0, small.shape[axis])
    # [b, C, *S, *K] to [b·groups, C/groups·K, S], the weight's own order.
    order = (0, 1, *range(2 + dims, 2 + 2 * dims), *range(2, 2 + dims))
    num_points = small.shape[2:].numel()
    columns = windows.permute(order).reshape(b * layer.groups, -1, num_points)
    channels = small.reshape(b * layer.groups, -1, num_points)
    return (channels @ columns.transpose(1, 2)).reshape(b, -1)


def _columns_per_record(layer: _ConvNd, large: Tensor, small: Tensor) -> int:
    return large.shape[1] * prod(layer.kernel_size) * small.shape[2:].numel()


def _bias(g: Tensor) -> Tensor:
    """``[n, C, *S]`` to ``[n, C]``."""
    return g.flatten(2).sum(2)


def _gradients(layer: _ConvNd, x: Tensor, g: Tensor) -> Gradients:
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode

    def dense(x: Tensor, g: Tensor) -> Tensor:
        padded = F.pad(x, layer._reversed_padding_repeated_twice, mode=mode)
        return _correlate(layer, padded, g)

    def weight(selection: Selection) -> Contribution:
        return blockwise(selection, dense, (x, g), _columns_per_record(layer, x, g))

    return {"weight": weight, "bias": lambda selection: Rows(selection.gather(_bias(g)))}


def _transposed_gradients(layer: _ConvNd, x: Tensor, g: Tensor) -> Gradients:
    assert not isinstance(layer.padding, str)
    padding = [size for size in reversed(layer.padding) for _ in range(2)]

    def dense(x: Tensor, g: Tensor) -> Tensor:
        return _correlate(layer, F.pad(g, padding), x)

    def weight(selection: Selection) -> Contribution:
        return blockwise(selection, dense, (x, g), _columns_per_record(layer, g, x))

    return {"weight": weight, "bias": lambda selection: Rows(selection.gather(_bias(g)))}


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
