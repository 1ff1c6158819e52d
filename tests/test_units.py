"""Privacy units: which records are one person's, through wrappers and caps."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, random_split

from toys import Numbers
from tptopk_pl.units import PrivacyUnits, unit_ids

FAMILIES = ["a"] * 3 + ["b"] + ["c"] * 2 + ["a", "d", "e", "e", "c"]  # a: 4 records, c: 3


class Named(Numbers):
    """A data set that names units."""

    def __init__(self, ids: Any) -> None:
        super().__init__(len(ids))
        self.privacy_units = ids


class Wrapper(Dataset):
    """A wrapper of its own kind."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        raise NotImplementedError


def records(units: PrivacyUnits, unit: int) -> list[int]:
    found, ends = units.records(np.array([unit]))
    assert ends.tolist() == [len(found)]
    return found.tolist()


@pytest.mark.parametrize(
    "ids",
    [
        ["b", "a", "b", "c"],
        [7, 5, 7, 9],
        [1, "1", 1, 2],  # not the same id
        [("b", 1), ("b", 2), ("b", 1), ("c", 1)],
        np.array([7, 5, 7, 9]),
        torch.tensor([7, 5, 7, 9]),
    ],
    ids=["text", "numbers", "mixed", "pairs", "array", "tensor"],
)
@pytest.mark.parametrize("subset", [False, True])
def test_records_with_equal_ids_are_one_unit(ids: Any, subset: bool) -> None:
    """Equal, not identical: the items of a tensor are not."""
    dataset: Any = Named(ids)
    if subset:
        dataset = Subset(dataset, [0, 1, 2, 3])
    units = PrivacyUnits(unit_ids(dataset))
    assert units.num_units == 3
    owned = sorted(records(units, unit) for unit in range(3))
    assert owned == [[0, 2], [1], [3]]
    for unit in range(3):
        assert (units.unit_of_record[records(units, unit)] == unit).all()


@pytest.mark.parametrize(
    ("ids", "message"),
    [([1.0, float("nan")], "NaN"), ([[1], [2]], "hashable"), (np.ones((2, 2)), "hashable")],
)
def test_ids_that_cannot_be_compared_are_refused(ids: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"Expected privacy_units.*{message}"):
        PrivacyUnits(ids)


def test_units_without_names_are_single_records() -> None:
    assert unit_ids(TensorDataset(torch.zeros(4))) is None
    units = PrivacyUnits.one_per_record(4)
    assert [records(units, unit) for unit in range(4)] == [[0], [1], [2], [3]]
    assert (units.num_units, units.largest) == (4, 1)


def test_ids_are_found_through_subsets_and_concatenations() -> None:
    named, other = Named(["a", "b", "c", "a"]), Named(["b", "d"])
    both = ConcatDataset([Subset(named, [3, 1, 0]), ConcatDataset([other])])
    assert list(unit_ids(both) or ()) == ["a", "b", "a", "b", "d"]
    assert list(unit_ids(Subset(Subset(both, [4, 2, 1]), torch.tensor([0, 2]))) or ()) == ["d", "b"]
    part, _ = random_split(named, [2, 2])
    assert list(unit_ids(part) or ()) == [named.privacy_units[i] for i in part.indices]


def test_a_wrapper_with_ids_of_its_own_is_believed() -> None:
    wrapper = Wrapper(Named(["a", "b", "c", "a"]))
    wrapper.privacy_units = ["x", "y", "z", "x"]  # type: ignore[attr-defined]
    assert list(unit_ids(wrapper) or ()) == ["x", "y", "z", "x"]


@pytest.mark.parametrize(
    "hide",
    [
        Wrapper,
        lambda named: Wrapper([named]),
        lambda named: Wrapper({"train": named}),
        lambda named: Wrapper(Subset(named, [0])),
        lambda named: Wrapper(Wrapper(named)),
        lambda named: Subset(Wrapper(named), [0]),
        lambda named: ConcatDataset([Wrapper(named)]),
    ],
)
def test_a_wrapper_that_hides_ids_is_refused(hide: Any) -> None:
    """Each record would silently be a unit of its own: a weaker guarantee than was asked for."""
    with pytest.raises(ValueError, match="Wrapper wraps a data set with privacy_units"):
        unit_ids(hide(Named(["a", "b", "c", "a"])))


def test_data_sets_that_hold_each_other_are_searched_once() -> None:
    one, other = Wrapper(None), Wrapper(None)
    one.inner, other.inner = other, one
    assert unit_ids(one) is None


def test_partly_named_and_miscounted_ids_are_refused() -> None:
    with pytest.raises(ValueError, match="Only some parts"):
        unit_ids(ConcatDataset([Named(["a"]), Numbers(2)]))
    with pytest.raises(ValueError, match="Only some parts"):
        unit_ids(ConcatDataset([Numbers(2), Named(["a"])]))
    short = Named(["a", "b"])
    short.n = 3
    with pytest.raises(ValueError, match="each of the 3 records, got 2"):
        unit_ids(short)


def test_the_cap_on_records_looks_at_the_unit_alone() -> None:
    """Adding or removing another unit must not change which records a unit keeps."""
    whole = PrivacyUnits(FAMILIES, max_records_per_unit=2)
    assert whole.largest == 2
    kept = {FAMILIES[records(whole, u)[0]]: records(whole, u) for u in range(5)}
    assert kept["a"] == [0, 1]
    assert PrivacyUnits(FAMILIES).largest == 4
    for gone in "abcde":
        places = [i for i, family in enumerate(FAMILIES) if family != gone]
        rest = PrivacyUnits([FAMILIES[i] for i in places], max_records_per_unit=2)
        assert rest.num_units == 4
        for unit in range(4):
            own = [places[i] for i in records(rest, unit)]
            assert own == kept[FAMILIES[own[0]]]


def test_a_record_that_is_there_twice_is_one_unit() -> None:
    """Oversampling a class by repeated indices must not double a person's influence."""
    repeated = Subset(Numbers(4), [0, 1, 1, 1, 2])
    units = PrivacyUnits(unit_ids(Subset(repeated, [0, 1, 2, 4])) or ())
    assert units.num_units == 3
    assert units.largest == 2
    numbers = Numbers(4)
    with pytest.raises(ValueError, match="one data set twice"):
        unit_ids(ConcatDataset([numbers, numbers]))
