"""Pictures of results: every value is drawn where it belongs, what cannot be drawn is said."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import matplotlib
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.text import Text
from results_examples import cloud, examples, forest, many, spectrum

from csprune.analysis.results import Curve, Panel, Picture
from csprune.pages.results_pictures import draw
from csprune.pages.theme import COLOURS, NARROW, WIDE, colour, inline_svg, looks, png_file, svg_file

PICTURES = {picture.name: picture for result in examples() for picture in result.pictures}


def texts(drawn: Figure) -> list[str]:
    return [" ".join(each.get_text().split()) for each in drawn.findobj(Text) if each.get_text()]


def points(axes: Axes, colour_: str) -> np.ndarray:
    """Where values of one colour are drawn, [values, 2]."""
    found = [
        np.column_stack(line.get_data())
        for line in axes.get_lines()
        if line.get_color() == colour_ and len(np.atleast_1d(line.get_xdata()))
    ]
    return np.concatenate([each[np.isfinite(each).all(axis=1)] for each in found])


def single(curves: Sequence[Curve], x: Sequence[float], **options: object) -> Picture:
    return Picture("one", "title", "caption", [Panel(curves, x, "places", "values", **options)])  # type: ignore[arg-type]


@pytest.mark.parametrize("width", [WIDE, NARROW])
@pytest.mark.parametrize("name", sorted(PICTURES))
def test_nothing_is_clipped_and_nothing_overlaps(name: str, width: float) -> None:
    drawn = draw(PICTURES[name], width)
    drawn.draw_without_rendering()
    box = drawn.bbox
    (legend,) = drawn.legends or [None]
    for axes in drawn.axes:
        extent = axes.get_window_extent()
        assert extent.width > 0.3 * box.width / (3 if width == WIDE else 1)
        if legend is not None:
            assert not legend.get_window_extent().overlaps(extent)
        for other in drawn.axes:
            assert other is axes or not other.get_window_extent().overlaps(extent)
    ticks = [label for axes in drawn.axes for label in (*axes.get_xticklabels(), *axes.get_yticklabels())]
    for text in drawn.findobj(Text):
        if not text.get_text() or not text.get_visible() or text in ticks:
            continue
        extent = text.get_window_extent()
        assert extent.x0 >= -1 and extent.x1 <= box.width + 1, text.get_text()
        assert extent.y0 >= -1 and extent.y1 <= box.height + 1, text.get_text()
        assert text.get_fontsize() >= 8


def test_panels_are_side_by_side_or_stacked() -> None:
    for name, columns in (("mass", 2), ("three", 3), ("many", 1)):
        places = [axes.get_subplotspec() for axes in draw(PICTURES[name], WIDE).axes]
        assert {place.colspan.start for place in places if place} == set(range(columns))
        places = [axes.get_subplotspec() for axes in draw(PICTURES[name], NARROW).axes]
        assert {place.colspan.start for place in places if place} == {0}


def test_lines_and_their_gaps_are_drawn() -> None:
    picture = spectrum().pictures[0]
    (axes,) = draw(picture).axes
    for curve in picture.panels[0].curves:
        look = looks(["Fisher term", "prediction change", "random"], ["random"])[curve.label]
        found = points(axes, look["color"])
        known = [(x, y) for x, y in zip(picture.panels[0].x, curve.y, strict=True) if y is not None]
        assert {tuple(each) for each in found.tolist()} == set(known)
    (low, high) = axes.get_ylim()
    assert low < 0.3 and high > 6 and axes.get_yscale() == "log"
    # Its interval makes a stroke of the value that stands alone.
    (stroke,) = [
        each for each in axes.collections if hasattr(each, "get_segments") and len(each.get_segments())
    ]
    assert [segment[0][0] for segment in stroke.get_segments()] == [14]


def test_labelled_points_become_rows_where_labels_are_many_or_long() -> None:
    panel = forest().pictures[0].panels[0]
    drawn = draw(forest().pictures[0])
    axes = drawn.axes[0]
    labels = [" ".join(label.get_text().split()) for label in axes.get_yticklabels()]
    assert labels == list(panel.x_labels or ())
    heights = points(axes, colour("singular"))
    assert heights[:, 0].tolist() == [each for each in panel.curves[0].y if each is not None]
    assert (np.diff(heights[:, 1]) < 0).all()  # from top to bottom
    shown = [axes.yaxis.get_tick_params()["labelleft"] for axes in drawn.axes]
    assert shown == [True, False]  # the second panel has the same labels
    for count, long, rows in ((3, False, False), (6, False, True), (3, True, True)):
        names = [f"{'a-long-label-' * 4 * long}{k}" for k in range(count)]
        picture = single([Curve("", [1.0] * count)], list(range(count)), marks="points", x_labels=names)
        (axes,) = draw(picture).axes
        assert ([label.get_text() for label in axes.get_xticklabels()] != names) == rows


def test_intervals_are_strokes_where_the_points_are() -> None:
    curves = [
        Curve(name, [1.0, None, 3.0], low=[0.5, None, 2.0], high=[2.0, None, 4.0]) for name in ("a", "b")
    ]
    (axes,) = draw(single(curves, [1, 2, 3], marks="points")).axes
    segments = [each.get_segments() for each in axes.collections if hasattr(each, "get_segments")]
    assert [[(s[0][1], s[1][1]) for s in each] for each in segments] == [[(0.5, 2.0), (2.0, 4.0)]] * 2
    first, second = ([s[0][0] for s in each] for each in segments)
    assert first != second and np.allclose(first, [1, 3], atol=0.3)  # beside each other
    low, high = axes.get_xlim()
    assert low < min(first + second) and high > max(first + second)
    bare = [replace(each, low=None, high=None) for each in curves]  # control
    (axes,) = draw(single(bare, [1, 2, 3], marks="points")).axes
    assert not any(len(each.get_segments()) for each in axes.collections if hasattr(each, "get_segments"))


def test_a_cloud_has_all_its_points_on_equal_axes() -> None:
    picture = cloud().pictures[0]
    axes = draw(picture).axes[0]
    patches = [each for each in axes.patches if isinstance(each, PathPatch)]
    for curve, patch in zip(picture.panels[0].curves, patches, strict=True):
        starts = patch.get_path().vertices[::2]
        assert starts.tolist() == np.column_stack([curve.x, curve.y]).tolist()
    assert axes.get_aspect() == 1
    across, upward = axes.get_xlim(), axes.get_ylim()
    assert across[1] - across[0] == pytest.approx(upward[1] - upward[0])
    svg = inline_svg(draw(picture), "a", "a")
    assert len(svg) < 60 * 3 * 2000 and svg.count("<use") < 200  # not an element for each point
    assert axes.get_aspect() != draw(spectrum().pictures[0]).axes[0].get_aspect()  # control


def test_the_dots_of_a_cloud_are_seen() -> None:
    def ink(picture: Picture) -> float:
        drawn = draw(picture)
        drawn.set_dpi(100)
        canvas = FigureCanvasAgg(drawn)
        canvas.draw()
        pixels = np.asarray(canvas.buffer_rgba())[..., :3].astype(float)
        return float((pixels.max(axis=2) - pixels.min(axis=2) > 40).mean())

    picture = cloud().pictures[0]
    empty = replace(
        picture,
        panels=[
            replace(
                picture.panels[0],
                curves=[replace(c, y=[c.y[0], *[None] * 1999]) for c in picture.panels[0].curves],
            )
        ],
    )
    assert ink(replace(picture, panels=picture.panels[:1])) > 0.01 > 4 * ink(empty)


def test_what_cannot_be_drawn_is_said() -> None:
    said = texts(draw(many().pictures[1]))
    assert "Left out, not a positive number: 2 of the values" in said
    assert "Nothing to show: no value is defined." in said
    negative = single([Curve("", [-1.0, 0.0])], [1, 2], y_scale="log", line=1.0)
    assert "Nothing to show: no value is positive." in texts(draw(negative))
    assert not any("Left out" in each or "Nothing" in each for each in texts(draw(spectrum().pictures[0])))


def test_intervals_that_reach_zero_go_to_the_edge_of_a_ratio_axis() -> None:
    curve = Curve("a", [1.0, 2.0], low=[-5.0, 1.5], high=[3.0, 2.5])
    (axes,) = draw(single([curve], [1, 2], marks="points", y_scale="log", line=1.0)).axes
    low, high = axes.get_ylim()
    assert 0.1 < low < 1 and high > 3
    ends = [
        s[0][1] for each in axes.collections if hasattr(each, "get_segments") for s in each.get_segments()
    ]
    assert ends == [low, 1.5]


def test_series_can_be_told_apart_and_the_reference_is_grey() -> None:
    labels = [f"layer {k}" for k in range(20)]
    found = looks([*labels, "random", "fisher"], ["random"])
    pairs = [(look["color"], str(look["linestyle"])) for look in found.values()]
    assert len(set(pairs)) == len(pairs) == 22
    assert found["random"]["color"] == colour("random") and found["random"]["linestyle"] == "--"
    assert found["fisher"] == looks(["fisher"])["fisher"]
    assert colour("random") not in [found[label]["color"] for label in labels]
    assert colour("fisher") not in [found[label]["color"] for label in labels]  # it is a method's here
    assert colour("fisher") == looks(labels)["layer 0"]["color"]  # control
    said = texts(draw(many().pictures[0], NARROW))
    assert {f"layer {k}" for k in range(1, 20)} <= set(said)


def test_panels_of_one_title_share_their_scale() -> None:
    curve = Curve("a", [1.0, 2.0])
    panels = [Panel([replace(curve, y=[k, 2.0 * k])], [1, 2], "x", "y") for k in (1.0, 5.0)]
    limits = [axes.get_ylim() for axes in draw(Picture("a", "a", "a", panels)).axes]
    assert limits[0] == limits[1] and limits[0][1] > 10
    panels[1] = replace(panels[1], y_title="other")
    limits = [axes.get_ylim() for axes in draw(Picture("a", "a", "a", panels)).axes]
    assert limits[0][1] < 5 < limits[1][1]  # control


def test_colours_follow_the_reader_and_bytes_repeat() -> None:
    for picture in PICTURES.values():
        svg = inline_svg(draw(picture, NARROW), "a", "a")
        assert re.findall(r"#[0-9a-fA-F]{6}\b", svg) == []
        assert set(re.findall(r"var\(--([\w-]+)\)", svg)) <= set(COLOURS)
    picture = forest().pictures[0]
    files = svg_file(draw(picture)), png_file(draw(picture))
    with matplotlib.rc_context({"axes.facecolor": "red", "font.size": 30, "lines.linewidth": 9}):
        assert (svg_file(draw(picture)), png_file(draw(picture))) == files
    first = picture.panels[0]
    changed = replace(
        first, curves=[replace(first.curves[0], y=[0.8, *first.curves[0].y[1:]]), *first.curves[1:]]
    )
    assert svg_file(draw(replace(picture, panels=[changed, *picture.panels[1:]]))) != files[0]  # control
