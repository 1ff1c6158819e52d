"""What is logged about privacy while a run goes on, and kept for its summary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tptopk_pl.callback.confidential import PREFIX
from tptopk_pl.plan import TwoPhasePlan

_PER_FIT = 50  # ε by PLD takes 30 to 60 ms: computed some 50 times a fit, whatever its length


class Figures:
    """The history of a run.

    Attributes:
        history: one dict of numbers by name for each occasion, with the ``step`` it was at.
    """

    def __init__(self) -> None:
        self.history: list[dict[str, float]] = []
        self._epsilons: dict[int, float] = {}

    @staticmethod
    def next_due(plan: TwoPhasePlan, step: int, log_every_n_steps: int) -> int:
        """The first step after ``step`` to log at: as often as asked, some 50 times at most."""
        period = max(log_every_n_steps, -(-plan.num_steps // _PER_FIT))
        landmarks = (1, plan.warmup_steps, plan.num_steps)
        return min((step // period + 1) * period, *(s for s in landmarks if s > step), 2**62)

    def epsilon(self, plan: TwoPhasePlan, step: int) -> float:
        """ε by PLD after ``step`` steps, computed once."""
        if step not in self._epsilons:
            self._epsilons[step] = plan.epsilon_at(step)
        return self._epsilons[step]

    def are_stale(self, plan: TwoPhasePlan, step: int) -> bool:
        """Whether an epoch's end has something new to log: again some 50 times at most."""
        last = max((row["step"] for row in self.history if "privacy/epsilon" in row), default=None)
        if last is None or last == step:
            return last is None
        return step >= plan.num_steps or (step - last) * _PER_FIT >= plan.num_steps

    def of_privacy(self, plan: TwoPhasePlan, step: int, num_active: int) -> dict[str, float]:
        """ε spent after ``step`` steps (PLD and RDP), the phase, and ``k``."""
        figures = {
            "privacy/epsilon": self.epsilon(plan, step),
            "privacy/epsilon_rdp": plan.epsilon_rdp_at(step),
            "privacy/phase": float(plan.phase_at(max(step - 1, 0))),
            "support/num_active": float(num_active),
        }
        self.keep(step, figures)
        return figures

    def keep(self, step: int, figures: Mapping[str, float]) -> None:
        """Keep what was logged at a step."""
        self.history.append({"step": step, **figures})

    def keep_measured(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Keep what validation measured."""
        measured = {
            name: float(value)
            for name, value in metrics.items()
            if not name.startswith(("privacy/", "support", PREFIX))
        }
        self.keep(step, measured)
