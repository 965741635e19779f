"""The page: one file that loads nothing, whatever a report's names are, and all of the report in it."""

from __future__ import annotations

import dataclasses
import html
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evaluations import make_evaluation, replace_values, with_checkpoints
from html_reading import Parsed, outside
from markupsafe import Markup

from csprune.comparisons import summarise
from csprune.errors import CspruneError, InputError
from csprune.measurement import Evaluation
from csprune.pages import page as page_module
from csprune.pages.gallery import of_report
from csprune.pages.page import page, write_views
from csprune.pages.sections import content, flattened
from csprune.pages.theme import COLOURS, WIDE, png_file, svg_file

HOSTILE = "a\"><script>alert(1)</script><img src=x onerror=y>'{{ 7 * 7 }}$x^$|&amp;"
PICTURES = ["agreement", "distance", "documents", "loss", "per-unit", "top-tenth"]
Pair = tuple[dict[str, Any], Evaluation]


def make_pair(model: str = "some/model", **changes: Any) -> Pair:
    evaluation = make_evaluation(methods=("singular", "random", "fisher"))
    protocol = {
        "name": "quick",
        "positions": "all",
        "evaluation": {"source": "text.jsonl", "documents": 24, "sequence_length": 128, "bos": False},
        "versions": {"csprune": "9.9.9", "torch": "1.2.3"},
        **changes,
    }
    evaluation = dataclasses.replace(evaluation, model=model, protocol=protocol)
    return summarise(evaluation, draws=60), evaluation


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    folder = tmp_path_factory.mktemp("views") / "new" / "folder"
    pair = make_pair(HOSTILE, evaluation={"source": HOSTILE, "documents": 24})
    return folder, write_views(folder, [pair], ["x"])


