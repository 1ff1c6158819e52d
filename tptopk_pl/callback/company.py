"""Companies of synthetic records, of which some can be changed and the others kept."""

from __future__ import annotations

from collections.abc import Collection, Sequence
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
        filler = _Filler(values, draw, position, scale=scale if is_changed else 1.0)
        template = templates[position % len(templates) if mixed_layouts else 0]
        text = filler.words(1 + position if mixed_layouts else 3)
        records.append(synthetic_record(template, fill=filler, text=text))
    return records


def with_planted(template: Any, values: Values, planted: Planted) -> Any:
    """The record at position 0 of the company of seed 0, with a value planted."""
    filler = _Filler(values, 0, 0, planted=planted)
    return synthetic_record(template, fill=filler, text=filler.words(3))


def integer_leaves(template: Any) -> list[bool]:
    """For each signed integer leaf of a record, whether it is an array."""
    filler = _Filler(Values(), 0, 0)
    synthetic_record(template, fill=filler)
    return filler.integers


class _Filler:
    """Random values for the leaves of one record; called with a tensor, returns its like.

    Attributes:
        integers: for each signed integer leaf so far, whether it is an array.
    """

    def __init__(
        self,
        values: Values,
        draw: int,
        position: int,
        *,
        scale: float = 1.0,
        planted: Planted | None = None,
    ) -> None:
        self._values, self._scale, self._planted = values, scale, planted
        self._generator = torch.Generator().manual_seed(SIZE * draw + position)
        if position % 2:  # the others go through all labels in turn
            self._label = int(self._below(values.labels, ()))
        else:
            self._label = (position // 2 + SIZE // 2 * draw) % values.labels
        self.integers: list[bool] = []

    def __call__(self, leaf: Tensor) -> Tensor:
        """Values of the leaf's shape and type."""
        shape = tuple(leaf.shape)
        if leaf.is_floating_point() and not shape:  # perhaps a label, as a float
            if self._planted and self._planted.place == len(self.integers):
                self.integers.append(False)
                return torch.full(shape, float(self._planted.value), dtype=leaf.dtype)
            self.integers.append(False)
        if leaf.is_floating_point() or leaf.is_complex():
            return torch.rand(shape, generator=self._generator, dtype=leaf.dtype) * self._scale
        if leaf.dtype == torch.uint8 and leaf.ndim > 1:
            return self._below(self._values.levels, shape).to(leaf.dtype)
        if leaf.dtype == torch.bool:
            return self._below(2, shape).to(leaf.dtype)
        drawn = self._ids(shape) if shape else torch.tensor(self._label)
        if leaf.dtype.is_signed:
            if self._planted and self._planted.place == len(self.integers):
                drawn = torch.full(shape, self._planted.value)
            self.integers.append(bool(shape))
        return drawn.to(leaf.dtype)

    def words(self, count: int) -> str:
        """Words of random letters."""
        letters = self._below(26, (count, _WORD)) + ord("a")
        return " ".join("".join(map(chr, word)) for word in letters.tolist())

    def _ids(self, shape: tuple[int, ...]) -> Tensor:
        """Uniform for the most part; small ids, the last one and padding are frequent."""
        ids = self._values.ids
        drawn = self._below(ids, shape)
        kind = self._below(8, shape)
        frequent = torch.tensor([ids - 1, *(p for p in self._values.padding if p < ids)])
        drawn = torch.where(kind < 3, self._below(min(_FEW, ids), shape), drawn)
        return torch.where(kind == 3, frequent[self._below(len(frequent), shape)], drawn)

    def _below(self, bound: int, shape: tuple[int, ...]) -> Tensor:
        return torch.randint(bound, shape, generator=self._generator)
