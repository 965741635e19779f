"""The page of results: one file that loads nothing, whatever their names, or one clear refusal."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from html_reading import Parsed, outside
from markupsafe import Markup
from results_examples import HEADING, cloud, estimate, examples, forest, many, spectrum

from csprune.analysis.results import Result, Row, read_result
from csprune.errors import CspruneError, InputError
from csprune.pages import results_page as page_module
from csprune.pages.results_check import check_results
from csprune.pages.results_page import check_results_target, results_page, write_results
from csprune.pages.results_sections import results_content
from csprune.pages.results_summary import results_markdown
from csprune.pages.theme import COLOURS


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    folder = tmp_path_factory.mktemp("results") / "new"
    return folder, write_results(folder, HEADING, examples())


@pytest.fixture(scope="module")
def source(written: tuple[Path, list[Path]]) -> str:
    return (written[0] / "analysis.html").read_text(encoding="utf-8")


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_module, "_drawn", lambda _: Markup("<svg></svg>"))
    monkeypatch.setattr(page_module, "png_file", lambda _: b"png")
    monkeypatch.setattr(page_module, "svg_file", lambda _: b"svg")


def said(*results: Result) -> str:
    return Parsed(results_page(results_content(HEADING, results))).said


def test_the_files_are_written_and_the_page_last(written: tuple[Path, list[Path]]) -> None:
    folder, paths = written
    names = [picture.name for result in examples() for picture in result.pictures]
    expected = [f"analysis-pictures/{name}.{form}" for name in names for form in ("svg", "png")]
    assert [str(path.relative_to(folder)) for path in paths] == [*expected, "analysis.md", "analysis.html"]
    assert sorted(paths) == sorted(path for path in folder.rglob("*") if path.is_file())
    for path in paths:
        start = path.read_bytes()[:200]
        assert start.startswith({".png": b"\x89PNG", ".svg": b"<?xml"}.get(path.suffix, b""))


def test_the_page_loads_nothing_and_names_are_text(source: str) -> None:
    assert outside(source) == []
    parsed = Parsed(source)
    assert not parsed.all("script") and not parsed.all("img")
    assert "A title with <script>alert(1)</script> and | and `code`" in parsed.said
    assert "<img src=x onerror=y> | {{ 7 * 7 }}" in parsed.said
    assert outside(
        source.replace("&lt;script&gt;", "<script>").replace("&lt;/script&gt;", "</script>")
    )  # control


def test_ids_are_unique_and_links_lead_somewhere(source: str) -> None:
    parsed = Parsed(source)
    ids = Counter(attributes["id"] for _, attributes in parsed.tags if "id" in attributes)
    assert [each for each, count in ids.items() if count > 1] == []
    references = re.findall(r"(?:href=\"|url\()#([^\")]+)", source)
    assert len(references) > 50 and set(references) <= set(ids)
    contents = [each["href"] for each in parsed.all("a")]
    assert [f"#result-{each.name}" for each in examples()] == contents[-4:]


def test_every_picture_is_there_twice_in_the_readers_colours(source: str) -> None:
    parsed = Parsed(source)
    expected = [f"picture-{picture.name}" for result in examples() for picture in result.pictures]
    assert [each["id"] for each in parsed.all("figure")] == expected
    assert len(parsed.all("svg")) == 2 * len(expected)
    inlined = "".join(re.findall(r"<svg.*?</svg>", source, re.DOTALL))
    assert re.findall(r"#[0-9a-fA-F]{6}\b", inlined) == []
    assert set(re.findall(r"var\(--([\w-]+)\)", inlined)) <= set(COLOURS)


@pytest.mark.usefixtures("undrawn")
def test_the_page_says_all_that_results_have() -> None:
    whole = said(*examples())
    for result in examples():
        for text in (result.title, result.place, result.definition, *result.findings):
            assert " ".join(text.split()) in whole
        for picture in result.pictures:
            assert picture.title in whole and picture.caption in whole
        for table in result.tables:
            assert table.title in whole and table.note in whole
            for label in (*(column.title for column in table.columns), *(row.label for row in table.rows)):
                assert label in whole
    for name, value in (*HEADING.facts, *HEADING.versions):
        assert f"{name} {value}" in whole
    assert "3.41x [2.96, 3.86] yes yes yes – yes" in whole
    assert "Established 1" in whole and "Not established 2" in whole and "1 of 2 established" in whole
    assert "5.81x * [5.35, 6.28]" in whole and "0.172x [0.163, 0.181]" in whole
    assert "excess loss" not in said(forest(), cloud())  # control


@pytest.mark.usefixtures("undrawn")
def test_stars_are_as_many_as_established_cells() -> None:
    result = spectrum()
    source = results_page(results_content(HEADING, [result]))
    held = sum(
        isinstance(cell, dict) and bool(cell.get("established"))
        for row in result.tables[0].rows
        for cell in row.cells.values()
    )
    assert source.count('<span class="star">') == held > 0
    table = result.tables[0]
    cells = {**table.rows[8].cells, "fisher": estimate(1.0, 0.1, established=True)}
    rows = [*table.rows[:8], Row(table.rows[8].label, cells), *table.rows[9:]]
    changed = replace(result, tables=[replace(table, rows=rows)])
    assert (
        results_page(results_content(HEADING, [changed])).count('<span class="star">') == held + 1
    )  # control


@pytest.mark.usefixtures("undrawn")
def test_results_without_statements_tables_or_findings() -> None:
    whole = said(cloud())
    assert "stablished" not in whole and "In brackets" not in whole and "Main findings" not in whole
    assert "The geometry of states" in whole
    assert "In brackets" in said(forest()) and "Established" not in said(forest())
    contents = 'aria-label="Results"'
    assert contents in results_page(results_content(HEADING, examples()))
    assert contents not in results_page(results_content(HEADING, examples()[:3]))


@pytest.mark.usefixtures("undrawn")
def test_a_part_on_the_other_side_does_not_hold_its_statement() -> None:
    """The part is established, but opposite to what is claimed: so the claim is not."""
    claimed = spectrum().statements[0]
    other = [{**part, "claimed": "below"} for part in claimed.estimates]
    result = replace(spectrum(), statements=[replace(claimed, established=False, estimates=other)])
    assert "3.41x [2.96, 3.86] yes yes yes – opposite" in said(result)
    assert f"{claimed.text} (the opposite is established)".lower() in said(result).lower()
    assert "the opposite is established" not in said(spectrum())  # control
    assert "3.41x [2.96, 3.86] yes yes yes – yes" in said(spectrum())  # control


def test_the_json_form_gives_the_same_page(tmp_path: Path, written: tuple[Path, list[Path]]) -> None:
    again = [read_result(json.loads(json.dumps(each.describe(), allow_nan=False))) for each in examples()]
    folder, _ = written
    assert results_page(results_content(HEADING, again)).encode() == (folder / "analysis.html").read_bytes()
    assert results_markdown(HEADING, again).encode() == (folder / "analysis.md").read_bytes()
    for path in write_results(tmp_path, HEADING, again[1:2])[:2]:  # one picture: the others are alike
        assert path.read_bytes() == (folder / "analysis-pictures" / path.name).read_bytes()
    changed = replace(again[1], findings=["Something else."])
    assert results_markdown(HEADING, [changed]) != results_markdown(HEADING, [again[1]])  # control


def test_markdown_has_the_tables_and_is_not_broken_by_names() -> None:
    text = results_markdown(HEADING, examples())
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert any("5.81x\\* [5.35, 6.28]" in row and row.startswith("| 95–100% |") for row in rows)
    widths = [len(re.findall(r"(?<!\\)\|", row)) for row in rows]
    assert Counter(widths) == {9: 21, 4: 9, 3: 3}
    assert "<script>" not in re.sub(r"\\<", "", text)
    assert "\\<script\\>" in text and "a \\| table \\<b\\>" in text
    assert "## Established (1)" in text and "## Not established (2)" in text
    assert "![Rare tokens carry most of it](analysis-pictures/tokens.png)" in text
    for name, value in HEADING.facts:
        assert f"- {name}: {value}" in text
    assert "<script>" in re.sub(r"\\<", "", text + "<script>")  # control


def broken(change: Callable[[Result], Result]) -> list[Result]:
    return [change(spectrum()), forest()]


def with_curve(result: Result, **changes: object) -> Result:
    picture = result.pictures[0]
    panel = picture.panels[0]
    curves = [replace(panel.curves[0], **changes), *panel.curves[1:]]  # type: ignore[arg-type]
    return replace(result, pictures=[replace(picture, panels=[replace(panel, curves=curves)])])


def with_cell(result: Result, cell: object) -> Result:
    table = result.tables[0]
    return replace(result, tables=[replace(table, rows=[Row("row", {"fisher": cell})])])  # type: ignore[dict-item]


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda r: with_cell(r, float("nan")), "column 'fisher' has nan where a finite number should be"),
        (lambda r: with_cell(r, {"value": float("inf"), "ci95": None}), "has inf where"),
        (lambda r: with_cell(r, {"value": 1.0, "ci95": [1.0, float("nan")]}), "has nan where"),
        (lambda r: with_cell(r, {"value": 1.0, "ci95": [1.0]}), "an interval of 1 ends"),
        (lambda r: with_cell(r, {"mean": 1.0}), "an estimate without a value"),
        (lambda r: with_curve(r, y=[float("nan")] * 20), "curve 'Fisher term' has nan where"),
        (lambda r: with_curve(r, y=[1.0]), "has 1 values for 20 places"),
        (lambda r: with_curve(r, high=None), "intervals with one end"),
        (lambda r: with_curve(r, x=[None] * 20), "has None where"),
        (lambda r: replace(r, name="tokens"), "analysis 'tokens' is there twice"),
        (lambda r: replace(r, name="../x"), "a name that is not of letters"),
        (
            lambda r: replace(r, pictures=[replace(r.pictures[0], name="../../x")]),
            "picture '../../x' has a name",
        ),
        (lambda r: replace(r, pictures=[replace(r.pictures[0], name="tokens")]), "'tokens' is there twice"),
        (lambda r: replace(r, pictures=[replace(r.pictures[0], panels=[])]), "has no panels"),
    ],
)
def test_what_cannot_be_shown_is_refused(
    change: Callable[[Result], Result], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        write_results(tmp_path / "x", HEADING, broken(change))
    assert "\n" not in str(caught.value) and "make them again" in str(caught.value)
    assert not (tmp_path / "x").exists()
    check_results(broken(lambda result: result))  # control


def test_no_result_is_refused() -> None:
    with pytest.raises(InputError, match="name at least one analysis"):
        check_results([])


@pytest.mark.usefixtures("undrawn")
def test_other_files_are_not_replaced(tmp_path: Path) -> None:
    check_results_target(tmp_path, False)
    write_results(tmp_path, HEADING, [forest()], page="subspace")
    with pytest.raises(InputError, match="holds a page already: choose another -o, or add --overwrite"):
        check_results_target(tmp_path, False, "subspace")
    check_results_target(tmp_path, True, "subspace")
    check_results_target(tmp_path, False)  # another page has pictures of its own
    (tmp_path / "analysis-pictures").mkdir()
    with pytest.raises(InputError, match="analysis-pictures is not a page of csprune's"):
        check_results_target(tmp_path, True)
    (tmp_path / "subspace.html").write_text("mine")
    with pytest.raises(InputError, match="is not a page of csprune's"):
        check_results_target(tmp_path, True, "subspace")


@pytest.mark.usefixtures("undrawn")
def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        with pytest.raises(CspruneError, match="No space left on device"):
            write_results(tmp_path / "views", HEADING, [many()])
    assert [path for path in (tmp_path / "views").rglob("*") if path.is_file()] == []
    assert len(write_results(tmp_path / "views", HEADING, [many()])) == 6  # control
