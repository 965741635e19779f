"""Predictive subspaces and what changes of their sites did, as a result to be shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from csprune.analysis.results import Column, Curve, Panel, Picture, Result, Row, Table
from csprune.predictive.checks import WAYS, Effect
from csprune.predictive.jacobian import JacobianSums
from csprune.predictive.last_mlp import LastMLP
from csprune.predictive.subspaces import RANK_TOLERANCE, SpannedSubspace, Subspace
from csprune.readout import Readout

_DEFINITION = """\
Logits count up to a shared shift, so a prediction reads each site of the readout along certain directions \
only: the logits orthogonally to (1, ..., 1); the final norm's output along the centred rows of the head, \
u_i - ubar; its input, and what the last MLP writes to it, along g_i = gamma * (u_i - ubar), gamma being \
the norm's gain. Their span is the site's predictive subspace. What the last MLP reads has no fixed one: \
there it is the leading eigendirections of E[J^T J], J being the derivatives of all g_i . mlp_out at one \
position (without the norm's factor 1 / RMS).
The dimension is the fewest leading directions that hold the share of the sum of the eigenvalues; the rank \
counts eigenvalues above {tolerance:.0e} of the largest.
The check changes the activation at every position in a random direction, by {size:.0%} of its length, and \
compares the predictions: KL(p || p'), the mean over positions."""
_READ_ALONG = {
    "logits": "the complement of (1, ..., 1)",
    "final": "the span of u_i - ubar",
    "post": "the span of g_i",
    "mlp_out": "the span of g_i",
    "mlp_in": "the leading directions of E[J^T J]",
}


@dataclass(frozen=True)
class Found:
    """What was computed.

    Attributes:
        readout: Of the model.
        subspaces: In the order of the sites.
        effects: Of changes at these sites.
        share: Of the sum of the eigenvalues.
        mlp: The last MLP, where a site needed it.
        sums: Of E[J^T J], where `mlp_in` was asked for.
    """

    readout: Readout
    subspaces: Sequence[Subspace]
    effects: Sequence[Effect]
    share: float
    mlp: LastMLP | None = None
    sums: JacobianSums | None = None


def result(found: Found) -> Result:
    """Tables, a picture of the spectra, and the main figures in words."""
    return Result(
        "subspace",
        "Predictive subspaces",
        "",
        _DEFINITION.format(tolerance=RANK_TOLERANCE, size=found.effects[0].size),
        findings=_findings(found),
        tables=[_dimensions(found), _changes(found)],
        pictures=_pictures(found),
        figures=_figures(found),
    )


def _dimensions(found: Found) -> Table:
    rows = [
        Row(
            each.site,
            {
                "along": _READ_ALONG[each.site],
                "width": each.width,
                "rank": each.rank,
                "dimension": each.dimension(found.share),
            },
        )
        for each in found.subspaces
    ]
    columns = [
        Column("along", "predictive subspace", "text"),
        Column("width", "width of the site", "count"),
        Column("rank", "rank", "count"),
        Column("dimension", f"dimension at {found.share:.4g}", "count"),
    ]
    note = f"The dimension holds {found.share:.4g} of the sum of the eigenvalues."
    if found.readout.unembedding.transform.cap is not None:
        note += (
            " The logits have a soft cap: a shift before it is not harmless, and u_i stands for u_i - ubar."
        )
    if found.readout.norm.removes_mean:
        note += " The LayerNorm takes the mean from the residual: a shift of all its entries is free besides."
    return Table("dimensions", "Predictive subspace at each site", columns, rows, note, "site")


def _changes(found: Found) -> Table:
    rows = []
    for effect in found.effects:
        cells: dict[str, Any] = {"dimension": effect.dimension, "free": effect.free, "kind": _kind(effect)}
        cells |= {way: float(kl.mean()) for way, kl in effect.divergence.items()}
        rows.append(Row(_label(effect), cells))
    columns = [
        Column("dimension", "dimension", "count"),
        Column("free", "complement's", "count"),
        Column("kind", "orthogonal change", "text"),
        *(Column(way, f"KL, nats: {way}", "number") for way in WAYS),
    ]
    note = (
        "All changes of a row are of one length. Exact: orthogonal to all that the prediction reads, so that "
        "the divergence is rounding. Measured: orthogonal too, but the norm's RMS moves with the activation. "
        f"Measured at the share: orthogonal to the directions that hold {found.share:.4g} of what is read, "
        "for the prediction reads every direction of the site; what is read least may still matter most to a "
        "prediction, as the smallest singular directions do."
    )
    return Table("changes", "What a change does to the prediction", columns, rows, note, "site")


def _kind(effect: Effect) -> str:
    if not effect.whole:
        return "measured at the share"
    return "measured" if effect.held == "RMS recomputed" else "exact"


def _label(effect: Effect) -> str:
    return ", ".join(filter(None, (effect.site, effect.held)))


def _pictures(found: Found) -> list[Picture]:
    """The spectra of the sites that have one; mlp_out's is that of post."""
    spanned = [each for each in found.subspaces if isinstance(each, SpannedSubspace)]
    if any(each.site == "post" for each in spanned):
        spanned = [each for each in spanned if each.site != "mlp_out"]
    if not spanned:
        return []
    sizes, shares = [], []
    for each in spanned:
        values = each.eigenvalues[: each.rank]
        places = [float(n) for n in range(1, each.rank + 1)]
        sizes.append(Curve(each.site, (values / values[0]).tolist(), places))
        shares.append(Curve(each.site, (values.cumsum(0) / values.sum()).tolist(), places))
    x = [float(n) for n in range(1, max(each.rank for each in spanned) + 1)]
    return [
        Picture(
            "subspace-spectrum",
            "How much the prediction reads each direction of a site",
            "Left: eigenvalues of the Gram matrix of the reading directions (at mlp_in of E[J^T J]), as "
            "shares of the largest. Right: the share of their sum that the leading directions hold; the "
            f"line is at {found.share:.4g}. Eigenvalues that are rounding are left out.",
            [
                Panel(sizes, x, "direction", "eigenvalue / largest", y_scale="log"),
                Panel(shares, x, "leading directions", "share of the sum", line=found.share),
            ],
        )
    ]


def _findings(found: Found) -> list[str]:
    sentences = []
    for each in found.subspaces:
        if each.site == "logits":
            sentences.append(
                f"The prediction depends on {each.rank:,} of {each.width:,} dimensions of the logits."
            )
            continue
        dimension = each.dimension(found.share)
        whole = " (all there are)" if each.rank == each.most else ""
        sentences.append(
            f"At {each.site} it reads {each.rank:,} of {each.width:,} dimensions{whole}; {dimension:,} hold "
            f"{found.share:.4g} of it."
        )
    for effect in found.effects:
        mean = {way: float(kl.mean()) for way, kl in effect.divergence.items()}
        held = f" ({effect.held})" if effect.held else ""
        if "orthogonal" in mean:
            sentences.append(
                f"A change at {effect.site}{held} orthogonal to the subspace moves the prediction by "
                f"{mean['orthogonal']:.1e} nats ({_kind(effect)}), one inside by {mean['inside']:.1e}, a "
                f"random one by {mean['random']:.1e}."
            )
    if found.sums is not None:
        share = found.sums.largest / float(found.sums.gram.trace())
        sentences.append(
            f"E[J^T J] is the mean over {found.sums.positions:,} positions, of which the heaviest has "
            f"{share:.1%} of the sum."
        )
    return sentences


def _figures(found: Found) -> dict[str, Any]:
    figures: dict[str, Any] = {"share": found.share, "sites": {}, "changes": []}
    for each in found.subspaces:
        described: dict[str, Any] = {
            "width": each.width,
            "rank": each.rank,
            "dimension": each.dimension(found.share),
        }
        if isinstance(each, SpannedSubspace):
            described["eigenvalues"] = each.eigenvalues.tolist()
        figures["sites"][each.site] = described
    for effect in found.effects:
        kl = effect.divergence
        figures["changes"].append(
            {
                "site": effect.site,
                "held": effect.held,
                "dimension": effect.dimension,
                "free": effect.free,
                "kind": _kind(effect),
                "size": effect.size,
                "positions": next(iter(kl.values())).numel(),
                "mean_kl": {way: float(each.mean()) for way, each in kl.items()},
                "largest_kl": {way: float(each.max()) for way, each in kl.items()},
            }
        )
    if found.mlp is not None:
        figures["mlp"] = {
            "reads": found.mlp.reads,
            "writes": found.mlp.writes,
            "factor": found.mlp.factor,
        }
    if found.sums is not None:
        figures["positions"] = found.sums.positions
        figures["largest_position"] = found.sums.largest / float(found.sums.gram.trace())
    return figures
