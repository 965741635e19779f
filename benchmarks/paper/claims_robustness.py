"""The paper's claims of the comparison at equal length under other choices: Section E.1."""

from __future__ import annotations

from claims import Claim, Open, above, at, below, between, compared, full_result
from reports import Found, NotApplicable, Reports

_MATCHED, _UNRESCALED = "rescaled by one coefficient", "not rescaled"
_NO_NEAR_ZERO = "no direction of the bottom band has a singular value near zero"
_VARIANCE = ("top-variance", "top-variance", "largest variance")
_ABOVE = ("above 1 in every model", above(1, judged=True))
_LOSS_ABOVE = ("above 0 in every model", above(0, judged=True))
_EXTREMES = "all seven Pythia and two of three others; in Qwen3-8B D is 1.00 and 0.95, not established"


def carried_near_zero(reports: Reports) -> Found:
    """The near-zero directions' share of the band change's squared length, a mean over documents."""
    if not reports.results["near-zero"].figures["near_zero"]:
        raise NotApplicable(_NO_NEAR_ZERO)
    return reports.cell("near-zero", "directions", 0, "mean_share")


CLAIMS = [
    *compared(
        "matched",
        "E.1",
        "Rescaled by one coefficient",
        ("scalings", "scalings", _MATCHED),
        {**full_result("every model"), "fisher_term": _ABOVE},
    ),
    *compared(
        "unrescaled",
        "E.1",
        "Not rescaled",
        ("scalings", "scalings", _UNRESCALED),
        {
            "logit_distance": (
                "below 1 in nine models; in Llama-3.1-8B 1.19, not established",
                below(1, judged=True),
            ),
            "fisher_term": _ABOVE,
            "prediction_change": ("3.3 to 21", between(3.3, 21, digits=1)),
            "loss_excess": _LOSS_ABOVE,
        },
    ),
    *compared(
        "unrescaled",
        "E.1",
        "Not rescaled",
        ("scalings", "lengths", _UNRESCALED),
        {
            "squared_length": (
                "2.8 to 5.6 in eight models; 0.92 and 0.96 in Pythia-70M and Pythia-160M",
                between(2.8, 5.6, (0.92, 0.92), (0.96, 0.96)),
            )
        },
    ),
    *compared(
        "donor",
        "E.1",
        "A donor's component for the mean",
        ("donors", "comparison", 0),
        {"loss_excess": ("positive in every model", above(0, judged=True))},
    ),
    *compared(
        "natural",
        "E.1",
        "Natural path",
        ("natural-path", "natural-path", "of equal length"),
        {"prediction_change": _ABOVE, "loss_excess": _LOSS_ABOVE},
    ),
    *compared(
        "natural-matched",
        "E.1",
        "Natural path, rescaled by one coefficient",
        ("natural-path", "natural-path", _MATCHED),
        {"logit_distance": ("below 1 in every model", below(1, judged=True))},
    ),
    *compared(
        "natural-unrescaled",
        "E.1",
        "Natural path, not rescaled",
        ("natural-path", "natural-path", _UNRESCALED),
        {
            "logit_distance": (
                "not established below 1 in the eight models from Pythia-410M up",
                Open(1, "below"),
            ),
            "fisher_term": _ABOVE,
        },
    ),
    *compared(
        "across-matched",
        "E.1",
        "Natural path across the logits, rescaled by one coefficient",
        ("natural-path", "across", _MATCHED),
        {"fisher_term": _ABOVE},
    ),
    *compared(
        "across-unrescaled",
        "E.1",
        "Natural path across the logits, not rescaled",
        ("natural-path", "across", _UNRESCALED),
        {"fisher_term": _ABOVE},
    ),
    Claim(
        "near-zero-carried",
        "E.1",
        "Near-zero directions' share of the band change's squared length",
        "43% and 38% in the two Qwen models",
        "share",
        between(0.38, 0.43),
        carried_near_zero,
    ),
    *compared(
        "near-zero",
        "E.1",
        "Without near-zero directions",
        ("near-zero", "near-zero", 1),
        {
            "logit_distance": ("0.18 and 0.23 in the two Qwen models", between(0.18, 0.23)),
            "prediction_change": ("7.7 and 8.5 in the two Qwen models", between(7.7, 8.5, digits=1)),
            "loss_excess": ("0.69 and 0.64 nats in the two Qwen models", between(0.64, 0.69)),
        },
        _NO_NEAR_ZERO,
    ),
    *compared(
        "raw", "E.1", "Raw basis", ("bases", "bases", "raw"), full_result("every model but Pythia-70M")
    ),
    *compared(
        "folded",
        "E.1",
        "Folded, uncentred basis",
        ("bases", "bases", "folded"),
        {
            "logit_distance": ("0.10 to 0.29", between(0.10, 0.29)),
            "prediction_change": ("3.9 to 11.2", between(3.9, 11.2, digits=1)),
            "loss_excess": _LOSS_ABOVE,
        },
    ),
    *(
        claim
        for key, row in (("mean-square", "largest mean squares"), ("variance", "largest variances"))
        for claim in compared(
            f"extremes-{key}",
            "E.1",
            f"Without coordinates of the {row}",
            ("extreme-coordinates", "extreme-coordinates", row),
            {
                **full_result("every model"),
                "logit_distance": (f"below 1: {_EXTREMES}", below(1, judged=True)),
            },
            "nothing of the band is left without them",
        )
    ),
    *compared(
        "variance",
        "E.1",
        "Subspace of the largest variance",
        _VARIANCE,
        {
            "logit_distance": (
                "1.3 to 11.7 in nine models, 0.98 in Llama-3.1-8B",
                between(1.3, 11.7, (0.98, 0.98)),
            ),
            "prediction_change": ("2.0 to 7.6", between(2.0, 7.6, digits=1)),
            "fisher_per_distance": ("0.4 to 2.5", between(0.4, 2.5, digits=1)),
        },
    ),
    Claim(
        "band-per-distance",
        "E.1",
        "Bottom band in the same run: F/D, to random's",
        "12 to 38",
        "ratio",
        between(12, 38, digits=0),
        at("top-variance", "top-variance", "bottom band", "fisher_per_distance"),
    ),
]
