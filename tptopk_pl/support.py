"""The support: which coordinates of the flattened model are trained.

Coordinates are numbered over the trained parameters, laid one after the other in a fixed order,
each flattened in its logical (row-major) order. Notation of Zhang and Xie (arXiv 2606.04375):
``A`` the support, ``k = |A|``, ``d`` the number of trained coordinates, ``m = 1_A`` its mask.

>>> support = Support(torch.tensor([0, 4, 5]), sizes=(4, 3))
>>> [local.tolist() for local in support.split()]
[[0], [0, 1]]
>>> support.shares()
[0.25, 0.6666666666666666]
>>> support.num_active, support.num_total, support.is_dense
(3, 7, False)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Support:
    """An immutable set of ``k`` of ``d`` flat coordinates.

    Args:
        indices: int64 ``[k]``, strictly increasing, each in ``[0, d)``.
        sizes: number of elements of each parameter, in the order of the flat vector.

    Raises:
        ValueError: if the indices are not int64, one-dimensional, increasing and in range.
    """

    indices: Tensor
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        indices = self.indices
        if indices.dtype != torch.int64 or indices.ndim != 1:
            raise ValueError(
                f"Expected indices of dtype int64 and one dimension, got {indices.dtype} "
                f"with shape {tuple(indices.shape)}."
            )
        if len(indices) and (indices[0] < 0 or indices[-1] >= self.num_total):
            raise ValueError(f"Expected indices in [0, {self.num_total}).")
        if not bool((indices[1:] > indices[:-1]).all()):
            raise ValueError("Expected strictly increasing indices.")

    @classmethod
    def dense(cls, sizes: Sequence[int], device: torch.device | str = "cpu") -> Support:
        """Every coordinate of parameters with these ``sizes``."""
        return cls(torch.arange(sum(sizes), device=device), tuple(sizes))

    @property
    def num_active(self) -> int:
        """``k``."""
        return len(self.indices)

    @property
    def num_total(self) -> int:
        """``d``."""
        return sum(self.sizes)

    @property
    def is_dense(self) -> bool:
        """Whether every coordinate is active."""
        return self.num_active == self.num_total

    def split(self) -> list[Tensor]:
        """Flat indices within each parameter: int64 ``[k_p]`` for parameter ``p``."""
        offsets = list(accumulate(self.sizes, initial=0))
        bounds = torch.tensor(offsets, device=self.indices.device)
        cuts = torch.searchsorted(self.indices, bounds).tolist()
        return [
            self.indices[low:high] - offset
            for low, high, offset in zip(cuts[:-1], cuts[1:], offsets[:-1], strict=True)
        ]

    def shares(self) -> list[float]:
        """Active share ``k_p / numel`` of each parameter."""
        return [
            len(local) / max(size, 1) for local, size in zip(self.split(), self.sizes, strict=True)
        ]

    def to(self, device: torch.device | str) -> Support:
        """The same support with its indices on ``device``."""
        return Support(self.indices.to(device), self.sizes)
