"""Cells of results: digits as far as they mean something, a star where something is established."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from results_examples import estimate, forest, spectrum

from csprune.analysis.results import Cell, Unit
from csprune.pages.results_text import STAR, judged, shown


@pytest.mark.parametrize(
    "cell, unit, expected",
    [
        ({"value": 3.412, "ci95": [3.1, 3.72]}, "ratio", "3.41x [3.10, 3.72]"),
        ({"value": 0.123, "ci95": [0.1, 0.15]}, "nats", "+0.123 [+0.100, +0.150]"),
        ({"value": -0.0012, "ci95": [-0.0101, 0.0077]}, "nats", "−0.0012 [−0.0101, +0.0077]"),
        ({"value": 0.431, "ci95": [0.4, 0.46]}, "share", "43.1% [40.0, 46.0]"),
        ({"value": 0.97, "ci95": None}, "number", "0.970"),
        # A ratio that is established to be above one must not read [1.00, 1.00].
        ({"value": 1.0012, "ci95": [1.0003, 1.0021]}, "ratio", "1.0012x [1.0003, 1.0021]"),
        # What the interval leaves open needs no digits.
        ({"value": 1.2e-6, "ci95": [-0.1, 0.1]}, "nats", "+0.0000 [−0.1000, +0.1000]"),
        ({"value": 3.41, "ci95": [1.2, 250.0]}, "ratio", "3.4x [1.2, 250.0]"),
        (1.2e-6, "nats", "+0.00000120"),
        (9.996, "number", "10.0"),
        (12345.6, "number", "12,346"),
        (3.2e8, "number", "3.20e+08"),
        (1204, "count", "1,204"),
        (-5, "count", "−5"),
        (20, "number", "20"),
        (True, "text", "yes"),
        ("as it is", "ratio", "as it is"),
        (None, "nats", "–"),
        ({"value": None, "ci95": None}, "ratio", "–"),
    ],
)
def test_cells_as_they_are_read(cell: Cell, unit: Unit, expected: str) -> None:
    assert str(shown(cell, unit)) == expected


def numbers(text: str) -> list[float]:
    return [
        float(each)
        for each in re.findall(r"[+-]?\d[\d.]*(?:e[+-]\d+)?", text.replace("−", "-").replace(",", ""))
    ]


@given(
    st.floats(-1e9, 1e9, allow_subnormal=False),
    st.floats(1e-6, 1e9),
    st.sampled_from(["ratio", "nats", "share", "number"]),
)
def test_what_is_read_is_what_was_measured(value: float, half: float, unit: Unit) -> None:
    ends = [value - half, value + half]
    found = shown({"value": value, "ci95": ends}, unit)
    scale = 100 if unit == "share" else 1
    (read,) = numbers(found.value)
    low, high = numbers(found.interval.strip("[]").replace(", ", " ; "))
    largest = scale * max(map(abs, (value, *ends)))
    for a, b in ((read, value), (low, ends[0]), (high, ends[1])):
        assert a == pytest.approx(scale * b, abs=0.0051 * largest)
    assert low <= read <= high
    # Rounding that would move a figure by two hundredths of the largest is seen: the test can fail.
    assert read + 0.02 * largest != pytest.approx(scale * value, abs=0.0051 * largest)


@given(st.floats(-1e6, 1e6).filter(lambda v: abs(v) > 1e-12))
def test_an_end_is_told_from_the_null_value(value: float) -> None:
    """An interval that leaves out its null value by much of its length is read as leaving it out."""
    half = abs(value) / 3
    low, high = numbers(shown({"value": value, "ci95": [value - half, value + half]}, "nats").interval)
    assert math.copysign(1, low) == math.copysign(1, high) == math.copysign(1, value) and low and high


def test_the_star_is_only_where_something_is_established() -> None:
    held, not_held = estimate(1.5, 0.1, established=True), estimate(1.5, 0.1, established=False)
    assert str(shown(held, "ratio")) == f"1.50x{STAR} [1.40, 1.60]"
    assert STAR not in str(shown(not_held, "ratio"))
    assert STAR not in str(shown(estimate(1.5, 0.1), "ratio"))  # no statement at all
    every = [cell for row in spectrum().tables[0].rows for cell in row.cells.values()]
    starred = [STAR in str(shown(cell, "number")) for cell in every]
    assert starred == [isinstance(cell, dict) and cell.get("established", False) for cell in every]
    assert 0 < sum(starred) < len(starred)
    assert not any(
        shown(c, "ratio").established for row in forest().tables[0].rows for c in row.cells.values()
    )


def test_parts_of_statements_show_the_adjusted_interval() -> None:
    assert judged(estimate(3.41, 0.3, established=True)) == ("3.41x", "[2.96, 3.86]")
    assert judged(estimate(0.12, 0.2, established=False, null=0.0)) == ("+0.120", "[−0.180, +0.420]")
    assert judged(estimate(0.6, 0.02, established=True, null=0.5)) == ("0.600", "[0.570, 0.630]")
    assert judged(estimate(None, established=False)) == ("–", "–")
