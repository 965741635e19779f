"""Results in the terminal: whole figures in 80 columns, nothing left out."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from results_examples import HEADING, cloud, examples, forest, many, spectrum
from rich.cells import cell_len
from rich.console import Console

from csprune.analysis.results import Result
from csprune.errors import InputError
from csprune.pages.results_text import shown
from csprune.results_table import results_table


def printed(*results: Result, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(results_table(results, HEADING))
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


@pytest.mark.parametrize("width", [80, 120, 200])
def test_every_figure_is_there_whole(width: int) -> None:
    text = printed(*examples(), width=width)
    assert all(cell_len(line) <= width for line in text.splitlines())
    flat = " ".join(text.split())
    for result in examples():
        for sentence in (result.title, *result.findings):
            assert sentence in flat
        for table in result.tables:
            for row in table.rows:
                for column in table.columns:
                    cell = shown(row.cells.get(column.key), column.unit)
                    assert cell.value in flat and cell.interval in flat


def test_what_has_no_room_follows_below() -> None:
    narrow, wide = printed(spectrum()), printed(spectrum(), width=200)
    assert len(re.findall(r"^95–100%", narrow, re.M)) == 2  # the table in two parts
    assert len(re.findall(r"^95–100%", wide, re.M)) == 1
    (row,) = re.findall(r"^95–100%.*", wide, re.M)
    assert "5.81x* [5.35, 6.28]" in row and "1,223" in row
    (row,) = re.findall(r"^all tokens.*", printed(forest()), re.M)
    assert "0.700x [0.600, 0.800]" in row  # intervals beside the figures where they fit


def test_statements_are_told_by_whether_they_are_established() -> None:
    text = printed(spectrum())
    held, undecided = text.split("Established: 1")[1].split("Not established: 1")
    assert "The last band's Fisher term is above random's" in held
    assert "K falls and then rises along the spectrum" in undecided
    assert "stablished: " not in printed(cloud())  # no statements, no rule, no legend
    assert "In brackets" not in printed(cloud()) and "In brackets" in text


def test_names_are_no_markup() -> None:
    result = many()
    text = printed(Result("a", "[bold]a[/bold] [/x]", "[red]", "d", findings=["[link=x]y[/link]"]), result)
    assert "[bold]a[/bold] [/x]" in text and "[red]" in text and "[link=x]y[/link]" in text


def test_results_that_cannot_be_shown_are_refused() -> None:
    with pytest.raises(InputError, match="is there twice"):
        results_table([forest(), forest()], HEADING)


def test_of_many_results_only_the_sentences_are_shown() -> None:
    several = [replace(forest(), name=f"result-{i}", pictures=[]) for i in range(7)]
    few, more = printed(*several[:6]), printed(*several)
    assert "all tokens" in few and "all tokens" not in more
    assert all(sentence in " ".join(more.split()) for sentence in forest().findings)
    assert "In brackets" in few and "In brackets" not in more
