"""How each kind of layer turns (input, output gradient) into gradients by record; one file a kind.

A rule serves a module only while its class computes what the rule thinks it does: a subclass that
overrides the forward (a weight-standardised convolution, say) is left to the composite path.
"""

from __future__ import annotations

from torch import nn

from tptopk_pl.gradients.rules._rule import Rule
from tptopk_pl.gradients.rules.convolution import CONVOLUTIONS
from tptopk_pl.gradients.rules.embedding import EMBEDDING
from tptopk_pl.gradients.rules.linear import LINEAR
from tptopk_pl.gradients.rules.normalization import NORMALIZATIONS

__all__ = ["Rule", "rule_for"]

_RULES: tuple[Rule, ...] = (LINEAR, *CONVOLUTIONS, *NORMALIZATIONS, EMBEDDING)


def rule_for(module: nn.Module) -> Rule | None:
    """The rule that serves ``module``; None if there is none or its forward is overridden."""
    return next((rule for rule in _RULES if rule.serves(module)), None)
