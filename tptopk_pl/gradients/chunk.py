"""What the engine holds between ``begin`` and ``end``: the gradients of one physical chunk.

Legend: ``n`` records, ``U`` units, ``k`` active coordinates, ``f_u`` the factor of unit ``u``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from tptopk_pl.gradients.contributions import Contribution, Rows, Selection, Units
from tptopk_pl.gradients.precision import full_precision


class Chunk:
    """Collects the contributions of every call of every layer, summed by parameter.

    The norm of a unit is that of the *sum* over the calls, so tied and repeated layers are right;
    and of the *mean* over its records, so that the clip norm keeps its meaning.

    Args:
        unit_of_record: int64 ``[n]``, in ``[0, U)``.
        num_units: ``U``.
        selections: by parameter.

    Attributes:
        calls: how often each layer was called, by name.
    """

    def __init__(
        self,
        unit_of_record: Tensor,
        num_units: int,
        selections: Sequence[Selection],
    ) -> None:
        self._units = Units(unit_of_record, num_units)
        self.num_records = len(unit_of_record)
        self.selections = selections
        self.closed = False
        self.calls: Counter[str] = Counter()
        self._held: dict[int, Contribution] = {}

    def is_active(self, position: int) -> bool:
        """Whether the parameter at ``position`` has a coordinate in the support."""
        return self.selections[position].num_active > 0

    def add(self, position: int, contribution: Contribution) -> None:
        """Add the gradients of the ``n`` records by one call to the parameter at ``position``."""
        if self.closed:
            raise ValueError(
                "A backward pass went through the graph of an earlier physical chunk. "
                "Detach what is carried from one training step to the next."
            )
        if not self._units.single:
            contribution = contribution.by_unit(self._units)
        held = self._held.get(position)
        if held is not None:
            contribution = Rows(held.rows() + contribution.rows())
        self._held[position] = contribution

    def norms(self) -> Tensor:
        """‖m ⊙ mean gradient‖ of each unit: ``[U]``, 0 for a unit without records."""
        units = self._units
        with full_precision(units.of_record.device):
            squares = torch.zeros((), device=units.of_record.device)
            for contribution in self._held.values():
                squares = squares + contribution.square_norms()
            if not units.single:
                return squares.sqrt().expand(units.num_units).contiguous()
            norms = squares.sqrt().expand(self.num_records)
            return norms.new_zeros(units.num_units).index_copy(0, units.of_record, norms)

    def weighted_sum(self, factors: Tensor, total: Tensor | None = None) -> Tensor:
        """Σ_u f_u · (masked gradient of unit u): ``[k]``, for ``factors`` ``[U]``.

        It is added to ``total``, in place, if that is given. Rows of factor 0 are left out before
        the product: 0 · NaN would be NaN.
        """
        assert factors.shape == (self._units.num_units,)
        if self._units.single:
            factors = factors[self._units.of_record]
        kept = factors.nonzero().flatten()
        some_left_out = len(kept) < len(factors)
        if some_left_out:
            factors = factors[kept]
        sizes = [selection.num_active for selection in self.selections]
        parts: dict[int, Tensor] = {}  # all of them before any is added: one may raise
        with full_precision(factors.device):
            for position, contribution in self._held.items():
                if some_left_out:
                    contribution = contribution.select(kept)
                parts[position] = contribution.weighted_sum(factors)
        total = factors.new_zeros(sum(sizes)) if total is None else total
        places = total.split(sizes)
        for position, part in parts.items():
            places[position].add_(part)
        return total

    def close(self) -> None:
        """Free the gradients and refuse later ones."""
        self.closed = True
        self._held.clear()
