"""The paper's score: mean squared privatized gradient less the noise variance."""

from __future__ import annotations

from torch import Tensor

from tptopk_pl.selectors.accumulator import ScoreAccumulator


def score(warmup: ScoreAccumulator) -> Tensor:
    """``a_p = (1/T1) sum_t [g_tp^2 - (sigma1 C1 / B)^2]``, ``[d]``, not clamped at zero.

    Half of all scores are typically negative: they are noise, and clamping would tie them.
    It holds minibatch sampling variance beside the gradient's energy.
    Source: Zhang and Xie, arXiv 2606.04375v1, phase 1.
    """
    return warmup.energy.sum(0) / max(warmup.num_steps, 1)
