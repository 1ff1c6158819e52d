"""The privacy loss of Poisson-subsampled Gaussian steps, and the noise that meets a target.

A schedule is a sequence of `Segment`s, composed adaptively. The headline ε is the tight one, by
privacy loss distributions (PLD, `dp_accounting`); the ε by Rényi divergences (RDP, Opacus) is the
looser figure that most papers report. Adjacency is add/remove of one privacy unit, unless said
otherwise.

Legend: σ noise multiplier (noise standard deviation on the sum, relative to the clip norm),
q sampling rate, T number of steps, α Rényi order.

>>> warmup, rest = Segment(1.0, 0.01, 500), Segment(0.8, 0.01, 1500)
>>> round(epsilon([warmup, rest], delta=1e-5), 2), round(epsilon_rdp([warmup, rest], delta=1e-5), 2)
(3.97, 4.52)
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import numpy as np
import numpy.typing as npt
from dp_accounting import NeighboringRelation
from opacus.accountants.analysis.rdp import compute_rdp
from scipy.optimize import brentq

from tptopk_pl._pld import Segment, compose
from tptopk_pl._validate import in_range, non_negative

__all__ = [
    "Segment",
    "calibrate",
    "delta",
    "epsilon",
    "epsilon_rdp",
    "epsilon_replace_one",
]

_ADD_REMOVE = NeighboringRelation.ADD_OR_REMOVE_ONE
_REPLACE_ONE = NeighboringRelation.REPLACE_ONE

# Dense where usual schedules have their optimum, sparse out to extreme budgets. Far above 1000
# Opacus has no finite figures.
_ORDERS = np.concatenate(
    [
        1 + np.geomspace(1e-3, 0.5, 60, endpoint=False),
        1 + np.geomspace(0.5, 10, 150),
        np.arange(12, 64),
        np.geomspace(64, 1024, 25).round(),
    ]
)


def epsilon(segments: Sequence[Segment], delta: float) -> float:
    """Return the tight ε of the composition at `delta` (PLD; an upper bound, about 0.1 % above it).

    Segments without steps cost nothing, but share in the choice of the grid: computed with all of a
    plan's segments, the ε of its prefixes lie on one grid and never decrease.

    Returns:
        ε ≥ 0; 0.0 if there are no steps, inf if a segment with steps has no noise, or if `delta` is
        too small for double precision (1e-13 at 1,000 steps, 1e-12 at 100,000).

    Raises:
        ValueError: if `delta` is not in (0, 1).
    """
    return _pld_epsilon(segments, delta, _ADD_REMOVE)


def epsilon_replace_one(segments: Sequence[Segment], delta: float) -> float:
    """Return ε under replace-one adjacency (PLD); otherwise as `epsilon`."""
    return _pld_epsilon(segments, delta, _REPLACE_ONE)


def delta(segments: Sequence[Segment], epsilon: float) -> float:
    """Return the tight δ of the composition at `epsilon` ≥ 0 (PLD).

    Returns:
        δ in [0, 1]; 0.0 if there are no steps, 1.0 if a segment with steps has no noise.

    Raises:
        ValueError: if `epsilon` is negative.
    """
    non_negative("epsilon", epsilon)
    if not _steps(segments):
        return 0.0
    if _is_open(segments):
        return 1.0
    spent = float(compose(segments, _ADD_REMOVE).get_delta_for_epsilon(epsilon))
    return min(1.0, spent + _rounding(segments))


def epsilon_rdp(segments: Sequence[Segment], delta: float) -> float:
    """Return ε of the composition by Rényi differential privacy; otherwise as `epsilon`.

    The conversion is Theorem 21 of Balle et al., "Hypothesis testing interpretations and Rényi
    differential privacy", arXiv 1905.09982v2.
    """
    in_range("delta", delta, 0.0, 1.0, low_open=True, high_open=True)
    if not _steps(segments):
        return 0.0
    if _is_open(segments):
        return math.inf
    rdp = sum(
        s.num_steps * _step_rdp(s.noise_multiplier, s.sampling_rate) for s in _steps(segments)
    )
    by_order = rdp - np.log(delta * _ORDERS) / (_ORDERS - 1) + np.log1p(-1 / _ORDERS)
    # Opacus has no figure (NaN) for some of the largest orders: they give no bound.
    return max(0.0, float(np.nanmin(by_order)))


def calibrate(
    segments_of: Callable[[float], Sequence[Segment]],
    target_epsilon: float,
    target_delta: float,
) -> float:
    """Return the smallest noise multiplier, to 0.1 % of ε, with which a schedule keeps its target.

    Args:
        segments_of: the whole schedule for a given noise multiplier; ε must fall as that grows.
        target_epsilon: ε > 0, never exceeded by `epsilon(segments_of(result), target_delta)`.
        target_delta: δ in (0, 1).

    Raises:
        ValueError: if a target is out of range, or no noise multiplier in [0.02, 1e7] meets it.
    """
    in_range("target_epsilon", target_epsilon, 0.0, math.inf, low_open=True)
    in_range("target_delta", target_delta, 0.0, 1.0, low_open=True, high_open=True)

    def excess(log_sigma: float, coarsening: int) -> float:
        segments = segments_of(math.exp(log_sigma))
        spent = _pld_epsilon(segments, target_delta, _ADD_REMOVE, coarsening)
        return math.log(min(max(spent, 1e-12), 1e12) / target_epsilon)

    # A coarse grid overstates ε by up to some percent, but finds σ and the slope at little cost.
    coarse = lru_cache(partial(excess, coarsening=8))
    log_sigma = float(brentq(coarse, *_bracket(coarse, target_epsilon, target_delta), xtol=1e-2))
    slope = (coarse(log_sigma + 0.05) - coarse(log_sigma)) / 0.05
    exceeded, met = -math.inf, math.inf  # between these lies the smallest log σ
    last: tuple[float, float] | None = None
    while met - exceeded > 3e-4:
        over = excess(log_sigma, coarsening=1)
        if over > 0:
            exceeded = log_sigma
        else:
            met = log_sigma
            if over >= -1e-3:
                break
        if last is not None:  # the coarse slope served for one step only
            slope = (over - last[1]) / (log_sigma - last[0]) or slope
        last = log_sigma, over
        # A secant step, to the middle of the accepted band. It may leave the bracket where ε jumps
        # over the band, at a change of grid: then bisect.
        log_sigma -= (over + 5e-4) / slope
        if not exceeded < log_sigma < met:
            log_sigma = (exceeded + met) / 2
    return math.exp(met)


def _bracket(
    excess: Callable[[float], float], target_epsilon: float, target_delta: float
) -> tuple[float, float]:
    """Return log σ where the target is exceeded and where it is met, a factor of 2 apart."""
    low = high = 0.0
    while excess(high) > 0:
        low, high = high, high + math.log(2)
        if high > math.log(1e7):
            raise ValueError(
                f"Expected target_epsilon={target_epsilon!r} within reach at target_delta="
                f"{target_delta!r}, but no noise meets it: raise one of the two."
            )
    while excess(low) <= 0:
        low, high = low - math.log(2), low
        if low < math.log(0.01):
            raise ValueError(
                f"Expected target_epsilon={target_epsilon!r} to need noise, but a noise multiplier "
                "of 0.02 meets it: lower it."
            )
    return low, high


def _steps(segments: Sequence[Segment]) -> list[Segment]:
    return [segment for segment in segments if segment.num_steps > 0]


def _is_open(segments: Sequence[Segment]) -> bool:
    return any(segment.noise_multiplier == 0 for segment in _steps(segments))


def _pld_epsilon(
    segments: Sequence[Segment], delta: float, relation: NeighboringRelation, coarsening: int = 1
) -> float:
    in_range("delta", delta, 0.0, 1.0, low_open=True, high_open=True)
    if not _steps(segments):
        return 0.0
    resolved = delta - _rounding(segments)
    if _is_open(segments) or resolved <= 0:
        return math.inf
    return float(compose(segments, relation, coarsening).get_epsilon_for_delta(resolved))


@lru_cache(maxsize=8)
def _step_rdp(sigma: float, rate: float) -> npt.NDArray[np.float64]:
    return np.asarray(compute_rdp(q=rate, noise_multiplier=sigma, steps=1, orders=_ORDERS.tolist()))


def _rounding(segments: Sequence[Segment]) -> float:
    """Return what double precision may take from δ: compositions lose below 1e-17 a step."""
    return 1e-13 + 1e-17 * sum(s.num_steps for s in segments)
