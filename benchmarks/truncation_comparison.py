"""The paper's comparison of truncations (Section 5.1, Figure 4; Section E.4) on any models.

    python benchmarks/truncation_comparison.py MODEL... -o DIR [--data demo] [--protocol quick]

For each model: all methods at 5, 10 and 20% of the rank beside random truncation, written as DIR/NAME (the
files of `csprune evaluate`), and what the paper says besides: the overlap of the removed sets, and the share
of the whitened removal that lies in the four bottom bands. DIR/comparison.md has the table of all models,
DIR/report.html and DIR/pictures the page with Figure 4. A model that DIR has already is not run again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from machine import describe
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import csprune
from csprune.models import locate_model
from csprune.pages.page import write_views
from csprune.report import read_evaluation, write_report
from csprune.settings import PROTOCOLS

RANKS = (0.05, 0.1, 0.2)
METHODS = ("singular", "fisher", "whitened", "fisher-whitened")
RECORD = "comparison.json"
console = Console(stderr=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL", help="a local folder, a hub id, or demo")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("--data", default="demo", metavar="TEXT")
    parser.add_argument("--protocol", choices=tuple(PROTOCOLS), default="quick")
    parser.add_argument("--documents", type=int, help="calibration documents, instead of the protocol's")
    parser.add_argument("--evaluation-documents", type=int)
    options = parser.parse_args()
    names = []
    for model in options.models:
        name = locate_model(model).name  # where it lies is nobody's concern
        if not (options.output / name / RECORD).is_file():
            run(model, name, options)
        names.append(name)
    reports = {name: json.loads((options.output / name / "report.json").read_text()) for name in names}
    records = {name: json.loads((options.output / name / RECORD).read_text()) for name in names}
    text = comparison(reports, records)
    (options.output / "comparison.md").write_text(text, encoding="utf-8")
    both = [(reports[name], read_evaluation(options.output / name)) for name in names]
    write_views(options.output, both, names)
    print(text)


def run(model: str, name: str, options: argparse.Namespace) -> None:
    """Evaluate one model, and write its report and what else the paper compares."""
    settings = PROTOCOLS[options.protocol]
    loaded = csprune.load_model(model)

    def read(block: str, documents: int) -> csprune.Windows:
        return csprune.read_windows(
            loaded.tokenizer,
            options.data,
            documents=documents,
            sequence_length=settings["sequence_length"],
            block=block,
            equal_blocks=settings["equal_blocks"],
        )

    windows = read("calibration", options.documents or settings["documents"])
    held_out = read("confirmation", options.evaluation_documents or settings["evaluation_documents"])
    here = {"documents": len(windows), "evaluation_documents": len(held_out)}
    departures = {
        key: {"protocol": settings[key], "here": value}
        for key, value in here.items()
        if value != settings[key]
    }
    readout = csprune.load_readout(loaded.model, held_out.input_ids)
    with bar() as progress:
        task = progress.add_task(f"{name}: calibrating")
        calibration = csprune.calibrate(
            loaded.model,
            windows,
            settings["positions"],
            readout=readout,
            name=name,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    truncations = {
        (rank, method): csprune.truncate(readout, calibration, method, rank)
        for rank in RANKS
        for method in METHODS
    }
    with bar() as progress:
        task = progress.add_task(f"{name}: evaluating")
        evaluation = csprune.evaluate(
            loaded.model,
            held_out,
            list(truncations.values()),
            positions=settings["positions"],
            name=name,
            protocol={"name": options.protocol, "departures": departures},
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    folder = options.output / name
    write_report(folder, evaluation, csprune.summarise(evaluation))
    bottom = truncations[0.2, "singular"]  # at 20% the four bottom bands of 20
    record = {
        "overlap_of_fisher_with_singular": {
            f"{rank:g}": csprune.overlap(truncations[rank, "fisher"], truncations[rank, "singular"])
            for rank in RANKS
        },
        "share_in_the_four_bottom_bands": {
            method: {f"{rank:g}": csprune.overlap(truncations[rank, method], bottom) for rank in RANKS}
            for method in METHODS[1:]
        },
        "width": readout.unembedding.width,
        "vocabulary": readout.unembedding.vocabulary,
        "class": type(readout.model).__name__,
        "machine": describe(),
    }
    (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def bar() -> Progress:
    columns = (TextColumn("{task.description:<48}"), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console)


def rows(reports: dict[str, Any]) -> Iterator[tuple[str, float, dict[str, Any]]]:
    """Model, rank, and the truncations there by method."""
    for name, report in reports.items():
        for rank in RANKS:
            yield name, rank, {e["method"]: e for e in report["truncations"] if e["rank"] == rank}


def comparison(reports: dict[str, Any], records: dict[str, Any]) -> str:
    """The table of all models, as Markdown."""
    lines = [
        "Loss change minus random truncation's, nats, with its 95% interval (`*`: established by the rule of",
        "the report, adjusted for the model's 12 comparisons), and in brackets D relative to random's.",
        "",
        f"| model | rank | random | {' | '.join(METHODS)} |",
        f"|---|---|---|{'---|' * len(METHODS)}",
    ]
    for name, rank, entries in rows(reports):
        cells = [name, f"{rank:.0%}", f"{entries['random']['loss_change']['mean']:+.4f}"]
        for method in METHODS:
            versus = entries[method]["vs_random"]
            loss, distance = versus["loss_change"], versus["logit_distance"]["ratio"]
            low, high = loss["difference_ci95"]
            star = "*" if loss["established"] else ""
            cells.append(f"{loss['difference']:+.4f}{star} [{low:+.4f}, {high:+.4f}] ({distance:.2f})")
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "Loss change per unit of logit distance, relative to random truncation's.",
        "",
        f"| model | rank | {' | '.join(METHODS)} |",
        f"|---|---|{'---|' * len(METHODS)}",
    ]
    for name, rank, entries in rows(reports):
        ratios = [entries[m]["per_unit_vs_random"]["loss_change"] for m in METHODS]
        shown = [
            "undefined" if r["ratio"] is None else f"{r['ratio']:.3g}{'*' * r['established']}" for r in ratios
        ]
        lines.append(f"| {name} | {rank:.0%} | {' | '.join(shown)} |")
    lines += [
        "",
        "What is removed: the share of the `fisher` set that `singular` removes too, and the share of each",
        "removed subspace that lies in the four bottom bands (of 20).",
        "",
        "| model | rank | fisher in singular's | "
        + " | ".join(f"{m} in the bottom" for m in METHODS[1:])
        + " |",
        f"|---|---|---|{'---|' * len(METHODS[1:])}",
    ]
    for name, record in records.items():
        for rank in RANKS:
            key = f"{rank:g}"
            shares = [record["share_in_the_four_bottom_bands"][m][key] for m in METHODS[1:]]
            first = record["overlap_of_fisher_with_singular"][key]
            lines.append(
                f"| {name} | {rank:.0%} | " + " | ".join(f"{s:.0%}" for s in (first, *shares)) + " |"
            )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
