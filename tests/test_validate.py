"""The one wording of refusals, and what counts as a number."""

import math

import numpy as np
import pytest

from tptopk_pl._validate import in_range, non_negative, non_negative_int, one_of, positive_int

NOT_NUMBERS = [math.nan, None, True, "0.5", [0.5], 1j]


def message(call, *args, **kwargs):
    with pytest.raises(ValueError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


@pytest.mark.parametrize("value", [0.25, 1, 1.0, np.float32(0.25), np.int64(1)])
def test_in_range_returns_a_plain_float(value):
    result = in_range("x", value, 0.25, 1.0)
    assert type(result) is float and result == value


@pytest.mark.parametrize(
    ("open_ends", "interval"),
    [
        ({}, "[0, 1]"),
        ({"low_open": True}, "(0, 1]"),
        ({"high_open": True}, "[0, 1)"),
        ({"low_open": True, "high_open": True}, "(0, 1)"),
    ],
)
def test_in_range_names_field_value_and_interval(open_ends, interval):
    for value in (1.5, -1e-9, math.inf):
        assert message(in_range, "active_ratio", value, 0.0, 1.0, **open_ends) == (
            f"Expected active_ratio={value!r} in {interval}."
        )


def test_in_range_respects_open_ends():
    assert in_range("x", 0.0, 0.0, 1.0) == 0.0
    assert in_range("x", 1.0, 0.0, 1.0, low_open=True) == 1.0
    assert message(in_range, "x", 0.0, 0.0, 1.0, low_open=True) == "Expected x=0.0 in (0, 1]."
    assert message(in_range, "x", 1.0, 0.0, 1.0, high_open=True) == "Expected x=1.0 in [0, 1)."


def test_infinite_end_is_open():
    assert message(non_negative, "x", math.inf) == "Expected x=inf in [0, inf)."


@pytest.mark.parametrize("value", NOT_NUMBERS)
def test_what_is_not_a_number_is_refused_in_the_same_words(value):
    assert message(in_range, "x", value, 0, 1) == f"Expected x={value!r} in [0, 1]."
    assert message(non_negative, "x", value) == f"Expected x={value!r} in [0, inf)."
    assert message(positive_int, "x", value) == f"Expected x={value!r} in {{1, 2, …}}."


def test_integers():
    assert positive_int("n", np.int64(3)) == 3 and type(positive_int("n", np.int64(3))) is int
    assert non_negative_int("n", 0) == 0
    assert message(positive_int, "n", 0) == "Expected n=0 in {1, 2, …}."
    assert message(positive_int, "n", 3.0) == "Expected n=3.0 in {1, 2, …}."
    assert message(non_negative_int, "n", -1) == "Expected n=-1 in {0, 1, …}."


def test_one_of():
    assert one_of("method", "a", {"a": 1, "b": 2}) == "a"
    assert message(one_of, "method", "c", ("a", "b")) == "Expected method='c' in {a, b}."
    assert message(one_of, "method", None, ("a", "b")) == "Expected method=None in {a, b}."
