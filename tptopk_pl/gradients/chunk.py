"""What the engine holds between ``begin`` and ``end``: the gradients of one physical chunk.

Legend: ``n`` records, ``U`` units, ``k`` active coordinates, ``f_u`` the factor of unit ``u``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from tptopk_pl.gradients.contributions import Contribution, Rows, Selection
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
        assert unit_of_record.dtype == torch.int64 and unit_of_record.ndim == 1
        counts = torch.bincount(unit_of_record, minlength=num_units)
        assert len(counts) == num_units, "a record names a unit out of range"
        self.num_records = len(unit_of_record)
        self.selections = selections
        self.closed = False
        self.calls: Counter[str] = Counter()
        self._unit = unit_of_record
        self._num_units = num_units
        self._single = bool((counts <= 1).all())
        self._weight = 1.0 / counts[unit_of_record]
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
        if not self._single:
            contribution = Rows(self._average(contribution.rows()))
        held = self._held.get(position)
        if held is not None:
            contribution = Rows(held.rows() + contribution.rows())
        self._held[position] = contribution

    def norms(self) -> Tensor:
        """‖m ⊙ mean gradient‖ of each unit: ``[U]``, 0 for a unit without records."""
        device = self._unit.device
        with full_precision(device):
            squares = torch.zeros((), device=device)
            for contribution in self._held.values():
                squares = squares + contribution.square_norms()
            if not self._single:
                return squares.sqrt().expand(self._num_units).contiguous()
            norms = squares.sqrt().expand(self.num_records)
            return norms.new_zeros(self._num_units).index_copy(0, self._unit, norms)

    def weighted_sum(self, factors: Tensor) -> Tensor:
        """Σ_u f_u · (masked gradient of unit u): ``[k]``, for ``factors`` ``[U]``.

        Rows of factor 0 are left out before the product: 0 · NaN would be NaN.
        """
        assert factors.shape == (self._num_units,)
        if self._single:
            factors = factors[self._unit]
        kept = factors.nonzero().flatten()
        some_left_out = len(kept) < len(factors)
        if some_left_out:
            factors = factors[kept]
        parts = [torch.empty(0, device=factors.device)]
        with full_precision(factors.device):
            for position, selection in enumerate(self.selections):
                contribution = self._held.get(position)
                if contribution is None:
                    parts.append(factors.new_zeros(selection.num_active))
                    continue
                if some_left_out:
                    contribution = contribution.select(kept)
                parts.append(contribution.weighted_sum(factors))
        return torch.cat(parts)

    def close(self) -> None:
        """Free the gradients and refuse later ones."""
        self.closed = True
        self._held.clear()

    def _average(self, rows: Tensor) -> Tensor:
        """Mean over each unit's records of ``rows`` ``[n, k]``: ``[U, k]``."""
        weighted = rows * self._weight.to(rows.dtype)[:, None]
        return rows.new_zeros(self._num_units, rows.shape[1]).index_add_(0, self._unit, weighted)
