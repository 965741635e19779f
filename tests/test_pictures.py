"""The pictures: everything measured is drawn where it belongs, and what cannot be drawn is said."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import matplotlib
import numpy as np
import pytest
from evaluations import DOCUMENTS, RANKS, make_evaluation, replace_values
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

from csprune.comparisons import summarise
from csprune.concentration import concentrations, tenth, top_share
from csprune.errors import InputError
from csprune.measurement import Evaluation
from csprune.pages.document_pictures import loss_over_documents, share_of_top_tenth
from csprune.pages.gallery import of_report, of_reports
from csprune.pages.pictures import (
    agreement_against_rank,
    loss_against_distance,
    loss_against_rank,
    per_unit,
    relative_to_random,
    without_ratio,
)
from csprune.pages.scales import amount_axis, logarithmic_ticks
from csprune.pages.theme import COLOURS, NARROW, WIDE, colour, drawing, inline_svg, look, png_file, svg_file
from csprune.pages.wording import distinct_labels, figure, nats, number, percent, shortened, times
from csprune.truncation import STRATEGIES

METHODS = ("singular", "fisher", "whitened", "fisher-whitened", "random")


def marks(axes: Axes, method: str) -> list[tuple[float, float]]:
    """The places of a method's marks."""
    own = look(method)
    return [
        (float(x), float(y))
        for line in axes.get_lines()
        if line.get_color() == own["color"] and line.get_marker() == own["marker"]
        for x, y in zip(*line.get_data(), strict=True)
        if np.isfinite(y)
    ]


def strokes(axes: Axes, method: str) -> list[tuple[float, float]]:
    """The lower and upper ends of a method's intervals."""
    found: list[tuple[float, float]] = []
    for collection in axes.collections:
        if hasattr(collection, "get_segments") and matplotlib.colors.same_color(
            collection.get_color()[0][:3], colour(method)
        ):
            found += [(float(s[0][1]), float(s[-1][1])) for s in collection.get_segments()]
    return found


def texts(drawn: Figure) -> list[str]:
    return [each.get_text() for each in drawn.findobj(Text) if each.get_text()]


def lower(evaluation: Evaluation, by: float) -> Evaluation:
    """The evaluation with every loss change lowered."""
    for place, each in enumerate(evaluation.measurements):
        evaluation = replace_values(evaluation, place, loss_change=each.values["loss_change"] - by)
    return evaluation


@pytest.fixture(scope="module")
def evaluation() -> Evaluation:
    return make_evaluation(methods=METHODS)


@pytest.fixture(scope="module")
def report(evaluation: Evaluation) -> dict[str, Any]:
    return summarise(evaluation, draws=100)


QUANTITY_PICTURES = [(loss_against_rank, "loss_change"), (agreement_against_rank, "top1_agreement")]


@pytest.mark.parametrize("draw, quantity", QUANTITY_PICTURES)
@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_every_truncation_is_drawn_at_its_value(
    draw: Callable[..., Figure], quantity: str, width: float, report: dict[str, Any]
) -> None:
    (axes,) = draw(report, width).axes
    low, high = axes.get_ylim()
    for method in METHODS:
        entries = [each for each in report["truncations"] if each["method"] == method]
        found = marks(axes, method)
        assert [y for _, y in found] == [each[quantity]["mean"] for each in entries]
        # A little apart, but nearer to their own rank than a hundredth part of the way to the next.
        assert [x for x, _ in found] == pytest.approx([each["rank"] for each in entries], rel=0.05)
        assert strokes(axes, method) == [tuple(each[quantity]["ci95"]) for each in entries]
        assert all(low < y < high for _, y in found)
    # Control: a report without a truncation lacks its mark.
    fewer = {**report, "truncations": report["truncations"][1:]}
    (axes,) = draw(fewer, width).axes
    assert len(marks(axes, "singular")) == 1


def test_random_is_the_range_of_its_subspaces(report: dict[str, Any]) -> None:
    def band(of: dict[str, Any]) -> list[tuple[float, float]]:
        (axes,) = loss_against_rank(of).axes
        polygons = [each for each in axes.collections if not hasattr(each, "get_segments")]
        ends = []
        for polygon in polygons:
            points = polygon.get_paths()[0].vertices
            for rank, _ in RANKS:
                heights = points[np.isclose(points[:, 0], rank), 1]
                ends.append((float(heights.min()), float(heights.max())))
        return ends

    values = [
        each["subspaces"]["loss_change"] for each in report["truncations"] if each["method"] == "random"
    ]
    assert band(report) == [(min(of_rank), max(of_rank)) for of_rank in values]
    without = [{k: v for k, v in each.items() if k != "subspaces"} for each in report["truncations"]]
    assert band({**report, "truncations": without}) == []  # control


