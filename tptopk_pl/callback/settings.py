"""The callback's keywords: validated, frozen, and turned into a plan."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tptopk_pl._validate import in_range, non_negative, one_of, positive_int
from tptopk_pl.plan import METHODS, TwoPhasePlan
from tptopk_pl.selectors import SELECTORS


@dataclass(frozen=True)
class Settings:
    """What the user asked for; see ``TwoPhaseSupportCallback`` for the meaning of each.

    Raises:
        ValueError: if a value is outside its range.
    """

    target_epsilon: float | None
    target_delta: float
    noise_multiplier: float | None
    expected_batch_size: int
    max_grad_norm: float
    active_ratio: float
    method: str
    selector: str
    warmup_steps: int | None
    warmup_fraction: float
    noise_multiplier_ratio: float
    phase2_max_grad_norm: float | None
    phase2_lr_factor: float
    physical_batch_size: int | None
    max_records_per_unit: int | None
    log_non_private: bool
    secure_rng: bool
    seed: int | None

    def __post_init__(self) -> None:
        one_of("method", self.method, METHODS)
        one_of("selector", self.selector, SELECTORS)
        positive_int("expected_batch_size", self.expected_batch_size)
        in_range("active_ratio", self.active_ratio, 0, 1, low_open=True)
        in_range("phase2_lr_factor", self.phase2_lr_factor, 0, math.inf, low_open=True)
        self._check_clip_norm("max_grad_norm", self.max_grad_norm)
        if self.phase2_max_grad_norm is not None:
            self._check_clip_norm("phase2_max_grad_norm", self.phase2_max_grad_norm)
        for name in ("warmup_steps", "physical_batch_size", "max_records_per_unit"):
            if (value := getattr(self, name)) is not None:
                positive_int(name, value)
        self._check_privacy_target()
        # A plan with some noise checks the rest now, not after the data are loaded.
        self._calibrate(2 * self.expected_batch_size, 2**40, None, 1.0)

    def _check_privacy_target(self) -> None:
        if not METHODS[self.method].is_private:
            return
        if (self.target_epsilon is None) == (self.noise_multiplier is None):
            raise ValueError(
                f"Expected exactly one of target_epsilon={self.target_epsilon} and "
                f"noise_multiplier={self.noise_multiplier}: leave the other out."
            )
        if self.target_epsilon is not None:
            in_range("target_epsilon", self.target_epsilon, 0, math.inf, low_open=True)
        else:
            non_negative("noise_multiplier", self.noise_multiplier)

    def _check_clip_norm(self, name: str, value: float) -> None:
        unclipped = value == math.inf
        if unclipped and METHODS[self.method].is_private and self.noise_multiplier != 0:
            raise ValueError(
                f"Expected {name}=inf only with noise_multiplier=0: the noise is relative to it."
            )
        if not unclipped:
            in_range(name, value, 0, math.inf, low_open=True)

    @property
    def enforces_budget(self) -> bool:
        """Whether no step may run beyond the plan: not if the run has no guarantee anyway."""
        return METHODS[self.method].is_private and self.noise_multiplier != 0 and self.seed is None

    def clip_norm(self, phase: int) -> float:
        """C of a phase; without privacy nothing is clipped."""
        if not METHODS[self.method].is_private:
            return math.inf
        if phase == 2 and self.phase2_max_grad_norm is not None:
            return self.phase2_max_grad_norm
        return self.max_grad_norm

    def plan(self, num_units: int, num_steps: int) -> TwoPhasePlan:
        """Calibrate the plan for ``N`` units and ``T`` steps."""
        return self._calibrate(num_units, num_steps, self.target_epsilon, self.noise_multiplier)

    def trial(self, num_steps: int) -> Settings:
        """The same for a trial of a few steps: its warm-up is no longer than it is."""
        if self.warmup_steps is None:
            return self
        return replace(self, warmup_steps=min(self.warmup_steps, num_steps))

    def contradictions(self, plan: TwoPhasePlan, num_units: int) -> list[str]:
        """What a plan that was made before does not agree with, one sentence each."""
        now = {
            "method": self.method,
            "num_units": num_units,
            "expected_batch_size": self.expected_batch_size,
            "target_delta": self.target_delta,
        }
        if METHODS[self.method].is_private:
            now["target_epsilon"] = self.target_epsilon
            if self.noise_multiplier is not None:
                now["noise_multiplier"] = self.noise_multiplier
        return [
            f"{name}={value} differs from {getattr(plan, name)} in the plan under way: the "
            "accounting would be wrong. Go on with the same value."
            for name, value in now.items()
            if getattr(plan, name) != value
        ]

    def _calibrate(
        self, num_units: int, num_steps: int, target: float | None, noise: float | None
    ) -> TwoPhasePlan:
        method = METHODS[self.method]
        return TwoPhasePlan.calibrate(
            num_units=num_units,
            num_steps=num_steps,
            expected_batch_size=self.expected_batch_size,
            target_delta=self.target_delta,
            target_epsilon=target if method.is_private else None,
            noise_multiplier=noise if method.is_private else None,
            method=self.method,
            warmup_steps=self.warmup_steps if method.has_warmup else None,
            warmup_fraction=self.warmup_fraction,
            noise_multiplier_ratio=self.noise_multiplier_ratio,
        )
