"""Privacy units: whose data a guarantee protects, one or more records each.

>>> units = PrivacyUnits(["ann", "bob", "ann", "cid"])
>>> units.num_units, units.records(np.array([0, 2]))[0].tolist()
(3, [0, 2, 3])
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset

IntArray = NDArray[np.int64]


class PrivacyUnits:
    """Which records belong to which privacy unit.

    Args:
        unit_ids: one hashable id for each record, in data set order.
        max_records_per_unit: keep only the first that many records of each unit. The rule looks at
            the unit alone, so one unit's presence never changes another's records.

    Raises:
        ValueError: if an id is NaN or not hashable.
    """

    def __init__(
        self,
        unit_ids: Sequence[Any] | NDArray[Any],
        *,
        max_records_per_unit: int | None = None,
    ) -> None:
        self.unit_of_record: IntArray = _numbered(unit_ids)
        self._by_unit: IntArray = np.argsort(self.unit_of_record, kind="stable")
        counts = np.bincount(self.unit_of_record)
        self._starts: IntArray = np.concatenate(([0], np.cumsum(counts)))
        self._cap = max_records_per_unit

    @classmethod
    def one_per_record(cls, num_records: int) -> PrivacyUnits:
        """Each record is a unit of its own."""
        return cls(range(num_records))

    @property
    def num_units(self) -> int:
        """``N``."""
        return len(self._starts) - 1

    @property
    def largest(self) -> int:
        """Most records of one unit, after the cap."""
        largest = int(np.diff(self._starts).max())
        return largest if self._cap is None else min(largest, self._cap)

    def records(self, units: IntArray) -> tuple[IntArray, IntArray]:
        """Data set indices of the records of ``units``, one unit after the other.

        Returns:
            The indices, int64 ``[n]``, and where each unit's end among them, ``[len(units)]``.
        """
        starts = self._starts[units]
        counts = self._starts[units + 1] - starts
        if self._cap is not None:
            counts = np.minimum(counts, self._cap)
        ends = np.cumsum(counts)
        places = np.arange(counts.sum()) + np.repeat(starts - ends + counts, counts)
        return self._by_unit[places], ends


def _numbered(unit_ids: Sequence[Any] | NDArray[Any]) -> IntArray:
    """The units' numbers from 0, int64 ``[n]``; records share one if their ids are equal."""
    if isinstance(unit_ids, range):
        return np.arange(len(unit_ids))
    if isinstance(unit_ids, np.ndarray):
        if unit_ids.ndim == 1 and unit_ids.dtype.kind in "iuSU":
            return np.unique(unit_ids, return_inverse=True)[1].astype(np.int64)
        unit_ids = unit_ids.tolist()
    numbers: dict[Any, int] = {}
    try:
        found = [numbers.setdefault(uid, len(numbers)) for uid in unit_ids]
    except TypeError as error:
        raise ValueError(f"Expected privacy_units that are hashable: {error}.") from error
    if any(uid != uid for uid in numbers):
        raise ValueError("Expected privacy_units with an id for every record, got NaN.")
    return np.array(found, dtype=np.int64)


def unit_ids(dataset: Dataset[Any]) -> Sequence[Any] | NDArray[Any] | None:
    """The ids that a data set names in ``privacy_units``, also through Subset and ConcatDataset.

    Returns:
        One id for each record, or None if no data set inside names units.

    Raises:
        ValueError: if a wrapper of unknown kind hides a data set that names units, or if only some
            parts of a ConcatDataset name them: records would silently be units of their own.
    """
    named = getattr(dataset, "privacy_units", None)
    if named is not None:
        if callable(named):
            raise ValueError("privacy_units is a method: make it an attribute or a property.")
        if len(named) != len(dataset):  # type: ignore[arg-type]
            raise ValueError(
                f"Expected privacy_units with one id for each of the {len(dataset)} records, "  # type: ignore[arg-type]
                f"got {len(named)}."
            )
        # Items of a tensor compare by identity, those of a table are found by its own index.
        return np.asarray(named) if isinstance(named, Tensor | np.ndarray) else list(named)
    if isinstance(dataset, Subset):
        inner = unit_ids(dataset.dataset)
        indices = [int(index) for index in dataset.indices]
        if inner is not None:
            return [inner[index] for index in indices]
        # A record that is there twice, as after oversampling, is still one unit.
        return indices if len(set(indices)) < len(indices) else None
    if isinstance(dataset, ConcatDataset):
        if len({id(part) for part in dataset.datasets}) < len(dataset.datasets):
            raise ValueError(
                "A ConcatDataset holds one data set twice: its units would count twice."
            )
        parts = [unit_ids(part) for part in dataset.datasets]
        if any(part is None for part in parts) and any(part is not None for part in parts):
            raise ValueError("Only some parts of the ConcatDataset have privacy_units: name all.")
        return None if parts[0] is None else [uid for part in parts for uid in part or ()]
    if _hides_units(dataset):
        raise ValueError(
            f"{type(dataset).__name__} wraps a data set with privacy_units but has none itself: "
            "give it an attribute privacy_units, one id for each record."
        )
    return None


def _hides_units(dataset: Dataset[Any]) -> bool:
    """Whether a data set that names units is held in an attribute, at whatever depth."""
    seen: set[int] = set()
    found = [dataset]
    while found:
        holder = found.pop()
        if getattr(holder, "privacy_units", None) is not None:
            return True
        seen.add(id(holder))
        for value in getattr(holder, "__dict__", {}).values():
            items = value.values() if isinstance(value, dict) else value
            parts = items if isinstance(value, dict | list | tuple) else [value]
            found += [p for p in parts if isinstance(p, Dataset) and id(p) not in seen]
    return False
