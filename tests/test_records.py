"""Reading records: a fault of one neither ends the run nor touches the others."""

import copy
import pickle
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, default_collate

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
    collate = kwargs.pop("collate", default_collate)
    return RecordReader(Faulty(broken), collate, owner, **kwargs)


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


def test_many_units_that_all_fail_raise() -> None:
    """That is a broken disk, not a broken record."""
    broken = {index: OSError(f"no file {index}") for index in range(5, 13)}
    with pytest.raises(OSError, match="no file 5"):
        collate(reader(broken), list(broken))


def test_a_few_units_that_all_fail_do_not_end_the_run() -> None:
    broken = {index: OSError(f"no file {index}") for index in range(5, 12)}
    assert collate(reader(broken), list(broken))[1] == []


def test_many_records_of_few_units_may_all_fail() -> None:
    broken = {index: OSError(f"no file {index}") for index in range(8)}
    assert collate(reader(broken, [0] * 20), list(broken))[1] == []


def test_many_units_that_do_not_go_with_the_first_records_raise() -> None:
    broken = {index: (torch.zeros(4), index) for index in range(12, 20)}
    with pytest.raises(ValueError, match=r"give the loader a collate_fn that can: .*equal size"):
        collate(reader(broken), list(broken))


def test_an_odd_record_is_left_out_in_whatever_company() -> None:
    """Else another one's presence decides: alone it could be collated, with others not."""
    of = reader({5: ODD["another shape"]})
    assert collate(of, [5])[1] == []
    assert collate(of, [4, 5])[1] == [4]


def test_records_of_any_shape_are_kept_where_units_share_no_chunk() -> None:
    of = reader({5: ODD["another shape"]}, units_share_chunks=False)
    (images, _), kept = collate(of, [5])
    assert kept == [5]
    assert images.shape == (1, 4)


class Texts(Faulty):
    """Records of 1 to 7 tokens and a label."""

    def __getitem__(self, index: int) -> Any:
        broken = self.broken.get(index)
        return broken or (torch.full((1 + index % 7,), index), index)


def padded(records: list[Any]) -> Any:
    """A collate function for texts; label 9 is unknown."""
    if any(label == 9 for _, label in records):
        raise KeyError("unknown label 9")
    texts = nn.utils.rnn.pad_sequence([text for text, _ in records], batch_first=True)
    return texts, torch.tensor([label for _, label in records])


@pytest.mark.parametrize("odd", [(None, 5), (torch.ones(3), 9), (torch.ones(3), "five"), (1, 2, 3)])
def test_among_records_of_many_shapes_only_the_faulty_one_is_left_out(odd: Any) -> None:
    """The others are unlike the usual record, too, but can be collated."""
    of = RecordReader(Texts({5: odd}), padded, np.arange(20))
    assert collate(of, [1, 2, 3, 5, 6, 7])[1] == [1, 2, 3, 6, 7]


def test_records_that_fail_only_together_leave_those_of_the_usual_layout() -> None:
    def picky(records: list[Any]) -> Any:
        if len({len(text) for text, _ in records}) > 2:
            raise RuntimeError("more than two lengths")
        return padded(records)

    of = RecordReader(Texts({}), picky, np.arange(20))
    assert len(of.template[0]) == 1
    assert collate(of, [0, 1, 2, 3, 7])[1] == [0, 7]


def test_all_records_of_one_unit_may_fail() -> None:
    """A unit whose every record is corrupt must not end the run."""
    broken = {index: OSError("no file") for index in (5, 6)}
    units = [*range(6), 5, *range(6, 19)]
    assert collate(reader(broken, units), [5, 6])[1] == []


def test_every_collate_failing_for_many_units_raises() -> None:
    def broken(records: list[Any]) -> Any:
        if any(label for _, label in records):
            raise RuntimeError("collate is broken")
        return default_collate(records)

    of = reader({}, collate=broken)
    with pytest.raises(RuntimeError, match="collate is broken"):
        collate(of, list(range(1, 9)))
    assert collate(of, list(range(1, 8)))[1] == []


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


def test_one_template_for_each_layout_commonest_first() -> None:
    broken: dict[int, Any] = {
        0: (torch.ones(5), 1),
        1: OSError("gone"),
        **dict.fromkeys((2, 4), (torch.ones(4), 1)),
    }
    of = reader(broken)
    assert [len(image) for image, _ in of.templates] == [3, 4, 5]
    assert of.template is of.templates[0]
    assert not any(image.any() or label for image, label in of.templates)


def test_a_first_record_that_cannot_be_imitated_is_passed_over() -> None:
    class Odd:
        def __init__(self, needed: int) -> None:
            """Cannot be made from nothing."""

    assert len(reader({0: (Odd(1), 1)}).templates) == 1


def test_images_of_one_size_are_of_one_layout_whatever_file_they_come_from(tmp_path: Path) -> None:
    for name in ("a.png", "b.jpg"):
        Image.new("L", (8, 8)).save(tmp_path / name)
    with Image.open(tmp_path / "a.png") as png, Image.open(tmp_path / "b.jpg") as jpg:
        assert type(png) is not type(jpg)
        pictures = {i: ((png, jpg)[i % 2], i) for i in range(20)}
        assert len(reader(pictures, collate=lambda records: records).templates) == 1


def test_an_empty_data_set_is_refused() -> None:
    with pytest.raises(ValueError, match="training data set is empty"):
        RecordReader(Faulty({}, n=0), default_collate, np.arange(0))


def test_other_attributes_are_those_of_the_data_set() -> None:
    of = reader({5: OSError("gone")})
    assert of.n == 20
    assert copy.copy(of).n == 20
    with pytest.raises(AttributeError, match="nothing"):
        _ = of.nothing


def test_the_data_sets_own_batched_reading_does_not_go_round_the_faults() -> None:
    """A Subset has __getitems__, which a loader prefers."""
    of = RecordReader(
        Subset(Faulty({5: OSError("gone")}), range(20)), default_collate, np.arange(20)
    )
    loader = DataLoader(of, batch_sampler=[[4, 5, 6]], collate_fn=of.collate)
    assert next(iter(loader))[1] == [4, 6]


def test_a_reader_goes_to_spawned_workers() -> None:
    of = pickle.loads(pickle.dumps(reader({5: OSError("gone")})))
    assert of.n == 20
    assert collate(of, [4, 5, 6])[1] == [4, 6]