def test_missing_intervals_leave_the_marks(report: dict[str, Any]) -> None:
    bare = [
        {
            **each,
            "loss_change": {**each["loss_change"], "ci95": None},
            "per_unit_vs_random": {
                name: {**ratio, "ci95": None} for name, ratio in each["per_unit_vs_random"].items()
            },
        }
        for each in report["truncations"]
    ]
    for draw in (loss_against_rank, per_unit):
        axes = draw({**report, "truncations": bare}).axes[0]
        assert len(marks(axes, "fisher")) == 2 and strokes(axes, "fisher") == []
        assert len(strokes(draw(report).axes[0], "fisher")) == 2  # control


def test_loss_against_distance(report: dict[str, Any]) -> None:
    (axes,) = loss_against_distance(report).axes
    for method in METHODS:
        expected = [
            (each["logit_distance"]["mean"], each["loss_change"]["mean"])
            for each in report["truncations"]
            if each["method"] == method
        ]
        assert sorted(marks(axes, method)) == sorted(expected)


def test_per_unit_ratios_and_their_line(report: dict[str, Any]) -> None:
    drawn = per_unit(report)
    names = ("fisher_term", "prediction_change", "loss_change")
    assert len(drawn.axes) == 3
    for axes, name in zip(drawn.axes, names, strict=True):
        assert axes.get_yscale() == "log"
        for method in METHODS[:-1]:
            entries = [each for each in report["truncations"] if each["method"] == method]
            assert [y for _, y in marks(axes, method)] == [
                each["per_unit_vs_random"][name]["ratio"] for each in entries
            ]
        assert any(line.get_ydata()[0] == line.get_ydata()[-1] == 1 for line in axes.get_lines())
        low, high = axes.get_ylim()
        assert low < 1 < high


def test_ratios_that_are_no_positive_number_are_left_out_and_said(evaluation: Evaluation) -> None:
    # Random lowers the loss at 5%; fisher lowers it at 20%, where random does not.
    values = evaluation.measurements[4].values["loss_change"]
    changed = replace_values(evaluation, 4, loss_change=-np.abs(values))
    changed = replace_values(changed, 6, loss_change=-np.abs(values[0]))
    report = summarise(changed, draws=100)
    drawn = per_unit(report)
    assert "Left out, not a positive number: 5 of the ratios" in texts(drawn)
    assert [len(marks(drawn.axes[2], method)) for method in METHODS[:-1]] == [1, 0, 1, 1]
    assert [len(marks(drawn.axes[0], method)) for method in METHODS[:-1]] == [2, 2, 2, 2]
    said = without_ratio(report, "per_unit_vs_random", ("fisher_term", "loss_change"))
    assert said[0] == "singular at 5%, loss change (undefined)"
    assert len(said) == 5 and any(each.startswith("fisher at 20%, loss change (−") for each in said)
    (picture,) = [each for each in of_report(report, changed) if each.name == "per-unit"]
    assert all(each in picture.caption for each in said)
    # Control: with every ratio positive nothing is left out.
    whole = summarise(evaluation, draws=100)
    assert without_ratio(whole, "per_unit_vs_random", ("loss_change",)) == []
    assert not any(text.startswith("Left out") for text in texts(per_unit(whole)))


def test_an_interval_that_reaches_zero_does_not_set_the_scale_of_ratios(report: dict[str, Any]) -> None:
    entries = [dict(each) for each in report["truncations"]]
    ratios = entries[1]["per_unit_vs_random"]
    entries[1]["per_unit_vs_random"] = {**ratios, "fisher_term": {**ratios["fisher_term"], "ci95": [1e-9, 2]}}
    low, _ = per_unit({**report, "truncations": entries}).axes[0].get_ylim()
    assert low > 1e-3


def test_several_reports_a_panel_each(report: dict[str, Any], evaluation: Evaluation) -> None:
    other = summarise(lower(evaluation, -1.0), draws=100)
    drawn = relative_to_random([report, other, report], ["a", "b", "a very long name " * 5], "loss_change")
    assert [axes.get_title("left") for axes in drawn.axes][:2] == ["a", "b"]
    assert len(drawn.axes[2].get_title("left")) < 30
    assert len({axes.get_ylim() for axes in drawn.axes}) == 1
    for axes, of in zip(drawn.axes, (report, other, report), strict=True):
        for method in METHODS[:-1]:
            entries = [each for each in of["truncations"] if each["method"] == method]
            expected = [each["vs_random"]["loss_change"]["ratio"] for each in entries]
            assert [y for _, y in marks(axes, method)] == expected
            assert strokes(axes, method) == [
                tuple(each["vs_random"]["loss_change"]["ci95"]) for each in entries
            ]


