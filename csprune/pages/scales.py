"""The scales of the pictures: which numbers an axis shows, and where its ticks stand."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter, NullLocator

from csprune.pages.theme import colour
from csprune.pages.wording import number, percent

Write = Callable[[float], str]
"""How a tick is labelled."""


def rank_axis(axes: Axes, ranks: Sequence[float]) -> None:
    """The removed share, on a logarithmic horizontal axis with a tick at each rank that has room for one."""
    axes.set_xscale("log")
    low, high = rank_limits(ranks)
    axes.set_xlim(low, high)
    apart = 0.075 * np.log(high / low)
    shown: list[float] = []
    for rank in sorted(ranks, reverse=True):
        if not shown or np.log(shown[-1] / rank) >= apart:
            shown.append(rank)
    _ticks(axes, "x", shown, percent)
    axes.set_xlabel("directions removed")


def rank_limits(ranks: Sequence[float]) -> tuple[float, float]:
    """The ends of the axis of ranks: a margin on both sides, also of a single rank."""
    low, high = min(ranks), max(ranks)
    margin = (high / low) ** 0.08 if high > low else 1.5
    return low / margin, high * margin


def amount_axis(axes: Axes, which: str, values: Sequence[float], label: str, most: int = 8) -> None:
    """An amount that may span decades and may be negative: "x" or "y" of the axes.

    Logarithmic where all values are positive and within five decades. Otherwise linear near zero, up to a
    power of ten, and logarithmic beyond on both sides, which the label says.

    Args:
        axes: To be scaled.
        which: "x" or "y".
        values: Everything that is to be seen, the ends of intervals too.
        label: What the axis shows, with its unit.
        most: Ticks at most, where it is logarithmic.
    """
    low, high = min(values), max(values)
    if low > 0 and high / low <= 1e5:
        logarithmic_axis(axes, which, low, high, most=most)
    else:
        low, high = min(low, 0.0), max(high, 0.0)
        threshold = _threshold(np.abs(values))
        set_scale = axes.set_xscale if which == "x" else axes.set_yscale
        set_scale("symlog", linthresh=threshold, linscale=0.5)
        margin = (high - low or 1) * 0.02
        pad = 10 ** (0.05 * (2 + np.log10(max(-low, high, threshold) / threshold)))
        ends = [
            end * pad if abs(end) > threshold else end + side * min(margin, 0.15 * threshold)
            for end, side in ((low, -1), (high, 1))
        ]
        _limits(axes, which, *ends)
        _ticks(axes, which, _signed_ticks(low, high, threshold), number)
        label = f"{label}\n(linear between \N{PLUS-MINUS SIGN}{number(threshold)}, log beyond)"
        (axes.axhline if which == "y" else axes.axvline)(0, color=colour("muted"), linewidth=0.9, zorder=1.5)
    axes.set(**{f"{which}label": label})


def ratio_axis(
    axes: Axes, which: str, values: Sequence[float], ends: Sequence[float] = (), write: Write = number
) -> None:
    """A ratio to random truncation on a logarithmic axis that shows 1 and every positive value.

    The ends of intervals are seen as far as a tenth of the smallest value: an interval that reaches
    zero or below goes to the edge.
    """
    known = [value for value in values if value > 0] + [1.0]
    known += [end for end in ends if end > min(known) / 10]
    logarithmic_axis(axes, which, min(known), max(known), write)


def share_axis(axes: Axes, which: str, values: Sequence[float]) -> None:
    """A share in percent on a linear axis that is no wider than it must be."""
    low, high = min(values), max(values)
    margin = max(0.06 * (high - low), 0.005)
    _limits(axes, which, low - margin, min(high + margin, 1 + margin / 2))
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: percent(round(value, 6))))


def linear_axis(axes: Axes, which: str, low: float, high: float, most: int = 6, whole: bool = False) -> None:
    """A linear axis from just below `low` to just above `high`, which may be the same; `whole`: integers."""
    margin = 0.05 * (high - low) or 0.1 * abs(high) or 1.0
    _limits(axes, which, low - margin, high + margin)
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(MaxNLocator(most, steps=[1, 2, 2.5, 5, 10], integer=whole))
    axis.set_major_formatter(FuncFormatter(lambda value, _: number(float(f"{value:.12g}"))))


def logarithmic_axis(
    axes: Axes, which: str, low: float, high: float, write: Write = number, most: int = 8
) -> None:
    """A logarithmic axis from just below `low` to just above `high`, with ticks that read well."""
    margin = (high / low) ** 0.06 if high / low > 1 + 1e-6 else 1.03
    low, high = low / margin, high * margin
    axes.set(**{f"{which}scale": "log"})
    _limits(axes, which, low, high)
    _ticks(axes, which, logarithmic_ticks(low, high, most), write)


def logarithmic_ticks(low: float, high: float, most: int = 8) -> list[float]:
    """Between two positive ends: 1-2-5 steps, whole decades where these are many, even steps where few."""
    decades = np.arange(np.floor(np.log10(low)), np.ceil(np.log10(high)) + 1)
    for steps in ((1, 2, 5), (1, 3), (1,)):
        ticks = [step * 10.0**decade for decade in decades for step in steps]
        ticks = [float(f"{tick:.12g}") for tick in ticks if low <= tick <= high]
        if len(ticks) <= most:
            break
    else:
        ticks = ticks[:: -(-len(ticks) // most)]
    if len(ticks) >= 3:
        return ticks
    even = MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
    return [float(f"{tick:.12g}") for tick in even if low <= tick <= high and tick > 0]


def _threshold(sizes: np.ndarray) -> float:
    """Up to where a signed axis is linear: a power of ten near the smallest sizes, at most 4 decades down."""
    largest = float(sizes.max())
    if largest == 0:
        return 1.0
    smallest = float(np.quantile(sizes[sizes > 0], 0.1))
    return float(10.0 ** np.floor(np.log10(max(smallest, largest / 1e4))))


def _signed_ticks(low: float, high: float, threshold: float) -> list[float]:
    """Zero, and powers of ten on both sides: at most four; with steps between where there are few."""
    exponents = np.arange(round(np.log10(threshold)), np.floor(np.log10(max(-low, high, threshold))) + 1)
    ticks = [0.0]
    for steps in ((1,), (1, 3), (1, 2, 5)):
        sizes = [float(f"{step * 10.0**exponent:.12g}") for exponent in exponents for step in steps]
        sizes = sizes[:: -(-len(sizes) // 4)] if len(steps) == 1 else sizes
        ticks = [-size for size in reversed(sizes)] + [0.0] + sizes
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) >= 3:
            break
    return ticks


def _limits(axes: Axes, which: str, low: float, high: float) -> None:
    axes.set(**{f"{which}lim": (low, high)})


def _ticks(axes: Axes, which: str, places: Sequence[float], write: Write) -> None:
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(FixedLocator(places))
    axis.set_major_formatter(FuncFormatter(lambda value, _: write(value)))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())
