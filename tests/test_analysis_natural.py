"""The natural path: the norm recomputed from the residual itself, with no closed form of its scale."""

from __future__ import annotations

from dataclasses import replace

import analysis_oracle as oracle_of
import numpy as np
import oracle
import pytest
import torch
from comparison_checks import (
    KINDS,
    bottom_change,
    case_of,
    check_comparison,
    check_json,
    row,
    table,
    value,
)
from test_analysis_scalings import coefficient

from csprune.analysis.effects import observe
from csprune.analysis.natural import (
    ACROSS,
    across_logits,
    natural_logit_change,
    natural_path,
    scale_factors,
)
from csprune.analysis.scalings import EQUAL, MATCHED, UNRESCALED
from csprune.analysis.spaces import Change


@pytest.mark.parametrize("kind", KINDS)
def test_natural_path_is_the_residuals(kind: str) -> None:
    case = case_of(kind)
    result = natural_path(case.study)
    check_json(result)
    du, random = bottom_change(case)
    scaled = {
        EQUAL: oracle_of.to_equal_length(random, du),
        MATCHED: coefficient(case) * random,
        UNRESCALED: random,
    }

    def logits(change: np.ndarray) -> oracle_of.Logits:
        return oracle_of.natural_path(case.folded, case.evaluation_r, case.parts.kind, case.eps, change)

    def factor(change: np.ndarray) -> np.ndarray:
        found = []
        for r, each in zip(case.evaluation_r, change, strict=True):
            scale = oracle_of.scale(r, case.parts.kind, case.eps)
            changed = r + scale * (case.folded.basis @ each)
            found.append(scale / oracle_of.scale(changed, case.parts.kind, case.eps))
        return np.array(found)

    of_band = logits(du)
    for name, keep, prefix in (
        ("natural-path", lambda x: x, ""),
        ("across", oracle_of.without_parallel, f"{ACROSS}."),
    ):
        own = oracle_of.effects(keep(of_band), case.targets)
        for label, changes in scaled.items():
            rows = [oracle_of.effects(keep(logits(each)), case.targets) for each in changes]
            reference = {key: np.array([each[key] for each in rows]) for key in rows[0]}
            check_comparison(
                _with_band(result, label, prefix),
                table(result, name),
                label,
                own,
                reference,
                prefix=f"checked.{label}",
            )
    factors = table(result, "scale-factors")
    expected = {"bottom band": factor(du)} | {
        f"random, {label}": np.array([factor(each) for each in changes]) for label, changes in scaled.items()
    }
    for label, each in expected.items():
        assert value(row(factors, label).cells["scale_factor"]) == pytest.approx(each.mean(), rel=1e-9)
    share = 1 - sum(
        oracle_of.effects(oracle_of.without_parallel(of_band), case.targets)["logit_distance"]
    ) / sum(oracle_of.effects(of_band, case.targets)["logit_distance"])
    assert value(row(factors, "bottom band").cells["along"]) == pytest.approx(share)


def _with_band(result, label: str, prefix: str):
    """The values of one comparison, whose band is the same beside all references."""
    values = {}
    for name in ("logit_distance", "fisher_term", "prediction_change", "loss_change"):
        values[f"checked.{label}.{name}"] = result.values[f"natural-path.bottom band.{prefix}{name}"]
        values[f"checked.{label}.random.{name}"] = result.values[
            f"natural-path.{label}.random.{prefix}{name}"
        ]
    return type(result)(**{**vars(result), "values": values})


def test_it_differs_from_a_scale_held_fixed() -> None:
    case = case_of("phi")
    du, _ = bottom_change(case)
    fixed = oracle_of.effects(oracle_of.fixed_scale(case.folded, case.evaluation_u, du), case.targets)
    found = natural_path(case.study).values["natural-path.bottom band.prediction_change"]
    assert not np.allclose(found, fixed["prediction_change"], rtol=1e-2)


@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
def test_the_norm_undoes_a_change_along_the_state(kind: str) -> None:
    # u + t u is the same direction, whose length the norm forgets; with |u|^2 = d, epsilon is zero.
    study = case_of(kind).study
    u, hidden = study.evaluation.u, study.unembedding.hidden
    states = replace(study.evaluation, u=u * hidden**0.5 / u.norm(dim=1, keepdim=True))
    whole = study.space.subspace(torch.eye(study.space.width, dtype=torch.float64))
    change = Change(0.5 * states.u, whole)

    def size(_scene, c):  # logits are changed up to a constant for each document
        return {"size": (c - c.mean(1, keepdim=True)).square().sum(1)}

    natural = observe(states, {"x": change}, size, logit_change=natural_logit_change)["x"]["size"]
    fixed = observe(states, {"x": change}, size)["x"]["size"]
    assert natural.max() < 1e-20 * fixed.min()
    factors = scale_factors(change, states.u, hidden)
    assert factors.numpy() == pytest.approx(np.full(len(factors), 1 / 1.5), rel=1e-12)
    # Control: with q in the place of d it would be another factor, of a LayerNorm.
    wrong = scale_factors(change, states.u, study.space.width)
    assert torch.allclose(wrong, factors, rtol=1e-3) == (kind == "llama")


def test_epsilon_is_in_the_scale() -> None:
    # A residual so small that epsilon is most of s(r)^2.
    generator = torch.Generator().manual_seed(0)
    r, eps = 1e-3 * torch.randn(5, 8, generator=generator, dtype=torch.float64), 1e-5
    scale = (r.square().mean(1) + eps).sqrt()
    u = r / scale[:, None]
    study = case_of("llama").study
    whole = study.space.subspace(torch.eye(study.space.width, dtype=torch.float64)[:, :8])
    subspace = type(whole)(torch.eye(8, dtype=torch.float64), whole.image, whole.metric)
    du = torch.randn(5, 8, generator=generator, dtype=torch.float64)
    changed = ((r + scale[:, None] * du).square().mean(1) + eps).sqrt()
    found = scale_factors(Change(du, subspace), u, 8)
    assert found.numpy() == pytest.approx((scale / changed).numpy(), rel=1e-12)
    # Control: |u| / |u + du| leaves epsilon out.
    assert not torch.allclose(found, u.norm(dim=1) / (u + du).norm(dim=1), rtol=1e-2)


@pytest.mark.parametrize("kind", ["phi", "gemma2"])
def test_what_is_taken_off_is_the_component_along_the_logits(kind: str) -> None:
    case = case_of(kind)
    x = oracle.after_cap(case.folded, oracle.before_cap(case.folded, case.evaluation_u))
    centred = x - x.mean(axis=1, keepdims=True)
    rest = np.random.default_rng(0).normal(size=x.shape)
    rest -= rest.mean(axis=1, keepdims=True)
    rest -= (rest * centred).sum(1, keepdims=True) / (centred**2).sum(1, keepdims=True) * centred
    seen = []

    def look(scene, _c):
        part = torch.from_numpy(rest[scene.documents])
        logits = torch.from_numpy(x[scene.documents])
        seen.append(across_logits(scene, part + 3 * logits + 7) - part)
        return {"none": torch.zeros(len(part))}

    observe(case.study.evaluation, {"x": case.study.removal(-1)}, look)
    assert float(torch.cat(seen).abs().max()) < 1e-9
    # Control: the rest is no rounding.
    assert np.abs(rest).max() > 0.1