def test_reports_of_other_ranks_and_methods_stand_side_by_side(report: dict[str, Any]) -> None:
    entries = [
        {**each, "rank": each["rank"] / 2} for each in report["truncations"] if each["method"] != "singular"
    ]
    drawn = relative_to_random([report, {**report, "truncations": entries}], ["a", "b"], "logit_distance")
    assert [len(marks(axes, "singular")) for axes in drawn.axes] == [2, 0]
    assert [len(marks(axes, "fisher")) for axes in drawn.axes] == [2, 2]
    assert [axes.get_xlim() for axes in drawn.axes] == [drawn.axes[0].get_xlim()] * 2
    assert len(of_reports([report, report], ["a", "b"])) == 2


def test_documents_in_ascending_order(evaluation: Evaluation) -> None:
    drawn = loss_over_documents(evaluation)
    assert [axes.get_title("left") for axes in drawn.axes] == ["5% removed", "20% removed"]
    for axes, (rank, _) in zip(drawn.axes, RANKS, strict=True):
        curves = {
            line.get_color(): line.get_ydata() for line in axes.get_lines() if len(line.get_xdata()) > 2
        }
        assert len(curves) == len(METHODS)
        for each in evaluation.measurements:
            if each.rank == rank:
                expected = np.sort(each.per_document("loss_change"))
                np.testing.assert_allclose(curves[colour(each.method)], expected, rtol=1e-12)


def test_concentration() -> None:
    assert [tenth(n) for n in (2, 10, 24, 25, 256)] == [1, 1, 2, 2, 26]
    assert top_share(np.ones(50)) == pytest.approx(0.1)
    assert top_share(np.r_[np.zeros(45), np.ones(5)]) == 1
    assert top_share(np.r_[-np.ones(10), np.zeros(35), 3 * np.ones(5)]) == 3
    assert top_share(-np.ones(20)) is None and top_share(np.zeros(20)) is None
    evaluation = make_evaluation(methods=METHODS)
    found = concentrations(evaluation)
    assert [(each.method, each.rank) for each in found] == [
        (each.method, each.rank) for each in evaluation.measurements
    ]
    fisher, random = evaluation.measurements[1].values["loss_change"], evaluation.measurements[4].values
    reference = random["loss_change"].mean(axis=0)
    above = sum(fisher[i] > reference[i] for i in range(DOCUMENTS)) / DOCUMENTS
    assert found[1].above_random == pytest.approx(above) and found[4].above_random is None
    assert found[1].top_tenth == pytest.approx(sum(sorted(fisher)[-2:]) / sum(fisher))
    assert found[1].median == pytest.approx(sorted(fisher)[11] / 2 + sorted(fisher)[12] / 2)
    sunk = concentrations(lower(evaluation, 100.0))[1]
    assert (sunk.rising, sunk.top_tenth, found[1].rising) == (0, None, 1)


def test_share_of_the_top_tenth(evaluation: Evaluation) -> None:
    (axes,) = share_of_top_tenth(evaluation).axes
    assert len(axes.get_yticklabels()) == len(evaluation.measurements)
    for each in concentrations(evaluation):
        assert each.top_tenth in [x for x, _ in marks(axes, each.method)]
    sunk = share_of_top_tenth(lower(evaluation, 100.0))
    assert texts(sunk).count("the total is not positive") == len(evaluation.measurements)


def variants(evaluation: Evaluation) -> dict[str, Evaluation]:
    """Evaluations of every shape that a report may have."""
    one_rank = [each for each in evaluation.measurements if each.rank == 0.2]
    zero = {name: 0 * values for name, values in evaluation.measurements[1].values.items()}
    return {
        "negative": lower(evaluation, 2.0),
        "all negative": lower(evaluation, 100.0),
        "one rank": dataclasses.replace(evaluation, measurements=one_rank),
        "random alone": dataclasses.replace(evaluation, measurements=one_rank[-1:]),
        "nothing changed": replace_values(evaluation, 1, **zero),
        "many ranks": dataclasses.replace(
            evaluation,
            measurements=[
                dataclasses.replace(each, rank=rank) for rank in (0.01, 0.02, 0.1, 0.5) for each in one_rank
            ],
        ),
    }


@pytest.mark.parametrize("name", variants(make_evaluation(methods=METHODS)))
def test_every_shape_of_report_has_its_pictures(name: str, evaluation: Evaluation) -> None:
    changed = variants(evaluation)[name]
    report = summarise(changed, draws=20)
    width = NARROW  # where room is scarce
    for picture in of_report(report, changed):
        drawn = picture.draw(width)
        drawn.draw_without_rendering()
        box = drawn.bbox
        for axes in drawn.axes:
            assert axes.get_window_extent().width > 0.4 * box.width / len(drawn.axes), picture.name
            low, high = axes.get_ylim()
            for method in METHODS:
                assert all(low <= y <= high for _, y in marks(axes, method)), (picture.name, method)
        for text in drawn.findobj(Text):
            if text.get_text() and text.get_visible() and text.get_window_extent().width:
                extent = text.get_window_extent()
                inside = extent.x0 >= -1 and extent.x1 <= box.width + 1
                assert inside or not seen(text), (picture.name, text.get_text())


