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
    """Indices of the ``k`` largest of ``scores`` ``[d]``, increasing; ties go to lower indices."""
    order = torch.sort(scores, descending=True, stable=True).indices
    return order[:k].sort().values


__all__ = ["SELECTORS", "ScoreAccumulator", "num_active", "top_k"]
