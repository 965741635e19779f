"""The predictive subspaces of a transformer trained on Mess3: dimensions, content, pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from machine import describe
from mess3_pictures import Clouds, draw
from mess3_process import CONTEXT, Mess3, excess_loss

from csprune.predictive.checks import WAYS, check, divergence
from csprune.predictive.findings import Found, result
from csprune.predictive.jacobian import JacobianSums, accumulate
from csprune.predictive.last_mlp import Activations, LastMLP, find_last_mlp
from csprune.predictive.subspaces import SpannedSubspace, final_subspace, logits_subspace, post_subspace
from csprune.readout import Readout, load_readout

SHARES = (0.9, 0.99, 0.999, 0.9999)
SAMPLED, CHECKED = 1024, 64  # sequences for E[J^T J], and to change activations in
DRAWN = 8  # every history of this length is a point
SEED = 1


def reproduce(process: Mess3, model: Any, output: Path) -> str:
    """Measure, write `README.md`, `mess3.json` and the pictures into a folder; the README."""
    readout = load_readout(model)
    mlp = find_last_mlp(readout)
    post = post_subspace(readout)
    sampled = process.sample(SAMPLED, CONTEXT, torch.Generator().manual_seed(SEED))
    sums = accumulate(mlp, post.reading_root(), sampled, batch_size=128)
    spanned = [final_subspace(readout), post, post_subspace(readout, "mlp_out"), sums.subspace()]
    effects = check(readout, [logits_subspace(readout), *spanned], sampled[:CHECKED], mlp=mlp)
    found = Found(readout, [logits_subspace(readout), *spanned], effects, 0.99, mlp, sums)

    clouds = see(process, readout, mlp)
    record: dict[str, Any] = {
        "loss": {
            "optimal": process.optimal_loss(CONTEXT).tolist(),
            "excess": excess_loss(process, model).tolist(),
        },
        "dimensions": {each.site: {str(s): each.dimension(s) for s in SHARES} for each in spanned},
        "content": content(clouds, readout, {each.site: each for each in spanned}),
        "ranks": {each.site: each.rank for each in found.subspaces},
        "spectrum_of_mlp_in": sums.subspace().eigenvalues.tolist(),
        "positions": sums.positions,
        "first_token": first_token(model),
        "mlp_out_length": float(
            (clouds.sites["mlp_out"].norm(dim=1) / clouds.sites["post"].norm(dim=1)) @ clouds.weights
        ),
        "changes": result(found).figures["changes"],
        "machine": describe(),
    }
    output.mkdir(parents=True, exist_ok=True)
    draw(clouds, {each.site: each for each in spanned}, output)
    (output / "mess3.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    text = readme(record, sums, model)
    (output / "README.md").write_text(text, encoding="utf-8")
    return text


def see(process: Mess3, readout: Readout, mlp: LastMLP) -> Clouds:
    """Run the model on every history of `DRAWN` tokens."""
    tokens, weights = process.histories(DRAWN)
    seen: Activations = mlp.run(tokens)
    beliefs = process.beliefs(tokens)
    with torch.no_grad():
        logits = readout.model(input_ids=tokens, use_cache=False).logits[:, -1].double()
    post = seen.residual[:, -1].double()
    norm = readout.norm
    return Clouds(
        weights,
        beliefs[:, -1],
        centred(process.predictions(beliefs[:, -1]).log()),
        logits,
        centred(logits.log_softmax(-1)),
        {
            "final": norm.normalise(post) * norm.gain + norm.bias,
            "post": post,
            "mlp_out": seen.written[:, -1].double(),
            "mlp_in": seen.read[:, -1].double(),
        },
        post.square().mean(-1).sqrt(),
    )


def content(
    clouds: Clouds, readout: Readout, subspaces: dict[str, SpannedSubspace]
) -> dict[str, dict[str, float] | float]:
    """What the subspaces hold: the centred log-probabilities, and how far a linear map gives them.

    Returns:
        The largest differences of the readings from the centred log-probabilities, whose standard deviation
        is `spread`; the largest KL after shared shifts; and R^2 (weighted by the histories' probabilities) of
        the optimal centred log-probabilities and of the beliefs from the coordinates in each subspace.
    """
    unembedding = readout.unembedding
    u = unembedding.weight.double()
    bias = torch.zeros(len(u)) if unembedding.bias is None else unembedding.bias
    bias = bias.double()
    read = clouds.sites["final"] @ (u - u.mean(0)).mT + bias - bias.mean()
    # The same from the residual: g_i . resid_post / RMS.
    g = (u - u.mean(0)) * unembedding.gain
    scale = (clouds.rms.square() + readout.norm.eps).sqrt()
    residual = clouds.sites["post"] @ g.mT / scale[:, None] + bias - bias.mean()
    generator = torch.Generator().manual_seed(SEED)
    shift = 100 * torch.randn(len(read), 1, generator=generator, dtype=torch.float64)
    places = {
        "final": clouds.sites["final"],
        "post": clouds.sites["post"],
        "post / RMS": clouds.sites["post"] / clouds.rms[:, None],
        "mlp_out": clouds.sites["mlp_out"],
        "mlp_in": clouds.sites["mlp_in"],
    }
    fits: dict[str, dict[str, float] | float] = {
        "final differs": float((read - clouds.content).abs().max()),
        "post / RMS differs": float((residual - clouds.content).abs().max()),
        "spread": float(clouds.content.std()),
        "shared shifts": float(divergence(clouds.logits, shift.expand_as(read)).max()),
    }
    for name, x in places.items():
        subspace = subspaces[name.split()[0]]
        coordinates = x @ subspace.basis(subspace.dimension(0.99))
        fits[name] = {
            "dimension": coordinates.shape[1],
            "optimal": explained(coordinates, clouds.optimal, clouds.weights),
            "own": explained(coordinates, clouds.content, clouds.weights),
            "beliefs": explained(coordinates, clouds.beliefs, clouds.weights),
        }
    return fits


@torch.no_grad()
def first_token(model: Any) -> float:
    """The largest difference of the predictions after one token and after four of the same."""
    logits = model(input_ids=torch.arange(3)[:, None].expand(-1, 4), use_cache=False).logits
    p = logits.softmax(-1)
    return float((p[:, 0] - p[:, 3]).abs().max())


def centred(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean(-1, keepdim=True)


def explained(x: torch.Tensor, y: torch.Tensor, weights: torch.Tensor) -> float:
    """R^2 of the least-squares linear map with a constant, points weighted."""
    root = weights.sqrt()[:, None]
    design = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)
    fit = design @ torch.linalg.lstsq(root * design, root * y).solution
    mean = (weights[:, None] * y).sum(0) / weights.sum()
    return 1 - float((root * (y - fit)).square().sum() / (root * (y - mean)).square().sum())


def readme(record: dict[str, Any], sums: JacobianSums, model: Any) -> str:
    losses, fits = record["loss"], record["content"]
    dimensions = record["dimensions"]
    rows = ["| logits | 3 | 2 | " + " | ".join(["2"] * len(SHARES)) + " |"]
    for site, at in dimensions.items():
        rows.append(
            f"| {site} | {sums.gram.shape[0]} | {record['ranks'][site]} | "
            + " | ".join(str(n) for n in at.values())
            + " |"
        )
    changes = []
    for each in record["changes"]:
        label = ", ".join(filter(None, (each["site"], each["held"])))
        kl = " | ".join(f"{each['mean_kl'][way]:.1e}" for way in WAYS)
        changes.append(f"| {label} | {each['dimension']} | {each['kind']} | {kl} |")
    fitted = [
        f"| {name} | {fit['dimension']} | {fit['own']:.5f} | {fit['optimal']:.5f} | {fit['beliefs']:.5f} |"
        for name, fit in fits.items()
        if isinstance(fit, dict)
    ]
    by_length = [
        f"| {n} | {best:.5f} | {extra:.5f} |"
        for n, (best, extra) in enumerate(zip(losses["optimal"], losses["excess"], strict=True), start=1)
    ]
    shares = " | ".join(f"at {share:.4g}" for share in SHARES)
    number = model.config.num_hidden_layers
    layers = f"{number} layer{'s' * (number > 1)}"
    newline = "\n"
    return f"""\
# The readout's predictive subspaces, on Mess3

    python benchmarks/mess3.py --model mess3-model -o benchmarks/results/mess3

A transformer of {model.num_parameters():,} parameters (width 64, MLP 256 with an exact GELU, RMSNorm;
{layers}) learned the Mess3 process (alpha 0.85, x 0.05: 3 states, 3 tokens). All that is said of histories is
exact: every history is run, weighted by its probability.

| tokens seen | optimal loss, nats | the model's excess |
|---|---|---|
{newline.join(by_length)}

The optimum falls to the entropy rate. What the model loses at the first token is its architecture's: without
a first token of its own, rotary attention sees the same in A as in AAAA (its predictions after the two
differ by {record["first_token"]:.0e} at most), while the optimal predictions differ.

## Dimensions

V - 1 = 2 wherever the prediction reads fixed directions; at mlp_in the leading eigendirections of E[J^T J]
over {sums.positions:,} positions of sampled sequences, at four shares of the sum of its eigenvalues. The MLP
writes vectors {record["mlp_out_length"]:.0%} as long as the residual that it writes to.

| site | width | rank | {shares} |
|---|---|---|{"---|" * len(SHARES)}
{newline.join(rows)}

## Content

Over all {3**DRAWN:,} histories of {DRAWN} tokens. The readings (u_i - ubar) . final + (b_i - bbar) are the
model's centred log-probabilities (of standard deviation {fits["spread"]:.2f}) to the rounding of its float32:
the largest difference is {fits["final differs"]:.1e}. So are the readings g_i . post / RMS + (b_i - bbar):
{fits["post / RMS differs"]:.1e}. A shift shared by all logits, of size 100 and another one for every history,
changes no prediction: KL at most {fits["shared shifts"]:.0e} nats.

How well *one* linear map (least squares, R^2) gives what from the coordinates in the subspace (at the share
0.99):

| site | coordinates | the model's centred log p | the optimal centred log p | the belief |
|---|---|---|---|---|
{newline.join(fitted)}

## Changes

Of 10% of the activation's length, in random directions, at {CHECKED * CONTEXT} positions; mean KL(p || p') in
nats.

| site | dimension | orthogonal change | orthogonal | inside | random |
|---|---|---|---|---|---|
{newline.join(changes)}

## Pictures

Every point is a history, its colour its belief (red, green, blue: the three states).

![Logits with four choices of the constant](logits.png)
![The content at final](final.png)
![The content at post, with and without the RMS, and at mlp_out](post.png)
![Leading components of mlp_in](mlp_in.png)
"""
