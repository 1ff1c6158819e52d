"""Clipped sums of unit gradients, without autograd ever computing a weight gradient.

A *record* is one row of a batch, a *privacy unit* one or more records. For every physical chunk the
engine gives the norm of each unit's gradient, and the sum of the units' gradients weighted by
factors that the caller derives from the norms; both restricted to the support.

>>> import torch
>>> from torch import nn
>>> model = nn.Linear(3, 1, bias=False)
>>> engine = GradientEngine(model, dict(model.named_parameters()))
>>> engine.attach()
>>> engine.begin(torch.arange(2), num_units=2)
>>> model(torch.tensor([[3.0, 4.0, 0.0], [0.0, 0.0, 2.0]])).sum().backward()
>>> engine.norms()
tensor([5., 2.])
>>> engine.weighted_sum(torch.tensor([0.2, 0.5]))
tensor([0.6000, 0.8000, 1.0000])
>>> engine.end()
>>> engine.detach()
"""

from tptopk_pl.gradients.engine import GradientEngine
from tptopk_pl.gradients.layers import layer_refusals

__all__ = ["GradientEngine", "layer_refusals"]
