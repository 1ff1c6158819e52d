"""Normalizations within a record: y = w ⊙ x̂ + b, so the gradient of w sums g ⊙ x̂ and that of b g.

x̂ is recomputed from the input in the backward pass: nothing more is kept than autograd keeps.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tptopk_pl.gradients.contributions import Contribution, Rows, Selection
from tptopk_pl.gradients.rules._rule import Gradients, Rule, only


def _affine(g: Tensor, normalized: Callable[[], Tensor], dims: range) -> Gradients:
    """Contributions of w and b, for ``dims`` the dimensions over which they are shared."""

    def reduce(tensor: Tensor) -> Tensor:
        # sum(dim=()) would sum over everything.
        return (tensor.sum(tuple(dims)) if dims else tensor).flatten(1)

    return {
        "weight": only(lambda selection: Rows(selection.gather(reduce(g * normalized())))),
        "bias": only(lambda selection: Rows(selection.gather(reduce(g)))),
    }


def _layer_norm(layer: nn.LayerNorm, x: Tensor, g: Tensor) -> Gradients:
    shape = layer.normalized_shape
    dims = range(1, x.ndim - len(shape))
    return _affine(g, lambda: F.layer_norm(x, shape, eps=layer.eps), dims)


def _rms_norm(layer: nn.RMSNorm, x: Tensor, g: Tensor) -> Gradients:
    shape = layer.normalized_shape
    dims = range(1, x.ndim - len(shape))
    return _affine(g, lambda: F.rms_norm(x, list(shape), eps=layer.eps), dims)


def _group_norm(layer: nn.GroupNorm, x: Tensor, g: Tensor) -> Gradients:
    """Σ_s g x̂ = (Σ_s g x − μ Σ_s g) / σ by channel, for which x̂ is not needed."""
    n, channels, groups = *x.shape[:2], layer.num_groups
    points = (n * channels, -1)

    def weight(selection: Selection) -> Contribution:
        points_each = x.shape[2:].numel()
        _, mean, rstd = torch.native_group_norm(
            x, None, None, n, channels, points_each, groups, layer.eps
        )
        products = torch.linalg.vecdot(g.reshape(points), x.reshape(points))
        products, sums = (t.view(n, groups, -1) for t in (products, bias_sums()))
        rows = (products - mean[:, :, None] * sums) * rstd[:, :, None]
        return Rows(selection.gather(rows.flatten(1)))

    def bias_sums() -> Tensor:
        return g.reshape(points).sum(1).view(n, channels)

    bias = only(lambda selection: Rows(selection.gather(bias_sums())))
    return {"weight": only(weight), "bias": bias}


def _instance_norm(layer: nn.InstanceNorm1d, x: Tensor, g: Tensor) -> Gradients:
    return _affine(g, lambda: F.instance_norm(x, eps=layer.eps), range(2, x.ndim))


def _with_channels(layer: nn.InstanceNorm1d) -> int:
    return 1 + layer._get_no_batch_dim()


def _beyond_shape(layer: nn.LayerNorm | nn.RMSNorm) -> int:
    return 1 + len(layer.normalized_shape)


NORMALIZATIONS = (
    Rule(nn.LayerNorm, _beyond_shape, _layer_norm),
    Rule(nn.RMSNorm, _beyond_shape, _rms_norm),
    Rule(nn.GroupNorm, lambda layer: 2, _group_norm),
    *(
        Rule(kind, _with_channels, _instance_norm, ("forward", "_apply_instance_norm"))
        for kind in (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
    ),
)
