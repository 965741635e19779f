"""The paper's claims of the bands and the most probable token: Sections 3.1 to 3.3 and E.2."""

from __future__ import annotations

from claims import Claim, above, at, below, between, compared, figure, full_result
from reports import Found, Reports, as_found

_BAND, _RANDOM = "bottom band", "random, of its length"


def bottom_over_others(reports: Reports) -> Found:
    """C_b of the bottom band to the largest of the other bands where it exists."""
    *others, bottom = reports.rows("consequence", "bands")
    known = [row.cells["consequence"] for row in others]
    largest = max(as_found(each).value for each in known if isinstance(each, dict) and each["value"])
    return Found(as_found(bottom.cells["consequence"]).value / largest)


def within_two(reports: Reports) -> Found:
    """The share of bands with a C_b between a half and two."""
    rows = reports.rows("consequence", "bands")
    values = [cell["value"] for row in rows if isinstance(cell := row.cells["consequence"], dict)]
    return Found(sum(each is not None and 0.5 <= each <= 2 for each in values) / len(values))


def least_condition(reports: Reports) -> Found:
    """The smallest C_b of all conditions, established where those of all are."""
    rows = reports.rows("conditions", "conditions")
    found = [as_found(row.cells["fisher_per_distance"]) for row in rows]
    least = min(found, key=lambda each: each.value)
    return Found(least.value, least.interval, all(each.established for each in found))


def peaks(reports: Reports) -> Found:
    """The share of conditions whose C_b is largest at the bottom band."""
    rows = reports.rows("conditions", "conditions")
    return Found(sum(row.cells["peak"] == reports.bands for row in rows) / len(rows))


def full_conditions(reports: Reports) -> Found:
    """The share of conditions with D below random's and K and the loss change above it, as they are."""
    held = []
    for row in reports.rows("conditions", "conditions"):
        distance, change, loss = (
            as_found(row.cells[key]).value for key in ("logit_distance", "prediction_change", "loss_excess")
        )
        held.append(distance < 1 < change and loss > 0)
    return Found(sum(held) / len(held))


def runner_up(reports: Reports) -> Found:
    """How much more often the runner-up takes the first place than under random changes."""
    absent = "the most probable token is replaced in no document"
    band, random = (
        reports.cell("top-token", "top-token", row, "runner_up", absent) for row in (_BAND, _RANDOM)
    )
    return Found(band.value - random.value)


def top_less_bottom(reports: Reports) -> Found:
    """The loss change of removing the top band less that of the bottom band."""
    top, bottom = (reports.cell("top-band", "ends", row, "loss_change") for row in (0, 1))
    return Found(top.value - bottom.value)


_EQUAL_LENGTH = [
    *compared(
        "equal", "3.1", "At equal length", ("bottom-band", "equal-length", 0), full_result("every model")
    ),
    Claim(
        "documents-per-distance",
        "3.1",
        "Documents in which F per unit of logit distance exceeds the references'",
        "83 to 93%",
        "share",
        between(0.83, 0.93),
        at("bottom-band", "documents", "F/D", "above"),
    ),
    Claim(
        "documents-total",
        "3.1",
        "Documents in which the total prediction change K exceeds the references'",
        "47 to 68%",
        "share",
        between(0.47, 0.68),
        at("bottom-band", "documents", "K", "above"),
    ),
]

_SPECTRUM = [
    Claim(
        "bottom-largest",
        "3.2",
        "C_b of the bottom band, to the largest of the other bands",
        "above 1: the bottom band has the largest in every model",
        "ratio",
        above(1),
        bottom_over_others,
    ),
    Claim(
        "bottom-consequence",
        "3.2",
        "C_b of the bottom band",
        "above 1 in every model",
        "ratio",
        above(1, judged=True),
        at("consequence", "bands", -1, "consequence"),
    ),
    Claim(
        "within-two",
        "3.2",
        "Bands whose C_b is within a factor of two of random's",
        "most of the spectrum (read as more than half)",
        "share",
        above(0.5),
        within_two,
    ),
]

