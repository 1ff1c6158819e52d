"""The plan of a two-phase run: everything that decides its guarantee, and nothing else.

A plan is fixed before training and never changes. Phase 1 (the warm-up) trains all coordinates and
finds the support; phase 2 trains the support. Both are steps of one subsampled Gaussian mechanism
each, composed adaptively, so their noise is calibrated jointly. The number of active coordinates,
the clip norms and the learning rates do not enter: they may be any function of what was released.

>>> plan = TwoPhasePlan.calibrate(num_units=60_000, num_steps=400, expected_batch_size=600,
...                               target_epsilon=1.0, target_delta=1e-5)
>>> plan.warmup_steps, plan.epsilon <= 1.0, plan.epsilon_at(plan.num_steps) == plan.epsilon
(120, True, True)
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any

from tptopk_pl import accounting
from tptopk_pl._validate import in_range, non_negative, non_negative_int, one_of, positive_int
from tptopk_pl.accounting import Segment


@dataclass(frozen=True)
class Method:
    """What a method's name says about its schedule.

    Attributes:
        has_warmup: a dense phase 1 comes first; otherwise all steps belong to phase 2.
        is_private: noise is added; otherwise σ = 0 and ε = ∞.
    """

    has_warmup: bool
    is_private: bool = True


METHODS: Mapping[str, Method] = {
    "tp_topk": Method(has_warmup=True),
    "tp_rand": Method(has_warmup=True),
    "dp_sgd": Method(has_warmup=False),
    "non_private": Method(has_warmup=False, is_private=False),
}


@dataclass(frozen=True)
class TwoPhasePlan:
    """A schedule of noise, fixed before training; make one with `calibrate`.

    Attributes:
        method: a name in `METHODS`.
        num_units: N, privacy units in the training set. Public.
        expected_batch_size: B, expected number of units in a step; the sampling rate is B/N.
        num_steps: T, logical steps of both phases.
        warmup_steps: T1, steps of phase 1; 0 for a method without one.
        noise_multiplier: σ1, noise standard deviation on the sum of clipped gradients ÷ clip norm.
        phase2_noise_multiplier: σ2, the same in phase 2.
        target_delta: δ of every ε here.
        target_epsilon: what the noise was calibrated to; None if the noise was given.

    Raises:
        ValueError: if a field is outside its range or contradicts the method.
    """

    method: str
    num_units: int
    expected_batch_size: int
    num_steps: int
    warmup_steps: int
    noise_multiplier: float
    phase2_noise_multiplier: float
    target_delta: float
    target_epsilon: float | None

    def __post_init__(self) -> None:
        method = METHODS[one_of("method", self.method, METHODS)]
        num_units = positive_int("num_units", self.num_units)
        if positive_int("expected_batch_size", self.expected_batch_size) > num_units:
            raise ValueError(
                f"Expected expected_batch_size={self.expected_batch_size} in [1, num_units="
                f"{num_units}]: lower it."
            )
        num_steps = positive_int("num_steps", self.num_steps)
        warmup_steps = non_negative_int("warmup_steps", self.warmup_steps)
        if method.has_warmup and not 1 <= warmup_steps <= num_steps:
            raise ValueError(
                f"Expected warmup_steps={warmup_steps} in [1, num_steps={num_steps}] for method="
                f"'{self.method}': change warmup_steps or warmup_fraction, or train for more steps."
            )
        if not method.has_warmup and warmup_steps:
            raise ValueError(
                f"Expected warmup_steps={warmup_steps} to be 0 for method='{self.method}', which "
                "has no warm-up: leave warmup_steps out."
            )
        non_negative("noise_multiplier", self.noise_multiplier)
        non_negative("phase2_noise_multiplier", self.phase2_noise_multiplier)
        if not method.is_private and (self.noise_multiplier or self.phase2_noise_multiplier):
            raise ValueError(
                f"Expected noise_multiplier={self.noise_multiplier} to be 0 for method="
                f"'{self.method}': leave noise_multiplier out."
            )
        in_range("target_delta", self.target_delta, 0.0, 1.0, low_open=True, high_open=True)
        if self.target_epsilon is not None:
            in_range("target_epsilon", self.target_epsilon, 0.0, math.inf, low_open=True)

    @classmethod
    def calibrate(
        cls,
        *,
        num_units: int,
        num_steps: int,
        expected_batch_size: int,
        target_delta: float,
        target_epsilon: float | None = None,
        noise_multiplier: float | None = None,
        method: str = "tp_topk",
        warmup_steps: int | None = None,
        warmup_fraction: float = 0.3,
        noise_multiplier_ratio: float = 1.0,
    ) -> "TwoPhasePlan":
        """Return the plan that spends `target_epsilon`, or the plan of a given noise.

        Args:
            num_units: N, privacy units in the training set.
            num_steps: T, logical steps of both phases.
            expected_batch_size: B, expected number of units in a step.
            target_delta: δ.
            target_epsilon: calibrate both phases jointly to this ε (PLD), never above it.
            noise_multiplier: σ1, given instead of `target_epsilon`. 0: no noise, ε = ∞.
            method: a name in `METHODS`; `non_private` takes neither of the two.
            warmup_steps: T1; None: ⌈warmup_fraction · T⌉. Not for a method without a warm-up.
            warmup_fraction: T1/T in (0, 1), if `warmup_steps` is None.
            noise_multiplier_ratio: σ2/σ1 > 0.

        Raises:
            ValueError: if an argument is outside its range, not exactly one of `target_epsilon` and
                `noise_multiplier` is given, or the target cannot be reached.
        """
        traits = METHODS[one_of("method", method, METHODS)]
        in_range("warmup_fraction", warmup_fraction, 0.0, 1.0, low_open=True, high_open=True)
        in_range("noise_multiplier_ratio", noise_multiplier_ratio, 0.0, math.inf, low_open=True)
        _refuse_unclear_noise(traits, method, target_epsilon, noise_multiplier)
        if warmup_steps is None:
            # Less a rounding of the product: 0.07 · 100 is 7.000000000000001, which is 7 steps.
            share = warmup_fraction * positive_int("num_steps", num_steps) * (1 - 1e-12)
            warmup_steps = math.ceil(share) if traits.has_warmup else 0
        plan = cls(
            method=method,
            num_units=num_units,
            expected_batch_size=expected_batch_size,
            num_steps=num_steps,
            warmup_steps=warmup_steps,
            noise_multiplier=0.0,
            phase2_noise_multiplier=0.0,
            target_delta=target_delta,
            target_epsilon=target_epsilon,
        )

        def with_noise(sigma: float) -> TwoPhasePlan:
            return replace(
                plan, noise_multiplier=sigma, phase2_noise_multiplier=sigma * noise_multiplier_ratio
            )

        if target_epsilon is None:
            sigma = 0.0 if noise_multiplier is None else noise_multiplier
            return with_noise(non_negative("noise_multiplier", sigma))
        return with_noise(
            accounting.calibrate(
                lambda sigma: with_noise(sigma).segments, target_epsilon, target_delta
            )
        )

    @property
    def sampling_rate(self) -> float:
        """The sampling rate q = B/N, the probability with which a step includes each unit."""
        return self.expected_batch_size / self.num_units

    @property
    def segments(self) -> list[Segment]:
        """Both phases, as `segments_until(num_steps)`."""
        return self.segments_until(self.num_steps)

    @cached_property
    def epsilon(self) -> float:
        """The tight ε of the whole plan (PLD, add/remove)."""
        return accounting.epsilon(self.segments, self.target_delta)

    @cached_property
    def epsilon_rdp(self) -> float:
        """The RDP ε of the whole plan."""
        return accounting.epsilon_rdp(self.segments, self.target_delta)

    def segments_until(self, step: int) -> list[Segment]:
        """Return both phases with the steps that are done after `step` steps, which may be 0.

        A phase not begun is there with 0 steps, so that every ε of the plan is on one grid. Steps
        beyond `num_steps`, which only a run without a budget makes, count as steps of phase 2.

        Raises:
            ValueError: if `step` is negative.
        """
        first = min(non_negative_int("step", step), self.warmup_steps)
        return [
            Segment(self.noise_multiplier, self.sampling_rate, first),
            Segment(self.phase2_noise_multiplier, self.sampling_rate, step - first),
        ]

    def epsilon_at(self, step: int) -> float:
        """Return the tight ε (PLD) spent after `step` steps."""
        return accounting.epsilon(self.segments_until(step), self.target_delta)

    def epsilon_rdp_at(self, step: int) -> float:
        """Return the RDP ε spent after `step` steps."""
        return accounting.epsilon_rdp(self.segments_until(step), self.target_delta)

    def phase_at(self, step: int) -> int:
        """Return the phase, 1 or 2, of the step about to run (0-based)."""
        return 1 if step < self.warmup_steps else 2

    def noise_multiplier_at(self, step: int) -> float:
        """Return σ of the step about to run (0-based)."""
        return self.noise_multiplier if self.phase_at(step) == 1 else self.phase2_noise_multiplier

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain numbers and text, for a checkpoint or JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "TwoPhasePlan":
        """Return the plan that `to_dict` wrote.

        Raises:
            ValueError: if a field is missing, unknown or outside its range.
        """
        known = {field.name for field in fields(cls)}
        if wrong := known.symmetric_difference(values):
            raise ValueError(
                f"Expected a plan with the fields {sorted(known)}; missing or unknown: "
                f"{sorted(wrong)}."
            )
        return cls(**values)


def _refuse_unclear_noise(
    traits: Method, method: str, target_epsilon: float | None, noise_multiplier: float | None
) -> None:
    given = f"target_epsilon={target_epsilon!r}, noise_multiplier={noise_multiplier!r}"
    if not traits.is_private:
        if target_epsilon is not None or noise_multiplier not in (None, 0):
            raise ValueError(
                f"Expected no privacy target for method='{method}', got {given}: leave both out."
            )
    elif (target_epsilon is None) == (noise_multiplier is None):
        raise ValueError(f"Expected exactly one of {given}: give one, leave the other out.")
