"""What one call of a layer contributes to the gradients of one parameter, record by record.

Legend: ``n`` records, ``k`` active coordinates of the parameter, ``g`` the gradient of the layer's
output, ``x`` its input, ``M`` the 0/1 mask of the active coordinates in the parameter's shape.

A contribution answers three questions (squared norms, weighted sum, the rows themselves) and may
answer the first two without ever holding the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

# Elements of the largest temporary a blockwise computation may hold: 64 MiB of float32, large
# enough to keep matrix products busy and small beside the activations of a typical chunk.
_BLOCK_ELEMENTS = 2**24

# Columns summed at once in a norm. PyTorch adds a row up in one float32 accumulator per lane:
# 1.4e-4 off at 4e6 columns (measured), against the 2^-10 by which the mechanism clips below C.
_NORM_COLUMNS = 2**18

# Above this, the entries of an outer product are taken for an overflow (see Outer.square_norms).
_OUTER_LIMIT = 1e8


class Selection:
    """The active coordinates of one parameter.

    Args:
        index: int64 ``[k]``, increasing flat coordinates; None for all of them.
        shape: the parameter's shape.
    """

    def __init__(self, index: Tensor | None, shape: torch.Size) -> None:
        self.index = index
        self.shape = shape

    @property
    def num_active(self) -> int:
        """``k``."""
        return self.shape.numel() if self.index is None else len(self.index)

    @cached_property
    def mask(self) -> Tensor | None:
        """``M``, bool in the parameter's shape; None if every coordinate is active."""
        if self.index is None:
            return None
        flat = torch.zeros(self.shape.numel(), dtype=torch.bool, device=self.index.device)
        return flat.index_fill_(0, self.index, True).view(self.shape)

    def to(self, device: torch.device) -> Selection:
        """The same selection with its index on ``device``."""
        if self.index is None or self.index.device == device:
            return self
        return Selection(self.index.to(device), self.shape)

    def gather(self, dense: Tensor) -> Tensor:
        """Active columns of ``dense``: ``[..., numel]`` to ``[..., k]``."""
        return dense if self.index is None else dense.index_select(-1, self.index)


class Contribution(Protocol):
    """Gradients of ``n`` records for one parameter, restricted to its ``k`` active coordinates."""

    def square_norms(self) -> Tensor:
        """Squared norm of each record's gradient: ``[n]``."""

    def weighted_sum(self, factors: Tensor) -> Tensor:
        """Sum of the rows times ``factors`` ``[n]``: ``[k]``."""

    def rows(self) -> Tensor:
        """The gradients themselves: ``[n, k]``."""

    def select(self, records: Tensor) -> Contribution:
        """The contribution of ``records`` (int64 ``[n']``) alone."""


class Rows:
    """A contribution that holds its rows ``[n, k]``."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows

    def square_norms(self) -> Tensor:
        """See :class:`Contribution`."""
        parts = [
            torch.linalg.vector_norm(part, dim=1)
            for part in torch.split(self._rows, _NORM_COLUMNS, dim=1)
        ]
        return torch.stack(parts).square().sum(0)

    def weighted_sum(self, factors: Tensor) -> Tensor:
        """See :class:`Contribution`."""
        return factors.to(self._rows.dtype) @ self._rows

    def rows(self) -> Tensor:
        """See :class:`Contribution`."""
        return self._rows

    def select(self, records: Tensor) -> Rows:
        """See :class:`Contribution`."""
        return Rows(self._rows.index_select(0, records))


class Outer:
    """The contribution ``g_i x_i^T`` of a linear layer, kept as its two factors.

    Args:
        g: ``[n, out]``.
        x: ``[n, in]``.
        selection: of a parameter of shape ``[out, in]``.
    """

    def __init__(self, g: Tensor, x: Tensor, selection: Selection) -> None:
        self._g = g
        self._x = x
        self._selection = selection

    def square_norms(self) -> Tensor:
        """‖M ⊙ (g xᵀ)‖² = Σ ((g² M) ⊙ x²), ``[n]``, without the outer product.

        Squares of tiny factors underflow where their product with a huge partner would not, which
        would understate the norm. So ``x`` is scaled to peak 1 and ``g`` takes the peak: what then
        underflows is below 1e-19 · _OUTER_LIMIT, and rows above the limit count as overflown (inf).
        """
        peak = self._x.abs().amax(1, keepdim=True)
        g2 = (self._g * peak).square()
        x2 = (self._x / peak.masked_fill(peak == 0, 1)).square()
        if (mask := self._selection.mask) is None:
            return g2.sum(1) * x2.sum(1)
        norms = ((g2 @ mask.to(g2.dtype)) * x2).sum(1)
        return norms.masked_fill(g2.amax(1) > _OUTER_LIMIT**2, torch.inf)

    def weighted_sum(self, factors: Tensor) -> Tensor:
        """See :class:`Contribution`."""
        weighted = self._g * factors.to(self._g.dtype)[:, None]
        return self._selection.gather((weighted.T @ self._x).flatten())

    def rows(self) -> Tensor:
        """See :class:`Contribution`."""
        if (index := self._selection.index) is None:
            return (self._g[:, :, None] * self._x[:, None, :]).flatten(1)
        num_inputs = self._x.shape[1]
        return self._g[:, index // num_inputs] * self._x[:, index % num_inputs]

    def select(self, records: Tensor) -> Outer:
        """See :class:`Contribution`."""
        g, x = self._g.index_select(0, records), self._x.index_select(0, records)
        return Outer(g, x, self._selection)


def blockwise(
    selection: Selection,
    dense: Callable[..., Tensor],
    tensors: Sequence[Tensor],
    elements_per_record: int,
) -> Rows:
    """Rows of a dense gradient that is made, and gathered, for a block of records at a time.

    Args:
        selection: the parameter's active coordinates.
        dense: maps the tensors of ``b`` records to their gradients ``[b, numel]``.
        tensors: each ``[n, ...]``, the last one (``g``) in the dtype of the result.
        elements_per_record: size of the largest temporary of ``dense`` for one record.
    """
    n = len(tensors[0])
    size = max(1, _BLOCK_ELEMENTS // max(1, elements_per_record))
    if size >= n:
        return Rows(selection.gather(dense(*tensors)))
    rows = tensors[-1].new_empty(n, selection.num_active)
    for start in range(0, n, size):
        block = [tensor[start : start + size] for tensor in tensors]
        rows[start : start + size] = selection.gather(dense(*block))
    return Rows(rows)
