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
    """No gradients, no autocast and no reduced float32 products on ``device``; restored after."""
    with _full_products(), torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


@contextmanager
def _full_products() -> Iterator[None]:
    """The engine uses matrix products and the weight gradients of convolutions."""
    backends = (
        torch.backends.cuda.matmul,
        torch.backends.cudnn.conv,  # type: ignore[attr-defined]
        torch.backends.mkldnn.matmul,  # type: ignore[attr-defined]
        torch.backends.mkldnn.conv,  # type: ignore[attr-defined]
    )
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision


@contextmanager
def _full_products_legacy() -> Iterator[None]:
    """The same before torch 2.9, where one setting governs the products of both backends."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
    _full_products = _full_products_legacy
