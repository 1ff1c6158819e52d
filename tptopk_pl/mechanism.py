"""The one place where privacy is made: clip, sum, noise, reduce, scale.

Notation: ``C`` the clip norm, ``sigma`` the noise multiplier relative to C, ``B`` the *expected*
batch size, ``A`` the support. One step releases

    g = (1/B) (sum_u clip_C(m * g_u) + m * z),   z ~ N(0, sigma^2 C^2 I),

with one standard normal draw for each coordinate of A (Zhang and Xie, arXiv 2606.04375v1).
Noise is added on rank 0 before anything leaves it; the other ranks add their sums to it.

>>> clip_factors(torch.tensor([0.5, 4.0, float("nan")]), max_grad_norm=1.0)
tensor([1.0000, 0.2498, 0.0000])
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from tptopk_pl.gradients import GradientEngine
from tptopk_pl.rng import gaussian_noise

# A norm rounded in float32 can leave a clipped gradient above C (by up to 5e-7 in relative terms,
# 6.5e-4 with bfloat16 operands): clip to slightly less, so that sensitivity C holds in floats too.
CLIP_MARGIN = 2.0**-10


def clip_factors(norms: Tensor, max_grad_norm: float) -> Tensor:
    """Factors ``[U]`` that bring units' gradients of these norms ``[U]`` to at most C.

    A norm that is not finite (overflow, NaN) gets factor 0: the unit contributes nothing.
    """
    bound = max_grad_norm * (1 - CLIP_MARGIN)
    factors = (bound / norms).clamp(max=1.0)
    return torch.where(torch.isfinite(norms), factors, torch.zeros_like(factors))


class GaussianMechanism:
    """Collects one logical step's chunks and releases its privatized mean gradient.

    The noise is drawn while forward and backward passes run: its size is known before them.

    Args:
        expected_batch_size: ``B``.
        noise_key: key of the noise stream on rank 0, None on every other rank.
        secure_rng: cryptographic noise.
        reduce: sums a tensor over all ranks.
    """

    def __init__(
        self,
        expected_batch_size: int,
        noise_key: bytes | None,
        *,
        secure_rng: bool = True,
        reduce: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    ) -> None:
        self._batch_size = expected_batch_size
        self._noise_key, self._secure_rng, self._reduce = noise_key, secure_rng, reduce
        self._drawing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="noise")
        self._begun = False
        self._sum = torch.zeros(0)  # of the chunks so far; its memory serves step after step
        self._noise: Future[Tensor] | None = None

    def close(self) -> None:
        """End the thread that draws noise."""
        self._drawing.shutdown()

    def begin_step(
        self,
        step: int,
        *,
        noise_multiplier: float,
        max_grad_norm: float,
        num_active: int,
        device: torch.device,
    ) -> None:
        """Start a logical step; whatever an interrupted one left behind is discarded.

        Args:
            step: 0-based; each step's noise is a stream of its own.
            noise_multiplier: ``sigma``; 0 adds no noise, whatever ``C``.
            max_grad_norm: ``C``.
            num_active: ``k``.
            device: of the gradients.
        """
        self._begun = True
        if self._sum.shape == (num_active,) and self._sum.device == device:
            self._sum.zero_()
        else:
            self._sum = torch.zeros(num_active, device=device)
        self._max_grad_norm, self._noise_std = max_grad_norm, 0.0
        self._noise = None
        if self._noise_key is not None and noise_multiplier > 0:
            self._noise_std = noise_multiplier * max_grad_norm
            draw = partial(gaussian_noise, device=device, secure=self._secure_rng)
            self._noise = self._drawing.submit(draw, self._noise_key, step, num_active)

    def add_chunk(self, engine: GradientEngine) -> None:
        """Add the clipped sum of the whole units whose gradients the engine holds."""
        assert self._begun
        factors = clip_factors(engine.norms(), self._max_grad_norm)
        self._sum = engine.weighted_sum(factors, self._sum.to(factors.dtype))

    def release(self) -> Tensor:
        """The step's privatized mean gradient on the support, ``[k]``; once for each step."""
        assert self._begun
        total, self._begun = self._sum, False
        if self._noise is not None:
            noise, self._noise = self._noise.result(), None
            total = noise.mul_(self._noise_std).add_(total).to(total.dtype)
        released = self._reduce(total) / self._batch_size
        self._sum.zero_()  # what has no noise is not kept
        return released
