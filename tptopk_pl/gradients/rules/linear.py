"""Linear layers, with or without dimensions (steps, patches) between the record and the features.

The gradient of a record's weight is Σ_t g_t x_tᵀ; without such dimensions it has rank one and is
never formed.
"""

from __future__ import annotations

from torch import Tensor, nn

from tptopk_pl.gradients.contributions import Contribution, Outer, Rows, Selection, blockwise
from tptopk_pl.gradients.rules._rule import Gradients, Rule


def _products(g: Tensor, x: Tensor) -> Tensor:
    """Σ_t g_t x_tᵀ for ``g`` ``[b, T, out]`` and ``x`` ``[b, T, in]``: ``[b, out·in]``."""
    return (g.transpose(1, 2) @ x).flatten(1)


def _gradients(layer: nn.Linear, x: Tensor, g: Tensor) -> Gradients:
    if x.ndim == 2:
        return {
            "weight": lambda selection: Outer(g, x, selection),
            "bias": lambda selection: Rows(selection.gather(g)),
        }
    steps_g, steps_x = g.flatten(1, -2), x.flatten(1, -2)

    def weight(selection: Selection) -> Contribution:
        return blockwise(selection, _products, (steps_g, steps_x), layer.weight.numel())

    return {
        "weight": weight,
        "bias": lambda selection: Rows(selection.gather(steps_g.sum(1))),
    }


LINEAR = Rule(nn.Linear, lambda layer: 2, _gradients)
