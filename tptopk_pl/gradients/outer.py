"""The gradient of a linear layer's weight by record: an outer product, kept as its two factors.

Legend: ``g`` ``[n, out]`` the output gradient, ``x`` ``[n, in]`` the input, ``M`` the mask.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from tptopk_pl.gradients.contributions import Contribution, Rows, Selection, Units
from tptopk_pl.gradients.correlation import Correlation
from tptopk_pl.gradients.gram import Gram
from tptopk_pl.gradients.sparse import csr_pattern

# Above this, the entries of an outer product are taken for an overflow (see Outer.square_norms).
_OUTER_LIMIT = 1e8


class Outer:
    """The contribution ``g_i x_i^T``.

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
        """‖M ⊙ (g xᵀ)‖² = Σ ((g² M) ⊙ x²), ``[n]``, without the outer product; ‖g‖² ‖x‖² if dense.

        Squares of tiny factors underflow where their product with a huge partner would not, which
        would understate the norm. So ``x`` is scaled to peak 1 and ``g`` takes the peak: what then
        underflows is below 1e-19 · _OUTER_LIMIT, and rows above the limit count as overflown (inf).
        """
        if self._selection.index is None:
            size = partial(torch.linalg.vector_norm, dim=1, dtype=torch.float64)
            squares: Tensor = (size(self._g) * size(self._x)).square()
            return squares.to(self._g.dtype)
        peak = self._x.abs().amax(1, keepdim=True)
        g2 = (self._g * peak).square()
        x2 = (self._x / peak.masked_fill(peak == 0, 1)).square()
        norms = self._masked(g2, x2)
        return norms.masked_fill(g2.amax(1) > _OUTER_LIMIT**2, torch.inf)

    def weighted_sum(self, factors: Tensor) -> Tensor:
        """See :class:`Contribution`."""
        weighted = self._g * factors.to(self._g.dtype)[:, None]
        return self._selected_product(weighted, self._x)

    def rows(self) -> Tensor:
        """See :class:`Contribution`."""
        if (index := self._selection.index) is None:
            return (self._g[:, :, None] * self._x[:, None, :]).flatten(1)
        num_inputs = self._x.shape[1]
        return self._g[:, index // num_inputs] * self._x[:, index % num_inputs]

    def select(self, records: Tensor) -> Outer:
        """See :class:`Contribution`."""
        g, x = self._g.index_select(0, records), self._x.index_select(0, records)
        return type(self)(g, x, self._selection)

    def by_unit(self, units: Units) -> Contribution:
        """See :class:`Contribution`; a unit's records are like the steps of one record."""
        if self._selection.index is not None:
            return Rows(units.average(self.rows()))
        return Gram(Correlation.of_steps(self._g[:, None], self._x[:, None]), units.members)

    def _masked(self, g2: Tensor, x2: Tensor) -> Tensor:
        """Σ ((g² M) ⊙ x²), ``[n]``."""
        mask = self._selection.mask
        assert mask is not None
        return ((g2 @ mask.to(g2.dtype)) * x2).sum(1)

    def _selected_product(self, g: Tensor, x: Tensor) -> Tensor:
        """``gᵀ x`` on the active coordinates, ``[k]``."""
        return self._selection.gather((g.T @ x).flatten())


class SparseOuter(Outer):
    """The same, computed on the active coordinates alone: the cheaper, the fewer they are."""

    def _masked(self, g2: Tensor, x2: Tensor) -> Tensor:
        pattern = csr_pattern(self._selection, g2.dtype)
        return ((pattern @ x2.T) * g2.T).sum(0)

    def _selected_product(self, g: Tensor, x: Tensor) -> Tensor:
        pattern = csr_pattern(self._selection, g.dtype)
        product: Tensor = torch.sparse.sampled_addmm(pattern, g.T.contiguous(), x, beta=0.0)
        return product.values()
