"""Linear layers, with or without dimensions (steps, patches) between the record and the features.

The gradient of a record's weight is Σ_t g_t x_tᵀ; without such dimensions it has rank one and is
never formed.
"""

from __future__ import annotations

from torch import Tensor, nn

from tptopk_pl.gradients.contributions import Rows
from tptopk_pl.gradients.correlation import Correlation
from tptopk_pl.gradients.options import correlation_options, outer_options
from tptopk_pl.gradients.rules._rule import Gradients, Rule, only


def _gradients(layer: nn.Linear, x: Tensor, g: Tensor) -> Gradients:
    if x.ndim == 2:
        return {
            "weight": lambda selection: outer_options(g, x, selection),
            "bias": only(lambda selection: Rows(selection.gather(g))),
        }
    steps = Correlation.of_steps(g.flatten(1, -2), x.flatten(1, -2))
    return {
        "weight": lambda selection: correlation_options(steps, selection),
        "bias": only(lambda selection: Rows(selection.gather(g.flatten(1, -2).sum(1)))),
    }


LINEAR = Rule(nn.Linear, lambda layer: 2, _gradients)
