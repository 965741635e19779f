"""What `csprune evaluate` costs beside a plain forward pass with loss over the same tokens.

    python benchmarks/evaluation_cost.py MODEL [--documents 32] [--rounds 3] [--positions all] [-o FILE.json]

Both are timed in turn in one run, so that a busy machine slows both; what counts is the ratio. The plain
pass is the model's own forward with logits of every position and their cross-entropy; the evaluation is what
`csprune evaluate` does by default once its calibration is there: four methods and eight random subspaces at
5, 10 and 20% of the rank (36 truncations), every quantity, for every document.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from machine import describe
from rich.console import Console
from rich.table import Table

import csprune

RANKS = (0.05, 0.1, 0.2)
METHODS = ("singular", "fisher", "whitened", "fisher-whitened")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", help="a local folder, a hub id, or demo")
    parser.add_argument("--data", default="demo")
    parser.add_argument("--documents", type=int, default=32)
    parser.add_argument("--positions", choices=("last", "all"), default="all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()

    loaded = csprune.load_model(options.model)
    read = {
        block: csprune.read_windows(loaded.tokenizer, options.data, documents=options.documents, block=block)
        for block in ("calibration", "confirmation")
    }
    readout = csprune.load_readout(loaded.model)
    calibration = csprune.calibrate(loaded.model, read["calibration"], options.positions, readout=readout)
    truncations = [csprune.truncate(readout, calibration, m, rank) for rank in RANKS for m in METHODS]
    held_out = read["confirmation"]

    def plain() -> None:
        with torch.no_grad():
            for first in range(0, len(held_out), options.batch_size):
                rows = slice(first, first + options.batch_size)
                logits = loaded.model(input_ids=held_out.input_ids[rows], use_cache=False).logits
                torch.nn.functional.cross_entropy(logits.flatten(0, 1), held_out.target_ids[rows].flatten())

    def evaluation() -> csprune.Evaluation:
        return csprune.evaluate(
            loaded.model,
            held_out,
            truncations,
            positions=options.positions,
            batch_size=options.batch_size,
        )

    plain()  # warm
    seconds: dict[str, list[float]] = {"plain": [], "evaluation": []}
    result = None
    for round_ in range(options.rounds):
        seconds["plain"].append(timed(plain))
        start = time.perf_counter()
        result = evaluation()
        seconds["evaluation"].append(time.perf_counter() - start)
        print(f"round {round_ + 1}: " + ", ".join(f"{k} {v[-1]:.1f} s" for k, v in seconds.items()))
    assert result is not None
    start = time.perf_counter()
    csprune.summarise(result)
    resampling = time.perf_counter() - start

    ratios = [e / p for e, p in zip(seconds["evaluation"], seconds["plain"], strict=True)]
    record: dict[str, Any] = {
        "model": options.model,
        "documents": len(held_out),
        "tokens": held_out.input_ids.numel(),
        "positions": options.positions,
        "truncations": len(RANKS) * (len(METHODS) + 8),
        "seconds": seconds,
        "ratio_to_a_plain_pass": {
            "median": statistics.median(ratios),
            "minimum": min(ratios),
            "maximum": max(ratios),
        },
        "resampling_seconds": resampling,
        "peak_memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "machine": describe(),
    }
    show(record)
    if options.output:
        options.output.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def timed(function: Any) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def show(record: dict[str, Any]) -> None:
    table = Table(
        title=f"{record['truncations']} truncations of {record['model']}, {record['tokens']:,} tokens"
    )
    for heading in ("", "median", "minimum", "maximum"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, values in record["seconds"].items():
        table.add_row(f"{name}, s", *(f"{f(values):.1f}" for f in (statistics.median, min, max)))
    ratio = record["ratio_to_a_plain_pass"]
    table.add_row("evaluation / plain", *(f"{ratio[k]:.2f}" for k in ("median", "minimum", "maximum")))
    Console().print(table)


if __name__ == "__main__":
    main()
