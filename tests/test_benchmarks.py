"""The scripts under benchmarks/ run, on a few documents of the small trained model, and keep a record."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from csprune.report import read_evaluation

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
NEOX = ROOT / "tests/data/neox"


def run(script: str, *arguments: str | Path) -> str:
    command = [sys.executable, ROOT / "benchmarks" / script, *arguments]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_the_truncation_comparison(tmp_path: Path) -> None:
    documents = ("--documents", "12", "--evaluation-documents", "12")
    text = run("truncation_comparison.py", NEOX, "-o", tmp_path, *documents)
    assert (tmp_path / "comparison.md").read_text() in text + "\n" and "| neox | 20% |" in text
    assert (tmp_path / "report.html").is_file()
    record = json.loads((tmp_path / "neox/comparison.json").read_text())
    # At a fifth of the rank `singular` removes the four bottom bands, and nothing else.
    assert record["width"] == 191
    shares = record["share_in_the_four_bottom_bands"]
    assert 0 < shares["whitened"]["0.2"] < 1
    assert record["overlap_of_fisher_with_singular"]["0.2"] == pytest.approx(shares["fisher"]["0.2"])
    assert len(read_evaluation(tmp_path / "neox").measurements) == 15
    # What is there already is not measured again.
    before = (tmp_path / "neox/report.json").stat().st_mtime_ns
    run("truncation_comparison.py", NEOX, "-o", tmp_path, *documents)
    assert (tmp_path / "neox/report.json").stat().st_mtime_ns == before


def test_the_cost_of_evaluating(tmp_path: Path) -> None:
    run("evaluation_cost.py", NEOX, "--documents", "4", "--rounds", "2", "-o", tmp_path / "cost.json")
    record = json.loads((tmp_path / "cost.json").read_text())
    assert record["truncations"] == 36 and record["tokens"] == 4 * 128
    ratios = [e / p for e, p in zip(record["seconds"]["evaluation"], record["seconds"]["plain"], strict=True)]
    assert record["ratio_to_a_plain_pass"]["maximum"] == pytest.approx(max(ratios))


def test_the_papers_claims(tmp_path: Path) -> None:
    documents = ("--documents", "40", "--evaluation-documents", "60")
    text = run("paper/run.py", NEOX, "-o", tmp_path, *documents)
    assert re.search(r"^neox: \d+ reproduced, \d+ differs, \d+ not applicable$", text, re.M)
    files = [tmp_path / name for name in ("paper.html", "paper.md", "verdicts.json")]
    before = [path.read_bytes() for path in files]
    run("paper/run.py", "--redo", "-o", tmp_path)
    assert [path.read_bytes() for path in files] == before
