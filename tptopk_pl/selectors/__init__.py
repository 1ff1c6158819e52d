"""Selectors: what ranks the coordinates at the switch. One small file each.

A selector maps the warm-up's accumulated released gradients to one score for each coordinate. It
sees nothing else, so its choice is post-processing and costs no privacy.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tptopk_pl.selectors.accumulator import ScoreAccumulator
from tptopk_pl.selectors.score import score

SELECTORS: dict[str, Callable[[ScoreAccumulator], Tensor]] = {"score": score}


def num_active(active_ratio: float, num_total: int) -> int:
    """``k = floor(rho d)``, safe against the rounding of the product (0.29 * 100 is 29).

    Raises:
        ValueError: if no coordinate would remain.
    """
    k = math.floor(round(active_ratio * num_total, 6))
    if k == 0:
        raise ValueError(
            f"Expected active_ratio={active_ratio} to keep at least one of {num_total} "
            f"coordinates: use at least {1 / num_total:.1e}."
        )
    return k


def top_k(scores: Tensor, k: int) -> Tensor:
    """Indices of the ``k`` largest of ``scores`` ``[d]``, increasing; ties go to lower indices.

    A score that is not a number is the smallest.
    """
    scores = torch.where(scores.isnan(), -torch.inf, scores)
    # Ranking all of them would take four times as long.
    lowest = torch.kthvalue(scores, min(len(scores) - k + 1, len(scores))).values
    chosen = scores > lowest
    ties = (scores == lowest).nonzero().flatten()
    chosen[ties[: k - int(chosen.sum())]] = True
    return chosen.nonzero().flatten()


def retained_energy(halves: Tensor, choose: Callable[[Tensor], Tensor]) -> float | None:
    """Share of the gradients' energy that lies on a support, cross-fitted.

    The support is chosen by the scores of one half of the warm-up's steps; its share is taken of
    the other half's, whose noise had no part in the choice; both ways averaged. (On the scores
    that it was chosen by, a support of noise alone would seem to keep more than all energy.)

    An estimate: noise may take it outside [0, 1], and beside the energy of the gradient it holds
    the sampling variance of the batches. A support that is chosen by all steps does a little
    better.

    Args:
        halves: ``[2, d]``, sum of each half's scores, such as ``ScoreAccumulator.energy``.
        choose: indices ``[k]`` of the support, from scores ``[d]``.

    Returns:
        The share; None if it is not defined: a half's total is not positive.
    """
    totals = halves.sum(1, dtype=torch.float64)
    if not bool((totals > 0).all()):
        return None
    kept = torch.stack(
        [halves[1 - half][choose(halves[half])].sum(dtype=torch.float64) for half in (0, 1)]
    )
    return float((kept / totals.flip(0)).mean())


__all__ = ["SELECTORS", "ScoreAccumulator", "num_active", "retained_energy", "top_k"]
