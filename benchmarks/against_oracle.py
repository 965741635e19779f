"""Compare csprune with the float64 oracle of the tests on a real Llama-class model and real text.

    python benchmarks/against_oracle.py MODEL CALIBRATION.jsonl EVALUATION.jsonl [--documents 256]

Prints every figure of the four deterministic methods beside the oracle's, and exits with 1 if one
differs by more than 1e-3 of its size or 2e-4 nats, whichever is larger. The oracle takes documents one at a
time and dense projections: minutes at the last position, far longer with `--positions all`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import csprune

ORACLE = Path(__file__).parent.parent / "tests" / "oracle.py"
QUANTITIES = {
    "loss_change": "loss_change",
    "logit_distance": "D",
    "fisher_term": "F",
    "prediction_change": "K",
}
METHODS = ("singular", "fisher", "whitened", "fisher-whitened")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", help="a local folder, or demo")
    parser.add_argument("calibration")
    parser.add_argument("evaluation")
    parser.add_argument("--documents", type=int, default=256)
    parser.add_argument("--positions", choices=("last", "all"), default="last")
    parser.add_argument("--rank", type=float, action="append")
    options = parser.parse_args()
    ranks = options.rank or [0.05, 0.2]

    loaded = csprune.load_model(options.model)
    calibration_windows, held_out = (
        csprune.read_windows(loaded.tokenizer, path, documents=options.documents)
        for path in (options.calibration, options.evaluation)
    )
    readout = csprune.load_readout(loaded.model, calibration_windows.input_ids)
    calibration = csprune.calibrate(loaded.model, calibration_windows, options.positions, readout=readout)
    truncations = [
        csprune.truncate(readout, calibration, method, rank) for rank in ranks for method in METHODS
    ]
    evaluation = csprune.evaluate(
        loaded.model, held_out, truncations, positions=options.positions, random_subspaces=1
    )
    ours = {(m.method, m.rank): m for m in evaluation.measurements}

    command = [sys.executable, str(ORACLE), str(loaded.folder), options.calibration, options.evaluation]
    command += ["--documents", str(options.documents), "--positions", options.positions]
    for rank in ranks:
        command += ["--rank", str(rank)]
    oracle = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)

    worst = compare("base loss", float(evaluation.base_loss.mean()), oracle["base_loss"])
    for row in oracle["table"]:
        measurement = ours[row["method"], row["rank"]]
        for quantity, label in QUANTITIES.items():
            name = f"{row['rank']:g} {row['method']} {label}"
            worst = max(worst, compare(name, float(measurement.values[quantity].mean()), row[label]))
    print(f"largest difference: {worst:.2f} of what is allowed")
    sys.exit(worst > 1)


def compare(name: str, ours: float, theirs: float) -> float:
    """Print two figures; their difference in units of what is allowed."""
    share = abs(ours - theirs) / max(1e-3 * abs(theirs), 2e-4)
    print(f"{name:32} {ours:14.5f} {theirs:14.5f}   {share:.3f}")
    return share


if __name__ == "__main__":
    main()
