"""Synthetic records: the form of real ones, and nothing of their content."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tptopk_pl.synthetic import synthetic_record

Pair = namedtuple("Pair", "image label")

LEAVES = {
    "tensor": torch.tensor([[1.5, 2.0]], dtype=torch.float64),
    "integers": torch.tensor([7, 8], dtype=torch.int32),
    "mask": torch.tensor([True, False]),
    "array": np.array([[3, 4]], dtype=np.uint8),
    "flipped array": np.arange(4.0)[::-1],
    "text array": np.array(["ann", "bob"]),
    "numpy number": np.float32(3.5),
    "numpy text": np.str_("ann"),
    "int": 9,
    "float": 2.5,
    "bool": True,
    "str": "ann",
    "bytes": b"ann",
    "none": None,
    "set": {1, 2},
}


@pytest.mark.parametrize("leaf", LEAVES.values(), ids=LEAVES)
def test_a_synthetic_record_has_the_type_and_no_value(leaf: Any) -> None:
    blank = synthetic_record(leaf)
    assert type(blank) is type(leaf)
    assert getattr(blank, "shape", None) == getattr(leaf, "shape", None)
    if hasattr(leaf, "dtype") and not isinstance(leaf, np.str_):
        assert blank.dtype == leaf.dtype
    assert not np.any(np.asarray(blank) if not isinstance(blank, str | bytes | set) else len(blank))


MODES = ["L", "RGB", "RGBA", "CMYK", "P", "1", "F", "I", "I;16"]


@pytest.mark.parametrize("mode", MODES)
def test_a_synthetic_image_has_no_pixels_palette_or_metadata(mode: str) -> None:
    image = Image.new(mode, (5, 4), color=1)
    image.info["patient"] = "ann"
    if mode == "P":
        image.putpalette([9] * 768)
    blank = synthetic_record(image)
    assert (blank.mode, blank.size) == (mode, (5, 4))
    assert not np.asarray(blank.convert("RGB") if mode == "P" else blank).any()
    assert not blank.info
    assert image.info  # the record itself is as it was


def test_a_synthetic_record_keeps_the_nest() -> None:
    record = {
        "pair": Pair(torch.ones(2), 3),
        "more": [(torch.ones(1), "x"), OrderedDict(a=None, b=np.ones(2))],
    }
    blank = synthetic_record(record)
    assert type(blank["pair"]) is Pair
    assert blank["pair"].image.equal(torch.zeros(2))
    assert blank["pair"].label == 0
    assert blank["more"][0][1] == ""
    assert list(blank["more"][1]) == ["a", "b"]
    assert record["pair"].label == 3


def test_fill_decides_what_numbers_become() -> None:
    record = (torch.zeros(2), np.zeros(2, np.float32), 0, False, "x")
    ones = synthetic_record(record, fill=torch.ones_like)
    assert ones[0].equal(torch.ones(2))
    assert ones[1].tolist() == [1.0, 1.0]
    assert ones[1].dtype == np.float32
    assert ones[2:] == (1, True, "")


@pytest.mark.parametrize("mode", MODES)
def test_fill_decides_what_pixels_become(mode: str) -> None:
    image = synthetic_record(Image.new(mode, (5, 4)), fill=lambda x: torch.full_like(x, 255))
    assert (image.mode, image.size) == (mode, (5, 4))
    assert np.asarray(image).all()


def test_text_is_given() -> None:
    assert synthetic_record(("ann", b"ann", np.str_("ann")), text="x y") == ("x y", b"x y", "x y")


class Kind(Enum):
    LEFT = "l"
    RIGHT = "r"


class Grade(IntEnum):
    ONE = 1
    TWO = 2


def test_a_member_of_an_enumeration_is_any_member() -> None:
    assert synthetic_record((Kind.RIGHT, Grade.TWO)) == (Kind.LEFT, Grade.ONE)
    assert synthetic_record((Kind.LEFT, Grade.ONE), fill=torch.ones_like) == (
        Kind.RIGHT,
        Grade.TWO,
    )


@dataclass(frozen=True)
class Visit:
    patient: str
    image: torch.Tensor
    extra: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        assert self.patient, "a constructor that refuses blanks is not called"


@dataclass(slots=True)
class Slotted:
    label: int


class Scan:
    """Without a constructor free of arguments."""

    def __init__(self, image: torch.Tensor, visit: Visit) -> None:
        self.image, self.visit = image, visit


def test_objects_are_made_anew_part_by_part() -> None:
    visit = Visit("ann", torch.ones(2), [7, 8])
    blank = synthetic_record([Scan(torch.ones(3), visit), Slotted(5)])
    scan, slotted = blank
    assert type(scan) is Scan
    assert scan.image.equal(torch.zeros(3))
    assert (scan.visit.patient, scan.visit.extra) == ("", [0, 0])
    assert scan.visit.image.equal(torch.zeros(2))
    assert slotted == Slotted(0)
    assert visit.patient == "ann"


class Opaque:
    """Made of nothing that can be seen."""

    __slots__ = ("secret",)

    def __init__(self, secret: str) -> None:
        self.secret = secret


def test_what_cannot_be_made_blank_is_refused() -> None:
    """Rather than copied, with its values."""
    endless = Scan(torch.ones(1), Visit("ann", torch.ones(1)))
    endless.visit = endless  # type: ignore[assignment]
    for record in ((torch.ones(1), Opaque("ann")), {"f": lambda: 1}, endless):
        with pytest.raises(ValueError, match="no synthetic one can be made: return tensors"):
            synthetic_record(record)
