"""Reading records: a fault of one neither ends the run nor touches the others."""

from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, default_collate

from tptopk_pl.records import Fault, RecordReader

Pair = namedtuple("Pair", "image label")


class Faulty(Dataset):
    """Records ``(tensor [3] of the index, index)``; those in ``broken`` do as told."""

    def __init__(self, broken: dict[int, Any], n: int = 20) -> None:
        self.broken, self.n = broken, n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        broken = self.broken.get(index)
        if isinstance(broken, Exception):
            raise broken
        return broken or (torch.full((3,), float(index)), index)


def reader(broken: dict[int, Any], units: list[int] | None = None, **kwargs: Any) -> RecordReader:
    owner = np.arange(20) if units is None else np.array(units)
    return RecordReader(Faulty(broken), kwargs.get("collate", default_collate), owner)


def collate(of: RecordReader, indices: list[int]) -> tuple[Any, list[int]]:
    return of.collate([of[index] for index in indices])


ODD = {
    "cannot be read": OSError("truncated file"),
    "another shape": (torch.zeros(4), 5),
    "another structure": (torch.zeros(3), 5, "extra"),
    "another type": (torch.zeros(3), "five"),
}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_only_the_faulty_record_is_left_out(odd: Any) -> None:
    (images, labels), kept = collate(reader({5: odd}), [4, 5, 6])
    assert kept == [4, 6]
    assert labels.tolist() == [4, 6]
    assert images.tolist() == [[4.0] * 3, [6.0] * 3]


def test_a_faulty_record_alone_becomes_a_synthetic_one_that_no_unit_owns() -> None:
    (images, _), kept = collate(reader({5: OSError("truncated file")}), [5])
    assert kept == []
    assert images.equal(torch.zeros(1, 3))


def test_a_value_that_cannot_be_collated_costs_that_record_only() -> None:
    """Its layout is like any other's."""

    def strict(records: list[Any]) -> Any:
        if any(label == 5 for _, label in records):
            raise KeyError("unknown label 5")
        return default_collate(records)

    of = reader({}, collate=strict)
    assert collate(of, [4, 5, 6])[1] == [4, 6]
    assert collate(of, [5])[1] == []


def test_several_units_that_all_fail_raise() -> None:
    """That is a broken disk, not a broken record."""
    broken = {index: OSError(f"no file {index}") for index in (5, 6)}
    with pytest.raises(OSError, match="no file 5"):
        collate(reader(broken), [5, 6])


def test_several_units_that_are_all_unlike_the_first_records_raise() -> None:
    broken = {index: (torch.zeros(index), index) for index in (17, 18)}
    with pytest.raises(RuntimeError, match="equal size"):
        collate(reader(broken), [17, 18])


def test_all_records_of_one_unit_may_fail() -> None:
    """A unit whose every record is corrupt must not end the run."""
    broken = {index: OSError("no file") for index in (5, 6)}
    units = [*range(6), 5, *range(6, 19)]
    assert collate(reader(broken, units), [5, 6])[1] == []


def test_every_collate_failing_for_several_units_raises() -> None:
    def broken(records: list[Any]) -> Any:
        raise RuntimeError("collate is broken")

    with pytest.raises(RuntimeError, match="collate is broken"):
        collate(reader({}, collate=broken), [1, 2])


@pytest.mark.parametrize("odd", [ODD[name] for name in list(ODD)[:3]], ids=list(ODD)[:3])
def test_the_first_record_may_be_the_faulty_one(odd: Any) -> None:
    of = reader({0: odd})
    assert of.template[0].equal(torch.zeros(3))
    assert len(of.template) == 2
    assert collate(of, [0, 1, 2])[1] == [1, 2]


def test_an_empty_chunk_is_one_synthetic_record() -> None:
    (images, labels), kept = reader({}).collate([])
    assert kept == []
    assert images.equal(torch.zeros(1, 3))
    assert labels.equal(torch.zeros(1, dtype=torch.int64))


def test_a_data_set_that_cannot_be_read_is_refused_with_its_own_reason() -> None:
    with pytest.raises(ValueError, match="FileNotFoundError: no such folder"):
        reader(dict.fromkeys(range(20), FileNotFoundError("no such folder")))


def test_reading_yields_index_and_record_or_its_fault() -> None:
    of = reader({5: OSError("gone")})
    assert of[4][0] == 4
    index, record = of[5]
    assert index == 5
    assert isinstance(record, Fault)
    assert len(of) == 20


def test_images_of_another_size_are_seen_before_tensors_are_made_of_them() -> None:
    """A collate function may be what turns images into tensors."""
    pictures = {i: (Image.new("L", (8, 8) if i != 5 else (4, 4)), i) for i in range(20)}

    def stack(records: list[Any]) -> Any:
        return torch.stack([torch.from_numpy(np.array(image)) for image, _ in records])

    assert collate(reader(pictures, collate=stack), [4, 5, 6])[1] == [4, 6]
