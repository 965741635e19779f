"""The Markdown summary: whole tables, no foreign markup, the same figures as the page."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
from evaluations import make_evaluation, replace_values, with_checkpoints

from csprune.comparisons import summarise
from csprune.measurement import QUANTITIES, Evaluation
from csprune.pages.findings import conclusions, groups, least_costly
from csprune.pages.sections import content
from csprune.pages.summary import summary
from csprune.pages.wording import nats

METHODS = ("singular", "fisher", "random")
HOSTILE = "a|b\n# <script>alert(1)</script> [x](y) `c` *d* __e__ &amp;"


def cells(row: str) -> list[str]:
    return [each.strip() for each in re.split(r"(?<!\\)\|", row)[1:-1]]


def tables(text: str) -> list[list[list[str]]]:
    """The rows of every Markdown table."""
    blocks = re.findall(r"(?:^\|.*\n)+", text, re.M)
    return [[cells(row) for row in block.splitlines()] for block in blocks]


def text_of(evaluation: Evaluation, draws: int = 100) -> str:
    return summary(content([(summarise(evaluation, draws=draws), evaluation)], ["x"]))


def clear_cut() -> Evaluation:
    """Singular costs more than random and fisher less, beyond doubt."""
    evaluation = make_evaluation(methods=METHODS)
    generator = np.random.default_rng(3)
    for place, each in enumerate(evaluation.measurements):
        level = {"singular": 3.0, "fisher": 0.3, "random": 1.0}[each.method]
        shape = each.values["loss_change"].shape
        values = {name: level * generator.uniform(0.9, 1.1, size=shape) for name in QUANTITIES[:-1]}
        values["logit_distance"] = generator.uniform(0.9, 1.1, size=shape)
        evaluation = replace_values(evaluation, place, **values)
    return evaluation


def test_tables_are_whole_and_have_every_truncation() -> None:
    evaluation = with_checkpoints(make_evaluation(methods=("fisher", "singular", "random")))
    report = summarise(evaluation, draws=100)
    found = tables(summary(content([(report, evaluation)], ["x"])))
    assert [len(table) - 2 for table in found] == [6, 6, 2, 4]
    for table in found:
        assert len({len(row) for row in table}) == 1
    costs = {(row[0], row[1]): row[2] for row in found[0][2:]}
    for entry in report["truncations"]:
        shown = costs[f"{100 * entry['rank']:g}%", entry["method"]]
        low, high = entry["loss_change"]["ci95"]
        assert shown == f"{nats(entry['loss_change']['mean'])} [{nats(low)}, {nats(high)}]"
    assert [row[1] for row in found[0][2:]] == ["fisher", "singular", "random"] * 2


def test_names_from_outside_are_no_markup() -> None:
    evaluation = dataclasses.replace(
        make_evaluation(), model=HOSTILE, protocol={"evaluation": {"source": HOSTILE, "documents": 24}}
    )
    text = text_of(evaluation)
    assert not re.search(r"(?<!\\)(?:<|`c|\]\(y|\*d|__e)", text)
    assert text.startswith("# Truncating the head of a\\|b # \\<script\\>")
    assert len([line for line in text.splitlines() if line.startswith("# ")]) == 1
    assert "&amp;amp;" in text
    # With several, the name stands in the first table too.
    pair = (summarise(evaluation, draws=20), evaluation)
    several = summary(content([pair, pair], ["m|n", "o"]))
    for table in tables(several):
        assert len({len(row) for row in table}) == 1
    assert cells("| a | b \\| c |") == ["a", "b \\| c"]  # control: an escaped bar ends no cell


def test_what_is_established_and_what_is_not() -> None:
    report = summarise(clear_cut(), draws=400)
    held, undecided = conclusions(report)
    assert held[:2] == [
        "The loss rises less than under random truncation: fisher at 5% and 20%.",
        "The loss rises more than under random truncation: singular at 5% and 20%.",
    ]
    assert undecided == []
    assert least_costly(report)[0].startswith("5% removed: of the methods fisher costs least, +0.")
    assert least_costly(report)[0].endswith("that it costs less than the next, singular, is established.")
    # Controls: a check that fails, and documents that say nothing, make it open.
    report["truncations"][0]["vs_random"]["loss_change"]["established"] = False
    held, undecided = conclusions(report)
    assert "The loss rises more than under random truncation: singular at 20%." in held
    assert undecided == ["Whether the loss rises more or less than under random truncation: singular at 5%."]
    noise = text_of(make_evaluation(methods=METHODS))
    open_ = noise.split("## Not established")[1].split("##")[0]
    assert "Whether the loss rises more or less than under random truncation" in open_


def test_groups_have_every_statement_once() -> None:
    report = summarise(clear_cut(), draws=100)
    found = groups(report)
    assert [len(group.statements) for group in found] == [4] * 8 + [2]
    assert found[0].count == "4 of 4 established"
    assert "4 comparisons judged together" in found[0].note and "98.75%" in found[0].note
    assert [each.text for each in found[0].statements] == [
        *("singular above random's", "fisher below random's") * 2,
    ]
    assert [each.text for each in found[-1].statements] == ["singular costs more than fisher"] * 2
    checks = report["truncations"][0]["vs_random"]["loss_change"]["checks"]
    assert len(found[0].statements[0].checks) == len(checks)
    checks["blocks"] = False
    assert groups(report)[0].statements[0].checks == ["yes", "yes", "no", "yes"]
    assert found[-1].statements[0].checks[-1] == "–"  # random subspaces do not enter


def test_a_negative_ratio_is_not_put_into_words() -> None:
    evaluation = clear_cut()
    lowered = replace_values(
        evaluation, 1, loss_change=evaluation.measurements[1].values["loss_change"] - 1.0
    )
    (line, other) = least_costly(summarise(lowered, draws=50))
    assert "costs least, −0." in line and "times" not in line
    assert "times random truncation's" in other  # control


def test_pictures_are_named() -> None:
    text = text_of(make_evaluation())
    assert re.findall(r"\]\(pictures/([\w-]+)\.png\)", text) == [
        *("loss", "distance", "per-unit", "documents", "top-tenth", "agreement"),
    ]
    pair = (summarise(make_evaluation(), draws=20), make_evaluation())
    several = summary(content([pair, pair], ["a", "b"]))
    assert re.findall(r"\]\(pictures/([\w-]+)\.svg\)", several) == ["comparison-loss", "comparison-distance"]


def test_means_lie_in_their_tables_however_small() -> None:
    assert [nats(value) for value in (0.00094, 0.00096, -9.99994, 9.99996)] == [
        *("+0.00094", "+0.0010", "−9.9999", "+10.000")
    ]
    evaluation = make_evaluation()
    scaled = evaluation.measurements[0].values["loss_change"] * 1e-6
    text = text_of(replace_values(evaluation, 0, loss_change=scaled))
    assert not re.search(r"\+0\.0000\b", text)
