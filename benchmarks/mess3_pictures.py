"""Pictures of Mess3's histories in the predictive subspaces: every point a history, its colour its belief."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import torch

from csprune.predictive.subspaces import SpannedSubspace

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # the backend has to be chosen before
from matplotlib.ticker import MaxNLocator

SIZE, RESOLUTION = 3.4, 90  # inches of a panel, dots an inch
SEED = 2


@dataclass(frozen=True)
class Clouds:
    """Every history of one length, and where the model puts it; all float64 [histories, ...].

    Attributes:
        weights: The histories' probabilities.
        beliefs: [histories, states].
        optimal: Centred logarithms of the optimal predictions, [histories, V].
        logits: The model's own, as it returns them.
        content: Centred logarithms of the model's own predictions.
        sites: Activations by site: final, post, mlp_out, mlp_in.
        rms: Of post, [histories].
    """

    weights: torch.Tensor
    beliefs: torch.Tensor
    optimal: torch.Tensor
    logits: torch.Tensor
    content: torch.Tensor
    sites: dict[str, torch.Tensor]
    rms: torch.Tensor


def draw(clouds: Clouds, subspaces: dict[str, SpannedSubspace], folder: Path) -> None:
    """`logits.png`, `final.png`, `post.png` and `mlp_in.png`."""
    _draw_logits(clouds, folder / "logits.png")
    _draw_final(clouds, subspaces["final"], folder / "final.png")
    _draw_post(clouds, subspaces, folder / "post.png")
    _draw_mlp_in(clouds, subspaces["mlp_in"], folder / "mlp_in.png")


def plane(x: torch.Tensor) -> torch.Tensor:
    """Coordinates [.., 2] of vectors [.., 3] in the plane orthogonal to (1, 1, 1): no length is changed."""
    basis = torch.tensor([[1.0, -1.0, 0.0], [1.0, 1.0, -2.0]], dtype=x.dtype)
    return x @ (basis / basis.norm(dim=1, keepdim=True)).mT


def _draw_logits(clouds: Clouds, path: Path) -> None:
    """The same predictions with four choices of the constant that every logit vector may have added."""
    generator = torch.Generator().manual_seed(SEED)
    log_p = clouds.logits.log_softmax(-1)
    random = 0.7 * torch.randn(len(log_p), 1, generator=generator, dtype=torch.float64)
    panels = {
        "the model's own": clouds.logits,
        "0: log p itself": log_p,
        "minus the mean: centred log p": clouds.content,
        "random for every history": clouds.content + random,
    }
    figure = plt.figure(figsize=(4 * SIZE, SIZE + 0.5), layout="constrained")
    limit = float(max(x.abs().max() for x in panels.values()))
    for place, (title, x) in enumerate(panels.items(), start=1):
        axes: Any = figure.add_subplot(1, 4, place, projection="3d")
        axes.scatter(*x.mT.numpy(), **_points(clouds, 2))
        ends = [-limit, limit]
        axes.plot(ends, ends, ends, color="0.6", linewidth=0.8)
        axes.set(xlim=ends, ylim=ends, zlim=ends, title=title, xlabel="A", ylabel="B", zlabel="C")
        for axis in (axes.xaxis, axes.yaxis, axes.zaxis):
            axis.set_major_locator(MaxNLocator(4))
        axes.set_box_aspect((1, 1, 1))
        axes.view_init(elev=18, azim=-20)
    figure.suptitle("Logits with four constants: the same predictions (grey: the direction of the constant)")
    _save(figure, path)


def _draw_final(clouds: Clouds, subspace: SpannedSubspace, path: Path) -> None:
    coordinates = clouds.sites["final"] @ subspace.basis(2)
    design = torch.cat([coordinates, torch.ones(len(coordinates), 1, dtype=torch.float64)], 1)
    mapped = design @ torch.linalg.lstsq(design, plane(clouds.content)).solution
    panels = {
        "optimal centred log p": plane(clouds.optimal),
        "the model's centred log p": plane(clouds.content),
        "final, in its subspace": coordinates,
        "final, one linear map further": mapped,
    }
    _draw_clouds(clouds, panels, "The content of `final` is the centred log-probabilities, sheared", path)


def _draw_post(clouds: Clouds, subspaces: dict[str, SpannedSubspace], path: Path) -> None:
    basis = subspaces["post"].basis(2)
    panels = {
        "post, in its subspace": clouds.sites["post"] @ basis,
        "post / RMS": clouds.sites["post"] @ basis / clouds.rms[:, None],
        "mlp_out, in the same subspace": clouds.sites["mlp_out"] @ basis,
    }
    _draw_clouds(
        clouds, panels, "The norm's RMS changes lengths, not directions; mlp_out is not forced", path
    )


def _draw_mlp_in(clouds: Clouds, subspace: SpannedSubspace, path: Path) -> None:
    centred = clouds.sites["mlp_in"] - clouds.sites["mlp_in"].mean(0)
    along = centred @ subspace.basis(6)
    figure, axes = _figure(4)
    for place, one in enumerate((0, 2, 4)):
        title = f"components {one + 1} and {one + 2}"
        _cloud(axes[place], clouds, along[:, one : one + 2], title)
    values = subspace.eigenvalues[: subspace.rank]
    held = (values.cumsum(0) / values.sum()).numpy()
    axes[3].plot(range(1, len(held) + 1), held, marker=".", color="0.2")
    axes[3].axhline(0.99, color="0.6", linewidth=0.8)
    dimension = subspace.dimension(0.99)
    axes[3].axvline(dimension, color="0.6", linewidth=0.8)
    axes[3].set(title=f"E[J^T J]: {dimension} directions hold 0.99", xlabel="leading directions")
    axes[3].set_ylim(0, 1.02)
    figure.suptitle("mlp_in along the leading eigendirections of E[J^T J], and the share they hold")
    _save(figure, path)


def _draw_clouds(clouds: Clouds, panels: dict[str, torch.Tensor], title: str, path: Path) -> None:
    figure, axes = _figure(len(panels))
    for each, (name, x) in zip(axes, panels.items(), strict=True):
        _cloud(each, clouds, x, name)
    figure.suptitle(title)
    _save(figure, path)


def _figure(panels: int) -> tuple[Any, Any]:
    return plt.subplots(1, panels, figsize=(panels * SIZE, SIZE + 0.5), layout="constrained")


def _cloud(axes: Any, clouds: Clouds, x: torch.Tensor, title: str) -> None:
    axes.scatter(*x.mT.numpy(), **_points(clouds, 3))
    axes.set(title=title, aspect="equal")
    axes.set_aspect("equal", adjustable="datalim")


def _points(clouds: Clouds, size: float) -> dict[str, Any]:
    return {"c": clouds.beliefs.clamp(0, 1).numpy(), "s": size, "linewidths": 0}


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=RESOLUTION, metadata={"Software": None})
    plt.close(figure)