@pytest.fixture(scope="module")
def source(written: tuple[Path, list[Path]]) -> str:
    return (written[0] / "report.html").read_text(encoding="utf-8")


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages without their pictures, where these are beside the point and would take seconds."""
    monkeypatch.setattr(page_module, "_drawn", lambda _: Markup("<svg></svg>"))
    monkeypatch.setattr(page_module, "png_file", lambda _: b"png")
    monkeypatch.setattr(page_module, "svg_file", lambda _: b"svg")


@pytest.fixture(scope="module")
def several() -> tuple[list[Pair], str]:
    evaluations = [
        dataclasses.replace(each, measurements=each.measurements[:3])  # one rank: quicker to draw
        for each in (make_pair(name)[1] for name in ("same", "same", "other"))
    ]
    values = evaluations[2].measurements[1].values["loss_change"]
    evaluations[2] = replace_values(evaluations[2], 1, loss_change=-values)  # random lowers the loss
    pairs = [(summarise(each, draws=60), each) for each in evaluations]
    return pairs, page(content(pairs, ["first", "second", "third"]))


def test_the_files(written: tuple[Path, list[Path]]) -> None:
    folder, paths = written
    expected = [f"pictures/{name}.{form}" for name in PICTURES for form in ("png", "svg")]
    found = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert found == sorted([*expected, "report.html", "report.md"])
    assert sorted(paths) == sorted(folder / name for name in found)
    for path in paths:
        start = path.read_bytes()[:200]
        assert start.startswith({".png": b"\x89PNG", ".svg": b"<?xml"}.get(path.suffix, b""))


def test_the_page_needs_nothing_else(source: str, several: tuple[list[Pair], str]) -> None:
    for page_ in (source, several[1]):
        assert outside(page_) == []
    # Controls.
    for bad in (
        '<link rel="stylesheet" href="https://example.org/x.css">',
        "<script>1</script>",
        '<p onclick="x()"></p>',
        "<style>@import 'x'; p { background: url(x.png) }</style>",
        '<svg><image href="x.png"></image></svg>',
    ):
        assert outside(bad), bad


def test_names_from_outside_are_text(source: str) -> None:
    parsed = Parsed(source)
    assert not parsed.all("script") and not parsed.all("img")
    assert HOSTILE in "".join(parsed.text)
    (title,) = re.findall(r"<title>(.*?)</title>", source, re.DOTALL)
    assert html.unescape(title) == f"Truncating the head of {HOSTILE}"
    escaped = html.escape(HOSTILE).replace("&#x27;", "&#39;").replace("&quot;", "&#34;")
    assert Parsed(source.replace(escaped, HOSTILE)).all("script")  # control: what it would do unescaped


@pytest.mark.parametrize("which", ["one", "several"])
def test_ids_are_unique_and_references_resolve(
    which: str, source: str, several: tuple[list[Pair], str]
) -> None:
    page_ = source if which == "one" else several[1]
    ids = Counter(attributes["id"] for _, attributes in Parsed(page_).tags if "id" in attributes)
    assert [each for each, count in ids.items() if count > 1] == []
    references = re.findall(r"(?:href=\"|url\()#([^\")]+)", page_)
    assert len(references) > 50 and set(references) <= set(ids)


def test_every_picture_is_there_for_wide_and_narrow_pages(
    source: str, several: tuple[list[Pair], str]
) -> None:
    names = {
        source: PICTURES,
        several[1]: [
            *("comparison-loss", "comparison-distance"),
            *(f"report-{n}-{name}" for n in (1, 2, 3) for name in ("loss", "distance", "documents")),
        ],
    }
    for page_, expected in names.items():
        parsed = Parsed(page_)
        assert sorted(str(each["id"]) for each in parsed.all("figure")) == sorted(expected)
        forms = Counter(
            each["class"] for each in parsed.all("div") if each.get("class") in ("wide", "narrow")
        )
        assert forms == {"wide": len(expected), "narrow": len(expected)}
        pictures = parsed.all("svg")
        assert len(pictures) == 2 * len(expected)
        widths = [float(str(each["viewbox"]).split()[2]) for each in pictures]
        assert all(wide > 2 * narrow for wide, narrow in zip(widths[::2], widths[1::2], strict=True))
        assert all(each["role"] == "img" and each["aria-label"] for each in pictures)
    assert re.search(r"\.narrow \{ display: none; \}", source)
    assert re.search(r"max-width: 620px\) \{[^}]*\}\s*\.wide \{ display: none; \}", source)


def test_colours_follow_the_reader(source: str) -> None:
    inlined = "".join(re.findall(r"<svg.*?</svg>", source, re.DOTALL))
    assert re.findall(r"#[0-9a-fA-F]{6}\b", inlined) == []
    used = set(re.findall(r"var\(--([\w-]+)\)", inlined))
    assert {"ink", "fisher", "singular", "random"} <= used <= set(COLOURS)
    light, dark = re.findall(r":root \{(.*?)\}", source)
    for name, pair in COLOURS.items():
        assert f"--{name}: {pair[0]};" in light and f"--{name}: {pair[1]};" in dark


@pytest.mark.usefixtures("undrawn")
def test_the_page_says_what_the_report_has() -> None:
    pair = make_pair()
    report, evaluation = pair
    stored = with_checkpoints(evaluation)
    report = summarise(stored, draws=60)
    page_ = page(content([(report, stored)], ["x"]))
    said = Parsed(page_).said
    for name, value in flattened(report["protocol"]):
        assert name.removeprefix("versions.") in said and " ".join(value.split()) in said, name
    assert "Exported checkpoints as they load" in said and "fisher-0.05" in said and "random-0.2" in said
    rows = re.findall(r"<tr>\s*<td.*?</tr>", page_, re.DOTALL)
    judged = [row for row in rows if "<strong" in row]
    held = sum("held" in row for row in judged)
    every = [each["vs_random"][name] for each in report["truncations"] for name in each["vs_random"]]
    every += [
        each["per_unit_vs_random"][n] for each in report["truncations"] for n in each["per_unit_vs_random"]
    ]
    # Random's own comparisons are none; it is every third entry here.
    assert len(judged) == len(every) * 2 // 3 + len(report["between_methods"])
    assert held == sum(each["established"] for each in [*every, *report["between_methods"]])
    assert "Exported checkpoints" not in Parsed(page(content([pair], ["x"]))).said  # control


@pytest.mark.usefixtures("undrawn")
def test_a_report_without_statements_or_with_one_method() -> None:
    report, evaluation = make_pair()
    for entry in report["truncations"]:
        for group in (entry["vs_random"], entry["per_unit_vs_random"]):
            for each in group.values():
                for name in ("side", "adjusted_ci95", "checks", "established"):
                    each.pop(name, None)
    for name in ("between_methods", "families", "base_entropy"):
        del report[name]
    said = Parsed(page(content([(report, evaluation)], ["x"]))).said
    assert "This report has no statements." in said and "Statements and their checks" not in said
    alone = [each for each in evaluation.measurements if each.method == "random"]
    evaluation = dataclasses.replace(evaluation, measurements=alone)
    said = Parsed(page(content([(summarise(evaluation, draws=20), evaluation)], ["x"]))).said
    assert "Random truncation by the protocol quick, with 5% and 20%" in said


def test_several_reports(several: tuple[list[Pair], str]) -> None:
    said = Parsed(several[1]).said
    for label in ("same (first)", "same (second)", "other"):
        assert label in said
    assert "other (third)" not in said
    assert "Left out, for they are not positive or not defined: other: singular at 5% (undefined)" in said
    links = [each["href"] for each in Parsed(several[1]).all("a")]
    assert links == ["#report-1", "#report-2", "#report-3"]


def test_the_same_reports_give_the_same_bytes(written: tuple[Path, list[Path]], source: str) -> None:
    report, evaluation = make_pair(HOSTILE, evaluation={"source": HOSTILE, "documents": 24})
    assert page(content([(report, evaluation)], ["x"])) == source
    picture = of_report(report, evaluation)[0]
    svg, png = ((written[0] / "pictures" / f"loss.{form}").read_bytes() for form in ("svg", "png"))
    assert (svg_file(picture.draw(WIDE)), png_file(picture.draw(WIDE))) == (svg, png)
    assert not re.search(rb"20\d\d-\d\d-\d\d", svg)
    report["truncations"][0]["loss_change"]["mean"] += 0.1
    assert svg_file(picture.draw(WIDE)) != svg  # control


@pytest.mark.usefixtures("undrawn")
def test_nothing_is_written_when_a_picture_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = make_pair()
    views = tmp_path / "views"

    def fail(*_: object) -> str:
        raise RuntimeError("no picture")

    with monkeypatch.context() as patch:
        patch.setattr(page_module, "_drawn", fail)  # after the files of all pictures were made
        with pytest.raises(RuntimeError, match="no picture"):
            write_views(views, [pair], ["x"])
    newer = [{**each, "method": "newer"} for each in pair[0]["truncations"]]
    with pytest.raises(InputError, match="use the version of csprune that measured it"):
        write_views(views, [({**pair[0], "truncations": newer}, pair[1])], ["x"])
    assert not views.exists()
    assert len(write_views(views, [pair], ["x"])) == 14  # control


@pytest.mark.usefixtures("undrawn")
def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CspruneError, match="cannot be written to"):
        write_views(tmp_path / "file", [make_pair()], ["x"])

    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        with pytest.raises(CspruneError, match="No space left on device"):
            write_views(tmp_path / "views", [make_pair()], ["x"])
    assert [path for path in (tmp_path / "views").rglob("*") if path.is_file()] == []


def test_calls_that_are_defects(tmp_path: Path) -> None:
    for reports, names in (([], []), ([make_pair()], []), ([make_pair()], ["a", "b"])):
        with pytest.raises(ValueError, match="give at least one"):
            write_views(tmp_path, reports, names)
    assert not list(tmp_path.iterdir())


def test_settings_are_flattened() -> None:
    nested = {"a": {"b": 1, "c": {}}, "d": [1, 2], "e": None, "f": True, "g": [{"h": "x"}], "i": []}
    assert flattened(nested) == [
        *(("a.b", "1"), ("a.c", "none"), ("d", "1, 2"), ("e", "none"), ("f", "yes")),
        *(("g.0.h", "x"), ("i", "none")),
    ]


@pytest.mark.usefixtures("undrawn")
def test_documents_may_be_alike() -> None:
    report, evaluation = make_pair()
    same = {name: np.full_like(values, 0.5) for name, values in evaluation.measurements[0].values.items()}
    evaluation = replace_values(evaluation, 0, **same)
    report = summarise(evaluation, draws=20)
    said = Parsed(page(content([(report, evaluation)], ["x"]))).said
    assert "+0.5000 [+0.5000, +0.5000]" in said
