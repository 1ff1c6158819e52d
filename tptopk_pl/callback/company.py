"""Companies of synthetic records, of which some can be changed and the others kept."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tptopk_pl.synthetic import synthetic_record

SIZE = 8  # records in a company
_FEW = 8  # the smallest ids are drawn often: padding and special tokens are among them
_WORD = 5  # letters


@dataclass(frozen=True)
class Values:
    """What integers of a record can be.

    Attributes:
        labels: a single integer is below this.
        ids: an array of integers is below this.
        levels: an array of bytes (an image, or a mask) is below this.
        padding: ids to draw often.
    """

    labels: int = 2
    ids: int = 2
    levels: int = 2
    padding: tuple[int, ...] = ()


@dataclass(frozen=True)
class Planted:
    """A value to put into the ``place``-th integer of a record."""

    place: int
    value: int


def company(
    templates: Sequence[Any],
    values: Values,
    seed: int,
    *,
    changed: Collection[int] = (),
    scale: float = 1.0,
    mixed_layouts: bool = False,
) -> list[Any]:
    """``SIZE`` records.

    Args:
        templates: synthetic records of the distinct layouts, commonest first.
        values: what integers can be.
        seed: draws the values.
        changed: positions that get other values; the others' values do not depend on it.
        scale: multiplies the floating-point values of the changed ones.
        mixed_layouts: use every template and texts of different lengths.
    """
    records = []
    for position in range(SIZE):
        is_changed = position in changed
        draw = 2 * seed + is_changed
        filler = Filler(values, draw, position, scale if is_changed else 1.0)
        template = templates[position % len(templates) if mixed_layouts else 0]
        text = filler.words(1 + position if mixed_layouts else 3)
        records.append(synthetic_record(template, fill=filler, text=text))
    return records


def with_planted(template: Any, values: Values, position: int, planted: Planted) -> Any:
    """The record at ``position`` of the company of seed 0, with a value planted.

    Returns:
        The record, or None if it has no such integer.
    """
    filler = Filler(values, 0, position, 1.0, planted)
    record = synthetic_record(template, fill=filler, text=filler.words(3))
    return record if filler.num_integers > planted.place else None


class Filler:
    """Random values for the leaves of one record; called with a tensor, returns its like."""

    def __init__(
        self,
        values: Values,
        draw: int,
        position: int,
        scale: float,
        planted: Planted | None = None,
    ) -> None:
        self._values, self._scale, self._planted = values, scale, planted
        self._generator = torch.Generator().manual_seed(SIZE * draw + position)
        even, half = position % 2 == 0, position // 2
        # Even positions go through all labels in turn, odd ones draw: the sum of labels changes.
        self._label = (
            (half + SIZE // 2 * draw) % values.labels if even else self._below(values.labels, ())
        )
        self.num_integers = 0
        self.planted_in_array = False

    def words(self, count: int) -> str:
        """Words of random letters."""
        letters = torch.as_tensor(self._below(26, (count, _WORD))) + ord("a")
        return " ".join("".join(map(chr, word)) for word in letters.tolist())

    def __call__(self, leaf: Tensor) -> Tensor:
        """Values of the leaf's shape and type."""
        shape = tuple(leaf.shape)
        if leaf.is_floating_point() or leaf.is_complex():
            return torch.rand(shape, generator=self._generator, dtype=leaf.dtype) * self._scale
        if leaf.dtype == torch.uint8 and leaf.ndim > 1:
            return torch.as_tensor(self._below(self._values.levels, shape)).to(leaf.dtype)
        if leaf.dtype == torch.bool:
            return torch.as_tensor(self._below(2, shape)).to(leaf.dtype)
        drawn = self._ids(shape) if shape else torch.tensor(self._label)
        if leaf.dtype.is_signed:
            if self._planted and self.num_integers == self._planted.place:
                drawn = torch.full(shape, self._planted.value)
            self.num_integers += 1
        return drawn.to(leaf.dtype)
