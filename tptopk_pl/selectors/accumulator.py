"""What the warm-up leaves behind: sums of released gradients, from which selectors score.

Everything is computed from the privatized gradient ``g`` (clipped, noised, reduced over all
ranks, scaled) before decay, momentum or learning rate touch it.

>>> warmup = ScoreAccumulator(num_total=2, window=2)
>>> for g in ([2.0, 0.0], [2.0, 1.0]):
...     warmup.add(torch.tensor(g), noise_variance=1.0)
>>> (warmup.energy.sum(0) / warmup.num_steps).tolist()
[3.0, -0.5]
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

_STATE = ("energy", "total", "window_total", "window_energy")


class ScoreAccumulator:
    """Running sums over the warm-up's steps, float32.

    Attributes:
        energy: ``[2, d]``, sum of ``g^2 - s^2`` over even and over odd steps (for cross-fitting).
        total: ``[d]``, sum of ``g``.
        window_total: ``[d]``, sum of ``g`` in the window under way.
        window_energy: ``[2, d]``, sum over even and odd closed windows of ``W`` steps of
            ``(sum of g)^2 - W s^2``.
        num_steps: steps added.

    Args:
        num_total: ``d``.
        window: ``W``, steps in a window.
        device: where the sums live.
    """

    def __init__(self, num_total: int, window: int, device: torch.device | str = "cpu") -> None:
        self.window, self.num_steps = window, 0
        self.energy = torch.zeros(2, num_total, device=device)
        self.total = torch.zeros(num_total, device=device)
        self.window_total = torch.zeros(num_total, device=device)
        self.window_energy = torch.zeros(2, num_total, device=device)
        self._window_variance = 0.0
        self._squared_variances = 0.0

    @property
    def noise_deviation(self) -> float:
        """Standard deviation of the mean of ``g^2 - s^2`` where ``g`` is noise alone.

        ``g^2 - s^2`` of one step has variance ``2 s^4``.
        """
        return math.sqrt(2 * self._squared_variances) / max(self.num_steps, 1)

    def add(self, gradient: Tensor, noise_variance: float) -> None:
        """Add one step.

        Args:
            gradient: ``[d]``, the released mean gradient.
            noise_variance: ``s^2 = (sigma C / B)^2`` of this step, with the expected batch size B.
        """
        gradient = gradient.float()
        self.energy[self.num_steps % 2].addcmul_(gradient, gradient).sub_(noise_variance)
        self.total.add_(gradient)
        self.window_total.add_(gradient)
        self._window_variance += noise_variance
        self._squared_variances += noise_variance**2
        self.num_steps += 1
        if self.num_steps % self.window == 0:
            half = (self.num_steps // self.window - 1) % 2  # the first is window 0
            self.window_energy[half].addcmul_(self.window_total, self.window_total)
            self.window_energy[half].sub_(self._window_variance)
            self.window_total.zero_()
            self._window_variance = 0.0

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain numbers; released values only."""
        state: dict[str, Any] = {name: getattr(self, name) for name in _STATE}
        return {
            **state,
            "window": self.window,
            "num_steps": self.num_steps,
            "window_variance": self._window_variance,
            "squared_variances": self._squared_variances,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` ended."""
        for name in _STATE:
            getattr(self, name).copy_(state[name])
        self.window, self.num_steps = state["window"], state["num_steps"]
        self._window_variance = state["window_variance"]
        self._squared_variances = state["squared_variances"]