def seen(text: Text) -> bool:
    """Whether a text is drawn: tick labels outside the limits of their axis are not."""
    axes = text.axes
    if axes is None:
        return True
    labels = [*axes.get_xticklabels(), *axes.get_yticklabels()]
    return text not in labels


def test_methods_can_be_told_apart() -> None:
    assert set(METHODS) == {*STRATEGIES, "random"}
    assert len({look(method)["marker"] for method in METHODS}) == len(METHODS)
    for dark in (False, True):
        assert len({pair[dark] for pair in COLOURS.values()}) == len(COLOURS)
        background = luminance(COLOURS["paper"][dark])
        for name in (*METHODS, "ink", "muted"):
            pair = sorted([luminance(COLOURS[name][dark]), background])
            assert (pair[1] + 0.05) / (pair[0] + 0.05) > 4.5, (name, dark)  # legible as text, too
    with pytest.raises(InputError, match="no picture shows the method 'newer'"):
        look("newer")


def luminance(name: str) -> float:
    """Relative luminance, as WCAG 2 defines it."""
    channels = np.array(matplotlib.colors.to_rgb(name))
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def test_no_setting_of_matplotlib_is_changed_or_heeded(report: dict[str, Any]) -> None:
    before = dict(matplotlib.rcParams)
    plain = inline_svg(loss_against_rank(report), "a", "a")
    files = svg_file(loss_against_rank(report)), png_file(loss_against_rank(report))
    assert dict(matplotlib.rcParams) == before
    with matplotlib.rc_context({"axes.facecolor": "red", "font.size": 30, "lines.linewidth": 9}):
        assert inline_svg(loss_against_rank(report), "a", "a") == plain
        assert (svg_file(loss_against_rank(report)), png_file(loss_against_rank(report))) == files
    with drawing(), matplotlib.rc_context({"lines.markersize": 9}):  # control: they would be seen
        figure_ = Figure()
        figure_.add_subplot().plot([1], [1], **look("fisher"))
    assert inline_svg(figure_, "a", "a") != plain


@pytest.mark.parametrize(
    "values, scale", [([0.001, 2.0], "log"), ([-0.01, 2.0], "symlog"), ([-3.0, -1.0], "symlog")]
)
def test_scale_of_amounts(values: list[float], scale: str) -> None:
    axes = Figure().add_subplot()
    amount_axis(axes, "y", values, "loss change, nats")
    assert axes.get_yscale() == scale
    low, high = axes.get_ylim()
    assert low < min(values) and max(values) < high
    assert ("linear between" in axes.get_ylabel()) == (scale == "symlog")
    ticks = axes.get_yticks()
    assert 3 <= len(ticks) <= 9 and ((0 in ticks) == (scale == "symlog"))


@pytest.mark.parametrize("low, high", [(0.9, 1.1), (0.03, 6.0), (1e-3, 2.0), (5.0, 8.0), (1e-9, 1e6)])
def test_ticks(low: float, high: float) -> None:
    ticks = logarithmic_ticks(low, high)
    assert 2 <= len(ticks) <= 8 and all(low <= tick <= high for tick in ticks)
    assert ticks == sorted(set(ticks))


def test_numbers_as_they_are_read() -> None:
    assert [nats(x) for x in (1.26318, -0.0306, 0.00049, 0.0, 12.34567)] == [
        *("+1.2632", "−0.0306", "+0.00049", "+0.0000", "+12.346")
    ]
    assert [figure(x) for x in (72_354.8, 35.97, 0.0361, 3.2e8)] == ["72,355", "36.0", "0.0361", "3.20e+08"]
    assert [times(x) for x in (8.632, 0.0996, 0.892, 123.4, -0.5)] == [
        "8.63",
        "0.0996",
        "0.892",
        "123",
        "−0.500",
    ]
    assert [percent(x) for x in (0.05, 0.125, 0.07, 0.2)] == ["5%", "12.5%", "7%", "20%"]
    assert [number(x) for x in (-0.01, 10_000.0, 0.5)] == ["−0.01", "10,000", "0.5"]
    assert shortened("abcdefghij", 5) == "ab…ij" and shortened("abc", 5) == "abc"


def test_labels_of_reports_are_distinct() -> None:
    reports = [{"model": "a"}, {"model": "a"}, {"model": "b"}]
    assert distinct_labels(reports, ["x", "y", "z"]) == ["a (x)", "a (y)", "b"]
    assert len(set(distinct_labels(reports, ["x", "x", "z"]))) == 3
