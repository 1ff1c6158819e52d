"""Reading records so that a fault of one never ends or marks a run.

A run that stops at a corrupt image tells whoever watches it that the image is there. A record that
cannot be read or collated is therefore left out, and its unit contributes what remains, perhaps
nothing. Whether it is left out depends on the record itself and on blank records, never on which
others were drawn: else one record could cost others their part. Only if the records of every one
of many units in a chunk fail is the failure raised: that is not one unit's fault.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_flatten
from torch.utils.data import Dataset

from tptopk_pl.synthetic import is_image, synthetic_record

_TRIED_FOR_LAYOUT = 16  # records read for their layouts

# So many units, if all of them fail, are a broken disk or module. Fewer can be bad luck, and ending
# the run would tell of them: they contribute nothing.
MANY_UNITS = 8


class Fault(NamedTuple):
    """Stands for a record that could not be read or collated."""

    error: Exception


class RecordReader(Dataset[Any]):
    """A data set that yields ``(index, record)`` and a collate function that skips faults.

    Other attributes are those of the data set that it wraps.

    Args:
        dataset: map-style data set.
        collate: the loader's own collate function.
        unit_of_record: int64 ``[n]``, the privacy unit of each record.
        units_share_chunks: a record must go into one batch with those of other units. If not, as
            with chunks of one unit each, records may be of shapes that cannot be stacked.

    Attributes:
        templates: blank records of the distinct layouts among the first records, commonest first.
        template: the first of them.

    Raises:
        ValueError: if the data set is empty or none of its first records can be read.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        collate: Callable[[list[Any]], Any],
        unit_of_record: NDArray[np.int64],
        *,
        units_share_chunks: bool = True,
    ) -> None:
        self.dataset, self.collate_records = dataset, collate
        self._unit_of_record = unit_of_record
        self._usual_layout, self.templates = self._first_layouts()
        self.template = self.templates[0]
        self._company = [self.template] if units_share_chunks else []
        self._misfits: dict[Hashable, str] = {}  # by layout; "" for those that fit

    def _first_layouts(self) -> tuple[Hashable, list[Any]]:
        """The commonest layout, not that of one odd record, and a blank record of each."""
        if not len(self):
            raise ValueError("The training data set is empty.")
        error: Exception | None = None
        layouts, blanks = [], []
        for index in range(min(_TRIED_FOR_LAYOUT, len(self))):
            try:
                record = self.dataset[index]
                layout, blank = _layout(record), synthetic_record(record)
            except Exception as caught:
                error = error or caught
            else:
                layouts.append(layout)
                blanks.append(blank)
        if not blanks:
            raise ValueError(
                "None of the first records of the training data set can be read and imitated: "
                f"{type(error).__name__}: {error}"
            ) from error
        firsts = [place for place, layout in enumerate(layouts) if layouts.index(layout) == place]
        firsts.sort(key=lambda place: -layouts.count(layouts[place]))
        return layouts[firsts[0]], [blanks[place] for place in firsts]

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> tuple[int, Any]:
        try:
            return index, self.dataset[index]
        except Exception as error:
            return index, Fault(error)

    def __getattr__(self, name: str) -> Any:
        # Not the protocols (__getitems__ would go round the faults), nor before there is a data
        # set (while unpickling, in a worker).
        if name == "dataset" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def collate(self, fetched: list[tuple[int, Any]]) -> tuple[Any, list[int]]:
        """Collate what was read.

        Returns:
            The batch and the indices of the records in it; without any, a batch of one synthetic
            record and no indices.

        Raises:
            Exception: what the data set or the collate function raised, if the records of every
                one of many units fail.
        """
        failures: list[Exception] = []
        # A value can fail a record of a good layout, but trying each is dear: only if all together
        # fail. The last resort is for records that go with a blank one but not with each other.
        for check in (self._check_layout, self._check_collates, self._check_usual):
            fetched = [(index, _checked(record, check)) for index, record in fetched]
            good = [(index, r) for index, r in fetched if not isinstance(r, Fault)]
            if not good:
                break
            try:
                return self._batch(good)
            except Exception as error:
                failures.append(error)
        if len({self._unit_of_record[index] for index, _ in fetched}) >= MANY_UNITS:
            raise [*(r.error for _, r in fetched if isinstance(r, Fault)), *failures][0]
        return self._batch([])

    def _batch(self, records: list[tuple[int, Any]]) -> tuple[Any, list[int]]:
        batch = self.collate_records([record for _, record in records] or [self.template])
        return batch, [index for index, _ in records]

    def _check_layout(self, record: Any) -> None:
        """Raise if blank records of this layout do not go with the usual ones."""
        layout = _layout(record)
        if layout not in self._misfits:
            fault = _checked(record, lambda r: self._check_collates(synthetic_record(r)))
            error = fault.error if isinstance(fault, Fault) else None
            self._misfits[layout] = f"{type(error).__name__}: {error}" if error else ""
        if self._misfits[layout]:
            raise ValueError(
                "A training record cannot be collated with a blank one of the usual layout, give "
                f"the loader a collate_fn that can: {self._misfits[layout]}"
            )

    def _check_collates(self, record: Any) -> None:
        self.collate_records([record, *self._company])  # the first may set what others must be
        self.collate_records([*self._company, record])

    def _check_usual(self, record: Any) -> None:
        if _layout(record) != self._usual_layout:
            raise ValueError("Training records of different layouts cannot be collated together.")


def _checked(record: Any, check: Callable[[Any], None]) -> Any:
    """The record, or its fault if the check raises."""
    if isinstance(record, Fault):
        return record
    try:
        check(record)
    except Exception as error:
        return Fault(error)
    return record


def _layout(record: Any) -> Hashable:
    kind = type(record)
    if kind in (tuple, list):  # what most data sets give; asking pytree would take ten times longer
        return (kind, *map(_layout, record))
    if issubclass(kind, Tensor | int | float | str):
        return _leaf_layout(record)
    leaves, structure = tree_flatten(record)
    return (repr(structure), *map(_leaf_layout, leaves))


def _leaf_layout(leaf: Any) -> Hashable:
    if is_image(leaf):  # whatever kind of file it comes from
        return leaf.mode, *leaf.size
    return type(leaf), tuple(getattr(leaf, "shape", ()))
