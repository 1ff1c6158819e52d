"""The arithmetic in which norms and sums are computed: full float32, whatever the user has set.

A clip holds only if the norm and the sum see the same numbers. Reduced products (TF32, bfloat16)
would let a unit exceed its clip norm by up to 6.5e-4, and autocast would choose them silently.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def exact(tensor: Tensor) -> Tensor:
    """Floating-point ``tensor`` of any shape in float32 (float64 stays); integers untouched."""
    if not tensor.is_floating_point() or tensor.dtype in (torch.float32, torch.float64):
        return tensor
    return tensor.float()


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """No gradients, no autocast and no reduced float32 products on ``device``; restored after.

    The engine multiplies by matrix products alone, so the two matrix backends are all it sets.
    """
    cuda, mkldnn = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = cuda.fp32_precision, mkldnn.fp32_precision
    cuda.fp32_precision = mkldnn.fp32_precision = "ieee"
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            yield
    finally:
        cuda.fp32_precision, mkldnn.fp32_precision = before
