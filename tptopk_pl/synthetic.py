"""Synthetic records: the structure, shapes and types of real ones, and none of their values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._pytree import tree_map


def synthetic_record(record: Any, *, fill: Callable[[torch.Tensor], Any] | None = None) -> Any:
    """A record of the same structure, shapes and types, and none of the values.

    Args:
        record: any nest of tensors, arrays, numbers and the like.
        fill: what a tensor becomes; zeros by default.
    """
    fill = fill or torch.zeros_like

    def blank(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return fill(leaf)
        if isinstance(leaf, bool | int | float) or _is_numeric(leaf, np.generic):
            return type(leaf)(fill(torch.as_tensor(leaf)).item())
        if _is_numeric(leaf, np.ndarray):  # copied: torch refuses negative strides
            return fill(torch.from_numpy(leaf.copy())).numpy()
        if isinstance(leaf, np.ndarray):
            return np.zeros_like(leaf)
        if is_image(leaf):
            from PIL.Image import new

            return new(leaf.mode, leaf.size)  # without palette and metadata
        return leaf if leaf is None else type(leaf)()

    return tree_map(blank, record)


def _is_numeric(leaf: Any, kind: type[np.generic] | type[NDArray[Any]]) -> bool:
    return isinstance(leaf, kind) and leaf.dtype.kind in "biuf"


def is_image(leaf: Any) -> bool:
    """Whether it is a PIL image, without importing PIL."""
    return hasattr(leaf, "point") and hasattr(leaf, "mode")
