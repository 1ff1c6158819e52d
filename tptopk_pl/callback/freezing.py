"""Holding frozen coordinates still, whatever the optimizer and its helpers do.

A zero gradient does not freeze a coordinate: momentum, Adam's moments and weight decay still move
it. After every optimizer step the frozen coordinates are therefore copied back, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor, nn
from torch.optim import Optimizer

from tptopk_pl.support import Support


class FrozenCoordinates:
    """The values of all parameters at the switch, restored off the support after each step.

    Args:
        parameters: the trained parameters, in the support's order.
        support: the coordinates that may move.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], support: Support) -> None:
        self._held = [
            (parameter, local, parameter.detach().clone())
            for parameter, local in zip(parameters, support.split(), strict=True)
            if len(local) < parameter.numel()
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Copy the frozen coordinates back; moving ones keep their present values."""
        for parameter, active, held in self._held:
            if not len(active):
                parameter.copy_(held)
                continue
            moved = parameter.reshape(-1).index_select(0, active)
            parameter.copy_(held)
            if parameter.is_contiguous():
                parameter.view(-1).index_copy_(0, active, moved)
            else:
                values = held.reshape(-1).clone()
                values[active] = moved
                parameter.copy_(values.view(parameter.shape))


@torch.no_grad()
def clear_optimizer_state(
    optimizer: Optimizer, parameters: Sequence[nn.Parameter], support: Support
) -> None:
    """Zero the optimizer's state off the support, and only there.

    State of a parameter's own shape (momentum, moments) is cleared; step counts stay.
    """
    for parameter, active in zip(parameters, support.split(), strict=True):
        for value in optimizer.state.get(parameter, {}).values():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                kept = value.reshape(-1)[active]
                cleared = torch.zeros(value.numel(), dtype=value.dtype, device=value.device)
                cleared[active] = kept
                value.copy_(cleared.view(value.shape))


@torch.no_grad()
def restart_averages(callbacks: Sequence[Callback], module: nn.Module) -> None:
    """Let weight averages begin anew at the present weights.

    An average over the switch would mix frozen coordinates with their moving past.
    """
    for callback in callbacks:
        if isinstance(callback, WeightAveraging) and callback._average_model is not None:
            average = callback._average_model
            average.module.load_state_dict(module.state_dict())
            average.n_averaged.fill_(1)


def scale_learning_rates(optimizer: Optimizer, factor: float) -> None:
    """Multiply the learning rate of every parameter group, in place."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].mul_(factor)
        else:
            group["lr"] *= factor


def scheduling_unscaled(
    optimizer: Optimizer, factor: Callable[[], float], schedule: Callable[..., None]
) -> Callable[..., None]:
    """Wrap ``lr_scheduler_step`` so that every scheduler computes with its own, unscaled rates.

    Schedulers update recursively or in closed form, from rates they keep under many names. They
    all stay right if the factor is taken out before they step and put back afterwards.
    """

    def step(*args: Any, **kwargs: Any) -> None:
        now = factor()
        if now == 1.0:
            return schedule(*args, **kwargs)
        scale_learning_rates(optimizer, 1 / now)
        schedule(*args, **kwargs)
        scale_learning_rates(optimizer, now)
        return None

    return step
