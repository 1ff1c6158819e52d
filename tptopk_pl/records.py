"""Reading records so that a fault of one never ends or marks a run.

A run that stops at a corrupt image tells whoever watches it that the image is there. A record that
cannot be read or collated is therefore left out, and its unit contributes what remains, perhaps
nothing. Only if the records of every one of several units in a chunk fail is the failure raised:
that is not one unit's fault.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils._pytree import tree_flatten
from torch.utils.data import Dataset

from tptopk_pl.synthetic import is_image, synthetic_record

_TRIED_FOR_LAYOUT = 16  # records tried until one can be read


class Fault(NamedTuple):
    """Stands for a record that could not be read."""

    error: Exception


class RecordReader(Dataset[Any]):
    """A data set that yields ``(index, record)`` and a collate function that skips faults.

    Args:
        dataset: map-style data set.
        collate: the loader's own collate function.
        unit_of_record: int64 ``[n]``, the privacy unit of each record.

    Raises:
        ValueError: if none of the first records can be read.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        collate: Callable[[list[Any]], Any],
        unit_of_record: NDArray[np.int64],
    ) -> None:
        self.dataset, self.collate_records = dataset, collate
        self._unit_of_record = unit_of_record
        usual = self._usual_record()
        self.template = synthetic_record(usual)
        self._layout = _layout(usual)

    def _usual_record(self) -> Any:
        """A record of the commonest layout among the first: not that of one odd record."""
        error: Exception | None = None
        readable = []
        for index in range(min(_TRIED_FOR_LAYOUT, len(self))):
            try:
                readable.append(self.dataset[index])
            except Exception as caught:
                error = error or caught
        if not readable:
            raise ValueError(
                "None of the first records of the training data set can be read: "
                f"{type(error).__name__}: {error}"
            ) from error
        layouts = [_layout(record) for record in readable]
        return readable[max(range(len(readable)), key=lambda i: layouts.count(layouts[i]))]

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> tuple[int, Any]:
        try:
            return index, self.dataset[index]
        except Exception as error:
            return index, Fault(error)

    def collate(self, fetched: list[tuple[int, Any]]) -> tuple[Any, list[int]]:
        """Collate what was read.

        Returns:
            The batch and the indices of the records in it; without any, a batch of one synthetic
            record and no indices.

        Raises:
            Exception: what the data set or the collate function raised, if the records of every
                one of several units fail.
        """
        faults = [record for _, record in fetched if isinstance(record, Fault)]
        if len(faults) == len(fetched) and self._of_several_units(fetched):
            raise faults[0].error
        good = [(index, r) for index, r in fetched if not isinstance(r, Fault)]
        try:
            return self._batch(good)
        except Exception:
            usual = [(index, r) for index, r in good if self._is_usual(r)]
            if len(usual) == len(good) or (not usual and self._of_several_units(good)):
                raise
            return self._batch(usual)

    def _batch(self, records: list[tuple[int, Any]]) -> tuple[Any, list[int]]:
        batch = self.collate_records([record for _, record in records] or [self.template])
        return batch, [index for index, _ in records]

    def _of_several_units(self, fetched: list[tuple[int, Any]]) -> bool:
        return len({self._unit_of_record[index] for index, _ in fetched}) > 1

    def _is_usual(self, record: Any) -> bool:
        """Whether a record looks like the others and can be collated: judged by itself alone."""
        if _layout(record) != self._layout:
            return False
        try:
            self.collate_records([record])
        except Exception:
            return False
        return True


def _layout(record: Any) -> tuple[Any, ...]:
    leaves, structure = tree_flatten(record)
    return (structure, *((type(leaf), _shape(leaf)) for leaf in leaves))


def _shape(leaf: Any) -> Any:
    return (leaf.mode, leaf.size) if is_image(leaf) else getattr(leaf, "shape", None)
