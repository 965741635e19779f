"""The job of `csprune subspace`: from a model's name to its predictive subspaces, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from csprune.analysis.results import Result
from csprune.errors import InputError
from csprune.identity import fingerprint, versions
from csprune.pages.results_page import check_results_target, write_results
from csprune.pages.results_sections import ResultsHeading
from csprune.predictive.checks import check
from csprune.predictive.files import check_subspace_target, write_subspaces
from csprune.predictive.findings import Found, result
from csprune.predictive.jacobian import accumulate
from csprune.predictive.last_mlp import find_last_mlp
from csprune.predictive.subspaces import (
    SITES,
    check_share,
    final_subspace,
    logits_subspace,
    post_subspace,
)
from csprune.preparation import Progress, calibration_windows, load, notes_on
from csprune.readout import Readout, load_readout
from csprune.settings import Settings, check_target

SHARE = 0.99
_PAGE = "subspace"
DOCUMENTS = 8
"""Read where the settings do not say: a position's derivatives cost as much as some hundred tokens."""
# Predictions that are compared, each some twenty times in float64, and how many of them of one document.
_CHECKED, _CHECKED_OF_ONE = 64, 32


@dataclass(frozen=True)
class Shown:
    """What the job found, as it is shown, and what was noticed on the way."""

    result: Result
    heading: ResultsHeading
    notes: list[str]


def subspace_job(
    settings: Settings,
    sites: Sequence[str],
    share: float,
    out: Path | None,
    overwrite: bool,
    progress: Progress,
) -> Shown:
    """`csprune subspace`: the predictive subspace at each site, its dimension, and the check of it.

    Args:
        settings: Of the job; the text is `calibration_data`, or the calibration block of `data`, and
            `documents` is `DOCUMENTS` by default.
        sites: Of `SITES`; where empty, all of them.
        share: Of the sum of the eigenvalues that the dimension holds, above 0 and at most 1.
        out: The folder to write bases, figures and a page to, or None.
        overwrite: Replace earlier subspaces there.
        progress: Where to show how far it is.

    Returns:
        The result with its heading, and what was noticed about the text.

    Raises:
        InputError: An unknown site, a share out of range, a target that cannot be written, or a model
            whose readout or, for mlp_out and mlp_in, last MLP cannot be proved.
    """
    wanted = _wanted(sites)
    check_share(share)
    if settings.calibration is not None:
        raise InputError("subspace reads text anew: leave the calibration file out")
    if out is not None:
        check_target(out, "folder")
        check_subspace_target(out, overwrite)
        check_results_target(out, overwrite, _PAGE)
    if settings.documents is None:
        settings = replace(settings, documents=DOCUMENTS)
    loaded = load(settings, settings.dtype or "float32", progress)
    windows = calibration_windows(settings, loaded, progress)
    readout = load_readout(loaded.model, windows.input_ids)
    last = settings.resolved("positions") == "last"
    start = windows.sequence_length - 1 if last else settings.resolved("skip_first")
    if start >= windows.sequence_length:
        raise InputError(
            f"the first {start} of {windows.sequence_length} positions are left out, which leaves none: "
            "give a smaller --skip-first"
        )
    found = _find(readout, windows.input_ids, wanted, share, start, settings, progress)
    shown = result(found)
    protocol: dict[str, Any] = {
        "share": share,
        "sites": wanted,
        "positions": "last" if last else "all",
        "skip_first": settings.resolved("skip_first"),
        "dtype": settings.dtype or "float32",
        "seed": settings.seed,
        "revision": settings.revision,
        "corpus": windows.describe(),
        "fingerprint": fingerprint(readout),
        "versions": versions(),
    }
    heading = ResultsHeading(
        title=f"Predictive subspaces of {settings.model}",
        done=f"At {', '.join(wanted)}; {len(windows)} documents of {windows.source}.",
        facts=[
            (name.replace("_", " "), ", ".join(value) if isinstance(value, list) else str(value))
            for name, value in protocol.items()
            if name not in ("corpus", "versions")
        ],
        versions=list(protocol["versions"].items()),
    )
    if out is not None:
        described = {"model": settings.model, "protocol": protocol, "results": [shown.describe()]}
        write_subspaces(out, described, found.subspaces, share)
        write_results(out, heading, [shown], page=_PAGE)
    notes = notes_on("calibration", windows.describe(), settings.resolved("documents"))
    return Shown(shown, heading, notes)


def _wanted(sites: Sequence[str]) -> list[str]:
    if unknown := [site for site in sites if site not in SITES]:
        raise InputError(f"site {unknown[0]!r} is unknown: use one of {', '.join(SITES)}")
    return [site for site in SITES if site in sites or not sites]


def _find(
    readout: Readout,
    input_ids: torch.Tensor,
    sites: list[str],
    share: float,
    start: int,
    settings: Settings,
    progress: Progress,
) -> Found:
    mlp = find_last_mlp(readout) if {"mlp_out", "mlp_in"} & set(sites) else None
    with progress.stage("Decomposing"):
        post = post_subspace(readout)
        if not post.rank:
            raise InputError(
                f"the head of {type(readout.model).__name__} gives every token the same logit, whatever it "
                "reads: there is nothing to predict with"
            )
        made: dict[str, Any] = {"post": post, "mlp_out": replace(post, site="mlp_out")}
        made["logits"] = logits_subspace(readout)
        if "final" in sites:
            made["final"] = final_subspace(readout)
    sums = None
    if mlp is not None and "mlp_in" in sites:
        with progress.stage("Differentiating", input_ids.shape[1]) as step:
            sums = accumulate(
                mlp,
                post.reading_root(),
                input_ids,
                start=start,
                batch_size=settings.batch_size,
                progress=step,
            )
        made["mlp_in"] = sums.subspace()
    subspaces = [made[site] for site in sites]
    length = input_ids.shape[1]
    positions = torch.linspace(start, length - 1, min(_CHECKED_OF_ONE, length - start)).round().long()
    checked = input_ids[: max(1, _CHECKED // len(positions))]
    with progress.stage("Checking"):
        effects = check(
            readout, subspaces, checked, positions=positions, mlp=mlp, share=share, seed=settings.seed
        )
    return Found(readout, subspaces, effects, share, mlp, sums)