_CONDITIONS = [
    Claim(
        "conditions-least",
        "3.3",
        "The smallest C_b of the bottom band of all conditions",
        "well above 1 in all 56 combinations of model, condition and position",
        "ratio",
        above(1, judged=True),
        least_condition,
    ),
    Claim(
        "conditions-peak",
        "3.3",
        "Conditions in which C_b is largest at the bottom band",
        "every one of the 56",
        "share",
        between(1, 1, digits=None),
        peaks,
    ),
    Claim(
        "conditions-full",
        "3.3",
        "Conditions in which D is below random's, K and the loss change above it",
        "almost all of the 56 (read as more than half)",
        "share",
        above(0.5),
        full_conditions,
    ),
]

_DOCUMENTS = [
    Claim(
        "documents-change-per-distance",
        "E.2",
        "Documents in which K per unit of logit distance exceeds the references'",
        "77 to 92%",
        "share",
        between(0.77, 0.92),
        at("bottom-band", "documents", "K/D", "above"),
    ),
    Claim(
        "median-change-per-distance",
        "E.2",
        "Median of the documents' K/D ratios to random's",
        "4.9 to 12.1",
        "ratio",
        between(4.9, 12.1, digits=1),
        at("bottom-band", "documents", "K/D", "median"),
    ),
    Claim(
        "median-loss-excess",
        "E.2",
        "Median of the documents' loss excess",
        "\N{MINUS SIGN}0.13 to 0.02 nats",
        "nats",
        between(-0.13, 0.02),
        at("bottom-band", "documents", "loss change", "excess"),
    ),
    Claim(
        "tenth",
        "E.2",
        "Share of the summed loss excess that the tenth of documents with the largest carries",
        "63 to 115%",
        "share",
        between(0.63, 1.15),
        figure("bottom-band", "tenth_of_loss_excess", "the summed loss excess is not positive"),
    ),
]


def _token(key: str, text: str, said: str, low: float | None, high: float, row: str, column: str) -> Claim:
    unit = "share" if column == "changed" else "number"
    return Claim(key, "E.2", text, said, unit, between(low, high), at("top-token", "top-token", row, column))


_TOKEN_AND_TOP = [
    _token("replaced", "Most probable token replaced", "25 to 48%", 0.25, 0.48, _BAND, "changed"),
    _token(
        "replaced-random",
        "Most probable token replaced under the references",
        "10 to 29%",
        0.10,
        0.29,
        _RANDOM,
        "changed",
    ),
    _token("accuracy-fall", "Fall of top-1 accuracy", "0.03 to 0.20", 0.03, 0.20, _BAND, "fall"),
    _token(
        "accuracy-random",
        "Fall of top-1 accuracy under the references",
        "at most 0.04",
        None,
        0.04,
        _RANDOM,
        "fall",
    ),
    Claim(
        "runner-up",
        "E.2",
        "Replaced by the runner-up: share of replacements, less that under random changes",
        "less often in eight of the ten models",
        "number",
        below(0),
        runner_up,
    ),
    Claim(
        "top-less-bottom",
        "E.2",
        "Loss change of removing the top band less that of the bottom band",
        "as much or more in nine of the ten models, 0.60 against 0.79 nats in Llama-3.1-8B",
        "nats",
        above(0),
        top_less_bottom,
    ),
    Claim(
        "top-loss",
        "E.2",
        "Loss change of removing the top band",
        "0.96 to 1.75 nats in nine models, 0.60 in Llama-3.1-8B",
        "nats",
        between(0.96, 1.75, (0.60, 0.60)),
        at("top-band", "ends", "top band", "loss_change"),
    ),
    Claim(
        "bottom-loss",
        "E.2",
        "Loss change of removing the bottom band",
        "0.17 to 1.23 nats in nine models, 0.79 in Llama-3.1-8B",
        "nats",
        between(0.17, 1.23),
        at("top-band", "ends", "bottom band", "loss_change"),
    ),
    Claim(
        "top-consequence",
        "E.2",
        "C_b of the top band",
        "0.4 to 2.4",
        "ratio",
        between(0.4, 2.4, digits=1),
        at("top-band", "ends", "top band", "consequence"),
    ),
]

CLAIMS = [*_EQUAL_LENGTH, *_SPECTRUM, *_CONDITIONS]
FURTHER = [*_DOCUMENTS, *_TOKEN_AND_TOP]
