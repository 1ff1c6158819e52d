"""What one call of a layer contributes to the gradients of one parameter, record by record.

Legend: ``n`` records, ``U`` units, ``k`` active coordinates of the parameter, ``g`` the gradient of
the layer's output, ``x`` its input, ``M`` the 0/1 mask of the active coordinates in the parameter's
shape.

A contribution answers three questions (squared norms, weighted sum, the rows themselves) and may
answer the first two without ever holding the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

_T = TypeVar("_T")

# What is derived from a selection depends on input sizes: ever new ones must not fill memory.
_MAX_DERIVED = 8

# Elements of the largest temporary of a blockwise computation. On a CPU it stays in the cache, and
# in memory that the allocator hands out again: a fresh page costs more than the arithmetic on it.
# An accelerator needs blocks large enough to fill it (64 MiB).
_BLOCK_ELEMENTS = {"cpu": 2**18}
_BLOCK_ELEMENTS_ELSEWHERE = 2**24

# Columns summed at once in a norm. PyTorch adds a row up in one float32 accumulator per lane:
# 1.4e-4 off at 4e6 columns (measured), against the 2^-10 by which the mechanism clips below C.
_NORM_COLUMNS = 2**18


class Selection:
    """The active coordinates of one parameter.

    Args:
        index: int64 ``[k]``, increasing flat coordinates; None for all of them.
        shape: the parameter's shape.
    """

    def __init__(self, index: Tensor | None, shape: torch.Size) -> None:
        self.index = index
        self.shape = shape
        self._derived: dict[Hashable, Any] = {}

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

    def derived(self, key: Hashable, make: Callable[[Tensor], _T]) -> _T:
        """What ``make`` makes of the index; made once for each ``key``."""
        assert self.index is not None
        if key not in self._derived:
            if len(self._derived) >= _MAX_DERIVED:
                self.forget()
            self._derived[key] = make(self.index)
        derived: _T = self._derived[key]
        return derived

    def forget(self) -> None:
        """Free what was derived."""
        self._derived.clear()


class Units:
    """Which records make up each unit of a chunk.

    Args:
        unit_of_record: int64 ``[n]``, in ``[0, U)``.
        num_units: ``U``.

    Attributes:
        counts: records of each unit, ``[U]``.
        single: whether no unit has more than one record.
    """

    def __init__(self, unit_of_record: Tensor, num_units: int) -> None:
        assert unit_of_record.dtype == torch.int64 and unit_of_record.ndim == 1
        self.of_record, self.num_units = unit_of_record, num_units
        self.counts = torch.bincount(unit_of_record, minlength=num_units)
        assert len(self.counts) == num_units, "a record names a unit out of range"
        self.single = bool((self.counts <= 1).all())

    @cached_property
    def members(self) -> Tensor:
        """The records of each unit, ``[U, r]`` for ``r`` the most that one has; -1 for none."""
        device = self.of_record.device
        width = max([1, *self.counts.tolist()])
        order = self.of_record.argsort(stable=True)
        starts = self.counts.cumsum(0) - self.counts
        place = torch.arange(len(order), device=device) - starts[self.of_record[order]]
        members = torch.full((self.num_units, width), -1, device=device)
        members[self.of_record[order], place] = order
        return members

    def average(self, rows: Tensor) -> Tensor:
        """Mean over each unit's records of ``rows`` ``[n, k]``: ``[U, k]``."""
        weights = 1.0 / self.counts[self.of_record].to(rows.dtype)
        averages = rows.new_zeros(self.num_units, rows.shape[1])
        return averages.index_add_(0, self.of_record, rows * weights[:, None])


class Contribution(Protocol):
    """Gradients of ``n`` records (or units) for one parameter, restricted to the active ``k``."""

    def square_norms(self) -> Tensor:
        """Squared norm of each record's gradient: ``[n]``."""

    def weighted_sum(self, factors: Tensor) -> Tensor:
        """Sum of the rows times ``factors`` ``[n]``: ``[k]``."""

    def rows(self) -> Tensor:
        """The gradients themselves: ``[n, k]``."""

    def select(self, records: Tensor) -> Contribution:
        """The contribution of ``records`` (int64 ``[n']``) alone."""

    def by_unit(self, units: Units) -> Contribution:
        """The contribution of ``U`` units, each the mean of its records."""


# The ways in which one contribution can be had, by name; the first is the one taken unmeasured.
Options = Mapping[str, Callable[[], Contribution]]


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

    def by_unit(self, units: Units) -> Rows:
        """See :class:`Contribution`."""
        return Rows(units.average(self._rows))


def block_size(elements_per_record: int, device: torch.device) -> int:
    """Records whose temporaries of so many elements each make one block."""
    limit = _BLOCK_ELEMENTS.get(device.type, _BLOCK_ELEMENTS_ELSEWHERE)
    return max(1, limit // max(1, elements_per_record))


def blocks(n: int, elements_per_record: int, device: torch.device) -> Iterator[slice]:
    """``n`` records in blocks; all but the last of the same size."""
    size = block_size(elements_per_record, device)
    for start in range(0, n, size):
        yield slice(start, min(start + size, n))


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
    if block_size(elements_per_record, tensors[-1].device) >= n:
        return Rows(selection.gather(dense(*tensors)))
    rows = tensors[-1].new_empty(n, selection.num_active)
    for block in blocks(n, elements_per_record, rows.device):
        rows[block] = selection.gather(dense(*(tensor[block] for tensor in tensors)))
    return Rows(rows)
