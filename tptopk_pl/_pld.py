"""Privacy loss distributions (PLD) of schedules, all on one rule of discretization.

The figures of a plan, of what a run has spent and of what is displayed agree exactly because they
come from here. `dp_accounting` makes and composes the distributions.

Legend: σ noise multiplier, q sampling rate, T number of steps.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce

from dp_accounting import NeighboringRelation
from dp_accounting.pld.privacy_loss_distribution import (
    PrivacyLossDistribution,
    from_gaussian_mechanism,
)

from tptopk_pl._validate import in_range, non_negative, non_negative_int


@dataclass(frozen=True)
class Segment:
    """Steps of one subsampled Gaussian mechanism.

    Attributes:
        noise_multiplier: σ ≥ 0, noise standard deviation on the sum ÷ clip norm. 0: no privacy.
        sampling_rate: q in (0, 1], the probability with which a step includes each unit.
        num_steps: T ≥ 0.

    Raises:
        ValueError: if a field is outside its range.
    """

    noise_multiplier: float
    sampling_rate: float
    num_steps: int

    def __post_init__(self) -> None:
        non_negative("noise_multiplier", self.noise_multiplier)
        in_range("sampling_rate", self.sampling_rate, 0.0, 1.0, low_open=True)
        non_negative_int("num_steps", self.num_steps)


def compose(
    segments: Sequence[Segment], relation: NeighboringRelation, coarsening: int = 1
) -> PrivacyLossDistribution:
    """Return the PLD of all steps.

    Args:
        segments: some have steps, and all of these have noise. The others count for the grid only.
        relation: adjacency.
        coarsening: power of 2, times the rule's interval: faster, and a looser upper bound.
    """
    interval = coarsening * _interval(segments)
    powers = (
        _power(s.noise_multiplier, s.sampling_rate, s.num_steps, interval, relation)
        for s in segments
        if s.num_steps
    )
    return reduce(lambda left, right: left.compose(right), powers)


@lru_cache(maxsize=8)
def _power(
    sigma: float, rate: float, num_steps: int, interval: float, relation: NeighboringRelation
) -> PrivacyLossDistribution:
    return _step_pld(sigma, rate, interval, relation).self_compose(num_steps)


@lru_cache(maxsize=8)
def _step_pld(
    sigma: float, rate: float, interval: float, relation: NeighboringRelation
) -> PrivacyLossDistribution:
    return from_gaussian_mechanism(
        sigma,
        sampling_prob=rate,
        value_discretization_interval=interval,
        neighboring_relation=relation,
    )


def _interval(segments: Sequence[Segment]) -> float:
    """Return the grid interval of the privacy loss: one rule, so that all figures agree exactly.

    Discretizing adds interval²/6 to the variance of a step's loss, hence to ε a twelfth of the
    square of interval ÷ deviation, whatever T is: 0.13 % at an eighth. Where rare large losses
    would make that grid too long to compute with, they also decide ε, and a coarser one does.
    Powers of two make grids nested; a coarser one can only raise ε, which keeps ε monotone in σ.
    """
    noisy = [s for s in segments if s.noise_multiplier > 0]
    finest = min(_loss_deviation(s.noise_multiplier, s.sampling_rate) for s in noisy) / 8
    longest = max(_loss_range(s.noise_multiplier, s.sampling_rate) for s in noisy) / 2**15
    return 2.0 ** math.floor(math.log2(max(finest, longest)))


def _loss_deviation(sigma: float, rate: float) -> float:
    """Return about the standard deviation of one step's privacy loss (at q = 1, exactly)."""
    # q·√(e^{1/σ²} − 1) is the χ distance to first order in q; the loss is a 1-Lipschitz function of
    # the unsampled one, whose deviation is 1/σ.
    return min(rate * math.sqrt(math.expm1(min(sigma**-2, 500.0))), 1 / sigma)


def _loss_range(sigma: float, rate: float) -> float:
    """Return about the length of what holds all but e^-50 of one step's privacy loss."""
    unsampled = 0.5 / sigma**2 + 10 / sigma
    # log(1 − q + q e^unsampled), without overflow
    top = unsampled + math.log(rate + (1 - rate) * math.exp(-min(unsampled, 700.0)))
    bottom = min(-math.log1p(-rate), unsampled) if rate < 1 else unsampled
    return top + bottom
