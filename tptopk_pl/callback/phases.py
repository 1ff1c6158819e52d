"""Which coordinates train now: all in the warm-up, the support afterwards, and the switch between.

Notation: ``d`` trained coordinates, ``k`` active ones, ``A`` the support.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer

from tptopk_pl import rng
from tptopk_pl.callback.freezing import (
    FrozenCoordinates,
    clear_optimizer_state,
    restart_averages,
    scale_learning_rates,
    scheduling_unscaled,
)
from tptopk_pl.callback.settings import Settings
from tptopk_pl.gradients import GradientEngine
from tptopk_pl.plan import METHODS, TwoPhasePlan
from tptopk_pl.selectors import SELECTORS, ScoreAccumulator, num_active, top_k
from tptopk_pl.support import Support

_WINDOWS = 10  # window sums in a warm-up


class Phases:
    """Holds the warm-up's scores, then the support, over fits and checkpoints.

    Attributes:
        support: None before the switch.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._warmup: ScoreAccumulator | None = None
        self._indices: Tensor | None = None  # of the support, until parameters are known
        self._lr_factor = 1.0
        self._frozen: FrozenCoordinates | None = None
        self._choices: dict[str, str] = {}  # of the phase under way
        self.support: Support | None = None

    def begin_fit(
        self, engine: GradientEngine, optimizer: Optimizer, parameters: Sequence[nn.Parameter]
    ) -> None:
        """Go on with these parameters; a support that was restored is taken up.

        Raises:
            ValueError: if ``active_ratio`` leaves no coordinate, or the support does not fit.
        """
        self._engine, self._optimizer, self._parameters = engine, optimizer, parameters
        self._sizes = tuple(parameter.numel() for parameter in parameters)
        self._num_active = num_active(self._settings.active_ratio, sum(self._sizes))
        self._frozen = None
        if self._indices is not None:
            self._confine(self._indices)

    def tune(self, plan: TwoPhasePlan, step: int, records_per_step: float) -> None:
        """Choose how each layer gets its gradients until the phase ends.

        A seed fixes the choice; a checkpoint brings that of the run that it goes on with.
        """
        if self._choices:
            self._engine.choices = self._choices
        elif self._settings.seed is None:
            rank_zero_info(
                "Measuring the fastest way to each layer's gradients, on synthetic signals "
                "(a minute if loops are compiled for it) ..."
            )
            last = plan.warmup_steps if plan.phase_at(step) == 1 else plan.num_steps
            self._engine.tune((last - step) * records_per_step)
            self._choices = self._engine.choices

    def add_released(self, gradient: Tensor, noise_variance: float, plan: TwoPhasePlan) -> None:
        """Score a released warm-up gradient ``[d]``."""
        if self._warmup is None:
            window = max(plan.warmup_steps // _WINDOWS, 1)
            self._warmup = ScoreAccumulator(gradient.numel(), window, gradient.device)
        self._warmup.add(gradient, noise_variance)

    @torch.no_grad()
    def write_gradients(self, gradient: Tensor) -> None:
        """Make ``p.grad`` of the released ``[k]``: dense, exactly 0 off the support."""
        if self.support is not None:
            dense = gradient.new_zeros(sum(self._sizes))
            dense[self.support.indices] = gradient
            gradient = dense
        parts = gradient.split(self._sizes)
        for parameter, part in zip(self._parameters, parts, strict=True):
            parameter.grad = part.view(parameter.shape).to(parameter.dtype)

    def switch_if_due(
        self, plan: TwoPhasePlan, step: int, trainer: Trainer, sampling_key: bytes
    ) -> ScoreAccumulator | None:
        """Enter phase 2 after the last warm-up step; if that happened now, what the warm-up left.

        The support is chosen on rank 0, from released gradients alone.
        """
        has_warmup = METHODS[plan.method].has_warmup
        if self.support is not None or not has_warmup or step < plan.warmup_steps:
            return None
        chosen = self._choose(plan, sampling_key) if trainer.is_global_zero else None
        self._confine(trainer.strategy.broadcast(chosen))
        assert self.support is not None
        self._choices = {}
        clear_optimizer_state(self._optimizer, self._parameters, self.support)
        restart_averages(trainer.callbacks, trainer.lightning_module)
        self._lr_factor = self._settings.phase2_lr_factor
        scale_learning_rates(self._optimizer, self._lr_factor)
        warmup, self._warmup = self._warmup, None
        return warmup

    def _choose(self, plan: TwoPhasePlan, sampling_key: bytes) -> Tensor:
        if plan.method == "tp_rand":
            stream = rng.Stream(sampling_key, "support", plan.warmup_steps)
            return stream.subset(sum(self._sizes), self._num_active)
        assert self._warmup is not None
        return top_k(SELECTORS[self._settings.selector](self._warmup), self._num_active).cpu()

    def _confine(self, indices: Tensor | None) -> None:
        assert indices is not None
        self._indices = indices
        self.support = Support(indices.to(self._parameters[0].device), self._sizes)
        self._engine.set_support(self.support)
        self._frozen = FrozenCoordinates(self._parameters, self.support)

    def restore_frozen(self) -> None:
        """Copy frozen coordinates back; after every optimizer step."""
        if self._frozen is not None:
            self._frozen.restore()

    def scheduling(self, module: LightningModule) -> Callable[..., None]:
        """``module.lr_scheduler_step`` under which the rate factor of phase 2 is kept."""
        return scheduling_unscaled(
            self._optimizer, lambda: self._lr_factor, module.lr_scheduler_step
        )

    def state_dict(self) -> dict[str, Any]:
        """Plain types and tensors."""
        return {
            "support": self._indices,
            "warmup": None if self._warmup is None else self._warmup.state_dict(),
            "lr_factor": self._lr_factor,
            "choices": self._choices,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` ended."""
        self._lr_factor = state["lr_factor"]
        self._indices, self._choices = state["support"], dict(state.get("choices", {}))
        if (warmup := state["warmup"]) is not None:
            total = warmup["total"]
            self._warmup = ScoreAccumulator(total.numel(), warmup["window"], total.device)
            self._warmup.load_state_dict(warmup)
