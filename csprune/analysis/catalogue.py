"""The analyses by name: those of the spectrum, and all others."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable

from csprune.analysis.chain import chain_rule
from csprune.analysis.conditions import other_conditions
from csprune.analysis.contrast import contrast_share
from csprune.analysis.donors import donors
from csprune.analysis.ends import bottom_band, top_band
from csprune.analysis.extremes import extreme_coordinates
from csprune.analysis.natural import natural_path
from csprune.analysis.near_zero import near_zero
from csprune.analysis.overlaps import removal_overlaps
from csprune.analysis.relations import regression
from csprune.analysis.removal import harp_removal
from csprune.analysis.results import Result
from csprune.analysis.scalings import reference_scalings
from csprune.analysis.spectrum import consequence_spectrum, singular_values
from csprune.analysis.study import Progress, Study
from csprune.analysis.subspaces import bases, top_variance
from csprune.analysis.temperature import brier_divergence, temperatures
from csprune.analysis.top_token import most_probable_token
from csprune.errors import InputError

Analysis = Callable[[Study, Progress | None], Result]

SPECTRUM: dict[str, Analysis] = {
    "consequence": consequence_spectrum,
    "bottom-band": bottom_band,
    "top-token": most_probable_token,
    "top-band": top_band,
    "singular-values": singular_values,
}
"""What `csprune spectrum` does (paper, Sections 2 and 3, Appendix D and E.2)."""

ANALYSES: dict[str, Analysis] = {
    "scalings": reference_scalings,
    "natural-path": natural_path,
    "bases": bases,
    "extreme-coordinates": extreme_coordinates,
    "near-zero": near_zero,
    "top-variance": top_variance,
    "removal": harp_removal,
    "donors": donors,
    "contrast-share": contrast_share,
    "chain-rule": chain_rule,
    "temperatures": temperatures,
    "brier": brier_divergence,
    "regression": regression,
    "overlaps": removal_overlaps,
    "conditions": other_conditions,
}
"""What `csprune analyze` does (paper, Sections 3.3 and 4, Appendix B, E to G)."""


def summary(analysis: Analysis) -> str:
    """An analysis in a sentence."""
    return inspect.cleandoc(analysis.__doc__ or "").splitlines()[0].rstrip(".")


def chosen(names: Iterable[str]) -> dict[str, Analysis]:
    """The analyses of some names, in the order of the catalogue; all of `ANALYSES` where there are none.

    Raises:
        InputError: Unknown names, with those that exist.
    """
    names = list(names)
    known = {**SPECTRUM, **ANALYSES}
    if unknown := [name for name in names if name not in known]:
        raise InputError(f"unknown analysis {unknown[0]!r}: choose from {', '.join(known)}")
    return {name: known[name] for name in known if name in names} if names else dict(ANALYSES)
