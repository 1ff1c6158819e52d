"""Synthetic records: the form of real ones, and nothing of their content."""

from collections import OrderedDict, namedtuple
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
}


@pytest.mark.parametrize("leaf", LEAVES.values(), ids=LEAVES)
def test_a_synthetic_record_has_the_type_and_no_value(leaf: Any) -> None:
    blank = synthetic_record(leaf)
    assert type(blank) is type(leaf)
    assert getattr(blank, "shape", None) == getattr(leaf, "shape", None)
    if hasattr(leaf, "dtype") and not isinstance(leaf, np.str_):
        assert blank.dtype == leaf.dtype
    assert not np.any(np.asarray(blank) if not isinstance(blank, str | bytes) else len(blank))


@pytest.mark.parametrize("mode", ["L", "RGB", "P", "1", "F", "I;16"])
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
