"""Norms from inner products between positions, and sums by one ordinary weight gradient.

Where a layer has few positions and many weights, a record's gradient Σ_s a_s b_sᵀ is much larger
than the signals that it is made of. Its norm follows from the inner products of the positions,
‖Σ_s a_s b_sᵀ‖² = Σ_st A_st B_st with A_st = ⟨a_s, a_t⟩ and B_st = ⟨b_s, b_t⟩ (Goodfellow,
arXiv 1510.01799; Rochette et al., arXiv 1912.06015), and a weighted sum over the records is what
ordinary training computes: neither needs the gradients themselves.

Norm and sum are then not of the very same numbers: where a gradient nearly cancels, rounding in
the sum could exceed what the norm says. Units whose norm is not large beside its terms are
therefore computed from their rows, in the norm and in the sum.

Legend: ``n`` records, ``U`` units of up to ``r`` records, ``S`` positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from tptopk_pl.gradients.contributions import Rows, Units, blocks

# Inner products are in float64: exact beside what follows, and far from under- and overflow. The
# sum over the records is in float32: below this share of a norm's terms it would lose more digits
# than the margin allows by which the mechanism clips below C.
_TRUSTED = 2.0**-9


class Positions(Protocol):
    """Gradients of ``n`` records that are sums over positions."""

    def __len__(self) -> int:
        """``n``."""

    @property
    def device(self) -> torch.device:
        """Where they are."""

    @property
    def dtype(self) -> torch.dtype:
        """Theirs."""

    def elements_per_record(self) -> int:
        """Size of the largest temporary of :meth:`dense` for one record."""

    def pairs_per_record(self) -> int:
        """Size of the largest temporary of :meth:`inner_products` for one record by itself."""

    def select(self, records: Tensor | slice) -> Positions:
        """Those of ``records`` alone."""

    def dense(self) -> Tensor:
        """The gradients ``[n, numel]``."""

    def total(self, factors: Tensor) -> Tensor:
        """Their sum, weighted by ``factors`` ``[n]``: ``[numel]``."""

    def inner_products(self, present: Tensor) -> tuple[Tensor, Tensor]:
        """A and B of units, each float64 ``[b, groups, r·S, r·S]``.

        Args:
            present: bool ``[b, r]``. The ``n = b·r`` records are those of ``b`` units; one that is
                not present counts as zero, whatever it holds.
        """


class Gram:
    """The contribution of all coordinates of a parameter, by units.

    Args:
        positions: the gradients of ``n`` records.
        members: int64 ``[U, r]``, the records of each unit, -1 for none; else each is a unit.
    """

    def __init__(self, positions: Positions, members: Tensor | None = None) -> None:
        self._in_order = members is None
        if members is None:
            members = torch.arange(len(positions), device=positions.device)[:, None]
        self._positions, self._members = positions, members
        self._doubtful: Tensor | None = None  # bool [U], once the norms are known

    def square_norms(self) -> Tensor:
        """See :class:`Contribution`."""
        num_units, device = len(self._members), self._positions.device
        self._doubtful = torch.zeros(num_units, dtype=torch.bool, device=device)
        parts = [torch.zeros(0, device=device)]
        width = self._members.shape[1]
        pairs = width**2 * self._positions.pairs_per_record()
        for block in blocks(num_units, pairs, device):
            squares, self._doubtful[block] = self._from_inner_products(block)
            parts.append(squares)
        squares = torch.cat(parts)
        for units in self._doubtful_blocks():
            squares[units] = Rows(self._unit_rows(units)).square_norms()
        return squares

    def weighted_sum(self, factors: Tensor) -> Tensor:
        """See :class:`Contribution`."""
        if self._doubtful is None:
            self.square_norms()
        assert self._doubtful is not None
        total = self._trusted_sum(factors, (~self._doubtful).nonzero().flatten())
        for units in self._doubtful_blocks():
            total = total + Rows(self._unit_rows(units)).weighted_sum(factors[units])
        return total

    def rows(self) -> Tensor:
        """See :class:`Contribution`."""
        units = torch.arange(len(self._members), device=self._positions.device)
        blocks = self._blocks(len(units))
        return torch.cat([self._unit_rows(units[block]) for block in blocks])

    def select(self, records: Tensor) -> Gram:
        """See :class:`Contribution`."""
        selected = Gram(self._positions, self._members[records])
        if self._doubtful is not None:
            selected._doubtful = self._doubtful[records]
        return selected

    def by_unit(self, units: Units) -> Gram:
        """See :class:`Contribution`."""
        return Gram(self._positions, units.members)

    def _blocks(self, num_units: int) -> Iterator[slice]:
        """Parts of so many units whose rows fit the cache."""
        elements = self._members.shape[1] * self._positions.elements_per_record()
        return blocks(num_units, elements, self._positions.device)

    def _doubtful_blocks(self) -> Iterator[Tensor]:
        """The units that are not to be trusted, int64, in such parts."""
        assert self._doubtful is not None
        units = self._doubtful.nonzero().flatten()
        return (units[block] for block in self._blocks(len(units)))

    def _from_inner_products(self, units: slice) -> tuple[Tensor, Tensor]:
        """Squared norms of ``units`` ``[b]``, and which of them are not to be trusted."""
        members = self._members[units]
        present = members >= 0
        in_order = units if self._in_order else members.clamp(min=0).flatten()
        records = self._positions.select(in_order)
        a, b = records.inner_products(present)
        traces = [matrix.diagonal(dim1=2, dim2=3).sum(2) for matrix in (a, b)]
        sizes = [torch.linalg.vector_norm(matrix, dim=(2, 3)) for matrix in (a, b)]
        scale = (traces[0] * sizes[1] + sizes[0] * traces[1]).sum(1)
        squares = (a * b).sum((1, 2, 3))
        mean = present.sum(1).clamp(min=1).to(squares.dtype) ** -2
        # Not "<": a scale that is not a number trusts nothing.
        doubtful = ~(squares >= _TRUSTED * scale)
        return (squares * mean).to(self._positions.dtype), doubtful

    def _unit_rows(self, units: Tensor) -> Tensor:
        """Mean gradients of ``units``, ``[b, numel]``."""
        members = self._members[units]
        unit, place = (members >= 0).nonzero(as_tuple=True)
        dense = self._positions.select(members[unit, place]).dense()
        if self._members.shape[1] == 1 and len(unit) == len(units):
            return dense
        weights = 1.0 / (members >= 0).sum(1).to(dense.dtype)
        rows = dense.new_zeros(len(units), dense.shape[1])
        return rows.index_add_(0, unit, dense * weights[unit, None])

    def _trusted_sum(self, factors: Tensor, units: Tensor) -> Tensor:
        """Σ over ``units`` of factor times mean gradient, by one pass over their records."""
        members = self._members[units]
        unit, place = (members >= 0).nonzero(as_tuple=True)
        weighted = (factors[units] / (members >= 0).sum(1).clamp(min=1))[unit]
        if self._in_order and len(units) == len(self._members):
            return self._positions.total(weighted)
        return self._positions.select(members[unit, place]).total(weighted)
