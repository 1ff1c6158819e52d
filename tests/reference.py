"""The method in plain loops, from its equations: the oracle for every kernel.

One record at a time, ordinary modules, ``torch.autograd.grad``. Slow, and meant to be obvious.
Notation: g_u the gradient of unit u (mean over its records), m the 0/1 mask of the support,
C max_grad_norm, B expected_batch_size, z the noise, σ noise_multiplier.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


def record_gradients(
    loss_of_record: Callable[[int], Tensor], parameters: Sequence[nn.Parameter], num_records: int
) -> Tensor:
    """Gradient of each record's own loss, flat: ``[n, d]``; zero where a parameter is unused."""
    rows = []
    for record in range(num_records):
        grads = torch.autograd.grad(
            loss_of_record(record), parameters, allow_unused=True, materialize_grads=True
        )
        rows.append(torch.cat([grad.reshape(-1) for grad in grads]))
    return torch.stack(rows)


def unit_gradients(records: Tensor, unit_of_record: Sequence[int], num_units: int) -> Tensor:
    """Mean over each unit's records: ``[n, d]`` to ``[U, d]``; zero for a unit without records."""
    units = torch.zeros(num_units, records.shape[1], dtype=records.dtype)
    for unit in range(num_units):
        own = [row for row, owner in zip(records, unit_of_record, strict=True) if owner == unit]
        if own:
            units[unit] = sum(own) / len(own)
    return units


def clip_factor(gradient: Tensor, max_grad_norm: float) -> float:
    """min(1, C/‖g‖), 1 for the zero gradient, 0 for one that is not finite."""
    norm = float(gradient.norm())
    if norm != norm or norm == float("inf"):
        return 0.0
    return 1.0 if norm == 0 else min(1.0, max_grad_norm / norm)


def private_gradient(
    units: Tensor,
    mask: Tensor,
    noise: Tensor,
    *,
    max_grad_norm: float,
    noise_multiplier: float,
    expected_batch_size: int,
) -> Tensor:
    """g̃ = (1/B) (Σ_u clip_C(m ⊙ g_u) + m ⊙ σ C z): ``[d]``. The mask comes before the clip.

    Args:
        units: ``[U, d]``.
        mask: 0/1 ``[d]``.
        noise: standard normal ``[d]``.
        max_grad_norm: C.
        noise_multiplier: σ.
        expected_batch_size: B, never the realised size.
    """
    total = torch.zeros_like(noise)
    for gradient in units:
        masked = torch.where(mask.bool(), gradient, torch.zeros_like(gradient))
        factor = clip_factor(masked, max_grad_norm)
        if factor > 0:
            total += factor * masked
    total += mask * noise_multiplier * max_grad_norm * noise
    return total / expected_batch_size


def accumulate_score(score: Tensor, gradient: Tensor, *, noise_std: float) -> Tensor:
    """The score's sum after one more warm-up step: a + g̃² − s², s = σC/B."""
    return score + gradient**2 - noise_std**2


def top_k(score: Tensor, size: int) -> list[int]:
    """The ``size`` largest, ties broken by index; sorted indices."""
    order = sorted(range(len(score)), key=lambda index: (-float(score[index]), index))
    return sorted(order[:size])
