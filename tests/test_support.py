"""The support: which coordinates, in which parameter."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tptopk_pl.support import Support

SIZES = (4, 0, 3, 1)


@given(st.sets(st.integers(0, 7)))
def test_split_puts_each_coordinate_into_its_parameter(chosen: set[int]) -> None:
    """Against the concatenated parameters themselves, an empty one included."""
    flat = torch.arange(8)
    support = Support(torch.tensor(sorted(chosen), dtype=torch.int64), SIZES)
    parts = [part[own] for part, own in zip(flat.split(SIZES), support.split(), strict=True)]
    assert torch.cat(parts).equal(flat[support.indices])
    assert (support.num_active, support.num_total) == (len(chosen), 8)
    assert support.is_dense == (len(chosen) == 8)


def test_dense_holds_every_coordinate() -> None:
    support = Support.dense(SIZES)
    assert support.is_dense
    assert [len(own) for own in support.split()] == list(SIZES)


def test_to_keeps_the_coordinates() -> None:
    support = Support(torch.tensor([1, 6]), SIZES).to("cpu")
    assert support.indices.tolist() == [1, 6]
    assert support.sizes == SIZES


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        (torch.tensor([0, 8]), r"in \[0, 8\)"),
        (torch.tensor([-1, 2]), r"in \[0, 8\)"),
        (torch.tensor([3, 1]), "increasing"),
        (torch.tensor([1, 1]), "increasing"),
        (torch.tensor([1, 99, 2]), "increasing"),
        (torch.tensor([1, 2], dtype=torch.int32), "int64"),
        (torch.tensor([True, False]), "int64"),
        (torch.tensor([[1, 2]]), "one dimension"),
    ],
)
def test_indices_that_are_no_set_of_coordinates_are_refused(
    indices: torch.Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Support(indices, SIZES)
