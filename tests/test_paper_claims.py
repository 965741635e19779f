"""The paper's claims in benchmarks/paper: how they are decided, and that every figure of theirs is found."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import paper_cases
import pytest
from claims import Claim, Open, Range, above, below, between, decide, difference
from claims_bands import bottom_over_others, least_condition, peaks, within_two
from claims_candidates import excess_of_small_shares, to_directions
from claims_truncation import less, versus_random
from page import CLAIMS, SECTIONS
from reports import Found, NotApplicable, Reports

from csprune.analysis.results import Column, Result, Row, Table
from csprune.errors import InputError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reports") / "tiny"
    paper_cases.write_reports(folder)
    return folder


def found(
    value: float, low: float | None = None, high: float | None = None, held: bool | None = None
) -> Found:
    return Found(value, None if low is None or high is None else (low, high), held)


@pytest.mark.parametrize(
    ("expects", "figure", "expected"),
    [
        (between(3.3, 21, digits=1), found(5.0), ""),
        (between(3.3, 21, digits=1), found(2.0), "below"),
        (between(3.3, 21, digits=1), found(22.0), "above"),
        # The interval reaches the range, or does not.
        (between(3.3, 21, digits=1), found(2.0, 1.0, 3.5), ""),
        (between(3.3, 21, digits=1), found(2.0, 1.0, 3.0), "below"),
        # 0.0861 is printed as 0.09, 0.0842 as 0.08.
        (between(0.09, 0.30), found(0.0861), ""),
        (between(0.09, 0.30), found(0.0842), "below"),
        (between(0.09, 0.30, digits=None), found(0.0861), "below"),
        (between(1.0, 1.0, digits=None), found(0.999), "below"),
        # An open end, and exceptions beside the range.
        (between(None, 0.04), found(-3.0), ""),
        (between(None, 0.04), found(0.05), "above"),
        (between(2.8, 5.6, (0.92, 0.92)), found(0.92), ""),
        (between(2.8, 5.6, (0.92, 0.92)), found(1.5), "between"),
        # A side: as it is, or by the paper's rule where the paper judged it so.
        (above(1), found(1.2), ""),
        (above(1), found(0.8), "below"),
        (above(1), found(1.0), "neither above nor below"),
        (below(0), found(0.2), "above"),
        (above(1), found(1.2, held=False), ""),
        (above(1, judged=True), found(1.2, held=True), ""),
        (above(1, judged=True), found(1.2, held=False), "above, but not established"),
        (above(1, judged=True), found(0.8, held=True), "below, established"),
        (above(1, judged=True), found(1.2), ""),
        # What the paper leaves open.
        (Open(1, "below"), found(0.8, held=False), ""),
        (Open(1, "below"), found(0.8, held=True), "below, established"),
        (Open(1, "below"), found(1.8, held=True), ""),
    ],
)
def test_how_a_claim_is_decided(expects: Any, figure: Found, expected: str) -> None:
    assert difference(expects, figure) == expected
    claim = Claim("key", "3.1", "text", "said", "ratio", expects, lambda _reports: figure)
    verdict = decide(claim, None)  # type: ignore[arg-type]  the finder asks nothing
    assert (verdict.mark, verdict.reason) == ("differs" if expected else "reproduced", expected)
    assert verdict.found is figure


def test_what_a_model_does_not_have_is_not_applicable() -> None:
    def find(_reports: Reports) -> Found:
        raise NotApplicable("it has no such directions")

    verdict = decide(Claim("key", "3.1", "text", "said", "ratio", above(1), find), None)  # type: ignore[arg-type]
    assert (verdict.mark, verdict.found, verdict.reason) == (
        "not applicable",
        None,
        "it has no such directions",
    )


def test_every_claim_finds_its_figure_in_a_models_reports(folder: Path) -> None:
    reports = Reports.read(folder)
    verdicts = {claim.key: decide(claim, reports) for claim in CLAIMS}
    assert len(verdicts) == len(CLAIMS) > 100
    absent = {key: each.reason for key, each in verdicts.items() if each.found is None}
    assert all(verdicts[key].mark == "not applicable" and reason for key, reason in absent.items())
    # This model has no near-zero directions, nor an excess to divide; nearly all else exists.
    assert {"near-zero-carried", "near-zero-logit-distance"} <= set(absent)
    assert len(absent) < 20
    # A figure is that of the report: one of each file.
    results = reports.results
    scalings = next(each for each in results["scalings"].tables if each.name == "scalings")
    cells = {row.label: row.cells for row in scalings.rows}["not rescaled"]
    assert (
        verdicts["unrescaled-prediction-change"].found.estimate.items() <= cells["prediction_change"].items()
    )
    tenth = results["bottom-band"].figures["tenth_of_loss_excess"]
    assert "tenth" in absent if tenth is None else verdicts["tenth"].found.value == tenth
    random = reports.truncation("singular", 0.05)["vs_random"]["loss_change"]
    assert verdicts["singular-loss-0.05"].found.value == random["difference"]


def test_claims_are_told_apart_and_complete() -> None:
    assert len({claim.key for claim in CLAIMS}) == len(CLAIMS)
    assert {claim.section for claim in CLAIMS} == set(SECTIONS)
    assert len({(claim.section, claim.text) for claim in CLAIMS}) == len(CLAIMS)


def test_ranges_are_those_that_are_quoted() -> None:
    """Every end of a range stands in the words of the claim: no typing error in one of the two."""
    for claim in CLAIMS:
        if not isinstance(claim.expects, Range) or claim.key in ("conditions-peak", "excess-of-small-shares"):
            continue
        printed = {float(each) for each in re.findall(r"\d+(?:\.\d+)?", claim.said.replace(",", ""))}
        scale = 100 if claim.unit == "share" else 1
        for ends in claim.expects.spans:
            for end in ends:
                assert end is None or round(scale * abs(end), 6) in printed, (claim.key, end, claim.said)
    # Control: another number is not there.
    assert 24.0 not in {float(each) for each in re.findall(r"\d+(?:\.\d+)?", CLAIMS[3].said)}


def made_up(**tables: tuple[list[str], dict[str, list[Any]]]) -> Reports:
    """Reports of nothing but some tables: by `ANALYSIS__TABLE`, labels, and columns of cells."""
    results = []
    for name, (labels, columns) in tables.items():
        analysis, table = (each.replace("_", "-") for each in name.split("__"))
        rows = [
            Row(label, {key: cells[i] for key, cells in columns.items()}) for i, label in enumerate(labels)
        ]
        titles = [Column(key, key, "number") for key in columns]
        results.append(Result(analysis, "", "", "", tables=[Table(table, "", titles, rows)]))
    return Reports("made-up", {"protocol": {"bands": 3}}, results, {}, {})


def estimate(value: float | None, **judged: Any) -> dict[str, Any]:
    ends = None if value is None else [value - 0.1, value + 0.1]
    return {"value": value, "ci95": ends, **judged}


def test_figures_of_the_spectrum() -> None:
    cells = [estimate(0.4), estimate(None), estimate(2.0), estimate(5.0)]
    reports = made_up(consequence__bands=(["1", "2", "3", "4"], {"consequence": cells}))
    assert bottom_over_others(reports) == Found(2.5)
    assert within_two(reports) == Found(0.25)


def test_figures_of_conditions() -> None:
    first, second = estimate(3.0, established=True), estimate(2.0, established=True)
    columns = {"fisher_per_distance": [first, second], "peak": [3, 2]}
    reports = made_up(conditions__conditions=(["text", "code"], columns))
    assert least_condition(reports) == Found(2.0, (1.9, 2.1), True)
    assert peaks(reports) == Found(0.5)
    columns["fisher_per_distance"] = [estimate(3.0, established=False), second]
    assert least_condition(made_up(conditions__conditions=(["text", "code"], columns))).established is False


def test_figures_of_shares() -> None:
    pairs = (["leading pair", "direction at random"], {"share": [estimate(0.2), 0.05]})
    shares, excesses = (
        [estimate(0.01), estimate(0.04), estimate(0.3)],
        [estimate(-0.3), estimate(0.1), estimate(2.0)],
    )
    deciles = (["1", "2", "3"], {"documents": [10, 30, 20], "share": shares, "excess": excesses})
    reports = Reports(
        "made-up",
        {},
        [
            Result(
                "contrast-share",
                "",
                "",
                "",
                tables=[
                    *made_up(contrast_share__pairs=pairs).results["contrast-share"].tables,
                    *made_up(contrast_share__deciles=deciles).results["contrast-share"].tables,
                ],
            )
        ],
        {},
        {},
    )
    assert to_directions("leading pair")(reports).value == pytest.approx(4.0)
    small = excess_of_small_shares(reports)
    assert small.value == pytest.approx(0.0) and small.interval == pytest.approx((-0.1, 0.1))
    for each in shares:
        each["value"] = 0.5
    with pytest.raises(NotApplicable, match="no tenth"):
        excess_of_small_shares(reports)


def test_figures_of_truncations() -> None:
    entry = {
        "difference": 0.3,
        "difference_ci95": [0.2, 0.4],
        "ratio": None,
        "ci95": None,
        "established": True,
    }
    compared = {"rank": 0.2, "first": "singular", "second": "fisher", **entry}
    reports = SimpleNamespace(
        truncations={"between_methods": [compared]},
        truncation=lambda _method, _rank: {"vs_random": {"loss_change": entry}},
    )
    assert less("singular", "fisher", 0.2)(reports) == Found(0.3, (0.2, 0.4), True)
    assert less("fisher", "singular", 0.2)(reports) == Found(-0.3, (-0.4, -0.2), True)
    assert versus_random("singular", 0.2, "loss_change", "difference")(reports) == Found(
        0.3, (0.2, 0.4), True
    )
    with pytest.raises(NotApplicable, match="undefined"):
        versus_random("singular", 0.2, "loss_change", "ratio")(reports)
    with pytest.raises(NotApplicable, match="not compared"):
        less("fisher", "whitened", 0.2)(reports)


def test_reports_that_are_not_whole_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="spectrum.json is not whole"):
        Reports.read(tmp_path)
    reports = Reports.read(folder)
    with pytest.raises(InputError, match="no table 'slopes' of the analysis 'brier'"):
        reports.cell("brier", "slopes", 0, "slope")
    with pytest.raises(InputError, match="no truncation fisher at 30%"):
        reports.truncation("fisher", 0.3)
    with pytest.raises(NotApplicable, match="no such"):
        reports.cell("brier", "brier", 7, "ratio", "no such row")
    for name in ("spectrum/spectrum.json", "analysis/analysis.json", "truncations/report.json"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "why.json").write_text("{")
    with pytest.raises(InputError, match=r"why.json cannot be read .*: run the model again"):
        Reports.read(tmp_path)
    assert json.loads((folder / "why.json").read_text())["directions"] == reports.spectrum["width"]
