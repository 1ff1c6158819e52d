"""Keyword validators with one wording, so that every refusal reads alike.

>>> in_range("active_ratio", 1.5, 0.0, 1.0, low_open=True)
Traceback (most recent call last):
    ...
ValueError: Expected active_ratio=1.5 in (0, 1].
"""

import math
from collections.abc import Collection
from numbers import Integral, Real


def in_range(
    name: str,
    value: object,
    low: float,
    high: float,
    *,
    low_open: bool = False,
    high_open: bool = False,
) -> float:
    """Return `value` as a float if it lies between `low` and `high`.

    The ends belong to the interval unless `low_open` or `high_open`; an infinite end always
    counts as open, so that the returned value is finite.

    Raises:
        ValueError: if `value` is outside, NaN, or not a real number (bool, None, text).
    """
    low_open = low_open or math.isinf(low)
    high_open = high_open or math.isinf(high)
    if isinstance(value, Real) and not isinstance(value, bool):
        number = float(value)
        above = number > low if low_open else number >= low
        below = number < high if high_open else number <= high
        if above and below:
            return number
    interval = f"{'(' if low_open else '['}{low:g}, {high:g}{')' if high_open else ']'}"
    raise ValueError(f"Expected {name}={value!r} in {interval}.")


def non_negative(name: str, value: object) -> float:
    """Return `value` as a finite float ≥ 0.

    Raises:
        ValueError: if it is negative, infinite, NaN, or not a real number.
    """
    return in_range(name, value, 0.0, math.inf)


def positive_int(name: str, value: object) -> int:
    """Return `value` as an int ≥ 1.

    Raises:
        ValueError: if it is below 1 or not an integer (3.0 and True are refused too).
    """
    return _int_from(name, value, 1)


def non_negative_int(name: str, value: object) -> int:
    """Return `value` as an int ≥ 0.

    Raises:
        ValueError: if it is below 0 or not an integer (3.0 and True are refused too).
    """
    return _int_from(name, value, 0)


def one_of(name: str, value: object, choices: Collection[str]) -> str:
    """Return `value` if it is one of the texts in `choices`.

    Raises:
        ValueError: if it is anything else.
    """
    if isinstance(value, str) and value in choices:
        return value
    raise ValueError(f"Expected {name}={value!r} in {{{', '.join(choices)}}}.")


def _int_from(name: str, value: object, low: int) -> int:
    if isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= low:
        return int(value)
    raise ValueError(f"Expected {name}={value!r} in {{{low}, {low + 1}, …}}.")
